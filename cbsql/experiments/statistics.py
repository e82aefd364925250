"""Statistics of few runs on several games, after Agarwal et al. (2021).

Scores are (..., runs, games), each the score of one run in one game; what comes before these two
dimensions is kept. The quantities are those of the rliable package, which cannot be used itself:
version 1.2 needs a version of arch that does not import beside pandas 3.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEAST_RUNS = 3
"""With fewer runs of a game there is no interval: two runs resampled have three outcomes."""

RESAMPLES = 5_000

HUMAN: Mapping[str, tuple[float, float]] = MappingProxyType(
    # Scores of random play and of a professional tester (Wang et al., 2016), in the paper's games.
    {
        "breakout": (1.7, 30.5),
        "freeway": (0.0, 29.6),
        "pong": (-20.7, 14.6),
        "qbert": (163.9, 13455.0),
        "seaquest": (68.4, 42054.7),
        "space_invaders": (148.0, 1668.7),
    }
)


def human_normalised(game: str, scores: Floats) -> Floats:
    """Scores of whole games on a scale on which 0 is random play and 1 a human's."""
    if game not in HUMAN:
        raise ValueError(f"Human scores are known of {', '.join(HUMAN)}, not of {game!r}.")
    random, human = HUMAN[game]
    return (scores - random) / (human - random)


def interquartile_mean(scores: Floats) -> Floats:
    """Mean of all runs of all games but the lowest and the highest quarter of them."""
    flat = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    cut = flat.shape[-1] // 4
    return np.asarray(flat[..., cut : flat.shape[-1] - cut].mean(-1))


def probability_of_improvement(x: Floats, y: Floats) -> Floats:
    """How likely a run of X beats a run of Y in the same game, ties counting half."""
    above = x[..., :, None, :] - y[..., None, :, :]  # (..., runs of X, runs of Y, games)
    return np.asarray((np.sign(above) + 1).mean((-3, -2, -1)) / 2)


def performance_profile(scores: Floats, thresholds: Floats) -> Floats:
    """Fraction of runs that score above each threshold: (..., thresholds)."""
    return np.asarray((scores[..., None] > thresholds).mean((-3, -2)))


def bootstrap_interval(
    statistic: Callable[..., Floats], *samples: Floats, seed: int = 0, coverage: float = 0.95
) -> Floats:
    """Percentile interval (2, ...) of a statistic of scores (runs, games).

    Runs are drawn with replacement in each game on its own (stratified), as the games are the ones
    we ask about and the runs are what chance chose.
    """
    rng = np.random.default_rng(seed)
    resampled = []
    for scores in samples:
        drawn = rng.integers(len(scores), size=(RESAMPLES, *scores.shape))
        resampled.append(np.take_along_axis(scores[None], drawn, axis=1))
    tail = (1 - coverage) / 2
    return np.quantile(statistic(*resampled), (tail, 1 - tail), axis=0)
