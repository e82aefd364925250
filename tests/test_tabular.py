"""The tabular learner on problems whose solution is known."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor

from cbsql import SQL, TabularSQL, files
from cbsql._vector_math import expm1, log, log1p
from cbsql.counts import SimHash
from cbsql.operators import mellowmax
from cbsql.tabular import rule, soft_value_iteration
from cbsql.temperature import Constant, CountBased, Greedy, Linear, Temperature

FROZEN_LAKE = {"id": "FrozenLake-v1", "is_slippery": False}
TEMPERATURES = [Greedy, lambda: Constant(100), lambda: Linear(0.01), CountBased]


@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=18),
    betas=st.lists(
        st.just(0.0) | st.floats(1e-300, 1e12) | st.just(math.inf), min_size=1, max_size=9
    ),
)
def test_compiled_mellowmax_is_the_operator(values, betas):
    """In each lane, whatever the temperatures of the others and with the values at any state."""
    q = np.zeros((len(betas), len(values), len(betas)))  # lane i is in state i
    for lane in range(len(betas)):
        q[lane, :, lane] = np.roll(values, lane)
    work = np.full((3, len(betas)), math.nan)
    ours = rule.mellowmax(q, rule.find(q, np.arange(len(betas))), np.array(betas), work)
    reference = [float(mellowmax(torch.tensor(values, dtype=torch.float64), b)) for b in betas]
    assert ours.tolist() == pytest.approx(reference, abs=1e-14 * max(map(abs, values)))


@pytest.mark.parametrize(
    ("ours", "reference", "low", "high"),
    [(expm1, math.expm1, -700, 1), (log1p, math.log1p, -1 + 1e-9, 1e9), (log, math.log, 0, 1e9)],
)
def test_vectorised_functions_are_those_of_the_c_library(ours, reference, low, high):
    rng = np.random.default_rng(0)
    small = 10 ** rng.uniform(-300, -0.01, 2000)
    for x in [0.0, *rng.uniform(low, high, 2000), *rng.uniform(-0.9, 0.9, 2000), *small, *-small]:
        if x > low:
            assert ours(x) == pytest.approx(reference(x), rel=1e-15, abs=0)


@pytest.mark.parametrize("make", TEMPERATURES)
@pytest.mark.parametrize(
    ("env", "steps", "best"),
    [
        (FROZEN_LAKE, 20_000, 1.0),
        # The best path of thirteen steps, or one row further from the cliff.
        ({"id": "CliffWalking-v1"}, 30_000, -15.0),
    ],
)
def test_learns_to_walk(make, env, steps, best):
    learner = TabularSQL(gym.make(**env), make(), learning_rate=0.5, seed=0).learn(steps)
    score, _ = evaluate_policy(learner, Monitor(gym.make(**env, max_episode_steps=100)), 20)
    assert score >= best


def test_learns_taxi():
    """Good drivers of Taxi average about 7.9; a random one about -770."""
    learner = TabularSQL("Taxi-v4", learning_rate=0.5, epsilon=0.05, seed=0).learn(150_000)
    score, _ = evaluate_policy(learner, Monitor(gym.make("Taxi-v4")), 200)
    assert score > 7


def test_converges_to_the_soft_optimum():
    """With a constant temperature the fixed point is that of soft value iteration."""
    env = gym.make(**FROZEN_LAKE)
    transitions, rewards = np.zeros((16, 4, 16)), np.zeros((16, 4))
    for state, action in np.ndindex(16, 4):
        ((_, after, reward, over),) = env.unwrapped.P[state][action]
        rewards[state, action] = reward
        transitions[state, action, after] = not over
    exact = soft_value_iteration(transitions, rewards, gamma=0.9, beta=10.0)
    learner = TabularSQL(env, Constant(10), 1.0, gamma=0.9, epsilon=1.0, seed=1).learn(60_000)
    visited = [s for s in range(16) if s not in (5, 7, 11, 12, 15)]  # not holes, not the goal
    np.testing.assert_allclose(learner.q[visited], exact[visited], atol=1e-6)


def test_bootstraps_at_a_time_limit_and_not_at_an_end():
    values = {}
    for end in ("timelimit", "terminal"):
        env = gym.make("cbsql/ChainWalk-v0", end=end, noise=0.0)
        learner = TabularSQL(env, Greedy(), 1.0, gamma=0.5, epsilon=1.0, seed=0).learn(5000)
        values[end] = learner.q[4, 1]
    assert values["timelimit"] == pytest.approx(1 / (1 - 0.5))
    # State 4 is first reached by the fourth step, so its action is always the last one.
    assert values["terminal"] == pytest.approx(1.0)


def test_spaces_that_do_not_start_at_zero():
    class Shifted(gym.Env):
        observation_space = gym.spaces.Discrete(2, start=10)
        action_space = gym.spaces.Discrete(2, start=-1)

        def reset(self, *, seed=None, options=None):
            return 10, {}

        def step(self, action):
            return 11, float(action), True, False, {}

    learner = TabularSQL(Shifted(), learning_rate=1.0, seed=0).learn(300)
    assert learner.predict(10)[0] == 0
    np.testing.assert_array_equal(learner.q[0], [-1, 0])


@pytest.mark.parametrize("make", TEMPERATURES)
def test_a_loaded_learner_goes_on_as_the_saved_one(tmp_path, make):
    saved = TabularSQL(gym.make(**FROZEN_LAKE), make(), seed=3).learn(500)
    saved.save(tmp_path / "model")
    loaded = TabularSQL.load(tmp_path / "model", gym.make(**FROZEN_LAKE))
    assert repr(loaded.temperature) == repr(saved.temperature)
    for learner in (saved, loaded):
        learner.learn(500)
    np.testing.assert_array_equal(saved.q, loaded.q)
    assert saved.num_timesteps == loaded.num_timesteps == 1000
    np.testing.assert_array_equal(saved.temperature.beta([0, 1]), loaded.temperature.beta([0, 1]))


def test_same_seed_same_table():
    tables = [TabularSQL(gym.make(**FROZEN_LAKE), seed=s).learn(300).q for s in (4, 4, 5)]
    np.testing.assert_array_equal(tables[0], tables[1])
    env = gym.make("cbsql/ChainWalk-v0")
    noisy = [TabularSQL(env, seed=s).learn(300).q for s in (4, 4, 5)]
    np.testing.assert_array_equal(noisy[0], noisy[1])
    assert (noisy[0] != noisy[2]).any()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"env": "CartPole-v1"}, "Discrete observations"),
        ({"gamma": 1.0}, "gamma"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"epsilon": -0.1}, "epsilon"),
    ],
)
def test_bad_arguments_are_refused(arguments, named):
    with pytest.raises(ValueError, match=named):
        TabularSQL(**{"env": "FrozenLake-v1", **arguments})


def test_a_foreign_file_or_another_environment_is_refused(tmp_path):
    path = tmp_path / "foreign.zip"
    SQL("MlpPolicy", "CartPole-v1", buffer_size=10).save(path)
    with pytest.raises(files.FileError, match="of the kind 'model', not 'tabular'"):
        TabularSQL.load(path, "FrozenLake-v1")
    learner = TabularSQL("FrozenLake-v1").learn(1)
    learner.q = learner.q.astype(np.float32)
    learner.save(path)
    with pytest.raises(files.FileError, match="cannot be loaded: it has a table of"):
        TabularSQL.load(path, "FrozenLake-v1")
    TabularSQL("FrozenLake-v1").learn(1).save(path)
    with pytest.raises(ValueError, match=r"\(16, 4\)"):
        TabularSQL.load(path, "CliffWalking-v1")


def test_counters_may_be_named():
    learner = TabularSQL(gym.make(**FROZEN_LAKE), CountBased("simhash"), seed=0).learn(10)
    assert type(learner.temperature.counter) is SimHash
    with pytest.raises(ValueError, match="one of cts, exact, simhash"):
        TabularSQL(gym.make(**FROZEN_LAKE), CountBased("hash"))


def test_a_temperature_for_several_learners_has_a_counter_for_each():
    temperature = CountBased()
    learners = [TabularSQL("FrozenLake-v1", temperature) for _ in range(2)]
    learners[0].temperature.update([3])
    assert [learner.temperature.beta([3]) for learner in learners] == [0.01, 0]


def test_a_temperature_may_say_a_whole_number():
    class Two(Temperature):
        def beta(self, x):
            return 2

    tables = [
        TabularSQL("FrozenLake-v1", temperature, seed=0).learn(300).q
        for temperature in (Two(), Constant(2.0))
    ]
    assert np.array_equal(*tables)
