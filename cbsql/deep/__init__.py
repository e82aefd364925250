"""Deep soft Q-learning on top of Stable-Baselines3."""

from cbsql.deep.munchausen import Munchausen
from cbsql.deep.rainbow import Rainbow
from cbsql.deep.sql import CBSQL, SQL

__all__ = ["CBSQL", "SQL", "Munchausen", "Rainbow"]
