"""Which scores are compared, and what is said of them."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from cbsql.experiments.comparison import (
    Comparison,
    compare,
    examine,
    score_table,
    scores_by_seed,
    verdicts,
)
from cbsql.experiments.curves import Result
from cbsql.experiments.paper import TABLE_1, TABLE_2
from cbsql.experiments.runner import Episode
from results.compare import main


def run(game, algorithm, seed, training, test=None):
    """A result of which only the scores matter."""
    tests = [] if test is None else [Episode("game", test - 1, 9), Episode("game", test + 1, 9)]
    return Result(
        **{"game": game, "algorithm": algorithm, "seed": seed, "training": training},
        **{"tests": tests, "steps": 1, "updates": 1, "seconds": 1, "commit": "", "command": ""},
        **{"folder": Path(), "curve": np.empty((0, 5)), "places": [], "protocol": "nature"},
    )


def test_seeds_without_a_score_in_every_game_are_not_compared():
    scores = {("a", 0): 1.0, ("b", 0): 2.0, ("a", 1): 3.0, ("a", 2): 4.0, ("b", 2): np.nan}
    runs = [run(game, "dqn", seed, score, test=7) for (game, seed), score in scores.items()]
    training, test = (scores_by_seed(runs, measure) for measure in ("training", "test"))
    assert score_table(training, "dqn", ["a", "b"]).tolist() == [[1.0, 2.0]]
    assert score_table(training, "dqn", ["a"]).tolist() == [[1.0], [3.0], [4.0]]
    assert score_table(test, "dqn", ["a", "b"]).tolist() == [[7, 7], [7, 7]]
    assert score_table(training, "dqn", ["b", "c"]).shape == (0, 2)


def test_algorithms_are_compared_by_the_games_in_which_both_have_three_seeds():
    runs = [run(game, "dqn", seed, seed) for game in "abc" for seed in range(3)]
    runs += [run(game, "cbsql", seed, 10 + seed) for game in "ab" for seed in range(4)]
    runs += [run("c", "cbsql", seed, -1) for seed in range(2)]
    scores = scores_by_seed(runs, "training")
    one = compare(scores, "cbsql", "dqn", ["a", "b", "c"])
    assert (one.games, len(one.x), len(one.y)) == (2, 4, 3)
    assert (one.probability, one.p) == (1, pytest.approx(2 / 35**2))  # 35: 7 choose 3
    assert compare(scores, "cbsql", "dqn", ["c"]) is None
    assert compare(scores, "cbsql", "sql 100", ["a"]) is None


HIGH, LOW = np.array([[4.0], [5.0], [6.0]]), np.array([[1.0], [2.0], [3.0]])


@pytest.mark.parametrize(
    ("x", "y", "verdict", "p"),
    [
        (np.hstack([HIGH, HIGH]), np.hstack([LOW, LOW]), "scores higher than", 2 / 20**2),
        (np.hstack([LOW, LOW]), np.hstack([HIGH, HIGH]), "scores lower than", 2 / 20**2),
        (np.hstack([HIGH, LOW]), np.hstack([LOW, HIGH]), "cannot be told from", 1),
        (HIGH, LOW, "has too few runs to be told from", 2 / 20),
    ],
)
def test_verdicts(x, y, verdict, p):
    one = Comparison("cbsql", "dqn", x, y)
    assert (verdicts([one]), one.p) == ([verdict], pytest.approx(p))


def test_of_many_comparisons_each_needs_a_clearer_difference():
    x, y = np.arange(8.0).reshape(2, 4, 1)
    clear = Comparison("cbsql", "dqn", y, x)  # 2 of 70 ways to exchange runs: 0.029
    alike = Comparison("cbsql", "sql", x, x)
    assert verdicts([clear]) == ["scores higher than"]
    assert set(verdicts([clear, alike])) == {"has too few runs to be told from"}
    both = Comparison("cbsql", "dqn", np.hstack([y, y]), np.hstack([x, x]))
    assert verdicts([alike, both, both])[1:] == ["scores higher than"] * 2


def table(scores, games=TABLE_2.games, seeds=3):
    return [
        run(game, algorithm, seed, training + seed / 100, test + seed / 100)
        for (algorithm, (training, test)), game, seed in product(
            scores.items(), games, range(seeds)
        )
    ]


RIVALS = dict.fromkeys(TABLE_2.algorithms[:-1], (1, 1))


@pytest.mark.parametrize(
    ("ours", "rivals", "verdict"),
    [
        ((2, 2), {}, "holds"),
        ((2, 1), {}, "undecided"),  # better in training only
        ((1, 1), {}, "undecided"),
        ((0, 0), {}, "does not hold"),
        ((2, 2), {"rainbow": (3, 3)}, "does not hold"),  # it takes one that is better
        ((2, 2), {"rainbow": (3, 1)}, "undecided"),
    ],
)
def test_claims(ours, rivals, verdict):
    runs = table(RIVALS | rivals | {"rainbow-cbsql": ours})
    assert examine(TABLE_2, runs).verdict == verdict


def test_a_claim_on_all_games_takes_all_games():
    scores = RIVALS | {"rainbow-cbsql": (2, 2)}
    assert examine(TABLE_2, table(scores, seeds=2)).verdict == "undecided"
    without = [one for one in table(scores) if one.algorithm != "rainbow"]
    assert examine(TABLE_2, without).verdict == "undecided"
    untested = [replace(one, tests=[]) for one in table(scores)]
    assert examine(TABLE_2, untested).verdict == "undecided"
    plain = {"dqn": (1, 1), "sql 100": (1, 1), "sql 1000": (1, 1), "cbsql": (2, 2)}
    assert examine(TABLE_1, table(plain, TABLE_1.claimed)).verdict == "holds"
    assert examine(TABLE_1, table(plain, TABLE_1.claimed[1:])).verdict == "undecided"
    worst = plain | {"cbsql": (0, 0)}
    assert examine(TABLE_1, table(worst, TABLE_1.claimed[1:])).verdict == "does not hold"
    others = sorted(set(TABLE_1.games) - set(TABLE_1.claimed))
    assert examine(TABLE_1, table(worst, others)).verdict == "undecided"  # nothing is claimed there


def test_two_algorithms_of_the_results_are_compared(capsys):
    """Every seed of either with more updates is above every seed with fewer: 2 of 20² exchanges."""
    main("updates", "rainbow-cbsql train_freq=1", "returns:rainbow-cbsql n_steps=1")
    shown = "1.00, p = 0.005 (seeds: 3 and 3, games: 2)\n"
    assert capsys.readouterr().out == f"test: {shown}training: {shown}"
    with pytest.raises(SystemExit, match="no game that both"):
        main("table2", "rainbow", "returns:rainbow n_steps=4")
