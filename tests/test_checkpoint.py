"""Checkpoints: what is written comes back, damage is found, and a resumed run is the same run."""

import csv
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.env_util import make_vec_env

from cbsql import SQL, checkpoint, files
from cbsql.checkpoint import CheckpointError, Checkpoints, Ring, only_process
from cbsql.deep.sql import DivergenceError
from cbsql.deep.state import restore_training, training_state
from cbsql.envs.episodes import ReplayableEpisodes
from cbsql.experiments import runner
from cbsql.experiments import spec as presets
from cbsql.experiments.runner import StoppedError, make_model, status, train
from cbsql.experiments.spec import RunSpec
from cbsql.replay import IndexedReplayBuffer

CBSQL = Path(sys.executable).parent / "cbsql"


class Written:
    """A ring and the numbers that went into it."""

    def __init__(self, length):
        self.rows, self.written = np.zeros((length, 2), np.int64), 0

    def add(self, count):
        for _ in range(count):
            self.rows[self.written % len(self.rows)] = self.written, self.written**2
            self.written += 1

    def ring(self):
        return Ring(self.rows, self.written)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    saves=st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=6),
    segment_bytes=st.integers(40, 600),
)
def test_rings_come_back_from_their_segments(tmp_path_factory, lengths, saves, segment_bytes):
    folder = tmp_path_factory.mktemp("rings")
    rings = [Written(length) for length in lengths]
    named = lambda rings: {str(i): ring.ring() for i, ring in enumerate(rings)}  # noqa: E731
    before, checkpoint.SEGMENT_BYTES = checkpoint.SEGMENT_BYTES, segment_bytes
    try:
        store = Checkpoints(folder)
        for i, (count, restart) in enumerate(saves):
            for ring in rings:
                ring.add(count)
            store.save(f"{i:03d}", {"i": i}, named(rings))
            if restart:  # as another process would
                store = Checkpoints(folder)
                copies = [Written(length) for length in lengths]
                assert store.load(named(copies)) == ({"i": i}, [])
                for copy, ring in zip(copies, rings, strict=True):
                    np.testing.assert_array_equal(copy.rows, ring.rows)
    finally:
        checkpoint.SEGMENT_BYTES = before
    assert len(list(folder.glob("*.json"))) == min(len(saves), checkpoint.KEPT)


def three_checkpoints(folder):
    ring = Written(1000)
    store = Checkpoints(folder)
    sizes = []
    for name in "abc":
        ring.add(100)
        sizes.append(store.save(name, {"name": name, "x": np.arange(5)}, {"r": ring.ring()}))
    sizes.append(store.save("d", {"name": "d", "x": np.arange(5)}, {"r": ring.ring()}))
    return ring, sizes


def test_a_checkpoint_writes_what_is_new(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SEGMENT_BYTES", 2**14)  # a file of parity is not larger
    ring = Written(100_000)
    ring.add(50_000)
    store = Checkpoints(tmp_path)
    first = store.save("a", {}, {"r": ring.ring()})
    ring.add(10)
    second = store.save("b", {}, {"r": ring.ring()})
    assert second < first / 10


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_is_named_and_the_checkpoint_before_is_used(tmp_path, damage):
    three_checkpoints(tmp_path)
    for path in [*tmp_path.glob("d.state*"), *tmp_path.glob("d.json")]:
        data = path.read_bytes()
        if damage == "flip":
            flip(path)
        elif damage == "truncate":
            path.write_bytes(data[:-3])
        elif path.suffix == ".json":
            continue  # without it there is no checkpoint to be damaged
        else:
            path.unlink()
        copy = Written(1000)
        state, damages = Checkpoints(tmp_path).load({"r": Ring(copy.rows, 0)})
        assert state["name"] == "c"
        assert len(damages) == 1
        assert str(path) in damages[0]
        assert copy.rows[299].tolist() == [299, 299**2]
        path.write_bytes(data)
    assert Checkpoints(tmp_path).load({"r": Ring(copy.rows, 0)})[0]["name"] == "d"


@pytest.mark.parametrize("damage", [flip, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_segment_that_checkpoints_share_is_restored_from_the_others(tmp_path, damage):
    ring, _ = three_checkpoints(tmp_path)
    segments = sorted(tmp_path.glob("?.replay*"))
    assert [path.name[0] for path in segments] == list("abcd")
    for path in segments:
        data = path.read_bytes()
        damage(path)
        copy = Written(1000)
        store = Checkpoints(tmp_path)
        state, damages = store.load({"r": Ring(copy.rows, 0)})
        assert state["name"] == "d"
        np.testing.assert_array_equal(copy.rows, ring.rows)
        assert len(damages) == 1
        assert str(path) in damages[0]
        assert "restored" in damages[0]
        assert path.read_bytes() == data
    ring.add(100)
    store.save("e", {"name": "e"}, {"r": ring.ring()})  # whose parity is that of all of them
    damage(segments[0])
    assert Checkpoints(tmp_path).load({"r": Ring(copy.rows, 0)})[0]["name"] == "e"
    np.testing.assert_array_equal(copy.rows, ring.rows)
    for path in segments[:2]:
        damage(path)
    with pytest.raises(CheckpointError, match=segments[0].name):
        Checkpoints(tmp_path).load({"r": Ring(copy.rows, 0)})


def test_a_damaged_segment_that_is_not_needed_any_more_does_no_harm(tmp_path):
    ring, store = Written(100), Checkpoints(tmp_path)
    for name in "abcde":
        ring.add(60)
        store.save(name, {"name": name}, {"r": ring.ring()})
        flip(next(tmp_path.glob(f"{name}.replay*"))) if name == "b" else None
    copy = Written(100)
    state, damages = Checkpoints(tmp_path).load({"r": Ring(copy.rows, 0)})
    assert (state["name"], damages) == ("e", [])
    np.testing.assert_array_equal(copy.rows, ring.rows)


def test_a_damaged_checkpoint_does_not_take_the_place_of_a_sound_one(tmp_path):
    store = Checkpoints(tmp_path)
    for name in ("1000", "2000"):
        store.save(name, {"name": name}, {})
    flip(next(tmp_path.glob("2000.state*")))
    store = Checkpoints(tmp_path)
    assert store.load({})[0] == {"name": "1000"}
    store.save("1500", {"name": "1500"}, {})
    flip(next(tmp_path.glob("1500.state*")))
    assert Checkpoints(tmp_path).load({})[0] == {"name": "1000"}


def test_when_all_are_damaged_it_says_so(tmp_path):
    three_checkpoints(tmp_path)
    for path in tmp_path.glob("*.json"):
        path.write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"c\.json is damaged.*"):
        Checkpoints(tmp_path).load({})
    assert Checkpoints(tmp_path / "nothing").load({}) is None


def test_a_full_disk_leaves_the_last_checkpoint_usable(tmp_path):
    three_checkpoints(tmp_path)
    store = Checkpoints(tmp_path)
    store.load({"r": Ring(np.zeros((1000, 2), np.int64), 0)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    noise = np.random.default_rng(0).integers(256, size=100_000, dtype=np.uint8)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        with pytest.raises(CheckpointError, match=r"could not be written: .*as it was"):
            store.save("e", {"noise": noise}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.glob("*unfinished*"))
    assert Checkpoints(tmp_path).load({"r": Ring(np.zeros((1000, 2)), 0)})[0]["name"] == "d"


def test_whatever_a_killed_process_leaves_is_gone_on_from(tmp_path, monkeypatch):
    """At every moment of a save there is this checkpoint or, whole, the one before."""
    left = []

    def keep(folder, newest):
        for part in (0, 0.5, 1):  # of what is not yet sure to be on disk
            left.append((tmp_path / str(len(left)), newest))
            shutil.copytree(folder, left[-1][0])
            for path in left[-1][0].glob("*unfinished*"):
                path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])

    folder, ring, saved = tmp_path / "run", Written(1000), None
    store = Checkpoints(folder)
    for owner, method in ((os, "fsync"), (Path, "replace"), (Path, "unlink")):
        original = getattr(owner, method)

        def moment(*arguments, original=original, **options):
            keep(folder, saved)
            original(*arguments, **options)

        monkeypatch.setattr(owner, method, moment)
    for name in "abc":
        ring.add(400)
        store.save(name, {"name": name}, {"r": ring.ring()})
        saved = name
    assert len(left) > 100
    for copy, newest in left:
        rows = np.zeros((1000, 2), np.int64)
        found = Checkpoints(copy).load({"r": Ring(rows, 0)})
        state, damages = found or ({"name": None}, [])
        assert damages == []
        assert state["name"] in (newest, chr(ord(newest or "`") + 1))


def test_one_folder_one_process(tmp_path):
    with only_process(tmp_path):
        code = (
            "import sys, pathlib; from cbsql.checkpoint import only_process\n"
            "with only_process(pathlib.Path(sys.argv[1])): pass"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False
        )
    assert "Another process is at work in" in done.stderr
    with only_process(tmp_path):
        pass


class Killed(BaseException):
    """Nothing of ours catches this."""


RUNS = {
    "sql": RunSpec("CartPole-v1", "sql", steps=700, settings={"learning_starts": 100}),
    "cbsql": RunSpec(
        "MinAtar/Breakout-v1", "cbsql", 300, settings={"buffer_size": 150, "learning_starts": 50}
    ),
    "rainbow": RunSpec(
        "MinAtar/Asterix-v1",
        "rainbow-cbsql",
        200,
        settings={"buffer_size": 100, "learning_starts": 50, "n_steps": 3},
    ),
    "dqn on images": RunSpec(
        "breakout", "dqn", 300, settings={"buffer_size": 200, "learning_starts": 50}
    ),
}


def everything(model, folder):
    """Weights, counter, replay and scores of a run that has ended."""
    rows = list(csv.DictReader((folder / "episodes.csv").open()))
    scores = [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    replay = {name: ring for name, (ring, _) in model.replay_buffer.rings().items()}
    state = model.replay_buffer.state_dict()
    arrays: dict[str, th.Tensor] = {}
    parts = [model.policy.state_dict(), model.temperature.state_dict(), replay, state]
    files.encode(parts, arrays, "all")
    lines = (folder / "progress.csv").read_text().count("\n")
    return arrays, scores, state["generator"], lines, model._n_updates


@pytest.mark.parametrize("name", RUNS)
def test_a_run_killed_twice_is_the_run_that_was_not(name, tmp_path):
    spec = RUNS[name]
    for folder in ("whole", "broken"):
        (tmp_path / folder).mkdir()
    whole = everything(train(spec, tmp_path / "whole"), tmp_path / "whole")
    for moment in (0.4, 0.7):

        def kill(step, _, last=moment * spec.steps):
            if step >= last:
                raise Killed

        with pytest.raises(Killed):
            train(spec, tmp_path / "broken", report=kill, checkpoint_seconds=0.0)
        assert status(spec, tmp_path / "broken") == "unfinished"
    model = train(spec, tmp_path / "broken")
    assert status(spec, tmp_path / "broken") == "finished"
    broken = everything(model, tmp_path / "broken")
    for key, array in whole[0].items():
        np.testing.assert_array_equal(broken[0][key], array, err_msg=key)
    assert broken[1:] == whole[1:]
    assert not (tmp_path / "broken" / "checkpoints").exists()


class Whim(gym.Wrapper):
    """An environment with chance of its own, which no seed reaches."""

    def step(self, action):
        observation, *rest = self.env.step(action)
        return observation + np.float32(os.urandom(1)[0] / 1000), *rest


gym.register("Whim-v0", lambda: Whim(gym.make("CartPole-v1")), max_episode_steps=500)


class Doubles(gym.ObservationWrapper):
    """Observations of another type than the space says, which SB3 casts."""

    def observation(self, observation):
        return observation.astype(np.float64)


gym.register(
    "Doubles-v0",
    lambda: Doubles(gym.make("CartPole-v1")),
    max_episode_steps=500,
    disable_env_checker=True,
)


class Item(gym.Wrapper):
    """Takes actions for what vector environments pass."""

    def step(self, action):
        return self.env.step(action.item())


gym.register("Item-v0", lambda: Item(gym.make("CartPole-v1")), max_episode_steps=500)


class Luck(gym.Wrapper):
    """Episodes end by chance, which no seed reaches."""

    def step(self, action):
        observation, reward, end, late, info = self.env.step(action)
        return observation, reward, end or os.urandom(1)[0] < 40, late, info


gym.register("Luck-v0", lambda: Luck(gym.make("CartPole-v1")), max_episode_steps=500)


@pytest.mark.parametrize(
    "spec",
    [
        RunSpec("Item-v0", "sql", steps=60, settings={"learning_starts": 10}),
        RunSpec("Doubles-v0", "sql", steps=60, settings={"learning_starts": 10}),
        RunSpec("CartPole-v1", "rainbow", steps=700, settings={"prioritized": False}),
    ],
)
def test_what_could_keep_a_run_from_going_on(spec, tmp_path):
    def stop(step, _):
        if step == spec.steps // 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(StoppedError, match="goes on"):
        train(spec, tmp_path, report=stop)
    assert checkpoint_names(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(spec, tmp_path)


class Succeeds(gym.Wrapper):
    """CartPole that says at the end of an episode whether it was a success."""

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            info["is_success"] = bool(observation[0] > 0)
        return observation, reward, terminated, truncated, info


def test_rates_of_success_go_on():
    env = make_vec_env(lambda: Succeeds(gym.make("CartPole-v1")))
    arguments = {"replay_buffer_class": IndexedReplayBuffer, "seed": 0}
    model = SQL("MlpPolicy", env, **arguments).learn(200)
    other = SQL("MlpPolicy", env, **arguments)
    other._setup_learn(1)
    restore_training(other, training_state(model))
    assert len(model.ep_success_buffer) > 5
    assert list(other.ep_success_buffer) == list(model.ep_success_buffer)


def test_a_run_that_cannot_go_on_says_so(tmp_path):
    spec = RunSpec("CartPole-v1", "sql", 600, settings={"replay_buffer_class": ReplayBuffer})

    def stop(step, _):
        if step == 300:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(StoppedError, match="begins anew"):
        train(spec, tmp_path, report=stop)


@pytest.mark.parametrize("game", ["Whim-v0", *["Luck-v0"] * 4])
def test_where_seeds_do_not_reach_it_says_so_and_goes_on(game, tmp_path, monkeypatch):
    spec = RunSpec(game, "sql", steps=60, settings={"learning_starts": 1000})
    seeds = []
    start = ReplayableEpisodes._start
    monkeypatch.setattr(
        ReplayableEpisodes, "_start", lambda env, *args: seeds.append(args[0]) or start(env, *args)
    )

    def stop(step, _):
        if step == 30:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(StoppedError):  # with a checkpoint of its last moment
        train(spec, tmp_path, report=stop)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert train(spec, tmp_path).num_timesteps >= 60
    if game == "Whim-v0":
        assert any("not determined by its seed" in str(one.message) for one in said)
    # A new episode has a new seed; only the one that was played again comes twice.
    assert len(seeds) - len(set(seeds)) <= 1


def test_another_run_in_the_folder_is_refused(tmp_path):
    train(RUNS["sql"], tmp_path)
    with pytest.raises(ValueError, match=r"with beta 100\.0 and not 7\.0"):
        train(RunSpec("CartPole-v1", "sql", 700, 0, 7.0, settings=RUNS["sql"].settings), tmp_path)
    with pytest.raises(ValueError, match="is finished"):
        train(RUNS["sql"], tmp_path)


@pytest.mark.parametrize("algorithm", ["sql", "rainbow"])
def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_batch(algorithm, tmp_path):
    huge = {"learning_starts": 10, "learning_rate": 1e30, "max_grad_norm": 1e30, "train_freq": 4}
    with pytest.raises(DivergenceError, match=r"(loss|gradient) of update \d+ is not a finite"):
        train(RunSpec("CartPole-v1", algorithm, 400, settings=huge), tmp_path)
    assert {"observations", "actions"} <= set(load_file(tmp_path / "diverged.safetensors"))


def test_weights_that_are_no_numbers_at_the_end_are_not_a_result(tmp_path, monkeypatch):
    spec = replace(RUNS["sql"], settings={"learning_starts": 1000})

    def spoilt(*args):
        model = make_model(*args)
        next(model.q_net.parameters()).data[0] = np.nan
        return model

    monkeypatch.setattr(runner, "make_model", spoilt)
    with pytest.raises(DivergenceError, match="weight"):
        train(spec, tmp_path)
    assert not (tmp_path / "model.zip").exists()


def test_other_settings_than_the_run_began_with_are_refused(tmp_path, monkeypatch):
    spec = replace(RUNS["sql"], steps=0)

    def interrupt():
        first = iter([signal.SIGINT])
        return lambda *_: [signal.raise_signal(number) for number in first]

    (tmp_path / "test.csv").write_text("of a run that was here before")
    with pytest.raises(StoppedError):
        train(spec, tmp_path, report=interrupt())
    assert not (tmp_path / "test.csv").exists()
    # What 0 steps mean is the same run.
    assert status(replace(spec, steps=runner.preset(spec).steps), tmp_path) == "unfinished"
    record = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**record, "commit": "another"}))
    with pytest.raises(StoppedError):
        train(spec, tmp_path, report=interrupt())
    assert json.loads((tmp_path / "run.json").read_text())["earlier_commits"] == ["another"]
    now = replace(presets.CARTPOLE, settings={**presets.CARTPOLE.settings, "gamma": 0.5})
    monkeypatch.setattr(presets, "CARTPOLE", now)
    with pytest.raises(ValueError, match=r"was begun with gamma 0\.99, and this version has 0\.5"):
        train(spec, tmp_path)


def test_a_log_that_goes_on_is_never_empty(tmp_path):
    path = tmp_path / "progress.csv"
    lines = ["a,b", *(f"{i},{i}" for i in range(500))]
    path.write_text("\n".join(lines) + "\n")
    log = runner._LogFile(path, 301)
    assert path.read_text().splitlines() == lines[:301]
    log.write({"a": 1, "c": 2}, {"a": (), "c": ()})
    log.close()
    assert path.read_text().splitlines()[::301] == ["a,b,c", "1,,2"]


def test_scores_that_are_lost_are_named(tmp_path):
    (tmp_path / "episodes.csv").write_text("kind\n")
    state = {"recent": [], "seconds": 0.0, "calls": 0, "episodes_bytes": 40, "log_lines": 0}
    log = runner.RunLog(tmp_path, 100, False, None)
    with pytest.warns(UserWarning, match="has lost 35 bytes"):
        log.open(state)
    log.close()
    assert (tmp_path / "episodes.csv").read_text() == "kind\n"


def test_sigterm_checkpoints_and_asks_to_be_queued_again(tmp_path):
    command = [CBSQL, "train", "CartPole-v1", "--algorithm", "sql", "--frames", "1M"]
    process = subprocess.Popen([*command, "--out", "run"], cwd=tmp_path, stdout=subprocess.PIPE)
    while not (tmp_path / "run" / "episodes.csv").exists():
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert b"The same command goes on" in said
    assert list((tmp_path / "run" / "checkpoints").glob("*.json"))


def test_told_to_stop_by_a_signal_in_the_same_process(tmp_path):
    def stop(step, _):
        if step == 350:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(StoppedError, match="SIGINT"):
        train(RUNS["sql"], tmp_path, report=stop)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(RUNS["sql"], tmp_path).num_timesteps == 768  # whole rollouts of 256


def checkpoint_names(run):
    return {path.name for path in (run / "checkpoints").glob("*.json")}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("game", "algorithm", "frames", "kills", "seconds"),
    [
        *(
            (game, algorithm, 25_000, 20, 0.2)
            for game in ("CartPole-v1", "MinAtar/Breakout-v1")
            for algorithm in ("sql", "cbsql", "rainbow-cbsql")
        ),
        # A checkpoint of these takes seconds.
        *(("pong", algorithm, 12_000, 3, 5.0) for algorithm in ("sql", "cbsql", "rainbow-cbsql")),
    ],
)
def test_sigkill_at_random_moments(game, algorithm, frames, kills, seconds, tmp_path):
    """Many kills of one run: each continues where the one before was killed."""
    arguments = ["--algorithm", algorithm, "--frames", str(frames)]
    arguments += ["--checkpoint-seconds", str(seconds)]
    arguments += ["--set", "learning_starts=500", "--set", "buffer_size=2000"]
    command = [CBSQL, "train", game, *arguments, "--out"]
    subprocess.run([*command, tmp_path / "whole"], check=True, capture_output=True)
    rng = random.Random(f"{game} {algorithm}")
    for kill in range(kills):
        before = checkpoint_names(tmp_path / "broken")
        process = subprocess.Popen([*command, tmp_path / "broken"], stdout=subprocess.DEVNULL)
        if kill % 4 == 3:
            time.sleep(rng.uniform(0, 5))  # while it begins, comes back, or a little later
        else:
            while checkpoint_names(tmp_path / "broken") <= before and process.poll() is None:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 2 * seconds))  # two checkpoints from now, or in between
        process.kill()
        assert process.wait() == -signal.SIGKILL, "the run ended before it was killed"
    subprocess.run([*command, tmp_path / "broken"], check=True, capture_output=True)
    spec = RunSpec(game, algorithm)
    models = [
        spec.learner.load(tmp_path / name / "model.zip", buffer_size=1)
        for name in ("whole", "broken")
    ]
    arrays = [{}, {}]
    for model, found in zip(models, arrays, strict=True):
        files.encode([model.policy.state_dict(), model.temperature.state_dict()], found, "all")
    for key, array in arrays[0].items():
        np.testing.assert_array_equal(arrays[1][key], array, err_msg=key)
    scores = [
        [
            {k: v for k, v in row.items() if k != "seconds"}
            for row in csv.DictReader((tmp_path / name / "episodes.csv").open())
        ]
        for name in ("whole", "broken")
    ]
    assert scores[0] == scores[1]
