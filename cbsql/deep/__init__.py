"""Deep soft Q-learning on top of Stable-Baselines3."""

from cbsql.deep.sql import CBSQL, SQL

__all__ = ["CBSQL", "SQL"]
