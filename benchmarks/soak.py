"""What a long run takes from its machine over time: memory, open files, CPU time per agent step.

    cbsql train breakout --algorithm rainbow-cbsql --out runs/soak &
    python benchmarks/soak.py runs/soak $! --out results/soak

Watches a running process from outside, by what Linux says of it, until it ends. Speed is in agent
steps per second of CPU time, which other work on the machine changes less than the wall clock.
"""

import argparse
import csv
import os
import time
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

WINDOW = 10
"""Samples over which speed is averaged: the log of a run has its steps in large parts."""
COLUMNS = ("minutes", "steps", "cpu_seconds", "resident_mb", "open_files", "threads")


def sample(run: Path, pid: int) -> tuple[int, float, float, int, int]:
    """Agent steps in the log, CPU seconds, resident megabytes, open files, threads."""
    process = Path("/proc") / str(pid)
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    cpu_seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    resident_mb = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    with (run / "progress.csv").open() as file:
        steps = [row["time/total_timesteps"] for row in csv.DictReader(file)]
    files = len(list((process / "fd").iterdir()))
    return int(steps[-1]) if steps else 0, cpu_seconds, resident_mb, files, int(fields[17])


def watch(run: Path, pid: int, out: Path, seconds: float) -> None:
    """Write one row every so many seconds, for as long as the process lives."""
    start = time.monotonic()
    with (out / "soak.csv").open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        while True:
            try:
                steps, cpu_seconds, resident_mb, files, threads = sample(run, pid)
            except (FileNotFoundError, ProcessLookupError):
                return
            minutes = (time.monotonic() - start) / 60
            shown = (f"{minutes:.2f}", steps, f"{cpu_seconds:.1f}", f"{resident_mb:.0f}")
            rows.writerow((*shown, files, threads))
            file.flush()
            time.sleep(seconds)


def draw(out: Path) -> None:
    """A figure of what was written."""
    table = np.genfromtxt(out / "soak.csv", delimiter=",", names=True)
    figure = Figure(figsize=(10, 3), layout="constrained")
    steps, cpu_seconds = table["steps"], table["cpu_seconds"]
    speed = (steps[WINDOW:] - steps[:-WINDOW]) / (cpu_seconds[WINDOW:] - cpu_seconds[:-WINDOW])
    for position, (values, label) in enumerate(
        (
            (table["resident_mb"], "resident memory, MB"),
            (speed, "agent steps per CPU second"),
            (table["open_files"], "open files"),
        ),
        start=1,
    ):
        axes = figure.add_subplot(1, 3, position)
        axes.spines[["top", "right"]].set_visible(False)
        axes.plot(table["minutes"][-len(values) :], values, color="#d7301f")
        axes.set(xlabel="minutes", ylabel=label, ylim=(0, None))
    figure.savefig(out / "soak.png", dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("pid", type=int, help="its process")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=30.0, help="from one sample to the next")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    watch(arguments.run, arguments.pid, arguments.out, arguments.seconds)
    draw(arguments.out)


if __name__ == "__main__":
    main()
