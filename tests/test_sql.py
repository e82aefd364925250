"""SQL and CBSQL: against SB3's DQN, naive targets, and the order of Algorithm 1."""

import math
import pickle
import re
import warnings
from contextlib import suppress

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium.wrappers import TimeLimit
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecFrameStack,
    VecNormalize,
    VecTransposeImage,
)
from stable_baselines3.dqn import MlpPolicy
from test_frame_replay import Drift

from cbsql import CBSQL, SQL
from cbsql.counts import CTS, ExactCounter, PixelCounter, SimHash
from cbsql.deep.sql import DivergenceError
from cbsql.envs import make_atari_vec_env
from cbsql.operators import mellowmax
from cbsql.replay import FrameReplayBuffer, IndexedReplayBuffer
from cbsql.temperature import Constant, CountBased, Greedy, Linear, Temperature

QUICK = {"learning_starts": 20, "buffer_size": 500, "batch_size": 8, "train_freq": 1, "seed": 0}
BETAS = [0.0, 0.3, 5.0, math.inf]


def weights(model):
    return list(model.policy.state_dict().values())


def same(first, second):
    return all(th.equal(a, b) for a, b in zip(first, second, strict=True))


def test_greedy_huber_sql_is_sb3s_dqn_bit_for_bit():
    arguments = {"learning_starts": 100, "train_freq": 1, "target_update_interval": 100, "seed": 3}
    dqn = DQN("MlpPolicy", "CartPole-v1", **arguments).learn(1100)
    sql = SQL("MlpPolicy", "CartPole-v1", temperature=Greedy(), loss="huber", **arguments)
    sql.learn(1100)
    assert sql._n_updates == dqn._n_updates == 1000
    assert same(weights(dqn), weights(sql))


class Script(Temperature):
    """Says a fixed beta for each row, and writes down what it is asked and told."""

    def __init__(self):
        self.log = []

    def beta(self, x):
        self.log.append(("beta", x))
        return np.resize(BETAS, len(x))

    def update(self, x):
        self.log.append(("update", x))


@pytest.mark.parametrize("double", [False, True])
def test_target_agrees_with_a_naive_loop(double):
    model = SQL("MlpPolicy", "CartPole-v1", temperature=Script(), double=double, **QUICK)
    model.learn(60)
    for parameter in model.q_net_target.parameters():  # so that the two networks disagree
        parameter.data += 0.1 * th.randn_like(parameter)
    batch, _ = model._sample(12)
    beta = model._beta(batch.next_observations)
    with th.no_grad():
        target = model._target(batch, beta)
        judge = model.q_net_target(batch.next_observations).double().tolist()
        choose = model.q_net(batch.next_observations).double().tolist() if double else judge
    for i, b in enumerate(np.resize(BETAS, 12)):
        if b == math.inf:
            value = judge[i][int(np.argmax(choose[i]))]
        elif b == 0:
            value = sum(judge[i]) / 2
        else:
            weight = [math.exp(b * q) for q in choose[i]]
            policy = [w / sum(weight) for w in weight]
            value = sum(
                p * (q - math.log(2 * p) / b) for p, q in zip(policy, judge[i], strict=True)
            )
        expected = float(batch.rewards[i]) + 0.99 * (1 - float(batch.dones[i])) * value
        assert float(target[i]) == pytest.approx(expected, abs=1e-5)


def test_mse_loss_is_the_mean_squared_error():
    model = SQL("MlpPolicy", "CartPole-v1", **QUICK).learn(30)
    batch, _ = model._sample(8)
    target = th.randn(8, 1)
    q = model.q_net(batch.observations).detach()
    naive = sum((float(q[i, batch.actions[i]]) - float(target[i])) ** 2 for i in range(8)) / 8
    assert float(model._loss(batch, target)) == pytest.approx(naive, rel=1e-5)


def test_beta_is_asked_at_next_states_before_states_are_counted():
    script = Script()
    model = SQL("MlpPolicy", "CartPole-v1", temperature=script, **QUICK).learn(40)
    assert [kind for kind, _ in script.log] == ["beta", "update"] * model._n_updates
    buffer = model.replay_buffer
    for kind, rows in script.log:
        table = buffer.next_observations if kind == "beta" else buffer.observations
        for row in rows.numpy():
            assert (row == table[: buffer.pos, 0]).all(1).any()


def test_counts_are_the_value_updates_made():
    model = CBSQL("MlpPolicy", "CliffWalking-v1", **QUICK).learn(100)
    state = model.temperature.state_dict()
    assert int(state["counts"].sum()) == model._n_updates * 8


@pytest.mark.parametrize("env", ["CliffWalking-v1", "MinAtar/Breakout-v1"])
def test_counts_may_be_of_visits(env):
    """Of each state, as often as the replay buffer has a step from it, whatever is replayed."""
    envs = make_vec_env(env, n_envs=2)
    model = CBSQL("MlpPolicy", envs, counter=ExactCounter(), counted="visits", **QUICK).learn(100)
    stored = model.replay_buffer.observations[: model.replay_buffer.pos].reshape(100, -1)
    states = model.replay_buffer.sample(30).observations
    visits = (states.numpy().reshape(30, 1, -1) == stored).all(-1).sum(1)
    np.testing.assert_array_equal(model.temperature.counter.count(states), visits)
    assert int(model.temperature.state_dict()["counts"].sum()) == 100


def test_visits_are_counted_as_they_were_before_vec_normalize():
    env = VecNormalize(DummyVecEnv([lambda: gym.make("CartPole-v1")]), norm_reward=False)
    script = Script()
    SQL("MlpPolicy", env, temperature=script, counted="visits", **QUICK).learn(20)
    seen = np.concatenate([rows for kind, rows in script.log if kind == "update"])
    assert seen.shape == (20, 4)
    assert np.abs(seen[:, 0]).max() < 0.2  # near the middle of the track; normalised it is not


@pytest.mark.parametrize(
    ("env", "policy", "kind"),
    [
        ("CartPole-v1", "MlpPolicy", SimHash),
        ("CliffWalking-v1", "MlpPolicy", ExactCounter),
    ],
)
def test_counter_is_chosen_by_the_observation_space(env, policy, kind):
    assert isinstance(CBSQL(policy, env, **QUICK).temperature.counter, kind)


@pytest.mark.parametrize("name", [None, "simhash"])
def test_a_temperature_for_several_models_has_a_counter_for_each(name):
    temperature = CountBased(name)
    models = [SQL("MlpPolicy", "CliffWalking-v1", temperature=temperature) for _ in range(2)]
    models[0].temperature.update(np.array([[3]]))
    assert [model.temperature.beta(np.array([[3]])) for model in models] == [0.01, 0]


class Squares(gym.Env):
    """Four-frame stacks of small images in which a square moves."""

    observation_space = gym.spaces.Box(0, 255, (4, 36, 36), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._time = 0
        return self._frames(), {}

    def step(self, action):
        self._time += 1
        return self._frames(), float(action == 1), self._time >= 20, False, {}

    def _frames(self):
        frames = np.zeros((4, 36, 36), np.uint8)
        for i in range(4):
            frames[i, (self._time + i) % 30 : (self._time + i) % 30 + 6, 10:16] = 255
        return frames


def test_images_are_counted_by_a_density_model():
    model = CBSQL("CnnPolicy", Squares(), **QUICK)
    assert isinstance(model.temperature.counter, PixelCounter)
    model.learn(40)
    assert model.temperature.counter.density.updates == 8 * model._n_updates
    bare = CBSQL("CnnPolicy", Squares(), counter=CTS((21, 21)), **QUICK).learn(30)
    assert bare.temperature.counter.density.shape == (21, 21)


def test_a_counter_that_is_given_is_used_though_it_is_empty(tmp_path):
    for env, counter in (("CartPole-v1", SimHash(4, k=3)), ("FrozenLake-v1", ExactCounter())):
        assert len(counter) == 0
        model = CBSQL("MlpPolicy", env, counter=counter, **QUICK).learn(60)
        assert model.temperature.counter is counter
        assert len(counter) > 0
    model = CBSQL("MlpPolicy", "CartPole-v1", counter=SimHash(4, k=3), **QUICK).learn(60)
    model.save(tmp_path / "model")
    with (
        pytest.raises(ValueError, match="k"),
        pytest.warns(UserWarning, match="an object of its own"),
    ):
        CBSQL.load(tmp_path / "model")  # with the counter it would choose
    own = CountBased(SimHash(4, k=3))
    loaded = CBSQL.load(tmp_path / "model", temperature=own)
    states = model.replay_buffer.sample(8).observations
    np.testing.assert_array_equal(loaded.temperature.beta(states), model.temperature.beta(states))


@pytest.mark.parametrize(
    ("name", "env"),
    [
        ("cts", "MinAtar/Breakout-v1"),
        ("simhash", "MinAtar/Breakout-v1"),
        ("coin-flip", "CartPole-v1"),
        ("coin-flip", "CliffWalking-v1"),
    ],
)
def test_a_counter_given_by_name_is_made_again_by_load(name, env, tmp_path):
    model = CBSQL("MlpPolicy", env, counter=name, **QUICK).learn(60)
    assert model._n_updates > 0
    model.save(tmp_path / "model")
    loaded = CBSQL.load(tmp_path / "model")
    assert type(loaded.temperature.counter) is type(model.temperature.counter)
    states = model.replay_buffer.sample(8).observations
    np.testing.assert_array_equal(loaded.temperature.beta(states), model.temperature.beta(states))


@pytest.mark.parametrize("own", [SimHash(4, standardize=True), CountBased(SimHash(4)).counter])
def test_a_counter_that_was_handed_in_is_named_when_load_replaces_it(own, tmp_path):
    model = CBSQL("MlpPolicy", "CartPole-v1", counter=own, **QUICK).learn(60)
    model.save(tmp_path / "model")
    with pytest.warns(UserWarning, match=re.escape(f"The counter {repr(own)!r} was an object")):
        CBSQL.load(tmp_path / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CBSQL.load(tmp_path / "model", temperature=CountBased(SimHash(4)))
        CBSQL("MlpPolicy", "CartPole-v1", **QUICK).save(tmp_path / "usual")
        CBSQL.load(tmp_path / "usual")


def test_the_memory_of_a_counter_is_no_reason_to_refuse_a_file(tmp_path):
    env = make_atari_vec_env("pong", seed=0)
    arguments = {**QUICK, "policy_kwargs": {"net_arch": [8]}}
    model = CBSQL("CnnPolicy", env, counter="coin-flip", **arguments).learn(25)
    model.save(tmp_path / "model")
    loaded = CBSQL.load(tmp_path / "model")
    states = model.replay_buffer.sample(8).observations
    np.testing.assert_array_equal(loaded.temperature.beta(states), model.temperature.beta(states))


def test_three_grey_frames_are_no_colours():
    env = VecFrameStack(DummyVecEnv([Drift]), 3, channels_order="last")
    model = CBSQL("CnnPolicy", VecTransposeImage(env), **QUICK)
    rng = np.random.default_rng(0)
    first, second = rng.integers(256, size=(2, 1, 3, 36, 36), dtype=np.uint8)
    first[:, -1] = second[:, -1]  # the newest
    symbols = model.temperature.counter.symbols
    np.testing.assert_array_equal(symbols(first), symbols(second))
    given = PixelCounter(CTS((36, 36)), model.observation_space, frame_channels=3)
    assert CBSQL("CnnPolicy", env, counter=given, **QUICK).temperature.counter is given


def test_tensorboard_has_folders_of_the_algorithms_name(tmp_path):
    for kind in (SQL, CBSQL, CBSQL):
        kind("MlpPolicy", "CartPole-v1", tensorboard_log=str(tmp_path), **QUICK).learn(5)
    assert {path.name for path in tmp_path.iterdir()} == {"SQL_1", "CBSQL_1", "CBSQL_2"}


def test_sb3s_buffer_of_several_steps_follows_the_model(tmp_path):
    arguments = {"handle_timeout_termination": True}
    model = SQL("MlpPolicy", "CartPole-v1", n_steps=3, replay_buffer_kwargs=arguments, **QUICK)
    assert arguments == {"handle_timeout_termination": True}
    assert (model.replay_buffer.n_steps, model.replay_buffer.gamma) == (3, 0.99)
    model.save(tmp_path / "model")
    loaded = SQL.load(tmp_path / "model", n_steps=2, gamma=0.5)
    assert (loaded.replay_buffer.n_steps, loaded.replay_buffer.gamma) == (2, 0.5)
    assert type(SQL.load(tmp_path / "model", n_steps=1).replay_buffer) is ReplayBuffer


def test_a_counter_put_in_the_place_of_a_named_one_has_no_name(tmp_path):
    model = CBSQL("MlpPolicy", "CliffWalking-v1", counter="simhash", **QUICK)
    model.temperature.counter = ExactCounter()  # the default
    model.save(tmp_path / "model")
    with pytest.warns(UserWarning, match="an object of its own"):
        assert type(CBSQL.load(tmp_path / "model").temperature.counter) is ExactCounter


def test_what_is_counted_is_checked_by_load_too(tmp_path):
    CBSQL("MlpPolicy", "CliffWalking-v1", **QUICK).save(tmp_path / "model")
    with pytest.raises(ValueError, match="counted must be one of updates, visits, not 'visit'"):
        CBSQL.load(tmp_path / "model", counted="visit")


def test_vec_normalize_is_undone_before_counting():
    env = VecNormalize(DummyVecEnv([lambda: gym.make("CartPole-v1")]), norm_reward=False)
    model = CBSQL("MlpPolicy", env, counter=SimHash(4), **QUICK).learn(60)
    batch, counted = model._sample(16)
    np.testing.assert_allclose(
        env.normalize_obs(counted.observations.numpy()), batch.observations, atol=1e-6
    )
    np.testing.assert_allclose(
        env.normalize_obs(counted.next_observations.numpy()), batch.next_observations, atol=1e-6
    )
    assert not th.allclose(batch.observations, counted.observations)


def test_normalised_and_counted_batches_are_the_same_rows_of_a_frame_buffer():
    env = VecNormalize(DummyVecEnv([Squares]), norm_obs=False)
    model = SQL("CnnPolicy", env, replay_buffer_class=FrameReplayBuffer, **QUICK).learn(60)
    batch, counted = model._sample(16)
    assert th.equal(batch.observations, counted.observations)
    assert not th.equal(batch.rewards, counted.rewards)


def test_each_environment_explores_on_its_own():
    model = SQL("MlpPolicy", make_vec_env("CartPole-v1", n_envs=4), **QUICK)
    model.exploration_rate = 0.5
    observations = np.zeros((1000, 4), np.float32)
    greedy, _ = model.predict(observations, deterministic=True)
    assert len(set(greedy.tolist())) == 1
    actions, _ = model.predict(observations)
    other = (actions != greedy).mean()  # half explore, half of those take the other action
    assert abs(other - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 1000)


@pytest.mark.parametrize(
    "make",
    [
        lambda **k: SQL("MlpPolicy", "CartPole-v1", beta=7.0, loss="huber", double=True, **k),
        lambda **k: SQL("MlpPolicy", "CartPole-v1", temperature=Linear(0.01), **k),
        lambda **k: CBSQL("MlpPolicy", "CartPole-v1", kappa=0.5, **k),
        lambda **k: CBSQL("CnnPolicy", Squares(), kappa=0.02, **k),
    ],
)
def test_save_and_load_keep_everything(tmp_path, make):
    model = make(**QUICK).learn(60)
    model.save(tmp_path / "model.zip")
    loaded = type(model).load(tmp_path / "model.zip", env=model.get_env())
    assert same(weights(model), weights(loaded))
    assert repr(loaded.temperature) == repr(model.temperature)
    assert (loaded.loss, loaded.double) == (model.loss, model.double)
    batch = model.replay_buffer.sample(8)
    np.testing.assert_array_equal(
        loaded.temperature.beta(batch.observations), model.temperature.beta(batch.observations)
    )
    loaded.learn(30, reset_num_timesteps=False)


def test_a_temperature_of_ones_own_is_passed_when_loading(tmp_path):
    class Own(Constant):
        pass

    SQL("MlpPolicy", "CartPole-v1", temperature=Own(3), **QUICK).save(tmp_path / "model")
    with pytest.raises(ValueError, match="pass it as temperature="):
        SQL.load(tmp_path / "model")
    assert repr(SQL.load(tmp_path / "model", temperature=Own(3)).temperature) == "Constant(3)"


def test_a_temperature_that_was_replaced_is_saved(tmp_path):
    SQL("MlpPolicy", "CartPole-v1", beta=7.0, **QUICK).save(tmp_path / "first")
    SQL.load(tmp_path / "first", temperature=Greedy()).save(tmp_path / "second")
    assert repr(SQL.load(tmp_path / "second").temperature) == "Greedy()"
    counting = CBSQL("MlpPolicy", "CartPole-v1", counter=SimHash(4), **QUICK).learn(60)
    counting.save(tmp_path / "third")
    for other in (Greedy(), Constant(3), Linear(0.1)):
        loaded = CBSQL.load(tmp_path / "third", temperature=other)
        assert loaded.temperature is other
    loaded = CBSQL.load(tmp_path / "third", temperature=CountBased(SimHash(4), kappa=2.0))
    states = counting.replay_buffer.sample(8).observations
    beta = counting.temperature.beta(states)
    np.testing.assert_allclose(loaded.temperature.beta(states), 2 / 0.01 * beta)
    with pytest.raises(ValueError, match="load\\(\\) takes no kappa"):
        CBSQL.load(tmp_path / "first", kappa=0.5)


def test_buffers_that_are_given_have_the_return_of_the_model(tmp_path):
    def buffer(**arguments):
        given = {"replay_buffer_class": IndexedReplayBuffer, **QUICK, **arguments}
        model = SQL("MlpPolicy", "CartPole-v1", gamma=0.9, **given)
        assert model.n_steps == model.replay_buffer.n_steps
        return model.replay_buffer.n_steps, model.replay_buffer.gamma

    assert buffer(n_steps=3) == (3, 0.9)
    assert buffer(replay_buffer_kwargs={"n_steps": 5}) == (5, 0.9)
    with pytest.raises(ValueError, match=r"gamma=0\.5, the model has gamma=0\.9"):
        buffer(replay_buffer_kwargs={"gamma": 0.5})
    model = SQL("MlpPolicy", "CartPole-v1", soft_n_step=True, n_steps=3, **QUICK)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "model")
    loaded = SQL.load(tmp_path / "model", gamma=0.5, n_steps=2)
    assert (loaded.replay_buffer.n_steps, loaded.replay_buffer.gamma) == (2, 0.5)
    loaded.load_replay_buffer(tmp_path / "model")
    assert (loaded.replay_buffer.n_steps, loaded.replay_buffer.gamma) == (2, 0.5)


def test_predict_takes_what_sb3s_takes():
    model = SQL("MlpPolicy", "FrozenLake-v1", **QUICK)
    model.policy.set_training_mode(False)  # as it is once it has acted
    assert model.predict(np.array(3), deterministic=True)[0].shape == ()
    for deterministic in (True, False):
        with pytest.raises(ValueError, match="Gym API"):
            model.predict(gym.make("FrozenLake-v1").reset(), deterministic=deterministic)
    model = SQL("MlpPolicy", "CartPole-v1", **QUICK)
    assert model.predict([0.0] * 4)[0].shape == ()


def test_n_step_returns_with_a_count_based_temperature():
    model = CBSQL("MlpPolicy", "CartPole-v1", n_steps=3, **QUICK).learn(60)
    batch, _ = model._sample(8)
    beta = model._beta(batch.next_observations)
    with th.no_grad():
        value = mellowmax(model.q_net_target(batch.next_observations), beta).unsqueeze(1)
        expected = batch.rewards + (1 - batch.dones) * batch.discounts * value
        th.testing.assert_close(model._target(batch, beta), expected)
    assert (batch.discounts < 0.99).any()


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("env", ["CartPole-v1", "vector"])
def test_soft_n_step_return_against_a_loop(env, double):
    # Episodes of 7 steps, so that many returns of 4 steps pass an end; the buffer has gone round.
    n_envs = 1 if env == "CartPole-v1" else 3
    limited = make_vec_env(lambda: TimeLimit(gym.make("CartPole-v1"), 7), n_envs=n_envs)
    arguments = {**QUICK, "n_steps": 4, "soft_n_step": True, "double": double, "gamma": 0.9}
    model = CBSQL("MlpPolicy", limited, **{**arguments, "buffer_size": 60}).learn(120)
    buffer = model.replay_buffer
    indices = buffer._draw_indices(64)
    returns = buffer._get_samples(indices).rewards
    softened = returns - model._path_costs(indices)
    network = model.q_net if double else model.q_net_target
    lengths = set()
    for i, index in enumerate(indices):
        row, column, total, k = index // n_envs, index % n_envs, 0.0, 0
        while True:
            if k:
                state = th.as_tensor(buffer.observations[row, column])[None]
                beta = float(model.temperature.beta(state)[0])
                with th.no_grad():
                    q = network(state)[0].double()
                policy = th.softmax(beta * q, 0)
                total -= 0.9**k * float((policy * th.log(2 * policy)).sum()) / beta if beta else 0
            total += 0.9**k * buffer.rewards[row, column]
            ended = buffer.dones[row, column] or buffer.timeouts[row, column]
            row, k = (row + 1) % buffer.buffer_size, k + 1
            if k == 4 or ended or row == buffer.pos:
                break
        lengths.add(k)
        assert float(softened[i]) == pytest.approx(total, abs=2e-5)
    assert lengths == {1, 2, 3, 4}
    assert (softened < returns).any()
    # What the learner samples are these returns.
    state = buffer.rng.bit_generator.state
    drawn = buffer._draw_indices(8)
    buffer.rng.bit_generator.state = state
    batch, _ = model._sample(8)
    expected = buffer._get_samples(drawn).rewards - model._path_costs(drawn)
    assert th.equal(batch.rewards, expected)


def test_soft_n_step_with_frames_stored_once_or_normalised():
    # FrameReplayBuffer.path is compared with lists of stacks elsewhere; here, who gets what.
    env = VecFrameStack(DummyVecEnv([lambda: TimeLimit(Drift(), 50)] * 2), n_stack=4)
    env = VecNormalize(VecTransposeImage(env), norm_obs=False)
    arguments = {**QUICK, "n_steps": 3, "soft_n_step": True}
    small = {"features_extractor_kwargs": {"features_dim": 16}}
    model = CBSQL("CnnPolicy", env, policy_kwargs=small, **arguments).learn(60)
    buffer = model.replay_buffer
    assert type(buffer) is FrameReplayBuffer
    indices = np.arange(10)
    states, discounts = buffer.path(indices)
    with th.no_grad():
        for i in range(10):
            beta = th.as_tensor(model.temperature.beta(states[i]), dtype=th.float32)
            q = model.q_net_target(states[i])
            naive = (discounts[i] * (q.mul(th.softmax(beta[:, None] * q, 1)).sum(1))).sum()
            naive -= (discounts[i] * mellowmax(q, beta)).sum()  # KL / beta = E[q] - mellowmax
            assert float(model._path_costs(indices)[i]) == pytest.approx(float(naive), abs=1e-5)


class Remembering(SimHash):
    def count(self, x):
        self.latest = super().count(x)
        return self.latest


def test_logs_say_what_the_temperature_does():
    counter = Remembering(4, k=3)
    model = CBSQL("MlpPolicy", "CartPole-v1", counter=counter, **QUICK)
    model.learn(30)
    figures = model._diagnose(*model._last_update)
    spread = ("mean", "p10", "p50", "p90")
    assert set(figures) == {"entropy", "q_mean"} | {
        f"{name}_{kind}" for name in ("beta", "count") for kind in spread
    }
    assert 0 <= figures["entropy"] <= math.log(2) + 1e-6
    assert figures["count_mean"] == pytest.approx(counter.latest.mean())
    assert figures["count_p90"] == pytest.approx(np.quantile(counter.latest, 0.9))
    assert figures["beta_p50"] == pytest.approx(0.01 * np.median(counter.latest))


class Broken(gym.Wrapper):
    def step(self, action):
        observation, _, *rest = self.env.step(action)
        return observation, math.nan, *rest


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: SQL("MlpPolicy", "CartPole-v1", beta=0.0), "beta must be a positive number"),
        (lambda: SQL("MlpPolicy", "CartPole-v1", beta=1.0, temperature=Greedy()), "not both"),
        (lambda: SQL("MlpPolicy", "CartPole-v1", loss="l1"), "one of mse, huber"),
        (lambda: SQL("MlpPolicy", "CartPole-v1", soft_n_step=True), "give n_steps above 1"),
        (
            lambda: SQL(
                *("MlpPolicy", "CartPole-v1"),
                soft_n_step=True,
                n_steps=2,
                replay_buffer_class=ReplayBuffer,
            ),
            "a buffer of cbsql.replay",
        ),
        (lambda: SQL("MlpPolicy", "CartPole-v1", temperature=Greedy), "takes an object of"),
        (lambda: SQL("MlpPolicy", "CartPole-v1", beta="hot"), "beta must be a positive number"),
        (lambda: CBSQL("MlpPolicy", "CartPole-v1", kappa=-1.0), "kappa must be a positive"),
        (lambda: CBSQL("MlpPolicy", "CartPole-v1", beta=3.0), "and no beta: SQL takes one"),
        (lambda: SQL("MlpPolicy", Broken(gym.make("CartPole-v1"))).learn(5), "finite"),
    ],
)
def test_bad_input_is_refused(make, named):
    with pytest.raises(ValueError, match=named):
        make()


def test_continuous_actions_are_refused():
    with pytest.raises(AssertionError, match="Discrete"):
        SQL("MlpPolicy", "Pendulum-v1")


@pytest.mark.slow
@pytest.mark.parametrize("make", [Greedy, lambda: Constant(100), CountBased])
def test_learns_cartpole(make):
    model = SQL(
        *("MlpPolicy", "CartPole-v1"),
        temperature=make(),
        learning_rate=2.3e-3,
        buffer_size=100_000,
        learning_starts=1000,
        batch_size=64,
        train_freq=256,
        gradient_steps=128,
        target_update_interval=10,
        exploration_fraction=0.16,
        exploration_final_eps=0.04,
        policy_kwargs={"net_arch": [256, 256]},
        seed=0,
    ).learn(50_000)
    scores = [info["r"] for info in model.ep_info_buffer]
    assert np.mean(scores) > 150


def test_a_gradient_that_is_no_number_is_named_with_its_update(monkeypatch):
    model = SQL("MlpPolicy", "CartPole-v1", **QUICK).learn(60)
    loss, weight = model._loss, next(model.q_net.parameters())
    # Zero, but with a gradient of zero times infinity.
    monkeypatch.setattr(model, "_loss", lambda *args: loss(*args) + (0 * weight).sum().sqrt())
    with pytest.raises(DivergenceError, match=f"gradient of update {model._n_updates + 1} is"):
        model.train(3, 8)


def test_a_model_that_is_set_up_later_has_the_temperature_it_was_given():
    counter = SimHash(4)
    model = CBSQL("MlpPolicy", "CartPole-v1", counter=counter, _init_setup_model=False)
    model._setup_model()
    assert model.temperature.counter is counter


class StepNumber(gym.Env):
    """Observes how many steps there were since the start, over all episodes."""

    observation_space = gym.spaces.Box(0, np.inf, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.steps = 0

    def reset(self, **kwargs):
        super().reset(**kwargs)
        return np.array([self.steps], np.float64), {}

    def step(self, action):
        self.steps += 1
        return np.array([self.steps], np.float64), 0.0, False, False, {}


@pytest.mark.parametrize("by", ["callback", "ctrl-c"])
def test_after_a_stop_no_transition_is_stored_that_never_was(by):
    def stop(inside, _):
        if by == "ctrl-c" and inside["num_collected_steps"] == 3:
            raise KeyboardInterrupt
        return inside["num_collected_steps"] < 3

    for env, policy in ((StepNumber(), "MlpPolicy"), (make_atari_vec_env("pong"), "CnnPolicy")):
        arguments = {**QUICK, "train_freq": 10, "learning_starts": 100}
        model = SQL(policy, env, **arguments)
        with suppress(KeyboardInterrupt):
            model.learn(30, callback=stop)
        model.learn(10, reset_num_timesteps=False)
        assert model.replay_buffer.pos == 12  # the step of the stop is not stored
        if policy == "MlpPolicy":
            buffer = model.replay_buffer
            jumps = buffer.next_observations[:12] - buffer.observations[:12]
            assert (jumps == 1).all()


class OnlyRight(MlpPolicy):
    def predict(self, *args, **kwargs):
        actions, state = super().predict(*args, **kwargs)
        return np.ones_like(actions), state


class Remembers(BaseFeaturesExtractor):
    """Makes a tensor when it is first asked, which is while it acts."""

    def __init__(self, space):
        super().__init__(space, 4)
        self.scale = None

    def forward(self, x):
        if self.scale is None:
            self.scale = th.linspace(0.5, 1.5, 4, requires_grad=False)
        return x * self.scale


def test_policies_and_networks_that_dqn_takes_are_taken():
    greedy = {**QUICK, "learning_starts": 0, "exploration_initial_eps": 0.0}
    greedy["exploration_final_eps"] = 0.0
    model = SQL(OnlyRight, "CartPole-v1", **greedy).learn(50)
    assert (model.replay_buffer.actions[:50] == 1).all()
    network = {"features_extractor_class": Remembers}
    SQL("MlpPolicy", "CartPole-v1", policy_kwargs=network, **greedy).learn(20)


class OwnDraws(ReplayBuffer):
    def sample(self, batch_size, env=None):
        self.rng = getattr(self, "rng", np.random.default_rng(0))
        return self._get_samples(self.rng.integers(self.pos, size=batch_size), env)


def test_two_batches_that_differ_are_not_taken_for_one():
    env = VecNormalize(make_vec_env("CartPole-v1"))
    model = SQL("MlpPolicy", env, replay_buffer_class=OwnDraws, **QUICK)
    with pytest.raises(ValueError, match="OwnDraws draws from a generator of its own"):
        model.learn(100)


def test_models_without_a_seed_draw_other_indices():
    arguments = {**QUICK, "seed": None, "replay_buffer_class": IndexedReplayBuffer}
    draws = []
    for _ in range(2):
        np.random.seed(0)  # what both begin with  # noqa: NPY002
        model = SQL("MlpPolicy", "CartPole-v1", **arguments)
        draws.append(model.replay_buffer.rng.integers(10**9))
    assert draws[0] != draws[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("buffer_size", -3), ("batch_size", 0), ("n_steps", -1), ("gamma", 2.0), ("gamma", -0.1)],
)
def test_numbers_that_make_no_sense_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .* not {value}"):
        SQL("MlpPolicy", "CartPole-v1", **{**QUICK, name: value})


def test_errors_of_divergence_reach_other_processes():
    error = pickle.loads(pickle.dumps(DivergenceError("The loss", 3, None)))
    assert "The loss of update 3 is not a finite number" in str(error)
    assert error.batch is None


def test_an_update_of_no_steps_changes_nothing():
    model = SQL("MlpPolicy", "CartPole-v1", **QUICK).learn(30)
    before = [weight.clone() for weight in weights(model)]
    model.train(0)
    assert model._n_updates == 10
    assert same(before, weights(model))


@pytest.mark.filterwarnings("error")
def test_logs_of_infinite_betas_are_numbers():
    model = SQL("MlpPolicy", "CartPole-v1", temperature=Script(), **QUICK).learn(40)
    figures = model._diagnose(*model._last_update)
    assert (figures["beta_p10"], figures["beta_p90"]) == (0.0, math.inf)
    assert figures["beta_p50"] in (0.3, 5.0)
