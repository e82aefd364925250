"""Runs: what the presets set, what a run leaves behind, and testing it."""

import csv
import json
import platform
import re
import shutil
import subprocess
from contextlib import closing
from dataclasses import replace
from functools import partial

import cv2
import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, NatureCNN

from cbsql._registration import MINATAR_GAMES
from cbsql.counts import SimHash
from cbsql.deep import SQL
from cbsql.deep.networks import MinAtarCNN
from cbsql.experiments import provenance, runner
from cbsql.experiments.runner import (
    COLUMNS,
    Episode,
    evaluate,
    make_env,
    make_model,
    read_test,
    train,
    write_test,
)
from cbsql.experiments.spec import ATARI, RunSpec, preset
from cbsql.replay import FrameReplayBuffer, frames
from cbsql.temperature import CountBased, Greedy

PAPER_GAMES = ("breakout", "freeway", "pong", "qbert", "seaquest", "space_invaders")
SMALL = {"buffer_size": 1000}


@pytest.mark.parametrize("game", PAPER_GAMES)
def test_atari_preset_is_the_papers_table(game):
    spec = RunSpec(game, "cbsql", settings=SMALL)
    env = make_env(spec)
    model = make_model(spec, env)
    env.close()
    assert model.observation_space.shape == (4, 84, 84)
    assert (model.gamma, model.batch_size, model.lr_schedule(1)) == (0.99, 32, 2.5e-4)
    assert (model.exploration_initial_eps, model.exploration_final_eps) == (1.0, 0.1)
    # Of 3M frames, the first million explore.
    assert model.exploration_fraction == pytest.approx(1 / 3)
    convolutions = [m for m in model.q_net.modules() if isinstance(m, torch.nn.Conv2d)]
    assert [m.out_channels for m in convolutions] == [32, 64, 64]
    assert [m.kernel_size for m in convolutions] == [(8, 8), (4, 4), (3, 3)]
    assert [m.stride for m in convolutions] == [(4, 4), (2, 2), (1, 1)]
    hidden, _ = (m for m in model.q_net.modules() if isinstance(m, torch.nn.Linear))
    assert hidden.out_features == 512
    assert isinstance(model.replay_buffer, FrameReplayBuffer)
    assert model.temperature.counter.density.shape == (42, 42)


@pytest.mark.parametrize("size", [1e-7, 1e-4, 1e-2])
def test_atari_preset_takes_the_steps_of_the_original_program(size):
    """That of Mnih et al. sums gradients over a batch; Torch's form is not quite the same."""
    kwargs = preset(RunSpec("pong", "dqn")).settings["policy_kwargs"]
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = kwargs["optimizer_class"]([weight], lr=2.5e-4, **kwargs["optimizer_kwargs"])
    g = g2 = theirs = 0.0
    for mean in size * np.random.default_rng(0).standard_normal(200):
        dw = 32 * mean
        g, g2 = 0.95 * g + 0.05 * dw, 0.95 * g2 + 0.05 * dw**2
        theirs -= 2.5e-4 * dw / (g2 - g**2 + 0.01) ** 0.5
        weight.grad = torch.tensor([mean], dtype=torch.float32)
        optimizer.step()
    assert weight.item() == pytest.approx(theirs, rel=0.001 if size < 1e-6 else 0.3)


def test_minatar_preset_is_the_authors_network():
    spec = RunSpec("MinAtar/Seaquest-v1", "dqn", settings=SMALL)
    with closing(make_env(spec)) as env:
        q_net = make_model(spec, env).q_net
    layers = [m for m in q_net.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    assert [tuple(m.weight.shape) for m in layers] == [(16, 10, 3, 3), (128, 1024), (6, 128)]


def test_what_is_said_about_the_network_leaves_the_rest_of_it():
    spec = RunSpec("MinAtar/Seaquest-v1", "rainbow", settings={"policy_kwargs": {"v_max": 5.0}})
    with closing(make_env(spec)) as env:
        policy = make_model(spec, env).policy
    assert policy.q_net.atoms[[0, -1]].tolist() == [-30, 5]
    assert isinstance(policy.q_net.features_extractor, MinAtarCNN)
    assert policy.optimizer.defaults["eps"] == 1.5e-4


@pytest.mark.parametrize("game", [*(f"MinAtar/{name}-v1" for name in MINATAR_GAMES), "Acrobot-v1"])
def test_every_preset_builds_and_learns(game, tmp_path):
    settings = {**SMALL, "learning_starts": 10}
    model = train(RunSpec(game, "cbsql", steps=40, settings=settings), tmp_path)
    assert model._n_updates > 0


@pytest.mark.parametrize(("algorithm", "kind"), [("dqn", Greedy), ("cbsql", CountBased)])
def test_a_run_leaves_scores_logs_and_a_model(algorithm, kind, tmp_path):
    spec = RunSpec("CartPole-v1", algorithm, steps=3000, seed=1)
    reports = []
    model = train(spec, tmp_path, "the command", lambda step, shown: reports.append((step, shown)))
    rows = list(csv.DictReader((tmp_path / "episodes.csv").open()))
    assert tuple(rows[0]) == COLUMNS
    # A CartPole score is the number of steps, and episodes follow each other without a gap.
    assert all(float(row["score"]) == int(row["length_steps"]) for row in rows)
    ends = np.cumsum([int(row["length_steps"]) for row in rows])
    assert ends.tolist() == [int(row["steps"]) for row in rows]
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["finished"]
    assert (record["command"], record["spec"]["seed"]) == ("the command", 1)
    assert record["updates"] == model._n_updates > 0
    logs = list(csv.DictReader((tmp_path / "progress.csv").open()))
    assert int(logs[-1]["time/frames"]) == int(logs[-1]["time/total_timesteps"])
    assert float(logs[-1]["train/entropy"]) >= 0
    assert reports[-1][0] >= 3000
    assert {"score", "beta"} == set(reports[-1][1])
    loaded = SQL.load(tmp_path / "model.zip")
    assert isinstance(loaded.temperature, kind)
    assert evaluate(spec, loaded, games=3, seed=5) == evaluate(spec, model, games=3, seed=5)


@pytest.mark.parametrize("game", ["MinAtar/Asterix-v1", "freeway"])
def test_the_film_is_the_first_game(game, tmp_path, monkeypatch):
    spec = RunSpec(game, "sql", settings=SMALL)
    with closing(make_env(spec)) as env:
        model = make_model(spec, env)
    played = []

    def policy(observation):  # up and down by turns: not the same frame all along
        played.append(observation[0, -1])
        return np.array([len(played) // 30 % 2 + 1]), False

    monkeypatch.setattr(runner, "policy_of_test", lambda *_: policy)
    games = evaluate(spec, model, 1, seed=3, video=tmp_path / "film.mp4")
    assert games[-1].length_steps == len(played)
    film = cv2.VideoCapture(str(tmp_path / "film.mp4"))
    pictures = [picture for ok, picture in iter(film.read, (False, None)) if ok]
    assert len(pictures) == len(played)
    assert min(pictures[0].shape[:2]) >= 320
    assert [path.name for path in tmp_path.iterdir()] == ["film.mp4"]
    if game == "freeway":  # what the agent sees, enlarged and compressed
        small = [cv2.resize(p[:, :, 0], (84, 84), interpolation=cv2.INTER_AREA) for p in pictures]
        errors = np.abs(np.array(small, float) - np.array(played)).mean((1, 2))
        assert errors.max() < 3


def test_a_test_game_without_an_end_is_ended(monkeypatch):
    monkeypatch.setattr(runner, "LONGEST_TEST_STEPS", 50)
    spec = RunSpec("MinAtar/Seaquest-v1", "sql", settings=SMALL)
    with closing(make_env(spec)) as env:
        model = make_model(spec, env)
    model.predict = lambda *_, **__: (np.zeros(1, int), None)  # stay at the surface
    monkeypatch.setattr(runner, "preset", lambda spec: replace(preset(spec), test_epsilon=0.0))
    assert evaluate(spec, model, 2, seed=3) == [Episode("game", 0.0, 50)] * 2


def test_a_buffer_that_does_not_fit_is_as_large_as_the_run(monkeypatch):
    spec = RunSpec("freeway", "sql", steps=1_000)
    monkeypatch.setattr(frames, "available_bytes", lambda: 10**9)
    with closing(make_env(spec)) as env:
        assert make_model(spec, env).buffer_size == 1_000
        with pytest.raises(MemoryError, match="would fit"):
            make_model(RunSpec("freeway", "sql", steps=10**6), env)


def test_the_same_run_twice_is_the_same(tmp_path):
    spec = RunSpec("MinAtar/Breakout-v1", steps=600, settings={**SMALL, "learning_starts": 100})
    models = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        models.append(train(spec, tmp_path / name))
    for a, b in zip(*(model.policy.state_dict().values() for model in models), strict=True):
        assert torch.equal(a, b)


def test_atari_scores_are_those_of_games_and_lives(tmp_path):
    spec = RunSpec("breakout", "sql", steps=700, settings={**SMALL, "learning_starts": 10_000})
    train(spec, tmp_path)
    rows = list(csv.DictReader((tmp_path / "episodes.csv").open()))
    assert all(int(row["frames"]) == 4 * int(row["steps"]) for row in rows)
    lives, games = [], []
    for row in rows:
        if row["kind"] == "life":
            lives.append(row)
        else:
            assert float(row["score"]) == sum(float(life["score"]) for life in lives)
            assert int(row["length_steps"]) == sum(int(life["length_steps"]) for life in lives)
            assert len(lives) == 5
            games.append(row)
            lives = []
    assert games


def test_test_games_are_written_with_their_lives(tmp_path):
    spec = RunSpec("seaquest", "sql", settings=SMALL)
    with closing(make_env(spec)) as env:
        model = make_model(spec, env)
    rng = np.random.default_rng(0)
    model.predict = lambda observation, deterministic: (rng.integers(18, size=1), None)
    played = evaluate(spec, model, 2, seed=3)
    first = [episode.kind for episode in played].index("game")
    for lives, game in ((played[:first], played[first]), (played[first + 1 : -1], played[-1])):
        assert [life.kind for life in lives] == ["life"] * 4
        assert game.kind == "game"
        assert game.score == sum(life.score for life in lives)
        assert game.length_steps == sum(life.length_steps for life in lives)
    write_test(tmp_path, played)
    assert read_test(tmp_path) == played
    assert (tmp_path / "test.csv").read_text().startswith("kind,score,length_steps\nlife,")
    (tmp_path / "test.csv").write_text("kind,score,length_steps\ngame,1")
    with pytest.raises(ValueError, match=r"test\.csv is damaged"):
        read_test(tmp_path)
    (tmp_path / "test.csv").write_text("kind,score,length_steps\ngame," + 200_000 * "\0")
    with pytest.raises(ValueError, match=r"test\.csv is damaged"):  # what power cuts leave
        read_test(tmp_path)
    (tmp_path / "test.csv").unlink()
    assert read_test(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"algorithm": "ppo"}, "one of dqn, sql, cbsql"),
        ({"steps": -1}, "steps must not be negative, but is -1"),
        ({"seed": -2}, "seed must not be negative, but is -2"),
        ({"algorithm": "sql", "beta": -1.0}, "beta must be a positive number"),
        ({"kappa": 0.0}, "kappa must be a positive number"),
        ({"settings": {"policy_kwargs": 3}}, "policy_kwargs takes names and values, not 3"),
        ({"algorithm": "munchausen", "beta": 10.0}, "one of its settings: --set beta=33.3"),
        ({"algorithm": "sql", "settings": {"beta": 10.0}}, "not 'beta'"),
        ({"settings": {"double": "false"}}, "double takes True or False, not 'false'"),
        ({"settings": {"buffer_size": 1e5}}, "buffer_size takes a whole number, not 100000.0"),
        ({"settings": {"n_steps": 2.0}}, "n_steps takes a whole number, not 2.0"),
        (
            {"algorithm": "rainbow", "settings": {"n_steps": 2.0}},
            "n_steps takes a whole number or None, not 2.0",
        ),
        ({"settings": {"gamma": "0.9x"}}, "gamma takes a number, not '0.9x'"),
        ({"counter": "hash"}, "counter must be one of cts, exact, simhash, coin-flip, not 'hash'"),
    ],
)
def test_bad_specs_are_refused(arguments, named):
    with pytest.raises(ValueError, match=named):
        RunSpec("CartPole-v1", **arguments)


def test_values_of_settings_may_be_all_that_sb3_takes():
    settings = {"max_grad_norm": 5, "train_freq": (1, "episode"), "gamma": 0.9, "double": True}
    RunSpec("CartPole-v1", settings={**settings, "tau": 1, "learning_rate": lambda _: 1e-3})
    RunSpec("CartPole-v1", "rainbow", settings={"n_steps": None})


@pytest.mark.parametrize(
    ("algorithm", "without", "with_effect"),
    [
        ("dqn", [{"beta": 10.0}, {"kappa": 0.1}, {"counter": "exact"}], []),
        ("rainbow-sql", [{"kappa": 0.1}, {"counter": "exact"}], [{"beta": 10.0}]),
        ("cbsql", [{"beta": 10.0}], [{"kappa": 0.1}, {"counter": "exact"}]),
    ],
)
def test_what_has_no_effect_is_refused(algorithm, without, with_effect):
    for fields in without:
        with pytest.raises(ValueError, match=f"{next(iter(fields))} .* has no effect on"):
            RunSpec("CartPole-v1", algorithm, **fields).check_effects()
    for fields in with_effect:
        RunSpec("CartPole-v1", algorithm, **fields).check_effects()


def test_munchausen_has_the_beta_of_its_settings():
    spec = RunSpec("CartPole-v1", "munchausen", settings={"beta": 10.0})
    with closing(make_env(spec)) as env:
        assert repr(make_model(spec, env).temperature) == "Constant(10)"


@pytest.mark.parametrize("spelling", ["Pong", "ALE/Pong-v5", "Pong-v4", "PongNoFrameskip-v4"])
def test_every_spelling_is_the_same_game(spelling):
    assert RunSpec(spelling) == RunSpec("pong")
    assert preset(RunSpec(spelling)) is ATARI


class Sights(gym.Env):
    """Nothing to see, but in the form asked for; it cannot draw itself and fails at step 40."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, space):
        self.observation_space = space
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        assert self.steps < 40
        return self.observation_space.sample(), 0.0, self.steps % 5 == 0, False, {}


VECTOR = gym.spaces.Box(-1, 1, (3,))
IMAGE = gym.spaces.Box(0, 255, (40, 40, 3), np.uint8)
SPACES = {"Vector": VECTOR, "Image": IMAGE, "Dict": gym.spaces.Dict(a=VECTOR, b=VECTOR)}


@pytest.fixture
def sights():
    for name, space in SPACES.items():
        gym.register(f"Sights/{name}-v0", Sights, kwargs={"space": space})
    yield
    for name in SPACES:
        del gym.registry[f"Sights/{name}-v0"]


@pytest.mark.parametrize("algorithm", ["cbsql", "rainbow"])
@pytest.mark.parametrize(
    ("name", "extractor"),
    [("Vector", FlattenExtractor), ("Image", NatureCNN), ("Dict", CombinedExtractor)],
)
def test_the_network_fits_what_is_seen(name, extractor, algorithm, sights, tmp_path):
    spec = RunSpec(f"Sights/{name}-v0", algorithm, steps=30, settings={**SOON, **SMALL})
    model = train(spec, tmp_path)
    assert model._n_updates > 0
    assert isinstance(model.q_net.features_extractor, extractor)
    assert evaluate(spec, model, 1, seed=3)
    with pytest.raises(ValueError, match="has no pictures to film"):
        evaluate(spec, model, 1, seed=3, video=tmp_path / "film.mp4")


def test_an_id_may_name_the_module_that_registers_it(tmp_path, monkeypatch):
    (tmp_path / "walks.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "gymnasium.register('Walks/Pole-v0', CartPoleEnv)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    spec = RunSpec("walks:Walks/Pole-v0", "sql", steps=60, settings={**SOON, **SMALL})
    assert not spec.is_atari  # before anything is imported, as by a report
    model = train(spec, tmp_path / "run")
    assert model._n_updates > 0
    assert len(evaluate(spec, model, 2, seed=3)) == 2
    del gym.registry["Walks/Pole-v0"]
    with pytest.raises(ValueError, match="cannot be imported: No module named 'nowhere'"):
        make_env(RunSpec("nowhere:Walks/Pole-v0"))


def test_runs_are_as_long_as_was_asked_for(tmp_path):
    """Rollouts of whole episodes end where they end: such runs are compared all the same."""
    settings = {**SOON, **SMALL, "train_freq": (1, "episode"), "gradient_steps": 1}
    for seed in range(2):
        spec = RunSpec("CartPole-v1", "dqn", steps=100, seed=seed, settings=settings)
        model = train(spec, tmp_path / str(seed))
        assert model.num_timesteps > 100
        assert json.loads((tmp_path / str(seed) / "run.json").read_text())["steps"] == 100


def test_what_fails_in_training_is_not_taken_for_an_argument(sights, tmp_path):
    spec = RunSpec("Sights/Vector-v0", steps=60, settings=SMALL)
    with pytest.raises(runner.TrainingError, match="At step 39: AssertionError") as raised:
        train(spec, tmp_path)
    assert isinstance(raised.value.__cause__, AssertionError)


def test_a_wheel_has_no_commit_of_the_checkout_it_is_installed_in(tmp_path, monkeypatch):
    assert provenance._commit()
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    commit = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]
    subprocess.run([*commit, "--allow-empty"], cwd=tmp_path, check=True)
    (tmp_path / "provenance.py").touch()
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    assert provenance._commit() is None


SOON = {"learning_starts": 20}


def test_runs_from_before_counters_had_names_are_those_of_the_usual_one(tmp_path):
    described = RunSpec("CartPole-v1").describe()
    del described["counter"]
    (tmp_path / "run.json").write_text(json.dumps({"finished": True, "spec": described}))
    assert runner.status(RunSpec("CartPole-v1"), tmp_path) == "finished"
    with pytest.raises(ValueError, match="with counter '' and not 'exact'"):
        runner.status(RunSpec("CartPole-v1", counter="exact"), tmp_path)


def test_a_run_counts_with_the_counter_it_names(tmp_path):
    spec = RunSpec("MinAtar/Breakout-v1", counter="simhash", steps=60, settings=SOON)
    model = train(spec, tmp_path)
    assert isinstance(model.temperature.counter, SimHash)
    assert model._n_updates > 0
    assert "counter=simhash" in spec.name


def test_a_test_policy_asks_the_network_once_about_what_stays_the_same(monkeypatch):
    spec = RunSpec("CartPole-v1", "sql")
    with closing(make_env(spec, 0, test=True)) as env:
        model, asked = make_model(spec, env), []
        predict = partial(model.predict, deterministic=True)
        states = np.random.default_rng(0).normal(scale=50, size=(100, 1, 4)).astype(np.float32)
        seen = next(x for x in states if predict(x)[0] != predict(-x)[0])
        wanted = [predict(x)[0] for x in (seen, seen, -seen, -seen, seen)]
        monkeypatch.setattr(
            model, "predict", lambda obs, deterministic: asked.append(1) or predict(obs)
        )
        act = runner.policy_of_test(spec, model, env, seed=0)
        actions = [act(seen)[0], act(seen.copy())[0]]
        seen *= -1  # environments may write to what they gave
        actions += [act(seen)[0], act(seen)[0], act(-seen)[0]]
    np.testing.assert_array_equal(actions, wanted)
    assert len(asked) == 3


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("lscpu"),
    reason="lscpu tells which processor this is, in these words on x86",
)
def test_the_processor_is_the_one_that_lscpu_sees():
    name, *numbers = provenance._cpu_name().split(", ")
    shown = subprocess.run("lscpu", env={"LC_ALL": "C"}, capture_output=True, text=True, check=True)
    cpu = dict(re.findall(r"^(Model name|CPU family|Model): +(.+)$", shown.stdout, re.MULTILINE))
    assert name == cpu["Model name"]
    assert numbers == [f"cpu family {cpu['CPU family']}", f"model {cpu['Model']}"]
