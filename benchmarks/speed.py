"""What an agent step costs while a run learns: processor time, one thread.

    OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 python benchmarks/speed.py

Processor time does not count waiting for a core, so that it also holds on a busy machine, though
one whose caches are shared. Wall time is beside it.
"""

import tempfile
import time
from pathlib import Path

from cbsql.experiments.provenance import provenance
from cbsql.experiments.runner import train
from cbsql.experiments.spec import RunSpec

STEPS = {"breakout": 3_000, "MinAtar/Breakout-v1": 8_000, "CartPole-v1": 8_000}
SETTINGS = {"learning_starts": 300, "buffer_size": 20_000}
WARM = 800  # agent steps that are not counted


def measure(game: str, algorithm: str) -> tuple[float, float]:
    """Processor and wall seconds of an agent step."""
    marks = []

    def mark(step: int, _: dict[str, float]) -> None:
        if step >= WARM:
            marks.append((step, time.process_time(), time.perf_counter()))

    with tempfile.TemporaryDirectory() as folder:
        train(RunSpec(game, algorithm, STEPS[game], settings=SETTINGS), Path(folder), "", mark)
    steps, cpu, wall = (last - first for first, last in zip(marks[0], marks[-1], strict=True))
    return cpu / steps, wall / steps


def main() -> None:
    print("| game | algorithm | ms of processor | ms of wall time |\n|---|---|---|---|")
    for game in STEPS:
        for algorithm in ("dqn", "cbsql", "rainbow", "rainbow-cbsql"):
            cpu, wall = measure(game, algorithm)
            print(f"| {game} | {algorithm} | {cpu * 1000:.2f} | {wall * 1000:.2f} |", flush=True)
    record = provenance()
    print(f"\n{record['machine']}, commit {record['commit']}\n")


if __name__ == "__main__":
    main()
