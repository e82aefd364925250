"""n(s): counters of value updates, each usable on its own."""

from cbsql.counts.coin_flip import CoinFlipNetwork
from cbsql.counts.cts import CTS
from cbsql.counts.default import default_counter, fit_counter
from cbsql.counts.exact import ExactCounter
from cbsql.counts.frames import PixelCounter
from cbsql.counts.simhash import SimHash

__all__ = [
    "CTS",
    "CoinFlipNetwork",
    "ExactCounter",
    "PixelCounter",
    "SimHash",
    "default_counter",
    "fit_counter",
]
