"""Whether two algorithms differ, by the exact test of docs/report.md over the games of both.

    python results/compare.py table2 rainbow-cbsql rainbow
    python results/compare.py updates 'rainbow train_freq=1' 'returns:rainbow n_steps=4'

The first is a folder of results, in which the algorithms are looked up unless they name another.
Prints the probability that a run of the first scores higher, and p, by training and by test games.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cbsql.experiments.curves import Result, read_tables
from cbsql.experiments.statistics import permutation_p, probability_of_improvement


def _test(run: Result) -> float:
    scores = run.scores("game")
    return float(scores.mean()) if len(scores) else np.nan


MEASURES: dict[str, Callable[[Result], float]] = {
    "training": lambda run: run.training,
    "test": _test,
}


def main(folder: str, *names: str) -> None:
    """Print the comparisons that the results allow, by seeds that have a score in every game."""
    runs = []
    for name in names:
        place, _, algorithm = name.rpartition(":")
        tables = read_tables(Path(__file__).parent / (place or folder))
        runs.append([run for run in tables if run.algorithm == algorithm])
    games = sorted(set.intersection(*({run.game for run in part} for part in runs)))
    if not games:
        raise SystemExit(f"There is no game that both of {names} have.")
    for measure, score in MEASURES.items():
        x, y = (_table(part, games, score) for part in runs)
        if len(x) and len(y):
            probability, p = probability_of_improvement(x, y), permutation_p(x, y)
            counted = f"seeds: {len(x)} and {len(y)}, games: {len(games)}"
            print(f"{measure}: {probability:.2f}, p = {p:.2g} ({counted})")


def _table(
    runs: list[Result], games: list[str], score: Callable[[Result], float]
) -> NDArray[np.float64]:
    """Scores (seeds, games)."""
    scores = {(run.seed, run.game): score(run) for run in runs}
    rows = [[scores.get((seed, game), np.nan) for game in games] for seed in {s for s, _ in scores}]
    table = np.array(rows).reshape(-1, len(games))
    return table[np.isfinite(table).all(1)]


if __name__ == "__main__":
    main(*sys.argv[1:])
