"""Many runs: each in a process of its own, on this machine or on the nodes of a Ray cluster.

Everything that a run knows is in its folder, so a sweep has no state: it looks which runs are not
done, and starts them. A run that was interrupted, wherever that was, goes on from its checkpoint.
"""

import logging
import os
import pickle
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cbsql.checkpoint import only_process
from cbsql.experiments import runner
from cbsql.experiments.spec import RunSpec, preset
from cbsql.replay.frames import available_bytes

CHILD = (sys.executable, "-c", "from cbsql.experiments.launch import child; child()")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
"""A core does more for a run that has it alone than for one that shares all of them."""
POLL_SECONDS = 0.2
REFRESH_SECONDS = 1.0
LOCK_SECONDS = 120.0
"""How long a run waits for a dying one to leave its folder; NFS frees a dead node's lock in 90."""
TRIES = 3
"""How often a run may die without a new checkpoint before it counts as failed."""
PROCESS_BYTES = 1_000_000_000
"""Memory of a run without its replay buffer, rounded up: 0.6 to 1.0 GB were measured."""


@dataclass(frozen=True)
class Job:
    """A run, its folder, and what belongs to it in a sweep."""

    spec: RunSpec
    folder: Path
    test_games: int
    command: str
    checkpoint_seconds: float

    @property
    def name(self) -> str:
        """How the run is called."""
        return self.folder.name

    @property
    def log(self) -> Path:
        """What its processes said."""
        return self.folder / "log.txt"

    def state(self) -> str:
        """ "new", "unfinished", "untested" or "done".

        :raises ValueError: if the folder has something else
        """
        state = runner.status(self.spec, self.folder)
        if state == "finished":
            with suppress(ValueError):  # a damaged test is made again
                kinds = [episode.kind for episode in runner.read_test(self.folder)]
                return "done" if kinds.count("game") >= self.test_games else "untested"
            return "untested"
        return state

    def memory_bytes(self) -> int:
        """About what it needs at most."""
        settings = {**preset(self.spec).settings, **self.spec.settings}
        stored = min(settings["buffer_size"], self.spec.steps)
        remembered = 4 * 50_000 if self.spec.counter == "coin-flip" else 0  # frames, by the counter
        return PROCESS_BYTES + ((stored + remembered) * 84 * 84 if self.spec.is_atari else 0)


class Plan(NamedTuple):
    """What there is to do for a list of runs."""

    jobs: list[Job]
    """Those that are not done."""
    done: int
    refused: dict[str, str]
    """Why runs cannot be started, by name."""


def plan(
    specs: Iterable[RunSpec],
    out: Path,
    test_games: int,
    command: str = "",
    checkpoint_seconds: float = 600.0,
) -> Plan:
    """Look what ``out`` has of some runs; nothing is written."""
    jobs: dict[str, Job] = {}
    for spec in specs:
        spec = replace(spec, steps=spec.steps or preset(spec).steps)
        folder = out.resolve() / spec.name
        jobs[spec.name] = Job(spec, folder, test_games, command, checkpoint_seconds)
    result = Plan([], 0, {})
    refusals: dict[tuple[str, str], str] = {}
    for name, job in jobs.items():
        try:
            if job.state() == "done":
                result = result._replace(done=result.done + 1)
                continue
        except ValueError as error:
            result.refused[name] = str(error)
            continue
        game = job.spec.game, job.spec.protocol
        if game not in refusals:
            refusals[game] = _refusal(job.spec)
        if refusals[game]:
            result.refused[name] = refusals[game]
        else:
            result.jobs.append(job)
    return result


def _refusal(spec: RunSpec) -> str:
    """Why a game cannot be played, or nothing."""
    try:
        with closing(runner.make_env(spec)):
            return ""
    except Exception as error:  # environments may raise anything
        return str(error) or repr(error)


def run_process(
    job: Job, stop: threading.Event | None = None, program: Sequence[str] = CHILD
) -> int:
    """Run a job in a process of its own and return its exit code.

    Setting ``stop``, a KeyboardInterrupt (with which Ray cancels), and the death of this process
    have the same effect: the child's input ends, on which it saves and exits with EX_TEMPFAIL.
    """
    stop = stop or threading.Event()
    if stop.is_set():  # before there was room for it
        return os.EX_TEMPFAIL
    if not job.folder.is_dir():
        raise FileNotFoundError(
            f"{job.folder} is not there on {platform.node()}: --out must be on storage that all "
            "nodes share."
        )
    with (
        job.log.open("ab") as log,
        subprocess.Popen(
            program,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, **ONE_THREAD},
            start_new_session=True,  # Ctrl-C is for the sweep alone
        ) as process,
    ):
        assert process.stdin
        with suppress(BrokenPipeError):  # then its exit code says more
            process.stdin.write(pickle.dumps(job))
        with suppress(KeyboardInterrupt):
            while process.poll() is None and not stop.wait(POLL_SECONDS):
                pass
        process.stdin.close()
        return process.wait()


def child() -> None:
    """What the process of a run does."""
    job = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_stop_at_end_of_input, daemon=True).start()
    print(f"{time.strftime('%F %T')} process {os.getpid()} on {platform.node()}", flush=True)
    try:
        run(job)
    except runner.StoppedError as error:
        print(error)
        sys.exit(os.EX_TEMPFAIL)
    except Exception as error:
        traceback.print_exc()
        sys.exit(" ".join(str(error).split()) or repr(error))


def _stop_at_end_of_input() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def run(job: Job) -> None:
    """Do what is left of a run: train, then test."""
    _wait_for_lock(job.folder)
    if runner.status(job.spec, job.folder) != "finished":
        runner.train(job.spec, job.folder, job.command, checkpoint_seconds=job.checkpoint_seconds)
    with only_process(job.folder):
        model = job.spec.learner.load(job.folder / "model.zip", buffer_size=1)
        seed = runner.seed_of_test(job.spec)
        runner.write_test(job.folder, runner.evaluate(job.spec, model, job.test_games, seed))


def _wait_for_lock(folder: Path) -> None:
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            with only_process(folder):
                return
        except ValueError:
            if time.monotonic() > end:
                raise
            time.sleep(1)


class Launcher(Protocol):
    """Where runs are run."""

    workers: int
    """How many at a time."""

    def submit(self, job: Job) -> "Future[int]":
        """Run a job when there is room; the result is its exit code."""

    def stop(self) -> None:
        """Start no more jobs, and have those that run save and exit."""


class LocalLauncher:
    """Processes of this machine."""

    def __init__(self, workers: int, run: Callable[[Job, threading.Event], int] = run_process):
        self.workers = workers
        self._run = run
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(workers)

    def submit(self, job: Job) -> "Future[int]":
        """Run a job when there is room; the result is its exit code."""
        return self._threads.submit(self._run, job, self._stop)

    def stop(self) -> None:
        """Start no more jobs, and have those that run save and exit."""
        self._stop.set()


def default_workers(jobs: Sequence[Job]) -> int:
    """One process per core, or fewer if memory does not hold as many."""
    affinity = getattr(os, "sched_getaffinity", None)  # not there on every Unix
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    available = available_bytes()
    largest = max((job.memory_bytes() for job in jobs), default=0)
    return max(1, min(cores, available // largest) if available and largest else cores)


class RayLauncher:
    """The nodes of a Ray cluster, which share the storage that the runs' folders are on."""

    def __init__(self, address: str, run: Callable[[Job], int] = run_process):
        try:
            ray: Any = import_module("ray")
        except ImportError:
            raise ValueError("--ray needs Ray: pip install 'cbsql[ray]'.") from None
        try:
            _check_address(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"No Ray cluster answers at {address}: {reason}") from None
        self.workers = int(ray.cluster_resources().get("CPU", 0))
        # If a node dies, its runs are started on others, however often; that a run itself dies is
        # no failure to Ray, but an exit code.
        self._remote: Any = ray.remote(max_retries=-1, num_cpus=1)(_interruptible)
        self._run = run
        self._ray = ray
        self._refs: list[Any] = []
        self._node_bytes = max(node["Resources"].get("memory", 0) for node in ray.nodes())

    def submit(self, job: Job) -> "Future[int]":
        """Run a job when there is room; the result is its exit code."""
        # More than any node has would be waited for in silence; the run itself says what is wrong.
        memory = min(job.memory_bytes(), self._node_bytes)
        ref = self._remote.options(memory=memory, name=job.name).remote(self._run, job)
        self._refs.append(ref)
        future: Future[int] = ref.future()
        return future

    def stop(self) -> None:
        """Start no more jobs, and have those that run save and exit."""
        for ref in self._refs:
            self._ray.cancel(ref)


def _interruptible(run: Callable[[Job], int], job: Job) -> int:
    """Run a job where Ray can cancel it, which is by an interrupt.

    It would have no effect in a cluster that was started in the background of a shell.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run(job)


def _check_address(address: str) -> None:
    """Fail at once where ``ray.init`` would wait for minutes."""
    address = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    if address != "auto":
        host, _, port = address.removeprefix("ray://").rpartition(":")
        socket.create_connection((host, int(port)), timeout=10).close()


class Watcher(Protocol):
    """Who is told how a sweep goes."""

    def refresh(self) -> None:
        """Called about every second."""

    def ended(self, job: Job, reason: str | None) -> None:
        """A run is done, or has failed for a reason."""


def sweep(jobs: Sequence[Job], launcher: Launcher, watcher: Watcher) -> str | None:
    """Run all jobs; returns the name of the signal that stopped it, if one did."""
    deaths: dict[str, list[str]] = defaultdict(list)
    waiting: dict[Future[int], Job] = {}
    with runner.stop_signals() as told_to_stop:
        for job in jobs:
            try:
                job.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                watcher.ended(job, f"{job.folder} cannot be written: {error.strerror}.")
            else:
                waiting[launcher.submit(job)] = job
        stopping = False
        while waiting:
            ended, _ = wait(waiting, REFRESH_SECONDS, FIRST_COMPLETED)
            for future in ended:
                job = waiting.pop(future)
                code, reason = _result(future, job)
                if code == 0:
                    watcher.ended(job, None)
                elif told_to_stop:
                    continue
                elif code < 0 or code == os.EX_TEMPFAIL:
                    # Killed, not failed: it goes on, unless it gets nowhere.
                    deaths[job.name].append(_newest_checkpoint(job))
                    if deaths[job.name][-TRIES:].count(deaths[job.name][-1]) < TRIES:
                        waiting[launcher.submit(job)] = job
                    else:
                        watcher.ended(job, f"{reason}, {TRIES} times without getting on.")
                else:
                    watcher.ended(job, reason)
            if told_to_stop and not stopping:
                launcher.stop()
                stopping = True
            watcher.refresh()
    return told_to_stop[0] if told_to_stop else None


def _result(future: "Future[int]", job: Job) -> tuple[int, str]:
    """Exit code of a job, and what there is to say about it."""
    try:
        code = future.result()
    except Exception as error:  # of the system, or of Ray
        return 1, (str(error).strip() or repr(error)).splitlines()[-1]
    if code < 0:
        return code, f"killed by {signal.Signals(-code).name}"
    lines = job.log.read_text(errors="replace").splitlines() if job.log.is_file() else []
    return code, lines[-1] if lines else f"exit code {code}"


def _newest_checkpoint(job: Job) -> str:
    return max((path.name for path in job.folder.glob("checkpoints/*.json")), default="")
