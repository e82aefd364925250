"""n(s): counters of value updates, each usable on its own."""

from cbsql.counts.coin_flip import CoinFlipNetwork
from cbsql.counts.cts import CTS
from cbsql.counts.default import COUNTERS, default_counter, fit_counter, named_counter
from cbsql.counts.exact import ExactCounter
from cbsql.counts.frames import DensityCounter, PixelCounter, PlaneCounter
from cbsql.counts.simhash import SimHash

__all__ = [
    "COUNTERS",
    "CTS",
    "CoinFlipNetwork",
    "DensityCounter",
    "ExactCounter",
    "PixelCounter",
    "PlaneCounter",
    "SimHash",
    "default_counter",
    "fit_counter",
    "named_counter",
]
