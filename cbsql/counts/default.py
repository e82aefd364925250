"""Which counter fits which observations."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np
from gymnasium import spaces

from cbsql.counts.cts import CTS
from cbsql.counts.exact import ExactCounter
from cbsql.counts.frames import PixelCounter, image_layout
from cbsql.counts.simhash import SimHash

Other = TypeVar("Other")


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


def fit_counter(counter: Other, observation_space: spaces.Space[Any]) -> Other | PixelCounter:
    """Make a counter take observations of a space: a bare CTS is given the frames it needs."""
    return PixelCounter(counter, observation_space) if isinstance(counter, CTS) else counter


def _size(space: spaces.Space[Any]) -> int:
    """Components of a state, or 0 for a space whose states are not arrays of one shape."""
    arrays = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    return math.prod(space.shape or ()) if isinstance(space, arrays) else 0
