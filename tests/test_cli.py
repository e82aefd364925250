"""The command line as a user meets it: a process, its output, its exit code, its files."""

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cbsql.checkpoint import only_process

CBSQL = Path(sys.executable).parent / "cbsql"
SMALL = ("reproduce", "chain", "--runs", "300", "--episodes", "30")


def cbsql(*arguments, cwd):
    return subprocess.run([CBSQL, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def test_reproduce_chain_writes_what_it_promises(tmp_path):
    done = cbsql(*SMALL, "--all-schedules", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "out/figure.png" in done.stdout
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {
        *("curves.csv", "figure.png", "figure.svg", "summary.md", "run.json"),
        *("schedules.png", "schedules.svg"),
        *("effective_beta.csv", "effective_beta.png", "effective_beta.svg"),
    }
    rows = list(csv.DictReader((out / "curves.csv").open()))
    assert len(rows) == 8 * 30
    assert list(rows[0]) == ["algorithm", "episode", "mean", "ci_low", "ci_high"]
    for row in rows:
        assert float(row["ci_low"]) <= float(row["mean"]) <= float(row["ci_high"])
        assert -0.5 <= float(row["mean"]) <= 0.6
    record = json.loads((out / "run.json").read_text())
    assert record["arguments"]["runs"] == 300
    assert record["command"].startswith("cbsql reproduce chain --runs 300")
    assert record["versions"]["torch"].startswith("2.13.0")
    assert "| CBSQL |" in (out / "summary.md").read_text()


def test_the_same_command_writes_the_same_numbers(tmp_path):
    for name in ("a", "b"):
        assert cbsql(*SMALL, "--out", name, cwd=tmp_path).returncode == 0
    for name in ("curves.csv", "summary.md", "figure.png", "figure.svg"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["reproduce", "chain", "--kappa", "-1"], "kappa must be a positive number, not -1.0"),
        (["reproduce", "chain", "--gamma", "1"], "gamma must be in [0, 1), not 1.0"),
        (["reproduce", "chain", "--retreat", "up"], "one of back, stay, start, not 'up'"),
        (["reproduce", "chain", "--runs", "many"], "Invalid value for '--runs'"),
        (["reproduce", "chain", "--temperature", "1"], "No such option: --temperature"),
        (["reproduce", "chains"], "No such command 'chains'"),
        (["train", "pongg"], "No Atari game is called 'pongg'. Nearest names: pong"),
        (
            ["train", "breakout", "--frames", "900M", "--set", "buffer_size=100_000_000"],
            "would fit",
        ),
        (["train", "Pendulum-v1"], "only supports"),
        (["train", "CartPole-v1", "--algorithm", "ppo"], "one of dqn, sql, cbsql, rainbow"),
        (["train", "CartPole-v1", "--frames", "lots"], "'lots' is not a positive number"),
        (["train", "CartPole-v1", "--frames", "inf"], "'inf' is not a positive number"),
        (
            ["train", "CartPole"],
            "Nor is it the id of a Gymnasium environment. Nearest ids: CartPole",
        ),
        (["train", "breakout", "--frames", "3"], "--frames 3 is less than a step, of 4"),
        (["reproduce", "table2", "--algorithms", "rainbow, dqn"], "there is no 'dqn'"),
        (["reproduce", "table2", "--frames", "3"], "3 frames are less than a step, of 4"),
        (["train", "CartPole-v1", "--set", "batch_size"], "name=value"),
        (["train", "CartPole-v1", "--set", "gamma={[]: 1}"], "name=value"),
        (["train", "CartPole-v1", "--set", "buffer_size=-3"], "buffer_size must be at least 1"),
        (["train", "CartPole-v1", "--set", "train_freq=0"], "train_freq must be at least 1"),
        (
            ["train", "CartPole-v1", "--set", "policy_kwargs={'net_arc': [4]}"],
            "not 'net_arc'; the nearest is 'net_arch'",
        ),
        (["train", "CartPole-v1", "--protocol", "foo"], "one of nature, machado, not 'foo'"),
        (["train", "CartPole-v1", "--protocol", "machado"], "has no effect on CartPole-v1"),
        (["reproduce", "table1", "--games", "brekout", "--dry-run"], "Nearest names: breakout"),
        (["train", "CartPole-v1", "--set", "loss=cubic"], "one of mse, huber, not 'cubic'"),
        (["train", "CartPole-v1", "--out", "file/out"], "folder file/out cannot be written"),
        (["sweep", "nowhere.yaml"], "nowhere.yaml cannot be read: No such file or directory"),
        (["reproduce", "table2", "--out", "file/out"], "folder file/out cannot be written"),
        (["evaluate", "nowhere"], "nowhere is not the folder of a run"),
        ([*SMALL, "--out", "file/out"], "The output folder file/out cannot be written"),
    ],
)
def test_bad_input_ends_with_one_sentence_and_nothing_written(tmp_path, arguments, named):
    (tmp_path / "file").write_text("in the way")
    done = cbsql(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert named in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_interrupted_run_leaves_the_old_results(tmp_path):
    (tmp_path / "curves.csv").write_text("old")
    long = ("reproduce", "chain", "--runs", "10000000", "--out", ".")
    process = subprocess.Popen(
        [CBSQL, *long],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        # Where the tests themselves run in the background of a shell, they ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        while not list(tmp_path.glob(".unfinished-*")):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) != 0
    finally:
        process.kill()
    assert [path.name for path in tmp_path.iterdir()] == ["curves.csv"]
    assert (tmp_path / "curves.csv").read_text() == "old"


def test_train_then_evaluate(tmp_path):
    done = cbsql("train", "CartPole-v1", "--frames", "1K", "--set", "seed=3", cwd=tmp_path)
    assert done.returncode == 2  # seed is an option of its own
    done = cbsql("train", "CartPole-v1", "--frames", "300", "--out", "short", cwd=tmp_path)
    assert "Nothing was learnt: its 300 steps ended" in " ".join(done.stdout.split())
    done = cbsql("train", "CartPole-v1", "--frames", "1K", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = cbsql("evaluate", "run", "--episodes", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "run" / "test.csv").open()))
    assert [row["kind"] for row in rows] == ["game"] * 3
    mean = sum(float(row["score"]) for row in rows) / 3
    assert f"mean {mean:.2f} over 3 games" in " ".join(done.stdout.split())
    before = (tmp_path / "run" / "test.csv").read_bytes()
    for option in ("--epsilon", "--seed"):
        done = cbsql("evaluate", "run", "--episodes", "3", option, "1", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert f"mean {mean:.2f} over" not in " ".join(done.stdout.split())
        assert (tmp_path / "run" / "test.csv").read_bytes() == before  # they are other games
    with only_process(tmp_path / "run"):
        done = cbsql("evaluate", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert "Another process is at work in run" in " ".join(done.stderr.split())
    done = cbsql("evaluate", "run", "--epsilon", "2", cwd=tmp_path)
    assert done.returncode == 2
    assert "epsilon must be from 0 to 1, not 2.0" in " ".join(done.stderr.split())
    done = cbsql("evaluate", "run", "--video", "film.gif", cwd=tmp_path)
    assert done.returncode == 2
    assert "takes the name of an .mp4 file, not film.gif" in " ".join(done.stderr.split())
