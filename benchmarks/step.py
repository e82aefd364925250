"""What one gradient step of each algorithm spends its time on, on real Breakout frames.

    python benchmarks/step.py > results/step.md

The parts are timed inside the learner's own `train`, each with the clock of the thread, and the
median over the updates is shown. "rest" is what `train` does besides: clearing and clipping
gradients, and its logs.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.logger import configure

from cbsql.deep import SQL
from cbsql.experiments.provenance import provenance
from cbsql.experiments.runner import keep_memory, make_env, make_model
from cbsql.experiments.spec import RunSpec

PARTS = ("sampling", "beta", "target", "forward", "backward", "optimiser", "counting", "rest")
BUFFER = 20_000  # transitions of random play


class Stopwatch:
    """Adds the time of calls to the part that they belong to."""

    def __init__(self) -> None:
        self.milliseconds: dict[str, float] = defaultdict(float)

    def time(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.milliseconds[part] += 1e3 * (time.thread_time() - start)

        return timed


def measure(algorithm: str, updates: int) -> dict[str, float]:
    """Median milliseconds of each part."""
    spec = RunSpec("breakout", algorithm, settings={"buffer_size": BUFFER, "learning_starts": 1e9})
    env = make_env(spec)
    model: SQL = make_model(spec, env)
    model.set_logger(configure(None, []))
    model._sample_action = lambda *_: (action := np.array([env.action_space.sample()]), action)
    model.learn(BUFFER)
    model.train(20, 32)  # warm up
    watch = Stopwatch()
    for part, name in (
        ("sampling", "_sample"),
        ("beta", "_beta"),
        ("target", "_target"),
        ("forward", "_loss"),
    ):
        setattr(model, name, watch.time(part, getattr(model, name)))
    model.temperature.update = watch.time("counting", model.temperature.update)
    model.policy.optimizer.step = watch.time("optimiser", model.policy.optimizer.step)
    backward = torch.Tensor.backward
    torch.Tensor.backward = watch.time("backward", backward)
    rows = []
    for _ in range(updates):
        watch.milliseconds.clear()
        start = time.thread_time()
        model.train(1, 32)
        total = 1e3 * (time.thread_time() - start)
        parts = dict(watch.milliseconds)
        rows.append([*(parts.get(part, 0.0) for part in PARTS[:-1]), total - sum(parts.values())])
    torch.Tensor.backward = backward
    env.close()
    return dict(zip(PARTS, np.median(rows, axis=0).tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=300)
    names = ("dqn", "sql", "cbsql", "rainbow", "rainbow-cbsql")
    parser.add_argument("--algorithms", nargs="+", choices=names, default=names)
    parser.add_argument("--give-back", action="store_true", help="leave memory to the allocator")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.give_back:
        keep_memory()
    record = provenance()
    print(
        f"One thread of {record['machine']}, commit {record['commit']}; batch 32, milliseconds.\n"
    )
    print("| algorithm |", " | ".join(PARTS), "| all |")
    print("|---|" + "---|" * (len(PARTS) + 1))
    for algorithm in arguments.algorithms:
        parts = measure(algorithm, arguments.updates)
        shown = " | ".join(f"{parts[part]:.2f}" for part in PARTS)
        print(f"| {algorithm} | {shown} | {sum(parts.values()):.2f} |", flush=True)


if __name__ == "__main__":
    main()
