"""Environments; importing this package registers them with Gymnasium, Atari and MinAtar too."""

from cbsql.envs import minatar
from cbsql.envs.atari import AtariVecEnv, make_atari_vec_env
from cbsql.envs.chain_walk import ChainWalk

minatar.register()

__all__ = ["AtariVecEnv", "ChainWalk", "make_atari_vec_env"]
