"""Soft Q-learning with tables: a learner for discrete environments, and the chain-walk."""

from cbsql.tabular.learner import TabularSQL
from cbsql.tabular.planning import soft_value_iteration

__all__ = ["TabularSQL", "soft_value_iteration"]
