"""Statistics of few runs on several games, after Agarwal et al. (2021).

Scores are (..., runs, games), each the score of one run in one game; what comes before these two
dimensions is kept. The quantities are those of the rliable package, which cannot be used itself:
version 1.2 needs a version of arch that does not import beside pandas 3.
"""

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEAST_RUNS = 3
"""With fewer runs of a game there is no interval: of two, Student's is 13 times their distance."""

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


def permutation_p(x: Floats, y: Floats) -> float:
    """How often runs that are exchanged by lot differ as much as X and Y (runs, games), or more.

    It is exact and two-sided: of all ways to exchange runs within each game, those are counted
    whose probability of improvement is at least as far from one half. In a single game this is
    Mann and Whitney's test, in several van Elteren's.
    """
    if np.isnan(x).any() or np.isnan(y).any():
        raise ValueError("Runs without a score cannot be compared.")
    runs, games = x.shape
    observed, ways = 0, np.ones(1)
    for game in range(games):
        scores = np.concatenate([x[:, game], y[:, game]])
        # Twice the ranks, ties sharing theirs, so that all are whole numbers.
        above, equal = (relation(scores[:, None], scores) for relation in (np.greater, np.equal))
        ranks = 2 * above.sum(1) + equal.sum(1) + 1
        observed += ranks[:runs].sum()
        sums = _sums(ranks, runs)
        ways = np.convolve(ways, sums / sums.sum())  # shares, which do not overflow
    middle = games * runs * (len(x) + len(y) + 1)
    far = np.abs(np.arange(len(ways)) - middle) >= abs(observed - middle)
    return float(ways[far].sum())


def holm(p: Floats) -> Floats:
    """Each p of comparisons that are made together, raised for their number (Holm, 1979).

    If those below a level are called differences, then one or more of them are none with at most
    the probability of that level.
    """
    order = np.argsort(p)
    raised = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    return np.asarray(np.minimum(raised, 1)[np.argsort(order)])


def _sums(values: NDArray[np.int64], size: int) -> Floats:
    """In how many ways ``size`` of the values have the sum 0, 1, 2, and so on."""
    ways = np.zeros((size + 1, values.sum() + 1))
    ways[0, 0] = 1
    for value in values:
        ways[1:, value:] += ways[:-1, :-value]
    return np.asarray(ways[size])


def performance_profile(scores: Floats, thresholds: Floats) -> Floats:
    """Fraction of runs that score above each threshold: (..., thresholds)."""
    return np.asarray((scores[..., None] > thresholds).mean((-3, -2)))


def mean_interval(values: Floats, coverage: float = 0.95) -> Floats:
    """Student's interval (2,) of the mean of a few values, which resampling would make too narrow.

    If they are distributed normally, it holds the true mean as often as it says.
    """
    if len(values) < 2:
        raise ValueError(f"An interval takes at least two values, not {len(values)}.")
    half = _student(len(values) - 1, coverage) * values.std(ddof=1) / len(values) ** 0.5
    return np.array([values.mean() - half, values.mean() + half])


@cache
def _student(degrees: int, coverage: float) -> float:
    """How far from 0 a variable with Student's distribution is at most, with this probability."""
    # With t = sqrt(degrees) tan(angle), its density is a power of the cosine.
    angle = np.linspace(-np.pi / 2, np.pi / 2, 100_001)
    density = np.cos((angle[1:] + angle[:-1]) / 2) ** (degrees - 1)
    share = np.append(0, density.cumsum()) / density.sum()
    return float(degrees**0.5 * np.tan(np.interp((1 + coverage) / 2, share, angle)))


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
