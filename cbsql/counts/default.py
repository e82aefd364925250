"""Which counter fits which observations."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np
from gymnasium import spaces

from cbsql.counts.coin_flip import CoinFlipNetwork
from cbsql.counts.cts import CTS
from cbsql.counts.exact import ExactCounter
from cbsql.counts.frames import DensityCounter, PixelCounter, PlaneCounter, image_layout
from cbsql.counts.simhash import SimHash

Other = TypeVar("Other")

COUNTERS = ("cts", "exact", "simhash", "coin-flip")
"""What :func:`named_counter` knows."""


def default_counter(
    observation_space: spaces.Space[Any], seed: int = 0
) -> PixelCounter | ExactCounter | SimHash:
    """The counter for an observation space.

    - images (uint8 in [0, 255]): CTS at 42 x 42 pixels, or fewer if the image is smaller
    - Discrete, MultiDiscrete, MultiBinary, boxes of integers or booleans: exact
    - boxes of floats, and Dict spaces of all these: SimHash with the given seed
    """
    space = observation_space
    if isinstance(space, spaces.Dict):
        sizes = [_size(part) for part in space.values()]
        if sizes and 0 not in sizes:
            return SimHash(sum(sizes), seed=seed)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        return ExactCounter()
    if isinstance(space, spaces.Box):
        try:
            shape, channel_axis = image_layout(space)
        except ValueError:
            if np.issubdtype(space.dtype, np.floating):
                return SimHash(math.prod(space.shape), seed=seed)
            return ExactCounter()
        height, width = np.delete(shape, [] if channel_axis is None else channel_axis).tolist()
        return PixelCounter(CTS((min(height, 42), min(width, 42))), space)
    raise ValueError(
        f"There is no default counter for {space}. Supported are Box, Discrete, MultiDiscrete, "
        "MultiBinary and Dict of these; for anything else pass a counter of your own."
    )


def named_counter(
    name: str, observation_space: spaces.Space[Any], seed: int = 0
) -> DensityCounter | ExactCounter | SimHash | CoinFlipNetwork:
    """One of :data:`COUNTERS`, for an observation space that it can count."""
    space = observation_space
    if name == "exact":
        floats = isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating)
        if floats or _size(space) == 0:
            raise ValueError(f"Only integers and booleans can be counted exactly, not {space}.")
        return ExactCounter()
    if name == "simhash":
        parts = space.values() if isinstance(space, spaces.Dict) else [space]
        sizes = [_size(part) for part in parts]
        if 0 in sizes:
            raise ValueError(f"SimHash takes arrays of one shape, which {space} are not.")
        return SimHash(sum(sizes), seed=seed)
    if name == "coin-flip":
        return CoinFlipNetwork(space, seed=seed)
    if name == "cts":
        if space.dtype == np.bool_ and len(space.shape or ()) == 3:
            height, width, planes = space.shape or ()
            return PlaneCounter(CTS((height, planes * width), levels=2), space)
        image_layout(space)  # refuses what is no image
        counter = default_counter(space)
        assert isinstance(counter, PixelCounter)
        return counter
    raise ValueError(f"A counter is one of {', '.join(COUNTERS)}, not {name!r}.")


def fit_counter(counter: Other, observation_space: spaces.Space[Any]) -> Other | DensityCounter:
    """Make a counter take observations of a space: a bare CTS is given the frames it needs."""
    if not isinstance(counter, CTS):
        return counter
    kind = PlaneCounter if observation_space.dtype == np.bool_ else PixelCounter
    return kind(counter, observation_space)


def _size(space: spaces.Space[Any]) -> int:
    """Components of a state, or 0 for a space whose states are not arrays of one shape."""
    arrays = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    return math.prod(space.shape or ()) if isinstance(space, arrays) else 0
