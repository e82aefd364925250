"""Learning curves and test scores of runs, small enough to be kept.

python -m cbsql.experiments.curves RUN... --out DIR [--until STEPS]

What DIR has of other runs stays there, so that runs can be added as they come.
"""

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from cbsql.envs.atari import FRAME_SKIP
from cbsql.experiments.runner import Episode, read_test
from cbsql.experiments.spec import RunSpec

Floats = NDArray[np.float64]

BINS = 50
"""Parts of a run over which its scores are averaged."""

RUN_KEY = ("game", "algorithm", "seed")
CURVE_COLUMNS = (*RUN_KEY, "steps", "score", "games", "beta", "count")
TEST_COLUMNS = (*RUN_KEY, *Episode._fields)
RUN_COLUMNS = (
    *(*RUN_KEY, "last_100_games"),
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
class Result:
    """What one run has shown."""

    game: str
    algorithm: str
    """With its constant and with what else differs from the preset."""
    seed: int
    steps: int
    """Agent steps of training."""
    updates: int
    seconds: float
    commit: str
    command: str
    folder: Path
    """What it was read from."""
    curve: Floats
    """(bins, 5): last step of a bin, mean score in it, number of games, mean beta and count at s';
    nan where there is none."""
    training: float
    """Mean score of the last 100 training games."""
    tests: list[Episode]
    places: list[dict[str, Any]]
    """Machines and versions that it may have been made with."""
    protocol: str

    @property
    def is_atari(self) -> bool:
        """Whether frames are emulator frames, of which a step has several."""
        return RunSpec(self.game).is_atari

    @property
    def frames(self) -> int:
        """Frames of training."""
        return self.steps * (FRAME_SKIP if self.is_atari else 1)

    @property
    def key(self) -> tuple[Any, ...]:
        """What no two runs should have in common."""
        return self.game, self.protocol, self.steps, self.algorithm, self.seed

    @property
    def row(self) -> tuple[str, str, int]:
        """What no two runs of a table have in common: :data:`RUN_KEY`."""
        return self.game, self.algorithm, self.seed

    @property
    def versions(self) -> set[str]:
        """Of this package, that it may have been made with."""
        return {place["versions"]["cbsql"] for place in self.places if place.get("versions")}

    def scores(self, kind: str) -> Floats:
        """Scores of its test episodes in order; kind is "game" or "life"."""
        return np.array([episode.score for episode in self.tests if episode.kind == kind])

    def with_last_games(self, number: int) -> "Result":
        """The same with the last of its test games, and all lives: fewer might begin in a game."""
        games = [episode for episode in self.tests if episode.kind == "game"]
        lives = [episode for episode in self.tests if episode.kind == "life"]
        return replace(self, tests=[*games[-number:], *lives])


def name_of(spec: dict[str, Any]) -> str:
    """The algorithm with its constant, if it has one, and what else is not as usual."""
    parts = [spec["algorithm"]]
    if spec["algorithm"] in ("sql", "rainbow-sql"):
        parts.append(f"{spec['beta']:g}")
    if spec["algorithm"].endswith("cbsql") and spec.get("kappa", 0.01) != 0.01:
        parts.append(f"kappa={spec['kappa']:g}")
    if spec["algorithm"].endswith("cbsql") and spec.get("counter"):
        parts.append(f"counter={spec['counter']}")
    if spec.get("protocol", "nature") != "nature":
        parts.append(f"protocol={spec['protocol']}")
    parts += [f"{name}={value}" for name, value in sorted(spec.get("settings", {}).items())]
    return " ".join(parts)


def read_run(folder: Path, until: int | None = None) -> Result:
    """Read a finished run, or what any run has shown in its first ``until`` agent steps.

    The latter is not what a run of that length shows, since schedules go on: its name says so. It
    has no test games, and the updates and seconds of its last game.

    :raises ValueError: if it is not finished, or has not come so far
    """
    record = json.loads((folder / "run.json").read_text())
    spec, finished = record["spec"], record["finished"]
    if until is None and not finished:
        raise ValueError(f"The run in {folder} is not finished.")
    with (folder / "episodes.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "game"]
    columns = ("steps", "score", "updates", "seconds")
    games = np.array([[float(row[name]) for name in columns] for row in rows]).reshape(-1, 4)
    with (folder / "progress.csv").open() as file:
        logged = ("time/total_timesteps", "train/beta_mean", "train/count_mean")
        lines = [[float(row.get(name) or "nan") for name in logged] for row in csv.DictReader(file)]
    logs = np.array(lines).reshape(-1, 3)
    name = name_of(spec)
    if until is None:
        updates, seconds = record["updates"], record["seconds"]
        steps = spec.get("steps") or record["steps"]
        tests = read_test(folder)
    else:
        reached = record["steps"] if finished else max((*games[-1:, 0], *logs[-1:, 0]), default=0)
        if reached < until:
            raise ValueError(f"The run in {folder} has come to step {reached:,.0f}, not {until:,}.")
        games = games[games[:, 0] <= until]
        updates, seconds = games[-1, 2:].tolist() if len(games) else (0, 0.0)
        name, steps, tests = f"{name} (cut off of {spec['steps']:,} steps)", until, []
    return Result(
        game=spec["game"],
        algorithm=name,
        seed=int(spec["seed"]),
        steps=int(steps),
        updates=int(updates),
        seconds=float(seconds),
        commit=record.get("commit") or "",
        command=record.get("command", ""),
        folder=folder,
        curve=_curve(games, logs, steps),
        training=float(games[-100:, 1].mean()) if len(games) else np.nan,
        tests=tests,
        places=[{key: record.get(key) for key in ("machine", "versions")}],
        protocol=spec.get("protocol", "nature"),
    )


def _curve(games: Floats, logs: Floats, steps: int) -> Floats:
    rows = []
    for low, high in pairwise(np.linspace(0, steps, BINS + 1)):
        scores = games[(games[:, 0] > low) & (games[:, 0] <= high), 1]
        logged = logs[(logs[:, 0] > low) & (logs[:, 0] <= high), 1:]
        score = scores.mean() if len(scores) else np.nan
        known = [column[~np.isnan(column)] for column in logged.T]  # nothing, before an update
        means = [column.mean() if len(column) else np.nan for column in known]
        rows.append([high, score, len(scores), *means])
    return np.array(rows)


def read_tables(folder: Path) -> list[Result]:
    """Read what :func:`write_tables` wrote."""
    curves: dict[tuple[str, ...], list[list[float]]] = defaultdict(list)
    for key, row in _rows(folder / "curves.csv"):
        curves[key].append([float(row[name] or "nan") for name in CURVE_COLUMNS[3:]])
    for key, rows in curves.items():
        if len(rows) != BINS:
            raise ValueError(f"curves.csv has {len(rows)} rows of {' '.join(key)}, not {BINS}")
    tests: dict[tuple[str, ...], list[Episode]] = defaultdict(list)
    if (folder / "tests.csv").is_file():
        for key, row in _rows(folder / "tests.csv"):
            episode = Episode(row["kind"], float(row["score"]), int(row["length_steps"]))
            tests[key].append(episode)
    places = json.loads((folder / "machines.json").read_text())
    return [
        Result(
            game=row["game"],
            algorithm=row["algorithm"],
            seed=int(row["seed"]),
            steps=int(row["steps"]),
            updates=int(row["updates"]),
            seconds=float(row["seconds"]),
            commit=row["commit"],
            command=row["command"],
            folder=folder,
            curve=np.array(curves[key]).reshape(-1, 5),
            training=float(row["last_100_games"]),
            tests=tests[key],
            places=places,
            protocol=row["protocol"],
        )
        for key, row in _rows(folder / "runs.csv")
    ]


def _rows(path: Path) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """Rows of a table, each with the run that it belongs to."""
    with path.open() as file:
        for row in csv.DictReader(file):
            yield tuple(row[name] for name in RUN_KEY), row


def write_tables(results: Iterable[Result], out: Path) -> None:
    """Write curves.csv, runs.csv, tests.csv and machines.json."""
    results = sorted(results, key=lambda one: one.row)
    for one, following in pairwise(results):
        if one.row == following.row:
            raise ValueError(f"{one.folder} and {following.folder} are the same run.")
        if one.row[:2] == following.row[:2] and one.steps != following.steps:
            raise ValueError(
                f"{one.game}, {one.algorithm} has runs of {one.steps:,} and {following.steps:,} "
                "steps, which cannot be averaged: give them an --out of their own."
            )
    curves, runs, tests = [], [], []
    for one in results:
        key = one.row
        for steps, score, games, *beta_and_count in one.curve:
            shown = [f"{x:.5g}" if np.isfinite(x) else "" for x in (score, *beta_and_count)]
            curves.append((*key, round(steps), shown[0], int(games), *shown[1:]))
        made = (one.steps, one.updates, one.seconds, one.commit, one.command, one.protocol)
        runs.append((*key, f"{one.training:.4g}", *made))
        tests += [(*key, *test) for test in one.tests]
    _write(out / "curves.csv", CURVE_COLUMNS, curves)
    _write(out / "runs.csv", RUN_COLUMNS, runs)
    _write(out / "tests.csv", TEST_COLUMNS, tests)
    places = {json.dumps(place) for one in results for place in one.places}
    text = json.dumps([json.loads(place) for place in sorted(places)], indent=2)
    (out / "machines.json").write_text(text + "\n")


def _write(path: Path, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    if not rows:
        path.unlink(missing_ok=True)  # what is there belongs to other runs
        return
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *rows])


def draw_curves(results: Iterable[Result], out: Path) -> None:
    """Draw curves.png and, where there are counts, beta.png and count.png, of all games."""
    results = list(results)
    _figure(results, 1, "score of a game").savefig(out / "curves.png", dpi=130)
    counting = [one for one in results if np.isfinite(one.curve[:, 4]).any()]
    for column, name, label in ((3, "beta", "mean beta(s')"), (4, "count", "mean count of s'")):
        path = out / f"{name}.png"
        path.unlink(missing_ok=True)
        if counting:
            _figure(counting, column, label).savefig(path, dpi=130)


def _figure(results: list[Result], column: int, label: str) -> Figure:
    """One column of the curves over steps, with axes for each game."""
    games: dict[str, dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for one in results:
        games[one.game][one.algorithm].append(one)
    names = sorted({one.algorithm for one in results}, key=_order)
    others = iter(OTHER_COLOURS * len(names))
    colours = {name: COLOURS.get(name.partition(" (")[0]) or next(others) for name in names}
    columns = min(len(games), 3)
    lines = -(-len(games) // columns)
    height = 3.2 * lines + 0.17 * len(names)  # inches, with room for the legend
    figure = Figure(figsize=(4.2 * columns, height), layout="constrained")
    explained: set[str] = set()
    for position, (game, by_name) in enumerate(sorted(games.items()), start=1):
        axes = figure.add_subplot(lines, columns, position)
        axes.spines[["top", "right"]].set_visible(False)
        for name in names:
            if name in by_name:
                _draw(axes, by_name[name], column, name, colours[name])
        axes.set(title=game, xlabel="thousands of agent steps", ylabel=label)
        if by_name.keys() - explained:
            # Below, since no corner is free of seven curves.
            axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.2))
        explained |= by_name.keys()
    return figure


def _order(name: str) -> tuple[int, str]:
    return ("sql" in name) + 2 * ("cbsql" in name), name


def _draw(axes: Axes, seeds: list[Result], column: int, name: str, colour: str) -> None:
    """The mean over seeds; the band goes from the lowest to the highest of them."""
    curves = np.array([one.curve for one in seeds])  # (seeds, bins, 5)
    steps, values = curves[0, :, 0] / 1000, curves[:, :, column]
    seen = np.isfinite(values).all(axis=0)
    wide = 2.2 if "cbsql" in name else 1.2
    label = f"{name} ({len(seeds)})"
    axes.plot(steps[seen], values[:, seen].mean(axis=0), color=colour, linewidth=wide, label=label)
    low, high = values[:, seen].min(axis=0), values[:, seen].max(axis=0)
    axes.fill_between(steps[seen], low, high, color=colour, alpha=0.15, linewidth=0)


def main() -> None:
    """Entry point of ``python -m cbsql.experiments.curves``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until", type=int, help="agent steps after which a run is cut off")
    arguments = parser.parse_args()
    read = []
    for folder in arguments.runs:
        try:
            read.append(read_run(folder, arguments.until))
        except (OSError, ValueError) as error:
            print(f"Left out: {error}")
    kept = read_tables(arguments.out) if (arguments.out / "runs.csv").is_file() else []
    given = {one.row for one in read}
    results = [*(one for one in kept if one.row not in given), *read]
    if not results:
        parser.error("there is nothing to write.")
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_tables(results, arguments.out)
    draw_curves(results, arguments.out)


if __name__ == "__main__":
    main()
