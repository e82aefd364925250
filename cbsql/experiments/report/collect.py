"""Finds runs and results below folders and reads them; what cannot be read is named, with why."""

import csv
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbsql.envs.atari import FRAME_SKIP
from cbsql.experiments.chain import ChainSpec
from cbsql.experiments.curves import BINS, CURVE_COLUMNS, read_run
from cbsql.experiments.runner import Episode
from cbsql.experiments.spec import RunSpec

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Result:
    """What one finished run has shown."""

    game: str
    algorithm: str
    """With its constant and with what else differs from the preset."""
    seed: int
    steps: int
    """Agent steps of training."""
    seconds: float
    commit: str
    command: str
    folder: Path
    curve: Floats
    """(bins, 5): as :meth:`cbsql.experiments.curves.Run.curve` has it."""
    training: float
    """Mean score of the last 100 training games."""
    tests: dict[str, Floats] = field(default_factory=dict)
    """Scores of test episodes in order, by kind: "game" or "life"."""
    versions: tuple[str, ...] = ()
    """Of this package, that it may have been made with."""
    protocol: str = "nature"

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


class _NotYetError(ValueError):
    """Nothing is wrong with a run, but it cannot be shown."""


@dataclass(frozen=True)
class Chain:
    """One chain-walk experiment."""

    record: dict[str, Any]
    """run.json"""
    curves: dict[str, Floats]
    """(episodes, 3) by algorithm: mean return and the ends of its interval."""
    folder: Path

    @property
    def key(self) -> tuple[Any, ...]:
        """What no two experiments should have in common."""
        return ("chain", *sorted(self.record["arguments"].items()))


@dataclass
class Collection:
    """All that was found."""

    results: list[Result] = field(default_factory=list)
    chains: list[Chain] = field(default_factory=list)
    unread: list[tuple[Path, str]] = field(default_factory=list)
    """Folders, and why they are not among the rest."""

    def size(self) -> int:
        """How much there is, read or not."""
        return len(self.results) + len(self.chains) + len(self.unread)


def collect(folders: Iterable[Path]) -> Collection:
    """Read everything below the folders."""
    found = Collection()
    seen: dict[tuple[Any, ...], Path] = {}
    for root in folders:
        before = found.size()
        for folder in _places(root):
            try:
                results, chains = _read(folder)
            except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
                found.unread.append((folder, _reason(error)))
                continue
            both: list[Result | Chain] = [*results, *chains]
            for one in both:
                if one.key in seen:
                    reason = f"holds what was read from {seen[one.key]} already"
                    found.unread.append((folder, reason))
                    continue
                seen[one.key] = folder
                if isinstance(one, Chain):
                    found.chains.append(one)
                else:
                    found.results.append(one)
        if found.size() == before:
            reason = "holds no runs" if root.is_dir() else "is not a folder"
            found.unread.append((root, reason))
    return found


def _places(root: Path) -> Iterator[Path]:
    """Folders that hold something to read."""
    for file in sorted([*root.rglob("run.json"), *root.rglob("runs.csv")]):
        yield file.parent
    # A run whose record is missing was begun by hand or lost: it is named too.
    for file in sorted(root.rglob("episodes.csv")):
        if not (file.parent / "run.json").exists():
            yield file.parent


def _read(folder: Path) -> tuple[list[Result], list[Chain]]:
    if (folder / "runs.csv").is_file():
        return _read_tables(folder), []
    record = json.loads((folder / "run.json").read_text())
    if "arguments" in record and (folder / "curves.csv").is_file():
        return [], [_read_chain(folder, record)]
    if "spec" not in record:
        return [], []  # some other experiment's
    if not record["finished"]:
        raise _NotYetError("is not finished: the command it was started with goes on with it")
    return [_read_run(folder)], []


def _read_run(folder: Path) -> Result:
    run = read_run(folder)
    record, spec = run.record, run.record["spec"]
    return Result(
        game=spec["game"],
        algorithm=run.name,
        seed=int(spec["seed"]),
        steps=int(record["steps"]),
        seconds=float(record["seconds"]),
        commit=record.get("commit") or "",
        command=record.get("command", ""),
        folder=folder,
        curve=run.curve(),
        training=float(run.games[-100:, 1].mean()) if len(run.games) else np.nan,
        tests=_by_kind(run.tests),
        versions=_versions([record]),
        protocol=spec.get("protocol", "nature"),
    )


def _versions(records: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(sorted({r["versions"]["cbsql"] for r in records if "versions" in r}))


def _by_kind(tests: Iterable[Episode]) -> dict[str, Floats]:
    scores: dict[str, list[float]] = defaultdict(list)
    for episode in tests:
        scores[episode.kind].append(episode.score)
    return {kind: np.array(values) for kind, values in scores.items()}


def _read_tables(folder: Path) -> list[Result]:
    """Runs of which only the tables of :mod:`cbsql.experiments.curves` were kept."""
    curves: dict[tuple[str, ...], list[list[float]]] = defaultdict(list)
    with (folder / "curves.csv").open() as file:
        for row in csv.DictReader(file):
            key = tuple(row[name] for name in CURVE_COLUMNS[:3])
            curves[key].append([float(row[name] or "nan") for name in CURVE_COLUMNS[3:]])
    tests: dict[tuple[str, ...], list[Episode]] = defaultdict(list)
    if (folder / "tests.csv").is_file():
        with (folder / "tests.csv").open() as file:
            for row in csv.DictReader(file):
                episode = Episode(row["kind"], float(row["score"]), int(row["length_steps"]))
                tests[row["game"], row["algorithm"], row["seed"]].append(episode)
    for key, rows in curves.items():
        if len(rows) != BINS:
            raise ValueError(f"curves.csv has {len(rows)} rows of {' '.join(key)}, not {BINS}")
    machines = json.loads((folder / "machines.json").read_text())
    with (folder / "runs.csv").open() as file:
        return [
            Result(
                game=row["game"],
                algorithm=row["algorithm"],
                seed=int(row["seed"]),
                steps=int(row["steps"]),
                seconds=float(row["seconds"]),
                commit=row["commit"],
                command=row["command"],
                folder=folder,
                curve=np.array(curves[row["game"], row["algorithm"], row["seed"]]).reshape(-1, 5),
                training=float(row["last_100_games"]),
                tests=_by_kind(tests[row["game"], row["algorithm"], row["seed"]]),
                versions=_versions(machines),
                protocol=row.get("protocol") or "nature",
            )
            for row in csv.DictReader(file)
        ]


def _read_chain(folder: Path, record: dict[str, Any]) -> Chain:
    curves: dict[str, list[list[float]]] = defaultdict(list)
    with (folder / "curves.csv").open() as file:
        for row in csv.DictReader(file):
            curves[row["algorithm"]].append([float(row[k]) for k in ("mean", "ci_low", "ci_high")])
    ChainSpec(**record["arguments"])  # refuses what is none
    return Chain(record, {name: np.array(rows) for name, rows in curves.items()}, folder)


def _reason(error: Exception) -> str:
    if isinstance(error, _NotYetError):
        return str(error)
    if isinstance(error, OSError):
        return f"{Path(error.filename or '').name}: {error.strerror}"
    if isinstance(error, json.JSONDecodeError):
        return f"a file of JSON is damaged or half-written: {error}"
    if isinstance(error, KeyError):
        return f"there is no {error} where one belongs"
    return f"a file is damaged or half-written: {error}"
