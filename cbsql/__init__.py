"""Count-based temperature scheduling for maximum-entropy reinforcement learning."""

import cbsql.envs  # registers the environments with Gymnasium  # noqa: F401
from cbsql.tabular import TabularSQL

__all__ = ["TabularSQL"]
