"""What four agent steps and the update that follows them spend their time on, on Breakout.

    python benchmarks/step.py [--threads 2]

The parts are timed by the wall clock inside the learner's own `learn`, so nothing else should run.
"rest" is what it does besides: SB3's loop, gradients that are cleared, logs. Figures are
milliseconds, medians of blocks of 20 updates; "arithmetic" is the share of acting, target, forward
and backward, which is close to what the networks themselves take.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cbsql.deep import sql
from cbsql.experiments import bench
from cbsql.experiments.provenance import provenance
from cbsql.experiments.runner import keep_memory

UPDATES = 20  # of a block
STORED = 20_000  # transitions in the replay buffer
ARITHMETIC = ("acting", "target", "forward", "backward")


class Stopwatch:
    """Adds the time of calls to the part that they belong to."""

    def __init__(self) -> None:
        self.milliseconds: dict[str, float] = defaultdict(float)

    def watch(self, owner: Any, name: str, part: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.milliseconds[part] += 1e3 * (time.perf_counter() - start)

        setattr(owner, name, timed)


def measure(algorithm: str, blocks: int, watch: Stopwatch) -> dict[str, float]:
    """Median milliseconds of each part."""
    model = bench._model("breakout", algorithm, STORED)
    for owner, name, part in (
        (model.env, "step", "environment"),
        (model, "_sample_action", "acting"),
        (model, "_store_transition", "storing"),
        (model, "_sample", "sampling"),
        (model, "_beta", "beta"),
        (model, "_target", "target"),
        (model, "_loss", "forward"),
        (model.temperature, "update", "counting"),
    ):
        watch.watch(owner, name, part)
    rows = []
    for block in range(blocks + 1):
        watch.milliseconds.clear()
        start = time.perf_counter()
        model.learn(4 * UPDATES, reset_num_timesteps=False, log_interval=None)
        total = 1e3 * (time.perf_counter() - start)
        if block:  # the first one warms up
            parts = dict(watch.milliseconds)
            rows.append(parts | {"rest": total - sum(parts.values())})
    return {part: float(np.median([row[part] for row in rows])) / UPDATES for part in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument(
        "--algorithms", nargs="+", choices=bench.ALGORITHMS, default=bench.ALGORITHMS
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_memory()
    watch = Stopwatch()
    watch.watch(torch.Tensor, "backward", "backward")
    watch.watch(sql, "clipped_step", "optimiser")
    record = provenance()
    print(f"{record['machine']}, {arguments.threads} torch threads, commit {record['commit']}\n")
    columns = [measure(algorithm, arguments.blocks, watch) for algorithm in arguments.algorithms]
    print("| part |", " | ".join(arguments.algorithms), "|\n|---|" + "---|" * len(columns))
    for part in columns[0]:
        print(f"| {part} |", " | ".join(f"{column[part]:.2f}" for column in columns), "|")
    totals = [sum(column.values()) for column in columns]
    print("| all |", " | ".join(f"{total:.1f}" for total in totals), "|")
    shares = [
        sum(column[part] for part in ARITHMETIC) / total
        for column, total in zip(columns, totals, strict=True)
    ]
    print("| arithmetic |", " | ".join(f"{share:.0%}" for share in shares), "|")


if __name__ == "__main__":
    main()
