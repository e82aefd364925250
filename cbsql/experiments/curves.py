"""Learning curves and test scores of finished runs, small enough to be kept.

python -m cbsql.experiments.curves RUN... --out DIR
"""

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from cbsql.experiments.runner import Episode, read_test

BINS = 50
"""Parts of a run over which its scores are averaged."""

CURVE_COLUMNS = ("game", "algorithm", "seed", "steps", "score", "games", "beta", "count")
TEST_COLUMNS = ("game", "algorithm", "seed", *Episode._fields)
RUN_COLUMNS = (
    *("game", "algorithm", "seed", "last_100_games"),
    *("steps", "updates", "seconds", "commit", "command", "protocol"),
)
COLOURS = {
    **{"dqn": "#555555", "sql 100": "#4292c6", "sql 1000": "#084594", "cbsql": "#d7301f"},
    **{"rainbow": "#555555", "rainbow-sql 100": "#4292c6", "rainbow-sql 1000": "#084594"},
    **{"rainbow-cbsql": "#d7301f", "munchausen": "#41ab5d"},
}
OTHER_COLOURS = (
    *("#807dba", "#fd8d3c", "#238b45", "#8c6d31"),
    *("#ce6dbd", "#17a2b8", "#e7ba52", "#7f3b08"),
)


@dataclass(frozen=True)
class Run:
    """One finished run, read from its folder."""

    record: dict[str, Any]
    """run.json"""
    games: NDArray[np.float64]
    """(games, 2): agent steps at the end of a game, and its score."""
    logs: NDArray[np.float64]
    """(logs, 3): agent steps, mean beta and mean count at s'; nan where there is none."""
    tests: list[Episode]

    @property
    def name(self) -> str:
        """The algorithm with its constant, if it has one, and what else is not as usual."""
        spec = self.record["spec"]
        parts = [spec["algorithm"]]
        if spec["algorithm"] in ("sql", "rainbow-sql"):
            parts.append(f"{spec['beta']:g}")
        if spec["algorithm"].endswith("cbsql") and spec.get("kappa", 0.01) != 0.01:
            parts.append(f"kappa={spec['kappa']:g}")
        if spec["algorithm"].endswith("cbsql") and spec.get("counter"):
            parts.append(f"counter={spec['counter']}")
        if spec.get("protocol", "nature") != "nature":
            parts.append(f"protocol={spec['protocol']}")
        parts += [f"{name}={value}" for name, value in spec.get("settings", {}).items()]
        return " ".join(parts)

    def curve(self) -> NDArray[np.float64]:
        """(bins, 5): last step of a bin, mean score in it, number of games, beta and count."""
        edges = np.linspace(0, self.record["steps"], BINS + 1)
        rows = []
        for low, high in pairwise(edges):
            scores = self.games[(self.games[:, 0] > low) & (self.games[:, 0] <= high), 1]
            logs = self.logs[(self.logs[:, 0] > low) & (self.logs[:, 0] <= high), 1:]
            score = scores.mean() if len(scores) else np.nan
            means = logs.mean(axis=0) if len(logs) else np.full(2, np.nan)
            rows.append([high, score, len(scores), *means])
        return np.array(rows)


def read_run(folder: Path) -> Run:
    """Read a run; an unfinished one is refused."""
    record = json.loads((folder / "run.json").read_text())
    if not record["finished"]:
        raise ValueError(f"The run in {folder} is not finished.")
    with (folder / "episodes.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "game"]
    games = np.array([[float(row["steps"]), float(row["score"])] for row in rows])
    with (folder / "progress.csv").open() as file:
        columns = ("time/total_timesteps", "train/beta_mean", "train/count_mean")
        logs = [[float(row.get(name) or "nan") for name in columns] for row in csv.DictReader(file)]
    return Run(record, games.reshape(-1, 2), np.array(logs).reshape(-1, 3), read_test(folder))


def write_curves(runs: Iterable[Run], out: Path) -> None:
    """Write curves.csv, runs.csv, tests.csv, machines.json and a figure of all games."""
    runs = sorted(runs, key=lambda run: (run.record["spec"]["game"], run.name))
    with (out / "curves.csv").open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(CURVE_COLUMNS)
        for run in runs:
            spec = run.record["spec"]
            for steps, score, games, *beta_and_count in run.curve():
                shown = [f"{x:.5g}" if np.isfinite(x) else "" for x in (score, *beta_and_count)]
                key = (spec["game"], run.name, spec["seed"], round(steps))
                rows.writerow((*key, shown[0], int(games), *shown[1:]))
    with (out / "runs.csv").open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(RUN_COLUMNS)
        for run in runs:
            spec, record = run.record["spec"], run.record
            last = run.games[-100:, 1].mean() if len(run.games) else np.nan
            made = [record[key] for key in ("steps", "updates", "seconds", "commit", "command")]
            made.append(spec.get("protocol", "nature"))
            rows.writerow((spec["game"], run.name, spec["seed"], f"{last:.4g}", *made))
    if any(run.tests for run in runs):
        with (out / "tests.csv").open("w", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(TEST_COLUMNS)
            for run in runs:
                spec = run.record["spec"]
                rows.writerows((spec["game"], run.name, spec["seed"], *test) for test in run.tests)
    places = {json.dumps({k: r.record[k] for k in ("machine", "versions")}) for r in runs}
    text = json.dumps([json.loads(place) for place in sorted(places)], indent=2)
    (out / "machines.json").write_text(text + "\n")
    _figure(runs, 1, "score of a game").savefig(out / "curves.png", dpi=130)
    counting = [run for run in runs if np.isfinite(run.curve()[:, 4]).any()]
    if counting:
        _figure(counting, 3, "mean beta(s')").savefig(out / "beta.png", dpi=130)
        _figure(counting, 4, "mean count of s'").savefig(out / "count.png", dpi=130)


def _figure(runs: list[Run], column: int, label: str) -> Figure:
    """One column of the curves over steps, with axes for each game."""
    games: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        games[run.record["spec"]["game"]][run.name].append(run)
    names = sorted({run.name for run in runs}, key=_order)
    others = iter(OTHER_COLOURS * len(names))
    colours = {name: COLOURS.get(name) or next(others) for name in names}
    columns = min(len(games), 3)
    lines = -(-len(games) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * lines), layout="constrained")
    explained: set[str] = set()
    for position, (game, by_name) in enumerate(games.items(), start=1):
        axes = figure.add_subplot(lines, columns, position)
        axes.spines[["top", "right"]].set_visible(False)
        for name in names:
            if name in by_name:
                _draw(axes, by_name[name], column, name, colours[name])
        axes.set(title=game, xlabel="thousands of agent steps", ylabel=label)
        if by_name.keys() - explained:
            axes.legend(frameon=False, fontsize=8)
        explained |= by_name.keys()
    return figure


def _order(name: str) -> tuple[int, str]:
    return ("sql" in name) + 2 * ("cbsql" in name), name


def _draw(axes: Axes, runs: list[Run], column: int, name: str, colour: str) -> None:
    """The mean over seeds; the band goes from the lowest to the highest of them."""
    curves = np.array([run.curve() for run in runs])  # (seeds, bins, 5)
    steps, values = curves[0, :, 0] / 1000, curves[:, :, column]
    seen = np.isfinite(values).all(axis=0)
    wide = 2.2 if "cbsql" in name else 1.2
    label = f"{name} ({len(runs)})"
    axes.plot(steps[seen], values[:, seen].mean(axis=0), color=colour, linewidth=wide, label=label)
    low, high = values[:, seen].min(axis=0), values[:, seen].max(axis=0)
    axes.fill_between(steps[seen], low, high, color=colour, alpha=0.15, linewidth=0)


def main() -> None:
    """Entry point of ``python -m cbsql.experiments.curves``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_curves([read_run(folder) for folder in arguments.runs], arguments.out)


if __name__ == "__main__":
    main()
