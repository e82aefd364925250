"""n(s): counters of value updates, each usable on its own."""

from cbsql.counts.exact import ExactCounter

__all__ = ["ExactCounter"]
