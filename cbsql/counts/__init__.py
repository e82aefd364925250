"""n(s): counters of value updates, each usable on its own."""

from cbsql.counts.cts import CTS
from cbsql.counts.exact import ExactCounter

__all__ = ["CTS", "ExactCounter"]
