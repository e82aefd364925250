"""The sum tree against a list, and prioritised replay against lists of episodes."""

import math
import pickle
import re
import sys
from collections import deque
from dataclasses import dataclass, field

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from cbsql import SQL
from cbsql.replay import (
    FrameReplayBuffer,
    IndexedReplayBuffer,
    PrioritizedFrameReplayBuffer,
    PrioritizedReplayBuffer,
    SumTree,
)

VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)
STACK = 3
STACKED = spaces.Box(0, 255, (STACK, 1, 3), np.uint8)
ACTIONS = spaces.Discrete(4)
GAMMA = 0.9
SPACE = {
    IndexedReplayBuffer: VECTOR,
    PrioritizedReplayBuffer: VECTOR,
    FrameReplayBuffer: STACKED,
    PrioritizedFrameReplayBuffer: STACKED,
}
PRIORITIZED = (PrioritizedReplayBuffer, PrioritizedFrameReplayBuffer)


# The sum tree


PRIORITY = st.one_of(
    st.just(0.0), st.floats(0, 10), st.floats(1e-300, 1e-200), st.floats(1e100, 1e200)
)


class TreeAgainstList(RuleBasedStateMachine):
    @initialize(capacity=st.integers(1, 40))
    def start(self, capacity):
        self.tree = SumTree(capacity)
        self.list = [0.0] * capacity

    def pairs(self, data, priority=PRIORITY):
        index = st.integers(0, len(self.list) - 1)
        return data.draw(st.lists(st.tuples(index, priority), max_size=12))

    @rule(data=st.data(), keep_zeros=st.booleans())
    def set(self, data, keep_zeros):
        pairs = self.pairs(data)
        self.tree.set([i for i, _ in pairs], [p for _, p in pairs], keep_zeros=keep_zeros)
        for index, priority in pairs:
            if self.list[index] > 0 or not keep_zeros:
                self.list[index] = priority

    @rule(start=st.integers(-50, 50), count=st.integers(0, 50), priority=PRIORITY)
    def fill(self, start, count, priority):
        self.tree.fill(start, count, priority)
        for i in range(start, start + count):
            self.list[i % len(self.list)] = priority

    @rule(data=st.data(), wrong=st.sampled_from(["priority", "index"]))
    def refuse(self, data, wrong):
        capacity = len(self.list)
        bad = (
            (0, data.draw(st.sampled_from([math.nan, math.inf, -math.inf, -1e-9, 1.7e308])))
            if wrong == "priority"
            else (data.draw(st.sampled_from([-1, capacity, capacity + 100])), 1.0)
        )
        pairs = [*self.pairs(data), bad, *self.pairs(data)]
        with pytest.raises(ValueError, match=re.escape(f"priority {bad[1]} for index {bad[0]}")):
            self.tree.set([i for i, _ in pairs], [p for _, p in pairs])
        if wrong == "priority":
            with pytest.raises(ValueError, match=re.escape(f"priority {bad[1]} for index 0")):
                self.tree.fill(0, 1, bad[1])

    @invariant()
    def holds_the_list_and_its_sum(self):
        if not hasattr(self, "list"):
            return
        assert self.tree.get(range(len(self.list))).tolist() == self.list
        assert self.tree.total == pytest.approx(math.fsum(self.list), rel=1e-13, abs=0)
        # No trace of earlier priorities, not even in the last bit.
        fresh = SumTree(len(self.list))
        fresh.set(range(len(self.list)), self.list)
        assert self.tree._nodes.tolist() == fresh._nodes.tolist()

    @rule(uniforms=st.lists(st.floats(0, 1), min_size=1, max_size=20))
    def sample(self, uniforms):
        if not any(self.list):
            with pytest.raises(ValueError, match="All priorities are zero"):
                self.tree.sample(uniforms)
            return
        total = math.fsum(self.list)
        for uniform, index in zip(uniforms, self.tree.sample(uniforms), strict=True):
            below = math.fsum(self.list[:index])
            assert self.list[index] > 0
            assert below - 1e-12 * total <= uniform * total
            assert uniform * total <= below + self.list[index] + 1e-12 * total


TreeAgainstList.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestTreeAgainstList = TreeAgainstList.TestCase


@given(
    priorities=st.lists(PRIORITY, min_size=1, max_size=70).filter(any),
    scale=st.sampled_from([1.0, 1e-305, 1e105]),
)
@settings(max_examples=300, deadline=None)
def test_no_rounding_leads_to_an_index_of_priority_zero(priorities, scale):
    priorities = np.minimum(np.array(priorities) * scale, sys.float_info.max / 100)
    if not priorities.any():
        return
    tree = SumTree(len(priorities))
    tree.set(range(len(priorities)), priorities)
    borders = np.cumsum(priorities) / tree.total
    close = [np.nextafter(borders, 0), borders, np.nextafter(borders, 2)]
    wild = [0.0, -0.0, 1 - 2**-53, 1.0, 1 + 2**-52, 5.0, -1.0, math.nan, math.inf]
    indices = tree.sample(np.concatenate([*close, wild]))
    assert (indices < len(priorities)).all()
    assert (priorities[indices] > 0).all()


def test_of_three_tenths_the_end_of_the_sum_is_the_last_index():
    # 0.1 + 0.2 rounds up and 3 * 0.1 is not 0.3: a walk that subtracts ends beyond the last one.
    tree = SumTree(5)
    tree.set([0, 1, 2], [0.1, 0.2, 0.3])
    assert tree.sample([1.0, 0.0]).tolist() == [2, 0]


def chi_square_is_small(counts, probabilities):
    """Within five standard deviations of what the probabilities give, none where they are zero."""
    assert counts[probabilities == 0].sum() == 0
    expected = counts.sum() * probabilities[probabilities > 0]
    chi_square = ((counts[probabilities > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    return chi_square <= freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("capacity", [7, 64, 65])
def test_a_tree_samples_in_proportion(capacity):
    rng = np.random.default_rng(capacity)
    priorities = rng.random(capacity) ** 3
    priorities[1::5] = 0
    tree = SumTree(capacity)
    tree.set(np.arange(capacity), priorities)
    counts = np.bincount(tree.sample(rng.random(100_000)), minlength=capacity)
    assert chi_square_is_small(counts, priorities / priorities.sum())


# Episodes, and buffers filled with them


@dataclass
class Step:
    obs: np.ndarray
    action: int
    reward: float
    next_obs: np.ndarray


@dataclass
class Episode:
    steps: list[Step] = field(default_factory=list)
    how_it_ended: str = "still going"


class Player:
    """One environment: episodes of random length, observations that never repeat."""

    def __init__(self, space, seed, endings=("end", "life lost", "time-out", "reset by hand")):
        self.space, self.endings = space, endings
        self.rng = np.random.default_rng(seed)
        self.number = int(self.rng.integers(1, 250**2))
        self.episodes = []
        self.begin()

    def observe(self):
        """A new observation; pixels of a frame and numbers of a vector name its moment."""
        self.number += 1
        digits = [self.number % 250 + 1, self.number // 250 % 250, self.number // 250**2]
        if self.space is VECTOR:
            return np.array(digits, np.float32)
        frame = np.array(digits, np.uint8).reshape(1, 1, 3)
        return np.concatenate([self.obs[1:], frame])

    def begin(self, afresh=True):
        if afresh:
            self.obs = np.zeros(self.space.shape, np.uint8)
            self.obs = self.observe()
        self.episodes.append(Episode())
        self.steps_left = int(self.rng.integers(1, 8))

    def step(self):
        """Arguments of `add` for this environment."""
        episode = self.episodes[-1]
        reward = float(self.rng.integers(-4, 5))
        step = Step(self.obs, int(self.rng.integers(4)), reward, self.observe())
        episode.steps.append(step)
        self.obs = step.next_obs
        self.steps_left -= 1
        if self.steps_left == 0:
            episode.how_it_ended = self.endings[self.rng.integers(len(self.endings))]
            self.begin(afresh=episode.how_it_ended != "life lost")
        done = episode.how_it_ended in ("end", "life lost", "time-out")
        info = {"TimeLimit.truncated": True} if episode.how_it_ended == "time-out" else {}
        return step.obs, step.next_obs, step.action, step.reward, done, info

    def n_step_transitions(self, n_steps):
        """(obs, next_obs, action, return, end, discount) of every step there ever was."""
        for episode in self.episodes:
            length = len(episode.steps)
            for start, step in enumerate(episode.steps):
                k = min(n_steps, length - start)
                rewards = [later.reward for later in episode.steps[start : start + k]]
                yield (
                    step.obs,
                    episode.steps[start + k - 1].next_obs,
                    step.action,
                    sum(GAMMA**i * reward for i, reward in enumerate(rewards)),
                    start + k == length and episode.how_it_ended in ("end", "life lost"),
                    GAMMA**k,
                )


def play(buffers, players, steps):
    for _ in range(steps):
        columns = zip(*(player.step() for player in players), strict=True)
        *arrays, infos = columns
        for buffer in buffers:
            buffer.add(*map(np.array, arrays), list(infos))


def make(buffer_class, rows=30, n_envs=1, **kwargs):
    kwargs = {"device": "cpu", "gamma": GAMMA, "rng": np.random.default_rng(0), **kwargs}
    return buffer_class(rows * n_envs, SPACE[buffer_class], ACTIONS, n_envs=n_envs, **kwargs)


def make_and_play(buffer_class, steps, rows=30, n_envs=1, **kwargs):
    buffer = make(buffer_class, rows, n_envs, **kwargs)
    players = [Player(SPACE[buffer_class], seed) for seed in range(n_envs)]
    play([buffer], players, steps)
    return buffer, players


def stored_indices(buffer, rows_added):
    """Index of every transition that can be sampled, oldest row first."""
    rows = [number % buffer.buffer_size for number in range(rows_added - buffer.size(), rows_added)]
    return np.array([row * buffer.n_envs + env for row in rows for env in range(buffer.n_envs)])


def assert_samples_are(samples, transitions, n_steps):
    fields = ("observations", "next_observations", "actions", "rewards", "dones", "discounts")
    for i, name in enumerate(fields):
        got = getattr(samples, name)
        if name == "discounts" and n_steps == 1:
            assert got is None
            continue
        wanted = np.stack([transition[i] for transition in transitions]).reshape(got.shape)
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("buffer_class", [IndexedReplayBuffer, *PRIORITIZED])
@given(
    seed=st.integers(0, 1 << 30),
    steps=st.integers(1, 60),
    rows=st.integers(1, 25),
    n_envs=st.integers(1, 3),
    n_steps=st.integers(1, 6),
)
@settings(max_examples=60, deadline=None)
def test_every_step_of_every_episode_has_its_return(
    buffer_class, seed, steps, rows, n_envs, n_steps
):
    buffer = make(buffer_class, rows, n_envs, n_steps=n_steps)
    players = [Player(SPACE[buffer_class], seed + env) for env in range(n_envs)]
    play([buffer], players, steps)
    if buffer_class is not PrioritizedFrameReplayBuffer:  # whose frames may leave earlier
        assert buffer.size() == min(steps, rows)
    per_env = [list(player.n_step_transitions(n_steps))[-buffer.size() :] for player in players]
    expected = [per_env[env][row] for row in range(buffer.size()) for env in range(n_envs)]
    assert_samples_are(buffer._get_samples(stored_indices(buffer, steps)), expected, n_steps)


@pytest.mark.parametrize("buffer_class", PRIORITIZED)
@pytest.mark.parametrize("number", [float, np.float64])
def test_the_last_states_of_an_episode_by_hand(buffer_class, number):
    buffer = make(buffer_class, n_steps=3, gamma=number(GAMMA))
    player = Player(SPACE[buffer_class], seed=0, endings=["time-out"])
    player.steps_left = 4
    play([buffer], [player], 6)
    rewards = [step.reward for episode in player.episodes for step in episode.steps]
    batch = buffer._get_samples(np.arange(6))
    assert batch.rewards.dtype == batch.discounts.dtype == th.float32
    expected = [GAMMA**3, GAMMA**3, GAMMA**2, GAMMA, GAMMA**2, GAMMA]
    np.testing.assert_allclose(batch.discounts.numpy().ravel(), expected, rtol=1e-6)
    assert batch.dones.sum() == 0  # a time-out bootstraps, from what was seen last:
    last_obs = player.episodes[0].steps[-1].next_obs
    for start in (1, 2, 3):
        np.testing.assert_array_equal(batch.next_observations[start], last_obs)
    assert batch.rewards[2].item() == pytest.approx(rewards[2] + GAMMA * rewards[3])


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_one_index_is_the_transition_that_sb3_has_there(n_envs, n_steps):
    ours = make(IndexedReplayBuffer, 20, n_envs, n_steps=n_steps)
    theirs = (
        ReplayBuffer(20 * n_envs, VECTOR, ACTIONS, "cpu", n_envs)
        if n_steps == 1
        else NStepReplayBuffer(
            20 * n_envs, VECTOR, ACTIONS, "cpu", n_envs, n_steps=n_steps, gamma=GAMMA
        )
    )
    # SB3 does not notice a reset without `done`.
    players = [Player(VECTOR, seed, endings=["end", "time-out"]) for seed in range(n_envs)]
    play([ours, theirs], players, 53)
    np.random.seed(1)  # noqa: NPY002
    wanted = theirs.sample(200)
    np.random.seed(1)  # noqa: NPY002
    rows = np.random.randint(0, 20, 200)  # noqa: NPY002
    envs = np.random.randint(0, n_envs, 200)  # noqa: NPY002
    got = ours._get_samples(rows * n_envs + envs)
    for name, value in wanted._asdict().items():
        assert value is getattr(got, name) is None or th.equal(value, getattr(got, name)), name


@pytest.mark.parametrize(
    ("plain_class", "prioritized_class"),
    [
        (IndexedReplayBuffer, PrioritizedReplayBuffer),
        (FrameReplayBuffer, PrioritizedFrameReplayBuffer),
    ],
)
@pytest.mark.parametrize("n_steps", [1, 3])
def test_prioritizing_changes_the_draws_and_not_the_transitions(
    plain_class, prioritized_class, n_steps
):
    plain = make(plain_class, 20, 2, n_steps=n_steps)
    prioritized = make(prioritized_class, 20, 2, n_steps=n_steps)
    play([plain, prioritized], [Player(SPACE[plain_class], seed) for seed in (0, 1)], 47)
    indices = prioritized.sample(50).indices
    for left, right in zip(
        plain._get_samples(indices), prioritized._get_samples(indices), strict=False
    ):
        assert left is right is None or th.equal(left, right)


# Priorities


class AgainstDictionary(RuleBasedStateMachine):
    """Priorities of what is stored are those last given; what has left is never drawn."""

    @initialize(
        buffer_class=st.sampled_from(PRIORITIZED),
        rows=st.integers(1, 30),
        n_envs=st.integers(1, 3),
        exponent=st.sampled_from([0.0, 0.5, 1.0]),
        seed=st.integers(0, 1 << 30),
    )
    def start(self, buffer_class, rows, n_envs, exponent, seed):
        self.buffer = make(buffer_class, rows, n_envs, priority_exponent=exponent)
        self.players = [Player(SPACE[buffer_class], seed + env) for env in range(n_envs)]
        self.exponent = exponent
        self.old_indices = np.array([0])
        self.forget()

    def forget(self):
        self.rows_added = 0
        # one dictionary of priorities, by index, for each row that is stored; oldest first
        self.stored = deque()
        self.largest = 1.0

    @rule(steps=st.integers(1, 12))
    def add(self, steps):
        for _ in range(steps):
            first = self.rows_added % self.buffer.buffer_size * self.buffer.n_envs
            play([self.buffer], self.players, 1)
            self.rows_added += 1
            self.stored.append({first + env: self.largest for env in range(self.buffer.n_envs)})
            # How many fit is a matter for the tests of FrameReplayBuffer.
            while len(self.stored) > self.buffer.size():
                self.stored.popleft()

    @rule(
        data=st.data(), batch_size=st.integers(1, 20), stale=st.booleans(), as_tensor=st.booleans()
    )
    def update(self, data, batch_size, stale, as_tensor):
        if not self.stored:
            return
        indices = self.old_indices if stale else self.buffer.sample(batch_size).indices
        self.old_indices = indices
        priority = st.sampled_from([0.0, 1e-9, 0.125, 0.5, 0.75, 2.0, 7.0])
        priorities = data.draw(st.lists(priority, min_size=len(indices), max_size=len(indices)))
        given = th.tensor(priorities, requires_grad=True)[:, None] if as_tensor else priorities
        self.buffer.update_priorities(indices, given)
        for row in self.stored:
            row.update(
                {i: max(p, 1e-6) for i, p in zip(indices, priorities, strict=True) if i in row}
            )
        self.largest = max(self.largest, *priorities)

    @rule(value=st.sampled_from([math.nan, math.inf, -0.5]))
    def refuse(self, value):
        if not self.stored:
            return
        index = next(iter(self.stored[-1]))
        before = pickle.dumps(self.buffer)
        with pytest.raises(ValueError, match=f"priority {value} for index {index}"):
            self.buffer.update_priorities([index, index], [100.0, value])
        with pytest.raises(ValueError, match="2 indices and 1 priorities"):
            self.buffer.update_priorities([index, index], [100.0])
        assert pickle.dumps(self.buffer) == before

    @rule()
    def reset(self):
        self.buffer.reset()
        self.forget()

    @invariant()
    def draws_follow_the_dictionary(self):
        if not hasattr(self, "buffer"):
            return
        priorities = {}
        for row in self.stored:
            priorities.update(row)
        capacity = self.buffer.buffer_size * self.buffer.n_envs
        leaves = [
            priorities[i] ** self.exponent if i in priorities else 0.0 for i in range(capacity)
        ]
        got = self.buffer._tree.get(range(capacity))
        np.testing.assert_allclose(got, leaves, rtol=1e-6)  # a tensor's are float32
        if not self.stored:
            with pytest.raises(ValueError, match="empty"):
                self.buffer.sample(1)
            return
        batch = self.buffer.sample(64)
        assert set(batch.indices) <= set(priorities)
        count, total = len(priorities), sum(leaves)
        weights = [
            (count * leaves[i] / total) ** -self.buffer.importance_exponent for i in batch.indices
        ]
        expected = np.array(weights)[:, None] / max(weights)
        np.testing.assert_allclose(batch.weights.numpy(), expected, rtol=1e-5)
        assert batch.weights.dtype == th.float32


AgainstDictionary.TestCase.settings = settings(
    max_examples=60, stateful_step_count=15, deadline=None
)
TestAgainstDictionary = AgainstDictionary.TestCase


@pytest.mark.parametrize("buffer_class", PRIORITIZED)
def test_transitions_are_drawn_in_proportion_to_the_power_of_their_priorities(buffer_class):
    buffer, _ = make_and_play(buffer_class, 81, 25, n_envs=2, priority_exponent=0.7)
    indices = stored_indices(buffer, 81)
    priorities = np.random.default_rng(2).random(len(indices)) * 3
    buffer.update_priorities(indices, priorities)
    drawn = np.concatenate([buffer.sample(32).indices for _ in range(2000)])
    probabilities = np.zeros(50)
    probabilities[indices] = priorities**0.7 / (priorities**0.7).sum()
    assert chi_square_is_small(np.bincount(drawn, minlength=50), probabilities)


@pytest.mark.parametrize("buffer_class", PRIORITIZED)
def test_a_reset_forgets_transitions_priorities_and_their_maximum(buffer_class):
    buffer, players = make_and_play(buffer_class, 20, 15)
    buffer.update_priorities([2], [50.0])
    buffer.reset()
    with pytest.raises(ValueError, match="empty"):
        buffer.sample(1)
    play([buffer], players, 3)
    assert buffer._tree.get(range(15)).tolist() == [1.0] * 3 + [0.0] * 12


def test_a_batch_has_one_index_from_every_part_of_the_total():
    buffer, _ = make_and_play(PrioritizedReplayBuffer, 32, 32)
    for _ in range(5):
        assert sorted(buffer.sample(32).indices) == list(range(32))


@pytest.mark.parametrize("exponent", [0.0, 0.4, 1.0])
def test_full_importance_weights_make_up_for_the_priorities(exponent):
    buffer, _ = make_and_play(PrioritizedReplayBuffer, 20, 20)
    buffer.update_priorities([3, 4, 5], [16.0, 0.25, 4.0])
    buffer.importance_exponent = exponent
    weights = buffer._get_samples(np.array([3, 4, 5])).weights.numpy().ravel()
    # With a priority exponent of 1/2 the probabilities are as 4 : 1/2 : 2.
    np.testing.assert_allclose(weights, [0.125**exponent, 1, 0.25**exponent], rtol=1e-6)


def test_frames_that_leave_early_take_their_priorities_along():
    buffer = make(PrioritizedFrameReplayBuffer, 200)
    player = Player(STACKED, 0, endings=["end"])
    for _ in range(300):
        player.steps_left = 1  # every step starts an episode, which takes two frames
        play([buffer], [player], 1)
    assert buffer.size() < 120
    buffer.update_priorities(np.arange(200), np.ones(200))  # also of those that have left
    drawn = np.concatenate([buffer.sample(50).indices for _ in range(200)])
    assert set(drawn) == set(stored_indices(buffer, 300))


# In use


def test_vec_normalize_normalises_observations_and_rewards():
    env = VecNormalize(DummyVecEnv([lambda: gym.make("CartPole-v1")] * 2))
    env.obs_rms.mean, env.obs_rms.var = np.arange(4.0), np.full(4, 4.0)
    env.ret_rms.var = np.array(9.0)
    buffer = PrioritizedReplayBuffer(40, env.observation_space, env.action_space, "cpu", n_envs=2)
    rng = np.random.default_rng(0)
    for _ in range(20):
        obs, next_obs = rng.normal(size=(2, 2, 4)).astype(np.float32)
        buffer.add(obs, next_obs, np.zeros(2), rng.random(2), np.zeros(2), [{}, {}])
    batch = buffer.sample(16, env)
    plain = buffer._get_samples(batch.indices)
    for name in ("observations", "next_observations"):
        expected = (getattr(plain, name).numpy() - np.arange(4)) / 2
        np.testing.assert_allclose(getattr(batch, name).numpy(), expected, atol=1e-4)
    np.testing.assert_allclose(batch.rewards.numpy(), plain.rewards.numpy() / 3, atol=1e-6)
    assert th.equal(batch.weights, plain.weights)


def test_the_counted_batch_is_the_learned_batch_before_normalisation():
    env = VecNormalize(DummyVecEnv([lambda: gym.make("CartPole-v1")]), norm_reward=False)
    model = SQL(
        "MlpPolicy",
        env,
        replay_buffer_class=PrioritizedReplayBuffer,
        learning_starts=50,
        batch_size=8,
        device="cpu",
        seed=0,
    ).learn(120)
    batch, counted = model._sample(16)
    np.testing.assert_array_equal(batch.indices, counted.indices)
    np.testing.assert_allclose(
        batch.observations.numpy(), env.normalize_obs(counted.observations.numpy()), rtol=1e-6
    )


def test_going_back_forgets_the_priorities_of_what_came_after():
    buffer, players = make_and_play(PrioritizedReplayBuffer, 4, 20)
    state = buffer.state_dict()
    play([buffer], players, 10)
    buffer.load_state_dict(state)
    assert buffer._tree.get(range(20)).tolist() == [1.0] * 4 + [0.0] * 16


def test_saving_and_loading_keeps_priorities_and_draws():
    buffer, _ = make_and_play(PrioritizedReplayBuffer, 30, 20)
    buffer.update_priorities(np.arange(20), np.arange(20))
    copy = pickle.loads(pickle.dumps(buffer))
    buffer.update_priorities([7], [1000.0])
    copy.update_priorities([7], [1000.0])
    batch, other = buffer.sample(64), copy.sample(64)
    np.testing.assert_array_equal(batch.indices, other.indices)
    assert (batch.indices == 7).sum() > 10


def test_smoke_of_sb3s_dqn_with_a_prioritized_buffer_of_two_environments():
    env = DummyVecEnv([lambda: gym.make("CartPole-v1")] * 2)
    model = DQN(
        "MlpPolicy",
        env,
        learning_starts=50,
        buffer_size=200,
        batch_size=8,
        device="cpu",
        replay_buffer_class=PrioritizedReplayBuffer,
        replay_buffer_kwargs={"n_steps": 3, "gamma": 0.99, "priority_exponent": 0.6},
    ).learn(300)
    assert model.replay_buffer.sample(4).weights.shape == (4, 1)


@pytest.mark.parametrize(
    ("space", "kwargs", "message"),
    [
        (spaces.Dict({"a": VECTOR}), {}, "one array"),
        (VECTOR, {"optimize_memory_usage": True}, "leave optimize_memory_usage"),
        (VECTOR, {"n_steps": 0}, "n_steps must be at least 1"),
        (
            VECTOR,
            {"rng": np.random.Generator(np.random.Philox(0))},
            "made by np.random.default_rng",
        ),
        (VECTOR, {"priority_exponent": -0.1}, "priority_exponent must be from 0 to 1"),
        (VECTOR, {"importance_exponent": 1.1}, "importance_exponent must be from 0 to 1"),
    ],
)
def test_what_it_cannot_do_is_refused(space, kwargs, message):
    with pytest.raises(ValueError, match=message):
        PrioritizedReplayBuffer(10, space, ACTIONS, **kwargs)


def test_a_tree_of_nothing_is_refused():
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        SumTree(0)
