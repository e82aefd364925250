"""Files: what goes in comes out, and a stranger's file does nothing but be refused."""

import io
import json
import math
import os
import pickle
import subprocess
import sys
import warnings
import zipfile
from collections import OrderedDict, deque
from contextlib import suppress
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import safetensors.torch
import torch as th
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.type_aliases import TrainFreq, TrainFrequencyUnit
from stable_baselines3.common.utils import FloatSchedule, LinearSchedule
from stable_baselines3.dqn import policies as dqn_policies
from stable_baselines3.her import GoalSelectionStrategy, HerReplayBuffer

from cbsql import CBSQL, SQL, Munchausen, Rainbow, files
from cbsql.counts import CTS, CoinFlipNetwork, ExactCounter, SimHash
from cbsql.deep.policies import RainbowNetwork, RainbowPolicy, SafePolicy
from cbsql.deep.stored import load_replay
from cbsql.files import FileError
from cbsql.replay import (
    FrameReplayBuffer,
    IndexedReplayBuffer,
    PrioritizedFrameReplayBuffer,
    PrioritizedReplayBuffer,
)
from cbsql.temperature import CountBased, Linear
from examples.own_counter import GridCounter

GOLDEN = Path(__file__).parent / "data" / "cbsql_cartpole_v1.zip"
MEMBERS = ["cbsql.json", "tensors.safetensors"]
QUICK = {"learning_starts": 20, "buffer_size": 300, "batch_size": 8, "train_freq": 1, "seed": 0}
SMALL = {"net_arch": [8]}


class Space(gym.Env):
    """Random observations of any space, in episodes of ten steps; not the same frame twice."""

    action_space = spaces.Discrete(3)

    def __init__(self, observation_space):
        self.observation_space = observation_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self._time = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self._time += 1
        return self.observation_space.sample(), float(action), self._time == 10, False, {}


class Frames(gym.Env):
    """Stacks of four small frames that move on by one."""

    observation_space = spaces.Box(0, 255, (4, 36, 36), np.uint8)
    action_space = spaces.Discrete(3)
    frame_stack = 4

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._time, self._stack = 0, np.zeros((4, 36, 36), np.uint8)
        return self._look(), {}

    def step(self, action):
        self._time += 1
        return self._look(), float(action), self._time == 10, False, {}

    def _look(self):
        frame = self.np_random.integers(1, 256, (1, 36, 36), np.uint8)
        self._stack = np.concatenate([self._stack[1:], frame])
        return self._stack


class Extractor(FlattenExtractor):
    """A stranger's class."""


KINDS = {
    "box": spaces.Box(-np.array([1, 2, 3]), np.array([np.inf, 2, 3]), dtype=np.float64),
    "discrete": spaces.Discrete(7),
    "multi-discrete": spaces.MultiDiscrete([3, 4]),
    "multi-binary": spaces.MultiBinary((2, 3)),
    "image": spaces.Box(0, 255, (36, 36, 3), np.uint8),
    "dict": spaces.Dict(
        OrderedDict(
            z=spaces.Box(0, 1, (2,)),
            image=spaces.Box(0, 255, (36, 36, 1), np.uint8),
            a=spaces.Discrete(3),
        )
    ),
}
POLICIES = {"image": "CnnPolicy", "dict": "MultiInputPolicy"}
ALGORITHMS = {
    "SQL": lambda *a, **k: SQL(*a, beta=7.0, loss="huber", double=True, **k),
    "linear": lambda *a, **k: SQL(*a, temperature=Linear(0.01), **k),
    "CBSQL": lambda *a, **k: CBSQL(*a, kappa=0.5, **k),
    "Munchausen": lambda *a, **k: Munchausen(*a, alpha=0.5, **k),
    "Rainbow": lambda *a, **k: Rainbow(*a, temperature=CountBased(kappa=0.5), **k),
}


def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, th.Tensor):
        return a.dtype == b.dtype and th.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, np.random.Generator):
        return a.bit_generator.state == b.bit_generator.state
    return repr(a) == repr(b) if hasattr(a, "__dict__") else a == b


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_model_comes_back_as_it_was(algorithm, kind, tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Dict observations are replayed uniformly")
        model = ALGORITHMS[algorithm](
            POLICIES.get(kind, "MlpPolicy"),
            Space(KINDS[kind]),
            policy_kwargs={
                **SMALL,
                "optimizer_class": th.optim.RMSprop,
                "activation_fn": th.nn.ELU,
            },
            learning_rate=LinearSchedule(1e-3, 1e-4, 0.5),
            **QUICK,
        ).learn(40)
    model.save(tmp_path / "model")
    loaded = type(model).load(tmp_path / "model", env=model.get_env(), force_reset=False)
    assert equal(loaded.get_parameters(), model.get_parameters())
    assert equal(loaded.temperature.state_dict(), model.temperature.state_dict())
    assert repr(loaded.temperature) == repr(model.temperature)
    skipped = {*model._excluded_save_params(), "policy", "q_net", "q_net_target"}
    for name in vars(model).keys() - skipped:
        assert equal(vars(loaded)[name], vars(model)[name]), name
    assert loaded.lr_schedule(0.8) == model.lr_schedule(0.8)
    assert loaded.observation_space == model.observation_space
    if kind == "dict":
        assert list(loaded.observation_space.spaces) == list(model.observation_space.spaces)
    observation = model.env.reset()
    assert (
        loaded.predict(observation, deterministic=True)[0]
        == model.predict(observation, deterministic=True)[0]
    )
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again.zip").read_bytes() == (tmp_path / "model.zip").read_bytes()


@pytest.mark.parametrize("algorithm", ["SQL", "linear", "CBSQL", "Munchausen"])
def test_a_loaded_model_learns_on_as_the_saved_one_does(algorithm, tmp_path):
    model = ALGORITHMS[algorithm]("MlpPolicy", "CartPole-v1", policy_kwargs=SMALL, **QUICK).learn(
        60
    )
    model.save(tmp_path / "model.zip")
    model.save_replay_buffer(tmp_path / "replay.zip")
    ends = []
    for loaded in (type(model).load(tmp_path / "model.zip"), model):
        if loaded is not model:
            loaded.load_replay_buffer(tmp_path / "replay.zip")
        loaded.set_env(gym.make("CartPole-v1"))
        loaded.set_random_seed(5)
        ends.append(loaded.learn(60, reset_num_timesteps=False).get_parameters())
        assert loaded._n_updates == 100
    assert equal(*ends)


@pytest.mark.parametrize(
    ("buffer_class", "env", "kwargs"),
    [
        (ReplayBuffer, "CartPole-v1", {}),
        (NStepReplayBuffer, "CartPole-v1", {"n_steps": 3, "gamma": 0.9}),
        (IndexedReplayBuffer, "CartPole-v1", {"n_steps": 3}),
        (PrioritizedReplayBuffer, "CartPole-v1", {"priority_exponent": 0.3}),
        (FrameReplayBuffer, Frames, {}),
        (PrioritizedFrameReplayBuffer, Frames, {"n_steps": 2, "rng": np.random.default_rng(3)}),
        (None, partial(Space, KINDS["dict"]), {}),
        (HerReplayBuffer, partial(BitFlippingEnv, 4, continuous=False), {"n_sampled_goal": 2}),
    ],
)
@pytest.mark.parametrize("size", [500, 60])
@pytest.mark.parametrize("n_envs", [1, 2])
def test_a_replay_buffer_comes_back_as_it_was(buffer_class, env, kwargs, size, n_envs, tmp_path):
    policy = (
        "CnnPolicy"
        if env is Frames
        else "MlpPolicy"
        if isinstance(env, str)
        else "MultiInputPolicy"
    )
    arguments = {**QUICK, "buffer_size": size, "learning_starts": 80}
    venv = make_vec_env(env, n_envs, seed=1)
    arguments |= {"replay_buffer_class": buffer_class, "replay_buffer_kwargs": kwargs}
    make = partial(SQL, policy, venv, policy_kwargs=SMALL, **arguments)
    model = make().learn(100)
    model.save_replay_buffer(tmp_path / "memory")
    other = make()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The last trajectory")
        other.load_replay_buffer(tmp_path / "memory", truncate_last_traj=False)
    mine, theirs = model.replay_buffer, other.replay_buffer
    assert type(theirs) is type(mine)
    used = slice(None) if mine.full else slice(mine.pos)
    assert mine.full == (size == 60)
    for name, value in vars(mine).items():
        if name in ("env", "infos", "_tree"):
            continue
        found = vars(theirs)[name]
        if isinstance(value, np.ndarray) and value.ndim > 1 and name != "frames":
            value, found = value[used], found[used]
        assert equal(found, value), name
    if hasattr(mine, "_tree"):
        assert equal(mine._tree._nodes, theirs._tree._nodes)
    batches = []
    for buffer in (mine, theirs):
        np.random.seed(0)  # noqa: NPY002 (SB3's buffers draw from it)
        batches.append(buffer.sample(32))
    for first, second in zip(*batches, strict=True):
        assert equal(first, second)
    assert (tmp_path / "memory.replay.zip").stat().st_size < 1.2 * size_of(mine) + 20_000


def size_of(buffer):
    arrays = [
        array
        for value in vars(buffer).values()
        for array in (value.values() if isinstance(value, dict) else [value])
    ]
    part = buffer.size() / buffer.buffer_size
    return part * sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


@pytest.mark.parametrize(
    ("counter", "states"),
    [
        (ExactCounter, np.arange(12).reshape(6, 2)),
        (partial(SimHash, 3, standardize=True), np.linspace(-1, 1, 18).reshape(6, 3)),
        (partial(CTS, (5, 4)), np.arange(120, dtype=np.uint8).reshape(6, 5, 4) % 8),
        (
            partial(CoinFlipNetwork, spaces.Box(-1, 1, (3,)), coins=4, memory=9),
            np.linspace(-1, 1, 18, dtype=np.float32).reshape(6, 3),
        ),
        (partial(Linear, 0.1), np.zeros((1, 1))),
    ],
)
def test_a_counter_has_a_file_of_its_own(counter, states, tmp_path):
    first, second = counter(), counter()
    first.update(states)
    files.save_state(tmp_path / "counter", first)
    files.load_state(tmp_path / "counter", second)
    assert equal(first.state_dict(), second.state_dict())
    with pytest.raises(FileError, match="is the state of"):
        files.load_state(tmp_path / "counter", CountBased(ExactCounter()))


@pytest.mark.parametrize("algorithm", [Rainbow, SQL, CBSQL])
def test_a_policy_and_its_network_have_files(algorithm, tmp_path):
    policy = algorithm("MlpPolicy", "CartPole-v1", policy_kwargs=SMALL, **QUICK).learn(40).policy
    for saved, other in ((policy, policy.q_net), (policy.q_net, policy)):
        saved.save(tmp_path / "policy")
        loaded = type(saved).load(tmp_path / "policy")
        assert type(loaded) is type(saved)
        assert equal(loaded.state_dict(), saved.state_dict())
        with pytest.raises(FileError, match="the tensor"):
            type(other).load(tmp_path / "policy")


@pytest.mark.parametrize(
    ("name", "env"), [("CnnPolicy", Frames), ("MultiInputPolicy", BitFlippingEnv)]
)
def test_policies_of_images_and_dicts_have_files(name, env, tmp_path):
    kwargs = {"features_extractor_kwargs": {"features_dim": 2}} if env is Frames else {}
    env = env() if env is Frames else env(4, continuous=False)
    policy = SQL(name, env, policy_kwargs=kwargs, **QUICK).policy
    assert isinstance(policy, getattr(dqn_policies, name))
    policy.save(tmp_path / "policy")
    assert equal(type(policy).load(tmp_path / "policy").state_dict(), policy.state_dict())


def test_a_small_file_cannot_ask_for_a_large_hindsight_buffer(tmp_path):
    env = BitFlippingEnv(4, continuous=False)
    SQL("MultiInputPolicy", env, replay_buffer_class=HerReplayBuffer, **QUICK).save(tmp_path / "a")
    document, tensors = parts(tmp_path / "a.zip")
    document["content"]["buffer_size"] = 3_000_000
    forge(tmp_path / "b.zip", document, tensors)
    with pytest.raises(FileError, match=r"3000000 steps of 1 environments; .* at most 1000000"):
        SQL.load(tmp_path / "b.zip", env=env)
    assert SQL.load(tmp_path / "a.zip", env=env).replay_buffer is not None


VALUES_KEPT = [
    *(None, True, 3, -(10**30), 0.1, math.inf, -math.inf, "ä\n", [], [[1], (2, (3,))], {}),
    *({"a": {"$": 1}, "b": None}, {1: 2, None: [3]}, deque([1, {"r": 2.0}], 5), np.dtype("uint8")),
    *(np.float32(0.5), np.int64(3), np.bool_(True), np.random.default_rng(7)),
    *(
        np.zeros((0, 3)),
        np.float32([]),
        np.arange(12).reshape(3, 4)[:, 1::2],
        np.ones((2, 2))[::-1],
    ),
    *(
        np.broadcast_to(np.float32(2), (3, 2)),
        np.broadcast_to(np.int64(2), 1),
        np.array(5, np.uint16),
    ),
    *(
        th.arange(12.0).reshape(3, 4).T,
        th.tensor(2.0, dtype=th.bfloat16),
        th.zeros(0, 2),
        th.tensor([True, False]),
    ),
    *(th.tensor(1).expand(1), th.ones(2, 3, dtype=th.float16, requires_grad=True)),
    *(th.nn.ReLU, th.optim.RMSprop, FrameReplayBuffer, RainbowPolicy, Extractor),
    *(LinearSchedule(1.0, 0.1, 0.5), FloatSchedule(3e-4), FloatSchedule(LinearSchedule(1, 0, 1))),
    *(TrainFreq(4, TrainFrequencyUnit.STEP), GoalSelectionStrategy.FINAL),
    *(spaces.Discrete(3, start=-2, dtype=np.int32), spaces.MultiBinary(4), *KINDS.values()),
    spaces.Tuple([spaces.MultiDiscrete([[2, 3]], start=[[1, -1]]), spaces.Dict(x=KINDS["dict"])]),
]


@pytest.mark.parametrize("value", VALUES_KEPT, ids=range(len(VALUES_KEPT)))
def test_values_come_back_as_they_were(value):
    document = files.Document("values")
    document["value"] = value
    stream = io.BytesIO()
    document.write(stream)
    found = files.read(stream, "values", trust=value is Extractor)["value"]
    expected = value.item() if isinstance(value, np.generic) else value
    assert type(found) is type(expected)
    assert equal(found, expected)
    with zipfile.ZipFile(stream) as archive:
        safetensors.torch.load(archive.read(MEMBERS[1]))


@pytest.mark.parametrize(
    "value", [object(), 1j, {1, 2}, len, b"x", np.array([None]), {(1,): 2}.keys()]
)
def test_other_values_are_refused(value):
    document = files.Document("values")
    with pytest.raises(FileError, match=r"value.1 is a .*which files do not hold"):
        document["value"] = [np.ones(1), value]
    assert not document.content
    assert not document.tensors


def test_the_members_are_json_and_safetensors(tmp_path):
    model = CBSQL("MlpPolicy", "CartPole-v1", policy_kwargs=SMALL, **QUICK)
    model.save(tmp_path / "model.zip")
    with zipfile.ZipFile(tmp_path / "model.zip") as archive:
        assert sorted(archive.namelist()) == MEMBERS
        assert json.loads(archive.read(MEMBERS[0]))["format"] == files.FORMAT
        tensors = safetensors.torch.load(archive.read(MEMBERS[1]))
    for name, tensor in model.policy.state_dict().items():
        assert th.equal(tensors[f"parameters/policy.{name}"], tensor)


def test_streams_and_parameters_alone(tmp_path):
    model = CBSQL("MlpPolicy", "CartPole-v1", policy_kwargs=SMALL, **QUICK).learn(40)
    stream = io.BytesIO()
    model.save(stream)
    assert equal(CBSQL.load(stream).get_parameters(), model.get_parameters())
    other = CBSQL("MlpPolicy", "CartPole-v1", policy_kwargs=SMALL, **{**QUICK, "seed": 9})
    other.set_parameters(stream)
    assert equal(other.get_parameters(), model.get_parameters())
    assert equal(other.temperature.state_dict(), model.temperature.state_dict())


def test_golden_file_of_the_first_format():
    """Written once: every later version loads it, and decides as it did."""
    model = CBSQL.load(GOLDEN, env=gym.make("CartPole-v1"))
    observations = np.linspace(-0.05, 0.05, 12, dtype=np.float32).reshape(3, 4)
    q = model.q_net(th.as_tensor(observations)).tolist()
    np.testing.assert_allclose(q, GOLDEN_Q, rtol=1e-5)
    np.testing.assert_allclose(model.temperature.beta(observations), GOLDEN_BETA)
    assert (model.num_timesteps, model._n_updates, model.batch_size) == GOLDEN_NUMBERS
    model.learn(20, reset_num_timesteps=False)


GOLDEN_Q = [[0.12156519, -0.24489582], [0.11428382, -0.24206544], [0.10700244, -0.23923507]]
GOLDEN_BETA = [0.0, 3.0, 25.0]
GOLDEN_NUMBERS = (120, 100, 8)


# What files cannot hold


def test_a_schedule_that_is_a_function_is_kept_as_its_value(tmp_path):
    rate = lambda left: 1e-3 * left  # noqa: E731
    model = SQL("MlpPolicy", "CartPole-v1", learning_rate=rate, **QUICK).learn(30)
    model._current_progress_remaining = 0.5
    with pytest.warns(UserWarning, match="takes its present value, 0.0005"):
        model.save(tmp_path / "model")
    assert SQL.load(tmp_path / "model").learning_rate == 5e-4
    loaded = SQL.load(tmp_path / "model", custom_objects={"learning_rate": rate})
    assert loaded.lr_schedule(0.25) == 2.5e-4


def test_policy_kwargs_that_files_cannot_hold_are_given_when_loading(tmp_path):
    kwargs = {"activation_fn": partial(th.nn.LeakyReLU, 0.3)}
    model = SQL("MlpPolicy", "CartPole-v1", policy_kwargs=kwargs, **QUICK)
    with pytest.warns(UserWarning, match="policy_kwargs.activation_fn is a partial"):
        model.save(tmp_path / "model")
    with pytest.raises(FileError, match="it has no policy_kwargs; pass custom_objects"):
        SQL.load(tmp_path / "model")
    loaded = SQL.load(tmp_path / "model", custom_objects={"policy_kwargs": kwargs})
    assert equal(loaded.get_parameters(), model.get_parameters())


def test_other_attributes_that_files_cannot_hold_are_given_when_loading(tmp_path):
    model = tiny()
    model.gamma = partial(float, 0.5)
    with pytest.warns(UserWarning, match='custom_objects={"gamma": ...}, load.. takes its default'):
        model.save(tmp_path / "model")
    assert SQL.load(tmp_path / "model").gamma == 0.99
    elsewhere = {"gamma": 0.5, "lr_schedule": 1, "clip_range": 1}  # others' custom_objects, too
    loaded = SQL.load(tmp_path / "model", custom_objects=elsewhere)
    assert (loaded.gamma, hasattr(loaded, "clip_range")) == (0.5, False)
    assert loaded.lr_schedule != 1


@pytest.mark.parametrize("arguments", [{"verbose": True}, {"double": 1}, {"soft_n_step": 0}])
def test_what_passes_for_another_kind_is_read_again(arguments, tmp_path):
    SQL("MlpPolicy", "CartPole-v1", **arguments, **QUICK).save(tmp_path / "model")
    ((name, value),) = arguments.items()
    assert getattr(SQL.load(tmp_path / "model"), name) == value


def test_load_does_not_change_what_the_networks_are_built_from(tmp_path):
    Rainbow("MlpPolicy", "CartPole-v1", **QUICK).save(tmp_path / "model")
    with pytest.raises(ValueError, match="cannot change noisy"):
        Rainbow.load(tmp_path / "model", noisy=False)
    env = make_vec_env("CartPole-v1")
    loaded = Rainbow.load(tmp_path / "model", env, noisy=True, prioritized=False)
    assert not isinstance(loaded.learn(30).replay_buffer, PrioritizedReplayBuffer)
    with pytest.raises(ValueError, match="loss must be one of mse, huber, not 'hubber'"):
        Rainbow.load(tmp_path / "model", loss="hubber")


def test_replay_of_other_environments_is_refused(tmp_path):
    several = make_vec_env("CartPole-v1", 2)
    SQL("MlpPolicy", several, **QUICK).learn(30).save_replay_buffer(tmp_path / "replay")
    model = SQL("MlpPolicy", "CartPole-v1", **QUICK)
    with pytest.raises(FileError, match=r"'environments: 2'.*the model needs .*'environments: 1'"):
        model.load_replay_buffer(tmp_path / "replay")


def test_another_counter_counts_from_nothing(tmp_path):
    model = CBSQL("MlpPolicy", "CartPole-v1", policy_kwargs=SMALL, **QUICK).learn(40)
    model.save(tmp_path / "model")
    observations = np.zeros((2, 4), np.float32)
    same = CountBased(SimHash(4), kappa=0.5)
    loaded = CBSQL.load(tmp_path / "model", temperature=same)
    assert loaded.temperature.beta(observations) == pytest.approx(
        50 * model.temperature.beta(observations)
    )
    other = CountBased(SimHash(4, k=9))
    with pytest.warns(UserWarning, match=r"begins without the counts in .*model: .*planes of this"):
        loaded = CBSQL.load(tmp_path / "model", temperature=other)
    assert loaded.temperature.beta(observations).tolist() == [0, 0]
    with pytest.warns(UserWarning, match=r"begins without the counts in .*KeyError"):
        CBSQL.load(tmp_path / "model", temperature=CountBased(GridCounter(0.25)))
    assert equal(loaded.get_parameters(), model.get_parameters())


def test_a_strangers_class_is_imported_with_trust_only(tmp_path):
    kwargs = {"features_extractor_class": Extractor}
    SQL("MlpPolicy", "CartPole-v1", policy_kwargs=kwargs, **QUICK).save(tmp_path / "model")
    with pytest.raises(FileError, match=r"class .*test_files:Extractor, which is not of Torch"):
        SQL.load(tmp_path / "model")
    loaded = SQL.load(tmp_path / "model", trust=True)
    assert isinstance(loaded.q_net.features_extractor, Extractor)
    assert (
        SQL.load(tmp_path / "model", custom_objects={"policy_kwargs": kwargs}).policy_kwargs
        == kwargs
    )


@pytest.mark.parametrize("elsewhere", ["/etc/x", "../x", "a/../../x"])
def test_a_strangers_file_does_not_say_where_to_write(elsewhere, tmp_path):
    model = tiny(tensorboard_log="runs/x")
    model.save(tmp_path / "model")
    assert SQL.load(tmp_path / "model").tensorboard_log == "runs/x"
    model.tensorboard_log = elsewhere
    model.save(tmp_path / "model")
    with pytest.warns(UserWarning, match="is not below this folder"):
        loaded = SQL.load(tmp_path / "model")
    assert loaded.tensorboard_log is None
    assert SQL.load(tmp_path / "model", trust=True).tensorboard_log == elsewhere


def test_buffers_of_strangers_are_not_saved(tmp_path):
    class Own(ReplayBuffer):
        pass

    model = SQL("MlpPolicy", "CartPole-v1", replay_buffer_class=Own, **QUICK)
    with pytest.raises(FileError, match="save_to_pkl"):
        model.save_replay_buffer(tmp_path / "replay")
    assert not list(tmp_path.iterdir())


def test_trust_loads_files_of_sb3(tmp_path):
    dqn = DQN("MlpPolicy", "CartPole-v1", policy_kwargs=SMALL, **QUICK).learn(40)
    dqn.save(tmp_path / "model")
    dqn.save_replay_buffer(tmp_path / "replay")
    with pytest.raises(FileError, match="needs trust=True"):
        SQL.load(tmp_path / "model")
    model = SQL.load(tmp_path / "model", trust=True)
    assert equal(model.get_parameters(), dqn.get_parameters())
    with pytest.raises(FileError, match="needs trust=True"):
        model.set_parameters(tmp_path / "model")
    model.set_parameters(tmp_path / "model", trust=True)
    with pytest.raises(FileError, match="needs trust=True"):
        model.load_replay_buffer(tmp_path / "replay.pkl")
    model.load_replay_buffer(tmp_path / "replay", trust=True)
    assert model.replay_buffer.pos == 40


# Hostile files. Every way in is a function of a path.

WAYS = {
    "model": lambda path: SQL.load(path),
    "parameters": lambda path: tiny(CBSQL).set_parameters(path),
    "replay": lambda path: tiny(CBSQL).load_replay_buffer(path),
    "policy": RainbowPolicy.load,
    "network": RainbowNetwork.load,
    "plain": SafePolicy.load,
    "state": lambda path: files.load_state(path, ExactCounter()),
}


def tiny(algorithm=SQL, **kwargs):
    return algorithm("MlpPolicy", "CartPole-v1", policy_kwargs=SMALL, **{**QUICK, **kwargs})


class Marker:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """A folder with a valid file for each way in."""
    folder = tmp_path_factory.mktemp("valid")
    model = tiny(CBSQL).learn(40)
    model.save(folder / "model")
    model.save(folder / "parameters")
    frames = SQL(
        *("CnnPolicy", make_vec_env(Frames, 2)),
        replay_buffer_class=PrioritizedFrameReplayBuffer,
        policy_kwargs={"features_extractor_kwargs": {"features_dim": 2}},
        **QUICK,
    )
    frames.learn(30)
    frames.save_replay_buffer(folder / "frames.zip")
    model.save_replay_buffer(folder / "replay.zip")
    policy = tiny(Rainbow).policy
    policy.save(folder / "policy.zip")
    policy.q_net.save(folder / "network.zip")
    model.policy.save(folder / "plain.zip")
    counter = ExactCounter()
    counter.update(np.arange(6)[:, None])
    files.save_state(folder / "state", counter)
    return folder


def parts(path):
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read(MEMBERS[0])), archive.read(MEMBERS[1])


def forge(path, document, tensors, extra=(), **how):
    """An archive with valid checksums of whatever it is given."""
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", **how) as archive:
        warnings.simplefilter("ignore")  # of names that are there already
        archive.writestr(MEMBERS[0], text)
        archive.writestr(MEMBERS[1], tensors)
        for name in extra:
            archive.writestr(name, b"")
    return path


@pytest.mark.parametrize("way", WAYS)
def test_pickles_are_not_loaded(way, valid, tmp_path):
    """Neither alone, nor as SB3 and Torch write them, nor beside what is valid."""
    marker = tmp_path / "marker"
    pickled = pickle.dumps(Marker(marker))
    (tmp_path / "bare").write_bytes(pickled)
    th.save({"state_dict": {}, "data": Marker(marker)}, tmp_path / "torch")
    dqn = DQN("MlpPolicy", "CartPole-v1", policy_kwargs=SMALL, **QUICK)
    dqn.learning_rate = Marker(marker)
    dqn.save(tmp_path / "sb3.zip")
    forge(tmp_path / "both", *parts(valid / f"{way}.zip"))
    for name in ("data", "data.pkl", "policy.pth"):
        with zipfile.ZipFile(tmp_path / "both", "a") as archive:
            archive.writestr(name, pickled)
    (tmp_path / "mixed").write_bytes(pickled + (valid / f"{way}.zip").read_bytes()[:-1])
    for name in ("bare", "torch", "sb3.zip", "both", "mixed"):
        with pytest.raises(FileError, match=name):
            WAYS[way](tmp_path / name)
    assert not marker.exists()
    pickle.loads(pickled)  # so that the marker would have told
    assert marker.exists()


@pytest.mark.parametrize(
    "name",
    [
        "strangers_module:Thing",
        "os:system",
        "subprocess:Popen",
        "builtins:object",
        "torch.nn.Linear.forward",
        "torch.nn.functional",
        "torch.nn._reduction",
        "torch.hub.load",
        "torch.optim.Adam",
        "stable_baselines3.common.buffers.np",
        "stable_baselines3.common.buffers.ReplayBuffer",
        "cbsql.deep.policies.files",
        "cbsql.deep.policies.th.load",
        "torch.nn.",
        "",
    ],
)
@pytest.mark.parametrize("key", ["features_extractor_class", "activation_fn"])
def test_classes_are_of_the_kind_needed_and_never_imported(name, key, valid, tmp_path, monkeypatch):
    code = f"import pathlib; pathlib.Path({str(tmp_path / 'marker')!r}).touch()\nclass Thing: pass"
    (tmp_path / "strangers_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    document, tensors = parts(valid / "model.zip")
    document["content"]["policy_kwargs"][key] = {"$": "class", "name": name}
    forge(tmp_path / "model.zip", document, tensors)
    with pytest.raises(FileError, match=r"model.zip cannot be loaded: .*class"):
        SQL.load(tmp_path / "model.zip")
    assert not (tmp_path / "marker").exists()


def change(**changes):
    """Replace what is in the content of a document."""

    def apply(document):
        for path, value in changes.items():
            at = document["content"]
            *parents, last = path.split("__")
            for parent in parents:
                at = at[parent]
            at[last] = value

    return apply


HUGE = {
    "layer": change(policy_kwargs={"net_arch": [10**9]}),
    "larger layer": change(policy_kwargs={"net_arch": [10**30]}),
    "many layers": change(policy_kwargs={"net_arch": [1] * 10**6}),
    "activations": change(
        policy_kwargs={"activation_fn": {"$": "class", "name": "torch.nn.Transformer"}}
    ),
    "observations": change(observation_space={"$": "MultiBinary", "n": 10**10}),
    "shape": change(
        observation_space={"$": "Box", "low": 0, "high": 1, "dtype": None, "shape": [10**5, 10**5]}
    ),
    "actions": change(action_space={"$": "Discrete", "n": 10**10, "start": 0, "dtype": "int64"}),
    "spaces": change(
        observation_space={
            "$": "Dict",
            "spaces": {str(i): {"$": "MultiBinary", "n": 10**6} for i in range(1000)},
        }
    ),
    "replay": change(buffer_size=10**16),
    "environments": change(n_envs=10**16),
    "prioritised replay": change(
        replay_buffer_class={"$": "class", "name": "cbsql.replay.PrioritizedReplayBuffer"},
        buffer_size=10**15,
    ),
    "depth": change(policy_kwargs=json.loads("[" * 100 + "]" * 100)),
}


def header(name="x", dtype="U8", shape=(1,), offsets=(0, 1), data=b"\0", length=None):
    text = json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


TENSORS = {
    "huge": header(shape=[2**50], offsets=[0, 2**50]),
    "huge in fact small": header(shape=[2**50]),
    "overflowing": header(shape=[2**32, 2**32, 0], offsets=[0, 0]),
    "negative": header(shape=[-1, -1]),
    "fractional": header(shape=[1.0]),
    "boolean": header(shape=[True]),
    "not numbers": header(shape="1"),
    "no such type": header(dtype="PICKLE"),
    "elsewhere": header(offsets=[1, 2]),
    "before": header(offsets=[-1, 0]),
    "not all": header(data=b"\0\0"),
    "longer": header(length=2**60),
    "shorter": header(length=5),
    "no header": b"",
    "list": (2).to_bytes(8, "little") + b"[]",
    "twice": (41).to_bytes(8, "little") + b'{"a":{"data_offsets":[0,0]}, "a": {}}   ',
}
BROKEN = {
    "bytes": b"\xff\xfe",
    "number": b"1",
    "list": b"[]",
    "depth": b'{"a":' * 10**5 + b"1" + b"}" * 10**5,
    "NaN": b'{"format": NaN, "kind": 1, "content": {}}',
    "twice": b'{"format": 1, "format": 1, "kind": "model", "content": {}}',
    "large number": b'{"format": ' + b"1" * 10**6 + b"}",
    "empty": b"{}",
    "long": b" " * 2**23 + b"{}",
}


@pytest.fixture(scope="module")
def hostile(valid, tmp_path_factory):
    """A folder of hostile files, each named after the way that should refuse it."""
    folder = tmp_path_factory.mktemp("hostile")
    for i, alter in enumerate(HUGE.values()):
        document, tensors = parts(valid / "model.zip")
        alter(document)
        forge(folder / f"model-huge-{i}", document, tensors)
    for way in WAYS:
        document, tensors = parts(valid / f"{way}.zip")
        for i, data in enumerate(TENSORS.values()):
            forge(folder / f"{way}-tensors-{i}", document, data)
        for i, text in enumerate(BROKEN.values()):
            forge(folder / f"{way}-json-{i}", text, tensors)
        for i, number in enumerate((0, 2, "1", None, 10**30)):
            forge(folder / f"{way}-version-{i}", {**document, "format": number}, tensors)
        forge(folder / f"{way}-kind", {**document, "kind": "other"}, tensors)
        for i, name in enumerate(("../x", "/etc/x", "..", "a/../../x", "C:\\x", "x\n", *MEMBERS)):
            forge(folder / f"{way}-name-{i}", document, tensors, extra=[name])
        zeros = b"\0" * 2**29 if way == "model" else tensors
        forge(folder / f"{way}-bomb", document, zeros, compression=zipfile.ZIP_DEFLATED)
        whole = (valid / f"{way}.zip").read_bytes()
        for i in range(10):
            (folder / f"{way}-truncated-{i}").write_bytes(whole[: len(whole) * i // 10])
        at = whole.rindex(b"PK\1\2")  # the directory's entry of the tensors
        sizes = (2**31).to_bytes(4, "little") * 2
        (folder / f"{way}-larger").write_bytes(whole[: at + 20] + sizes + whole[at + 28 :])
    document, tensors = parts(valid / "policy.zip")
    for i, atoms in enumerate((10**9, 10**30, -1)):
        document["content"]["arguments"]["n_atoms"] = atoms
        forge(folder / f"policy-atoms-{i}", document, tensors)
    wants = [("buffer_size", 10**15), ("n_envs", 10**15), ("n_envs", 0), ("buffer_size", -5)]
    for name in ("replay", "frames"):
        for i, (key, value) in enumerate(wants):
            document, tensors = parts(valid / f"{name}.zip")
            document["content"]["arguments"][key] = value
            forge(folder / f"replay-{name}-{i}", document, tensors)
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_hostile_files_are_refused_within_little_memory(hostile, valid):
    """In a process of its own, whose peak of memory is measured."""
    code = """
        import sys
        from pathlib import Path
        from test_files import WAYS, FileError
        def peak():  # ru_maxrss would be that of the parent
            status = Path("/proc/self/status").read_text()
            return int(status.partition("VmHWM:")[2].split()[0])
        folder, valid = map(Path, sys.argv[1:])
        for way, load in WAYS.items():
            load(valid / f"{way}.zip")
        before = peak()
        paths = sorted(folder.iterdir())
        for path in paths:
            try:
                WAYS[path.name.split("-")[0]](path)
            except FileError as error:
                assert path.name in str(error) and len(str(error).splitlines()) == 1, error
            else:
                raise AssertionError(f"{path.name} was loaded")
            grown = peak() - before
            assert grown < 200_000, (path.name, grown)
        print(len(paths), "refused, peak of memory", grown, "kB higher")
    """
    code = "\n".join(line[8:] for line in code.splitlines())
    run = subprocess.run(
        [sys.executable, "-c", code, hostile, valid],
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[1]}"},
        capture_output=True,
        text=True,
    )
    assert not run.returncode, run.stderr
    print(run.stdout)
    assert int(run.stdout.split()[0]) == len(list(hostile.iterdir())) > 250


def mutate_bytes(rng, data):
    data = bytearray(data)
    for _ in range(rng.integers(1, 9)):
        at = int(rng.integers(len(data) + 1))
        kind = rng.integers(4)
        if kind == 0:
            data[at : at + 1] = rng.bytes(1)
        elif kind == 1:
            del data[at : at + int(rng.integers(1, 50))]
        elif kind == 2:
            data[at:at] = rng.bytes(int(rng.integers(1, 50)))
        else:
            to = int(rng.integers(len(data) + 1))
            data[to : to + 20] = data[at : at + 20]
    return bytes(data)


VALUES = [None, True, False, -1, 0, 3, 10**30, 1e308, 0.5, "", "x", [], [1], {}, {"$": "x"}]
VALUES += [{"$": "tuple", "items": [1, 2]}, {"$": "class", "name": "torch.nn.ReLU"}]
VALUES += [{"$": "float", "value": "nan"}, {"$": "tensor", "name": "parameters/temperature.codes"}]
VALUES += [{"$": "dict", "items": [[1, 2]]}, {"$": "deque", "items": [1], "maxlen": 1}]
VALUES += [{"$": "Discrete", "n": 4, "start": 0, "dtype": {"$": "dtype", "name": "int64"}}]


def mutate_json(rng, document):
    """Replace, remove or rename something anywhere in a document."""
    places = []

    def walk(value):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            places.append((value, key))
            if isinstance(part, dict | list):
                walk(part)

    walk(document["content"])
    for _ in range(rng.integers(1, 3)):
        value, key = places[rng.integers(len(places))]
        if key not in (value if isinstance(value, dict) else range(len(value))):
            continue
        kind = rng.integers(5)
        if kind == 0:
            del value[key]
        elif kind == 1 and isinstance(value, dict):
            value["new" if rng.integers(2) else "$"] = value.pop(key)
        else:
            value[key] = VALUES[rng.integers(len(VALUES))]
    return document


@pytest.mark.parametrize("way", [*WAYS, "frames"])
@pytest.mark.parametrize("seed", range(2))
def test_mutated_files_are_refused_or_harmless(way, seed, valid, tmp_path):
    """150 of each: bytes anywhere, and JSON and tensors in archives whose checksums are right."""
    rng = np.random.default_rng(seed)
    load = WAYS.get(way) or (lambda path: load_replay(path, None, th.device("cpu")).sample(9))
    original = (valid / f"{way}.zip").read_bytes()
    path = tmp_path / "file"
    loaded = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(150):
            document, tensors = parts(valid / f"{way}.zip")
            if i % 3 == 0:
                path.write_bytes(mutate_bytes(rng, original))
            elif i % 3 == 1:
                forge(path, mutate_json(rng, document), tensors)
            else:
                length = 8 + int.from_bytes(tensors[:8], "little")
                forge(path, document, mutate_bytes(rng, tensors[:length]) + tensors[length:])
            with suppress(FileError):
                found = load(path)
                loaded += 1
                if way == "model" and i % 3 == 0:  # what no checksum covers does not matter
                    assert equal(found.get_parameters(), SQL.load(valid / way).get_parameters())
    assert loaded < 75


def test_weights_move_between_temperatures_or_nothing_moves(tmp_path):
    CBSQL("MlpPolicy", "CartPole-v1", policy_kwargs=SMALL, **QUICK).learn(40).save(tmp_path / "m")
    saved = CBSQL.load(tmp_path / "m").policy.state_dict()
    for other in (
        CBSQL("MlpPolicy", "CartPole-v1", counter=SimHash(4, k=9), policy_kwargs=SMALL, **QUICK),
        SQL("MlpPolicy", "CartPole-v1", policy_kwargs=SMALL, **{**QUICK, "seed": 1}),
    ):
        before = {name: value.clone() for name, value in other.policy.state_dict().items()}
        with pytest.raises(FileError, match="m cannot be loaded"):
            other.set_parameters(tmp_path / "m")
        assert equal(other.policy.state_dict(), before)
        with pytest.warns(UserWarning, match="begins without the counts in what is loaded"):
            other.set_parameters(tmp_path / "m", exact_match=False)
        assert equal(other.policy.state_dict(), saved)


def test_a_file_of_another_algorithm_is_refused(tmp_path):
    CBSQL("MlpPolicy", "CartPole-v1", policy_kwargs=SMALL, **QUICK).save(tmp_path / "m")
    with pytest.raises(FileError, match="Rainbow needs a RainbowPolicy, not SafePolicy"):
        Rainbow.load(tmp_path / "m")


def test_replay_with_other_returns_or_priorities_is_refused(tmp_path):
    def model(**arguments):
        return SQL("MlpPolicy", "CartPole-v1", policy_kwargs=SMALL, **QUICK, **arguments)

    three, one = model(n_steps=3, gamma=0.9).learn(40), model().learn(40)
    for stored, loads, named in (
        (three, one, "returns of 3 steps, gamma=0.9, the model needs 1 step"),
        (one, three, "returns of 1 step, the model needs 3 steps, gamma=0.9"),
    ):
        stored.save_replay_buffer(tmp_path / "r")
        stored.load_replay_buffer(tmp_path / "r")  # its own is taken
        with pytest.raises(FileError, match=named):
            loads.load_replay_buffer(tmp_path / "r")
    arguments = {"policy_kwargs": SMALL, **QUICK}
    Rainbow("MlpPolicy", "CartPole-v1", **arguments).learn(40).save_replay_buffer(tmp_path / "r")
    other = Rainbow("MlpPolicy", "CartPole-v1", priority_exponent=0.0, **arguments)
    with pytest.raises(FileError, match=r"priority_exponent of 0\.5, the model needs 0\.0"):
        other.load_replay_buffer(tmp_path / "r")


def test_large_hindsight_buffers_load_with_trust_or_smaller(tmp_path):
    env = BitFlippingEnv(4, continuous=False)
    arguments = {**QUICK, "buffer_size": 1_100_000, "replay_buffer_class": HerReplayBuffer}
    model = SQL("MultiInputPolicy", env, policy_kwargs=SMALL, **arguments).learn(30)
    model.save(tmp_path / "m")
    model.save_replay_buffer(tmp_path / "r")
    with pytest.raises(FileError, match="at most 1000000"):
        SQL.load(tmp_path / "m", env=env)
    assert SQL.load(tmp_path / "m", env=env, buffer_size=100).replay_buffer.buffer_size == 100
    loaded = SQL.load(tmp_path / "m", env=env, trust=True)
    loaded.load_replay_buffer(tmp_path / "r", trust=True)
    assert loaded.replay_buffer.pos == 30


def test_spaces_are_made_as_older_gymnasiums_take_them(tmp_path, monkeypatch):
    """Before 1.2.2, Discrete had no dtype to choose."""
    SQL("MlpPolicy", "CartPole-v1", policy_kwargs=SMALL, **QUICK).save(tmp_path / "m")
    original = spaces.Discrete.__init__

    def older(self, n, seed=None, start=0):
        original(self, n, seed, start)

    monkeypatch.setattr(spaces.Discrete, "__init__", older)
    assert SQL.load(tmp_path / "m").action_space == spaces.Discrete(2)
