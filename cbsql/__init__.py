"""Count-based temperature scheduling for maximum-entropy reinforcement learning."""

import cbsql.envs  # registers the environments with Gymnasium  # noqa: F401
from cbsql.deep import CBSQL, SQL
from cbsql.tabular import TabularSQL

__all__ = ["CBSQL", "SQL", "TabularSQL"]
