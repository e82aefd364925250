"""Count-based temperature scheduling for maximum-entropy reinforcement learning."""

import cbsql.envs  # registers the environments with Gymnasium  # noqa: F401
from cbsql.deep import CBSQL, SQL, Munchausen, Rainbow
from cbsql.tabular import TabularSQL

__all__ = ["CBSQL", "SQL", "Munchausen", "Rainbow", "TabularSQL"]
