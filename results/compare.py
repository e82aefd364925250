"""Whether two algorithms differ, by the exact test of docs/report.md over the games of both.

    python results/compare.py table2 rainbow-cbsql rainbow
    python results/compare.py updates 'rainbow train_freq=1' 'returns:rainbow n_steps=4'

The first is a folder of results, in which the algorithms are looked up unless they name another.
Prints the probability that a run of the first scores higher, and p, by training and by test games.
"""

import sys
from pathlib import Path

from cbsql.experiments.comparison import MEASURES, Comparison, score_table, scores_by_seed
from cbsql.experiments.curves import read_tables


def main(folder: str, *names: str) -> None:
    """Print the comparisons that the results allow, by seeds that have a score in every game."""
    parts = []
    for name in names:
        place, _, algorithm = name.rpartition(":")
        tables = read_tables(Path(__file__).parent / (place or folder))
        parts.append((algorithm, [run for run in tables if run.algorithm == algorithm]))
    games = sorted(set.intersection(*({run.game for run in runs} for _, runs in parts)))
    if not games:
        raise SystemExit(f"There is no game that both of {names} have.")
    for measure in MEASURES:
        x, y = (
            score_table(scores_by_seed(runs, measure), algorithm, games)
            for algorithm, runs in parts
        )
        if len(x) and len(y):
            one = Comparison(*names, x, y)
            counted = f"seeds: {len(x)} and {len(y)}, games: {one.games}"
            print(f"{measure}: {one.probability:.2f}, p = {one.p:.2g} ({counted})")


if __name__ == "__main__":
    main(*sys.argv[1:])
