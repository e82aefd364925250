"""Finds runs and results below folders and reads them; what cannot be read is named, with why."""

import csv
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cbsql.experiments.chain import ChainSpec
from cbsql.experiments.curves import Floats, Result, read_run, read_tables


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


_DAMAGE = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, csv.Error)
"""What reading half-written or damaged files raises."""


def collect(folders: Iterable[Path]) -> Collection:
    """Read everything below the folders."""
    found = Collection()
    seen: dict[tuple[Any, ...], Path] = {}
    for root in folders:
        before = found.size()
        for folder in _places(root):
            try:
                results, chains = _read(folder)
            except _DAMAGE as error:
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
        return read_tables(folder), []
    record = json.loads((folder / "run.json").read_text())
    if "arguments" in record and (folder / "curves.csv").is_file():
        return [], [_read_chain(folder, record)]
    if "spec" not in record:
        return [], []  # some other experiment's
    if not record["finished"]:
        raise _NotYetError("is not finished: the command it was started with goes on with it")
    return [read_run(folder)], []


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
