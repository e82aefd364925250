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

from cbsql.experiments.curves import Result, read_tables
from cbsql.experiments.statistics import permutation_p, probability_of_improvement

MEASURES: dict[str, Callable[[Result], float]] = {
    "training": lambda run: run.training,
    "test": lambda run: float(run.scores("game").mean()),
}


def main(folder: str, *names: str) -> None:
    """Print the comparisons that the results allow."""
    runs = []
    for name in names:
        place, _, algorithm = name.rpartition(":")
        tables = read_tables(Path(__file__).parent / (place or folder))
        runs.append([run for run in tables if run.algorithm == algorithm])
    games = sorted(set.intersection(*({run.game for run in part} for part in runs)))
    if not games:
        raise SystemExit(f"There is no game that both of {names} have.")
    tested = all(run.tests for part in runs for run in part)
    for measure in ("training", "test") if tested else ("training",):
        score = MEASURES[measure]
        x, y = (
            np.array([[score(run) for run in part if run.game == game] for game in games]).T
            for part in runs
        )
        probability, p = probability_of_improvement(x, y), permutation_p(x, y)
        counted = f"seeds: {len(x)} and {len(y)}, games: {len(games)}"
        print(f"{measure}: {probability:.2f}, p = {p:.2g} ({counted})")


if __name__ == "__main__":
    main(*sys.argv[1:])
