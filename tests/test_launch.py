"""Sweeps: what is run, in which processes, and what remains when some of them die."""

import csv
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from cbsql import files
from cbsql.experiments import launch
from cbsql.experiments.board import Board, Progress, Speeds, listing, progress, wall_seconds
from cbsql.experiments.launch import Job, LocalLauncher, RayLauncher, plan, run, run_process, sweep
from cbsql.experiments.spec import RunSpec, preset, read_specs

CBSQL = Path(sys.executable).parent / "cbsql"
SMALL = {"learning_starts": 100, "buffer_size": 1000, "gradient_steps": 32}
LONG_ENOUGH = 10_000  # steps: to be caught half-way


def jobs_in(folder, *specs, checkpoint_seconds=600.0):
    jobs = plan(specs, folder, 3, "", checkpoint_seconds).jobs
    for job in jobs:
        job.folder.mkdir(parents=True)
    return jobs


def everything(job):
    """Weights, training scores and test scores of a run; times differ, and are left out."""
    model = job.spec.learner.load(job.folder / "model.zip", buffer_size=1)
    rows = list(csv.DictReader((job.folder / "episodes.csv").open()))
    scores = [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    arrays = {}
    files.encode([model.policy.state_dict(), model.temperature.state_dict()], arrays, "all")
    return arrays, scores, (job.folder / "test.csv").read_text()


def assert_same(job, other):
    (arrays, *scores), (other_arrays, *other_scores) = everything(job), everything(other)
    assert scores == other_scores
    for key, array in arrays.items():
        np.testing.assert_array_equal(other_arrays[key], array, err_msg=key)


class Notes:
    """A watcher that remembers."""

    def __init__(self):
        self.reasons = {}

    def refresh(self):
        pass

    def ended(self, job, reason):
        self.reasons[job.name] = reason


def wait_until(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


# Lists of runs


def test_a_file_lists_runs(tmp_path):
    path = tmp_path / "runs.yaml"
    path.write_text(
        """
        test_games: 7
        runs:
          - game: [pong, MinAtar/Breakout-v1]
            algorithm: sql
            beta: [10, 1e3]
            seed: [0, 1]
            settings: {learning_rate: 1e-4, policy_kwargs: {net_arch: [64, 64]}}
          - {game: pong, algorithm: cbsql, kappa: 0.1, steps: 300}
        """
    )
    specs, test_games = read_specs(path)
    assert test_games == 7
    settings = {"learning_rate": 0.0001, "policy_kwargs": {"net_arch": [64, 64]}}
    expected = [
        RunSpec(game, "sql", seed=seed, beta=beta, settings=settings)
        for game in ("pong", "MinAtar/Breakout-v1")
        for beta in (10.0, 1000.0)
        for seed in (0, 1)
    ]
    assert specs == [*expected, RunSpec("pong", "cbsql", 300, kappa=0.1)]
    names = [spec.name for spec in specs]
    assert names[-1] == "pong-cbsql-steps=300-kappa=0.1-0"
    assert len(set(names)) == 9
    assert all(Path(name).name == name for name in names)


def test_other_runs_have_other_names():
    specs = [
        RunSpec("pong", algorithm, steps, seed, beta, kappa, protocol, settings)
        for algorithm in ("dqn", "sql", "cbsql", "rainbow-sql")
        for steps in (0, 100)
        for seed in (0, 1)
        for beta in (100.0, 100.5)
        for kappa in (0.01, 0.1)
        for protocol in ("nature", "machado")
        for settings in (
            *({}, {"loss": "huber"}),
            *({"policy_kwargs": {}}, {"policy_kwargs": {"net_arch": []}}),
        )
    ]
    assert len({spec.name for spec in specs}) == len(specs) == 512


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("runs: [{game: pong, sed: 3}]", "run 1 has the unknown key 'sed'; the nearest is 'seed'"),
        ("run: [{game: pong}]", "has the unknown key 'run'; the nearest is 'runs'"),
        ("runs: [{game: pong}, {seed: 1}]", "run 2 has no game"),
        ("runs: [{game: pong, seed: [0, one]}]", "seed takes an integer, not 'one'"),
        ("runs: [{game: pong, seed: true}]", "seed takes an integer, not True"),
        ("runs: [{game: pong, algorithm: ppo}]", "run 1: algorithm must be one of dqn, sql"),
        ("runs: [{game: pong, settings: {gama: 1}}]", "not 'gama'; the nearest is 'gamma'"),
        ("runs: [{game: pong, settings: {1: 2, gama: 3}}]", "not 1; the nearest is"),
        (
            "runs: [{game: pong, settings: {policy_kwargs: {net_arc: [4]}}}]",
            "run 1: policy_kwargs take the arguments of the policy, not 'net_arc'",
        ),
        ("runs: [{game: pong, protocol: foo}]", "run 1: protocol must be one of nature, machado"),
        ("runs: [{game: pong, seed: []}]", "run 1: the list of seed is empty"),
        ("runs: []", "runs takes a list of runs, not []"),
        ("runs: [{game: pong}]\ntest_games: 0", "test_games takes a positive integer, not 0"),
        ("[pong]", "must have the keys runs, test_games; it is ['pong']"),
        ("", "must have the keys runs, test_games; it is None"),
        ("runs: [", "is not YAML"),
        ("[" * 1_000, "is not YAML"),
        ("runs: !!python/object/apply:os.system [touch hacked]", "is not YAML"),
        ("\x00", "is not YAML"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, text, named, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(named)) as caught:
        read_specs(path)
    assert "\n" not in str(caught.value)
    assert [path] == list(tmp_path.iterdir())


# Processes


def stand_ins(folder, *names):
    jobs = [Job(RunSpec(name, "dqn", 1), folder / name, 1, "", 600.0) for name in names]
    return {job.name: job for job in jobs}


def launch_stand_ins(jobs, workers, *program):
    return watched(jobs, LocalLauncher(workers, partial(run_process, program=program)))


def watched(jobs, launcher):
    notes = Notes()
    stopped = sweep(list(jobs.values()), launcher, notes)
    return stopped, notes.reasons


def test_one_failure_does_not_stop_the_others(tmp_path):
    jobs = stand_ins(tmp_path, "good", "bad", "blocked", "killed", "again")
    (tmp_path / "blocked").write_text("a file where a folder should be")
    script = """
        case $(readlink /proc/$$/fd/1) in  # its log, which is in its folder
            *good/*) exit 0;;
            *bad/*) echo "what went wrong"; exit 3;;
            *killed/*) kill -9 $$;;
            *again/*) [ -s /proc/$$/fd/1 ] || { echo "the first time"; exit 75; };;
        esac
    """
    stopped, reasons = launch_stand_ins(jobs, 2, "sh", "-c", script)
    assert stopped is None
    assert reasons.pop("blocked").endswith("blocked cannot be written: File exists.")
    assert reasons == {
        "good": None,
        "bad": "what went wrong",
        "killed": "killed by SIGKILL, 3 times without getting on.",
        "again": None,
    }


def test_storage_that_a_node_does_not_have_is_named(tmp_path):
    (job,) = stand_ins(tmp_path, "a").values()
    with pytest.raises(FileNotFoundError, match=r"a is not there on .*storage that all nodes"):
        run_process(job)


def test_as_many_at_a_time_as_asked_for(tmp_path):
    jobs = stand_ins(tmp_path, *"abcdef")
    start = time.monotonic()
    launch_stand_ins(jobs, 3, "sh", "-c", "date +%s.%N; sleep 1; date +%s.%N")
    assert time.monotonic() - start > 2
    spans = [tuple(map(float, job.log.read_text().split())) for job in jobs.values()]
    for begin, _ in spans:
        assert sum(first <= begin < last for first, last in spans) <= 3
    assert max(sum(f <= begin < last for f, last in spans) for begin, _ in spans) > 1


def test_a_sweep_is_stopped_goes_on_and_reports_what_is_wrong(tmp_path):
    (tmp_path / "list.yaml").write_text(
        f"""
        test_games: 3
        runs:
          - &base
            game: CartPole-v1
            algorithm: cbsql
            steps: {LONG_ENOUGH}
            settings: {SMALL}
          - {{<<: *base, seed: 1}}
          - {{<<: *base, seed: 2}}
          - {{<<: *base, game: CartPol-v1}}
          - {{<<: *base, settings: {{batch_size: -3}}}}
        """
    )
    specs, _ = read_specs(tmp_path / "list.yaml")
    good, corrupt, blocked, unknown, failing = [
        Job(spec, tmp_path / "out" / spec.name, 3, "", 600.0) for spec in specs
    ]
    corrupt.folder.mkdir(parents=True)
    (corrupt.folder / "run.json").write_text('{"finished": tr')
    blocked.folder.write_text("in the way")
    command = [CBSQL, "sweep", "list.yaml", "--out", "out", "--workers", "1"]

    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: progress(good.folder).steps > 1000)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "The same command goes on" in said
    assert list((good.folder / "checkpoints").glob("*.json"))
    assert good.log.read_text().endswith("The same command goes on.\n")

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    said = done.stdout
    assert "1 of 5 runs done, 4 failed" in said
    assert f"failed   {corrupt.name}: {corrupt.folder / 'run.json'} is damaged" in said
    assert f"failed   {blocked.name}: {blocked.folder} cannot be written: File exists." in said
    assert f"failed   {unknown.name}: No Atari game is called 'CartPol-v1'" in said
    assert str(failing.log) in said
    assert "Traceback" in failing.log.read_text()
    assert (corrupt.folder / "run.json").read_text() == '{"finished": tr'
    assert blocked.folder.read_text() == "in the way"

    (whole,) = jobs_in(tmp_path / "whole", specs[0])
    run(whole)
    assert_same(good, whole)
    assert [job.state() for job in (good, whole)] == ["done", "done"]
    assert plan(specs, tmp_path / "out", 4).jobs[0].state() == "untested"
    assert plan(specs[:1], tmp_path / "out", 3) == ([], 1, {})
    speed = Speeds(tmp_path / "out").step_seconds(specs[0])
    assert speed == Speeds(tmp_path / "out").step_seconds(RunSpec("CartPole-v1", "dqn"))
    assert 1e-5 < speed < 0.1


@pytest.mark.slow
def test_runs_save_when_their_sweep_is_killed(tmp_path):
    (job,) = jobs_in(tmp_path, RunSpec("CartPole-v1", "sql", 1_000_000, settings=SMALL))
    code = (
        "import pickle, sys; from cbsql.experiments.launch import run_process\n"
        "run_process(pickle.load(sys.stdin.buffer))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    pickle.dump(job, process.stdin)
    process.stdin.close()
    wait_until(lambda: progress(job.folder).steps > 0)
    process.kill()
    process.wait()
    wait_until(lambda: job.log.read_text().endswith("The same command goes on.\n"))
    assert list((job.folder / "checkpoints").glob("*.json"))


# Ray


def descendants(pid):
    """The processes that a process has started, and those that these have started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (name) state parent ...; a name may have spaces.
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended meanwhile
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def process_of(job):
    """The process that a job's log names last."""
    lines = job.log.read_text().splitlines() if job.log.is_file() else []
    started = [line.split() for line in lines if " process " in line]
    return int(started[-1][3]) if started else None


@pytest.fixture(scope="module")
def cluster():
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    nodes = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    nodes.add_node(num_cpus=1)
    yield nodes
    nodes.shutdown()


@pytest.fixture
def ray(cluster):
    yield import_module("ray")
    import_module("ray").shutdown()


SAVES_AT_END_OF_INPUT = ("sh", "-c", "echo start; cat > /dev/null; sleep 1; echo end; exit 75")


def check_that_a_signal_stops_all(folder, launcher):
    jobs = stand_ins(folder, *"abcd")
    started = lambda: sum(job.log.is_file() and job.log.stat().st_size > 0 for job in jobs.values())  # noqa: E731

    def stop():
        wait_until(lambda: started() == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    assert watched(jobs, launcher) == ("SIGTERM", {})
    logs = [job.log.read_text() for job in jobs.values() if job.log.is_file()]
    assert logs == ["start\nend\n"] * 2


def test_a_signal_stops_all_processes_and_starts_no_more(tmp_path):
    run = partial(run_process, program=SAVES_AT_END_OF_INPUT)
    check_that_a_signal_stops_all(tmp_path, LocalLauncher(2, run))


def test_a_signal_stops_all_of_a_cluster_and_starts_no_more(tmp_path, cluster, ray):
    program = SAVES_AT_END_OF_INPUT  # a copy that is not this module's, which nodes do not have
    launcher = RayLauncher(cluster.address, lambda job: run_process(job, program=program))
    check_that_a_signal_stops_all(tmp_path, launcher)


def test_when_a_node_dies_its_runs_go_on_elsewhere(tmp_path, cluster, ray):
    specs = [RunSpec("CartPole-v1", "cbsql", LONG_ENOUGH, seed, settings=SMALL) for seed in (0, 1)]
    whole = jobs_in(tmp_path / "whole", *specs)
    jobs = jobs_in(tmp_path / "out", *specs, checkpoint_seconds=0.2)
    launcher = RayLauncher(cluster.address)
    assert launcher.workers == 2
    notes = Notes()
    thread = threading.Thread(target=sweep, args=(jobs, launcher, notes))
    thread.start()
    (node,) = cluster.worker_nodes
    (raylet,) = (info.process.pid for info in node.all_processes["raylet"])

    def on_node():
        mine = descendants(raylet)
        return [job for job in jobs if process_of(job) in mine]

    wait_until(lambda: any((job.folder / "checkpoints").is_dir() for job in on_node()))
    (moved,) = on_node()
    first = process_of(moved)
    # As if its plug were pulled: nothing on the node gets a chance to save or to say anything.
    for pid in [raylet, *descendants(raylet)]:
        os.kill(pid, signal.SIGKILL)
    for job in whole:
        run(job)
    thread.join(timeout=300)
    assert notes.reasons == {job.name: None for job in jobs}
    assert process_of(moved) != first
    for job, other in zip(jobs, whole, strict=True):
        assert_same(job, other)


@pytest.mark.parametrize(
    ("address", "named"), [("127.0.0.1:9", "refused"), ("nonsense", ""), ("nowhere.invalid:1", "")]
)
def test_an_address_without_a_cluster_is_refused_at_once(address, named):
    pytest.importorskip("ray")
    start = time.monotonic()
    with pytest.raises(ValueError, match=f"No Ray cluster answers at {address}: .*{named}"):
        RayLauncher(address)
    assert time.monotonic() - start < 20


# What is shown


def test_progress_is_read_while_it_is_written(tmp_path):
    assert progress(tmp_path) == Progress()
    names = "time/fps,rollout/ep_rew_mean,time/total_timesteps\n"
    (tmp_path / "progress.csv").write_text(names)
    assert progress(tmp_path) == Progress()
    lines = "".join(f"{i},{i / 2},{10 * i}\n" for i in range(1, 2000))
    (tmp_path / "progress.csv").write_text(names + lines + "2000,1")
    assert progress(tmp_path) == Progress(19_990, 999.5, 1999.0)


def test_wall_time():
    assert wall_seconds([3, 1, 1, 1], 2) == 3
    assert wall_seconds([1, 1, 1, 3], 2) == 4
    assert wall_seconds([], 2) == 0
    assert wall_seconds([5, 6], 100) == 6


def three_runs(folder):
    """The plan of a run that has begun, one that has not, and one that cannot be made."""
    specs = [RunSpec("pong", "cbsql", seed=0), RunSpec("pong", "cbsql", seed=1), RunSpec("pung")]
    found = plan(specs, folder, 3)
    begun = found.jobs[0]
    begun.folder.mkdir()
    (begun.folder / "run.json").write_text(
        json.dumps({"spec": begun.spec.describe(), "finished": False})
    )
    rows = "time/total_timesteps,rollout/ep_rew_mean,time/fps\n250000,-3.25,50\n"
    (begun.folder / "progress.csv").write_text(rows)
    return found


def test_a_dry_run_lists_what_there_is_to_do(tmp_path):
    lines = listing(three_runs(tmp_path), 2, Speeds(tmp_path)).splitlines()
    seconds = preset(RunSpec("pong", "cbsql")).step_seconds
    for line, state, steps in zip(lines, ("unfinished", "new"), (500_000, 750_000), strict=False):
        hours, _, found, name = line.split()
        assert float(hours) == pytest.approx(steps * seconds / 3600, abs=0.01)
        assert (found, name[:-1]) == (state, "pong-cbsql-")
    assert "refused" in lines[2]
    assert "pong" in lines[2]  # the nearest name
    assert lines[3].startswith("2 runs to make, 0 done: ")
    assert f"about {750_000 * seconds / 3600:.2f} with 2 at a time" in lines[3]


def test_the_live_table_shows_progress_score_speed_and_time_left(tmp_path):
    found = three_runs(tmp_path)
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Board(found, 2, Speeds(tmp_path), terminal) as board:
        found.jobs[0].log.write_text("process 1")
        board.refresh()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.file.getvalue())
    row = next(line for line in shown.splitlines() if line.strip().startswith("pong-cbsql-0"))
    # 500,000 steps at 50 a second.
    assert " ".join(row.split()) == "pong-cbsql-0 33% of 750,000 -3.25 50 2 h 46 min"
    assert "0 of 3 runs done, 1 failed." in shown
    assert "failed   pung" in shown


def test_a_run_has_one_thread_whatever_the_sweep_has(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    (job,) = jobs_in(tmp_path, RunSpec("CartPole-v1", "sql", 100))
    code = "import torch; print(torch.get_num_threads())"
    assert run_process(job, program=(sys.executable, "-c", code)) == 0
    assert job.log.read_text().split() == ["1"]


def test_as_many_processes_as_cores_and_memory_allow(tmp_path, monkeypatch):
    jobs = three_runs(tmp_path).jobs
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda _: range(8), raising=False)
    needed = jobs[0].memory_bytes()
    assert needed == 1_000_000_000 + 750_000 * 84 * 84
    for available, workers in ((None, 8), (100 * needed, 8), (3 * needed, 3), (1, 1)):
        monkeypatch.setattr(launch, "available_bytes", lambda a=available: a)
        assert launch.default_workers(jobs) == workers
