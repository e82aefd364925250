"""Statistics against SciPy, exhaustive enumeration, sampled coverage, and rliable where it runs."""
# ruff: noqa: NPY002 (NumPy's global generator is what rliable draws from)

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import mannwhitneyu, trim_mean

from cbsql.experiments.statistics import (
    bootstrap_interval,
    human_normalised,
    interquartile_mean,
    performance_profile,
    probability_of_improvement,
)

whole = st.integers(-20, 20).map(float)  # whole numbers, so that there are ties
tables = st.integers(1, 4).flatmap(
    lambda games: st.tuples(*[arrays(float, (n, games), elements=whole) for n in (5, 3)])
)


@given(tables)
def test_the_statistics_are_scipys(pair):
    x, y = pair
    assert interquartile_mean(x) == pytest.approx(trim_mean(x, 0.25, axis=None))
    ranks = [
        mannwhitneyu(a, b).statistic / (len(a) * len(b)) for a, b in zip(x.T, y.T, strict=True)
    ]
    assert probability_of_improvement(x, y) == pytest.approx(np.mean(ranks))


def test_a_profile_worked_out_by_hand():
    scores = np.array([[0.0, 1.0], [2.0, 3.0]])
    thresholds = np.array([-1.0, 0.0, 1.5, 3.0])
    assert performance_profile(scores, thresholds).tolist() == [1.0, 0.75, 0.5, 0.0]


def test_leading_dimensions_are_kept():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(7, 5, 3)), rng.normal(size=(7, 4, 3))
    thresholds = np.linspace(-1, 1, 6)
    assert np.allclose(interquartile_mean(x), [interquartile_mean(part) for part in x])
    parts = [probability_of_improvement(a, b) for a, b in zip(x, y, strict=True)]
    assert np.allclose(probability_of_improvement(x, y), parts)
    assert performance_profile(x, thresholds).shape == (7, 6)


@pytest.mark.parametrize("coverage", [0.5, 0.9])
def test_the_interval_is_that_of_all_resamples(coverage):
    # Two games of three runs have 27 * 27 equally likely resamples, drawn independently.
    scores = np.array([[1.0, 10.0], [2.0, 30.0], [4.0, 70.0]])
    outcomes = [
        np.mean([*scores[list(a), 0], *scores[list(b), 1]])
        for a in product(range(3), repeat=3)
        for b in product(range(3), repeat=3)
    ]
    tail = (1 - coverage) / 2
    exact = np.quantile(outcomes, (tail, 1 - tail))
    ours = bootstrap_interval(lambda x: x.mean((-2, -1)), scores, coverage=coverage)
    assert ours == pytest.approx(exact, abs=1.0)  # of outcomes from 5.5 to 37, 700 of them distinct


@pytest.mark.parametrize(("runs", "share"), [(3, 0.76), (5, 0.84), (20, 0.92)])
def test_intervals_hold_the_truth_as_often_as_docs_say(runs, share):
    rng = np.random.default_rng(1)
    held = 0
    for trial in range(400):
        scores = rng.normal(size=(runs, 1))
        low, high = bootstrap_interval(lambda x: x.mean((-2, -1)), scores, seed=trial)
        held += low < 0 < high
    assert abs(held / 400 - share) < 4 * (share * (1 - share) / 400) ** 0.5


def test_a_seed_gives_one_interval_and_the_global_generator_is_left_alone():
    scores = np.random.default_rng(0).normal(size=(5, 3))
    before = np.random.get_state()[1].tolist()
    first, again, other = (
        bootstrap_interval(interquartile_mean, scores, seed=s) for s in (3, 3, 4)
    )
    assert first.tolist() == again.tolist() != other.tolist()
    assert np.random.get_state()[1].tolist() == before


def test_human_normalised():
    assert human_normalised("pong", np.array([-20.7, 14.6, -3.05])).tolist() == [0, 1, 0.5]
    with pytest.raises(ValueError, match="not of 'chess'"):
        human_normalised("chess", np.zeros(1))


def test_rliable_says_the_same():
    try:
        from rliable import library, metrics
    except (ImportError, TypeError):  # its arch raises the latter beside pandas 3
        pytest.skip("rliable cannot be imported here")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(5, 4)), rng.normal(size=(6, 4)) + 0.3
    thresholds = np.linspace(-1, 1, 5)
    before = np.random.get_state()
    np.random.seed(0)  # its random_state has no effect
    comparisons = [
        (
            bootstrap_interval(interquartile_mean, x),
            library.get_interval_estimates(
                {"x": x}, lambda s: np.array([metrics.aggregate_iqm(s)]), reps=5000
            ),
        ),
        (
            bootstrap_interval(probability_of_improvement, x, y),
            library.get_interval_estimates(
                {"x": (x, y)}, metrics.probability_of_improvement, reps=5000
            ),
        ),
        (
            bootstrap_interval(lambda s: performance_profile(s, thresholds), x),
            library.create_performance_profile({"x": x}, thresholds, reps=5000),
        ),
    ]
    np.random.set_state(before)
    for ours, (_, theirs) in comparisons:
        assert ours == pytest.approx(theirs["x"].reshape(ours.shape), abs=0.06)
