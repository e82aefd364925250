"""What a sweep adds to the time of its runs.

    python benchmarks/launch.py [--runs 1000] [--workers 8]

The runs are processes that sleep for one second, so all time above runs / workers is overhead: of
xargs, of our local processes, and of a Ray cluster on this machine (without the time it takes to
start it).
"""

import argparse
import importlib.util
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cbsql.experiments.launch import Job, Launcher, LocalLauncher, RayLauncher, run_process, sweep
from cbsql.experiments.provenance import provenance
from cbsql.experiments.spec import RunSpec

SLEEP = ("sleep", "1")


class Quiet:
    def __init__(self) -> None:
        self.failed = 0

    def refresh(self) -> None:
        pass

    def ended(self, job: Job, reason: str | None) -> None:
        self.failed += reason is not None


def with_xargs(runs: int, workers: int) -> None:
    command = ["xargs", "-n1", f"-P{workers}", "sh", "-c", " ".join(SLEEP)]
    numbers = "\n".join(map(str, range(runs)))
    subprocess.run(command, input=numbers, text=True, check=True)


def with_sweep(runs: int, launcher: Launcher) -> None:
    with tempfile.TemporaryDirectory() as name:
        specs = [RunSpec("pong", "dqn", 1, seed) for seed in range(runs)]
        jobs = [Job(spec, Path(name) / spec.name, 1, "", 600.0) for spec in specs]
        watcher = Quiet()
        sweep(jobs, launcher, watcher)
        assert not watcher.failed


def report(name: str, runs: int, workers: int, start: Callable[[], None]) -> None:
    cpu, wall = resource.getrusage(resource.RUSAGE_SELF).ru_utime, time.perf_counter()
    start()
    wall = time.perf_counter() - wall
    cpu = resource.getrusage(resource.RUSAGE_SELF).ru_utime - cpu
    extra = (wall * workers / runs - 1) * 1000
    print(f"| {name} | {wall:.1f} | {extra:.0f} | {cpu / runs * 1000:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=8)
    arguments = parser.parse_args()
    runs, workers = arguments.runs, arguments.workers
    print(f"{runs} runs of one second, {workers} at a time: {runs / workers:.1f} s of sleep\n")
    print("| | seconds | ms more per run | of them on this process's CPU |\n|---|---|---|---|")
    report("xargs", runs, workers, lambda: with_xargs(runs, workers))
    run = partial(run_process, program=SLEEP)
    report("processes", runs, workers, lambda: with_sweep(runs, LocalLauncher(workers, run)))
    if importlib.util.find_spec("ray"):
        from ray.cluster_utils import Cluster

        node = {"num_cpus": workers, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=node)
        launcher = RayLauncher(cluster.address, lambda job: run_process(job, program=SLEEP))
        with_sweep(workers, launcher)  # starts Ray's workers
        report("Ray", runs, workers, lambda: with_sweep(runs, launcher))
    record = provenance()
    print(f"\n{record['machine']}, commit {record['commit']}\n")


if __name__ == "__main__":
    main()
