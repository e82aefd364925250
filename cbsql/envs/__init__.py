"""Environments; importing this package registers Atari's with Gymnasium too."""

from cbsql.envs.atari import AtariVecEnv, make_atari_vec_env
from cbsql.envs.chain_walk import ChainWalk

__all__ = ["AtariVecEnv", "ChainWalk", "make_atari_vec_env"]
