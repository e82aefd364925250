"""What a sweep shows: how far each run is, how it scores, and how long it will take."""

import csv
import heapq
import json
from collections.abc import Sequence
from math import isnan
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from cbsql.experiments.launch import Job, Plan
from cbsql.experiments.runner import read_test
from cbsql.experiments.spec import RunSpec, preset

TAIL_BYTES = 4096
"""More than the last line of a log has."""


class Progress(NamedTuple):
    """How far a run is."""

    steps: int = 0
    score: float = float("nan")
    """Mean of the last 100 training games."""
    steps_per_second: float = 0.0


def progress(folder: Path) -> Progress:
    """Read a run's log, which may be written at this moment."""
    try:
        with (folder / "progress.csv").open("rb") as file:
            names = file.readline().decode()
            file.seek(max(file.seek(0, 2) - TAIL_BYTES, 0))
            last = file.read().decode().rpartition("\n")[0].rpartition("\n")[2]
        row = next(csv.DictReader([names, last]))
        return Progress(
            int(row["time/total_timesteps"]),
            float(row.get("rollout/ep_rew_mean") or "nan"),
            float(row["time/fps"]),
        )
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return Progress()


class Speeds:
    """How long a step takes, from what has been measured."""

    def __init__(self, out: Path) -> None:
        self._finished: list[tuple[RunSpec, float]] = []
        for path in sorted(out.glob("*/run.json")):
            try:
                record = json.loads(path.read_bytes())
                spec = RunSpec(**{**record["spec"], "settings": {}})
                self._finished.append((spec, record["seconds"] / record["steps"]))
            except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
                continue  # unfinished, or damaged

    def step_seconds(self, spec: RunSpec) -> float:
        """The mean of finished runs of the same game and algorithm, else of the same kind.

        Without any, what the preset says.
        """
        kind = preset(spec)
        same = [s for other, s in self._finished if _what(other) == _what(spec)]
        alike = [s for other, s in self._finished if preset(other) is kind]
        known = same or alike or [kind.step_seconds]
        return sum(known) / len(known)

    def seconds_left(self, job: Job, state: Progress) -> float:
        """Of training, at the run's own speed if it runs."""
        per_step = 1 / state.steps_per_second if state.steps_per_second else 0.0
        steps = max(job.spec.steps - state.steps, 0)
        return steps * (per_step or self.step_seconds(job.spec))


def _what(spec: RunSpec) -> tuple[str, str, str]:
    return spec.game, spec.algorithm, spec.counter


def wall_seconds(seconds: Sequence[float], workers: int) -> float:
    """Time that runs take, if each worker takes the next as soon as it is free."""
    ends = [0.0] * max(workers, 1)  # a heap: the first is the smallest
    for one in seconds:
        heapq.heapreplace(ends, ends[0] + one)
    return max(ends)


def clock(seconds: float) -> str:
    """Hours and minutes, or minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes}:{rest:02d}"


def listing(plan: Plan, workers: int, speeds: Speeds) -> str:
    """The runs that a sweep would make, a line for each."""
    lines, seconds = [], []
    for job in plan.jobs:
        state = progress(job.folder)._replace(steps_per_second=0.0)  # it does not run
        seconds.append(speeds.seconds_left(job, state))
        lines.append(f"{seconds[-1] / 3600:8.2f} h  {job.state():10}  {job.name}")
    lines += [f"{'':10}  refused     {name}: {reason}" for name, reason in plan.refused.items()]
    hours, wall = sum(seconds) / 3600, wall_seconds(seconds, workers) / 3600
    lines.append(
        f"{len(seconds)} runs to make, {plan.done} done: {hours:.2f} hours of one core, about "
        f"{wall:.2f} with {workers} at a time, test games not counted."
    )
    return "\n".join(lines)


class Board:
    """A live table of a sweep on a terminal, and lines elsewhere."""

    def __init__(self, plan: Plan, workers: int, speeds: Speeds, console: Console) -> None:
        self._plan = plan
        self._workers = workers
        self._speeds = speeds
        self._console = console
        self._left = {job.name: job for job in plan.jobs}
        self._log_bytes = {job.name: _size(job.log) for job in plan.jobs}
        self._progress = {job.name: progress(job.folder) for job in plan.jobs}
        self._started: set[str] = set()
        self._done = plan.done
        self.failed: dict[str, str] = {}
        live = Live(console=console, auto_refresh=False, transient=True)
        self._live = live if console.is_terminal else None
        for name, reason in plan.refused.items():
            self._fail(name, reason)

    def __enter__(self) -> "Board":
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def ended(self, job: Job, reason: str | None) -> None:
        """Say how a run has ended."""
        del self._left[job.name]
        if reason is None:
            self._done += 1
            scores = [e.score for e in read_test(job.folder) if e.kind == "game"]
            self._say(f"done     {job.name}: {np.mean(scores):.4g} in {len(scores)} test games")
        else:
            self._fail(job.name, f"{reason} (log: {job.log})")

    def _fail(self, name: str, reason: str) -> None:
        self.failed[name] = reason
        self._say(f"failed   {name}: {reason}")

    def summary(self) -> str:
        """How many runs are where."""
        everything = len(self._plan.jobs) + self._plan.done + len(self._plan.refused)
        return f"{self._done} of {everything} runs done, {len(self.failed)} failed."

    def refresh(self) -> None:
        """Look at the logs of the runs that have been started."""
        for name, job in self._left.items():
            if name not in self._started and _size(job.log) > self._log_bytes[name]:
                self._started.add(name)
                if not self._live:
                    self._say(f"started  {name}")
        if self._live:
            self._live.update(self._table(), refresh=True)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Group:
        table = Table("run", "steps", "score", "steps/s", "left", box=None)
        seconds = []
        for name, job in self._left.items():
            if name in self._started:
                self._progress[name] = progress(job.folder)
            state = self._progress[name]
            seconds.append(self._speeds.seconds_left(job, state))
            if name in self._started:
                steps = f"{state.steps / job.spec.steps:.0%} of {job.spec.steps:,}"
                score = "" if isnan(state.score) else f"{state.score:.4g}"
                speed = f"{state.steps_per_second:.0f}" if state.steps_per_second else ""
                table.add_row(name, steps, score, speed, clock(seconds[-1]))
        left = clock(wall_seconds(seconds, self._workers))
        return Group(table, f"{self.summary()} About {left} left.")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
