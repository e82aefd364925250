"""Statistics against SciPy, exhaustive enumeration, sampled coverage, and rliable where it runs."""
# ruff: noqa: NPY002 (NumPy's global generator is what rliable draws from)

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import mannwhitneyu, norm, sem, t, trim_mean

from cbsql.experiments.statistics import (
    bootstrap_interval,
    holm,
    human_normalised,
    interquartile_mean,
    mean_interval,
    performance_profile,
    permutation_p,
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


@pytest.mark.parametrize("games", [2, 5])
def test_equals_are_seldom_told_apart(games):
    rng = np.random.default_rng(2)
    pairs = rng.normal(size=(1_000, 2, 3, games))
    assert np.mean([permutation_p(x, y) < 0.05 for x, y in pairs]) < 0.05 + 4 * 0.007  # its error


@given(tables)
def test_the_chance_of_a_difference_is_that_of_all_exchanges(pair):
    x, y = (part[:3, :2] for part in pair)
    both = np.concatenate([x, y])
    ways = [
        (both[list(one)], np.delete(both, one, axis=0)) for one in combinations(range(len(both)), 3)
    ]
    by_game = [
        [probability_of_improvement(a[:, [game]], b[:, [game]]) for a, b in ways]
        for game in range(x.shape[1])
    ]
    means = np.array([np.mean(one) for one in product(*by_game)])
    observed = abs(probability_of_improvement(x, y) - 0.5)
    assert permutation_p(x, y) == pytest.approx(np.mean(abs(means - 0.5) > observed - 1e-9))


def test_in_one_game_it_is_mann_and_whitneys():
    rng = np.random.default_rng(0)
    for runs in ((3, 3), (5, 4), (20, 30)):
        x, y = (rng.normal(size=(n, 1)) for n in runs)
        theirs = mannwhitneyu(x, y, method="exact").pvalue[0]
        assert permutation_p(x, y) == pytest.approx(theirs)
    with pytest.raises(ValueError, match="without a score"):
        permutation_p(x, np.array([[np.nan]]))


def test_many_runs_in_many_games_are_close_to_normal():
    x, y = np.random.default_rng(0).normal(size=(2, 20, 57))
    above = probability_of_improvement(x, y) - 0.5
    deviation = ((20 + 20 + 1) / (12 * 20 * 20) / 57) ** 0.5  # of U / (n m), over games
    assert permutation_p(x, y) == pytest.approx(2 * norm.sf(abs(above) / deviation), abs=0.01)


@given(st.lists(st.sampled_from([0.0, 0.01, 0.02, 0.04, 0.3, 1.0]), min_size=1, max_size=6))
def test_comparisons_made_together_are_tested_in_all_their_groups(p):
    """As is its reason: one is a difference if each group that it is in has one, by Bonferroni."""
    places = range(len(p))
    groups = [group for size in places for group in combinations(places, size + 1)]
    chance = {group: min(1, len(group) * min(p[i] for i in group)) for group in groups}
    expected = [max(chance[group] for group in groups if i in group) for i in places]
    assert holm(np.array(p)) == pytest.approx(expected)


def test_means_have_students_interval():
    rng = np.random.default_rng(0)
    for runs, coverage in product((2, 3, 4, 10, 100), (0.5, 0.95, 0.99)):
        values = rng.exponential(size=runs)
        theirs = t.interval(coverage, runs - 1, values.mean(), sem(values))
        assert mean_interval(values, coverage) == pytest.approx(theirs, rel=1e-6)
    with pytest.raises(ValueError, match="at least two values, not 1"):
        mean_interval(np.ones(1))


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


@pytest.mark.parametrize(
    ("interval", "games", "share"),
    [
        (lambda scores, _: mean_interval(scores[:, 0]), 1, 0.95),
        (lambda scores, seed: bootstrap_interval(interquartile_mean, scores, seed=seed), 5, 0.87),
    ],
    ids=["Student", "bootstrap"],
)
def test_intervals_of_three_runs_hold_the_truth_as_often_as_docs_say(interval, games, share):
    rng = np.random.default_rng(1)
    held = 0
    for trial in range(400):
        low, high = interval(rng.normal(size=(3, games)), trial)
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
