"""Environments; importing this package registers them with Gymnasium."""

from cbsql.envs.chain_walk import ChainWalk

__all__ = ["ChainWalk"]
