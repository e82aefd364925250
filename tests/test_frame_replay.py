"""FrameReplayBuffer against a list of full stacks, and against SB3's own buffers inside DQN."""

import pickle
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation, TimeLimit
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecFrameStack,
    VecNormalize,
    VecTransposeImage,
)

from cbsql.replay import FrameReplayBuffer, frames, stacked_frames

ATARI = spaces.Box(0, 255, (4, 84, 84), np.uint8)
ACTIONS = spaces.Discrete(4)
GAMMA = 0.9


class EveryIndex:
    """In place of a generator: `integers(high, size=high)` is every number below `high`."""

    @staticmethod
    def integers(high, size):
        assert high == size
        return np.arange(high)


@dataclass
class Transition:
    """What one environment's part of `add` was given, and which frames a ring must hold for it."""

    obs: np.ndarray
    next_obs: np.ndarray
    action: int
    reward: float
    done: bool
    timeout: bool
    oldest_frame: int
    frames_so_far: int


class AgainstFullStacks(RuleBasedStateMachine):
    """Whatever happens to the environments, every sample is what `add` was given."""

    @initialize(
        data=st.data(),
        rows=st.integers(1, 12),
        n_envs=st.integers(1, 3),
        stack=st.integers(2, 4),
        channels=st.integers(1, 2),
        n_steps=st.integers(1, 5),
        handle_timeouts=st.booleans(),
    )
    def start(self, data, rows, n_envs, stack, channels, n_steps, handle_timeouts):
        self.rows, self.n_envs, self.stack, self.n_steps = rows, n_envs, stack, n_steps
        self.handle_timeouts = handle_timeouts
        self.frame_shape = (channels, 3, 2)
        self.buffer = FrameReplayBuffer(
            rows * n_envs,
            spaces.Box(0, 255, (stack * channels, 3, 2), np.uint8),
            ACTIONS,
            device="cpu",
            n_envs=n_envs,
            handle_timeout_termination=handle_timeouts,
            n_steps=n_steps,
            gamma=GAMMA,
            frame_channels=channels,
        )
        self.log = [[] for _ in range(n_envs)]  # every transition ever, per environment
        self.stacks = [self.first_stack(data) for _ in range(n_envs)]

    def frame(self, data):
        # Few values, so that blank frames and frames equal to the one before happen by chance.
        seed = data.draw(st.integers(0, 30))
        values = np.random.default_rng(seed).integers(0, 3, self.frame_shape, np.uint8)
        return values * (seed > 4)

    def first_stack(self, data):
        frame = self.frame(data)
        older = {
            "zeros": [np.zeros_like(frame)] * (self.stack - 1),
            "repeated": [frame] * (self.stack - 1),
            "anything": [self.frame(data) for _ in range(self.stack - 1)],
        }[data.draw(st.sampled_from(["zeros", "repeated", "anything"]))]
        return np.stack([*older, frame])  # (stack, channels, height, width)

    def frames_of_first_stack(self, stack):
        """How many of its frames must be kept to rebuild a first stack."""
        images = [frame.tobytes() for frame in stack]
        blank = bytes(len(images[0]))
        kept = len(images)
        if images[0] == blank:
            while kept > 1 and images[-kept] == blank:
                kept -= 1
        else:
            while kept > 1 and images[-kept + 1] == images[0]:
                kept -= 1
        return kept

    @rule(data=st.data(), count=st.integers(1, 7))
    def add(self, data, count):
        for _ in range(count):
            self.add_one(data)

    def add_one(self, data):
        steps = []
        next_stacks = []
        for env in range(self.n_envs):
            obs = self.stacks[env]
            next_obs = np.concatenate([obs[1:], self.frame(data)[None]])
            kind = data.draw(
                st.sampled_from(["go on"] * 6 + ["end", "time-out", "life lost", "reset by hand"])
            )
            done = kind in ("end", "time-out", "life lost")
            steps.append((obs, next_obs, len(self.log[env]) % 4, done, kind == "time-out"))
            restart = kind in ("end", "time-out", "reset by hand")
            next_stacks.append(self.first_stack(data) if restart else next_obs)
        shape = (self.n_envs, *self.buffer.obs_shape)
        rewards = np.array(data.draw(st.lists(st.integers(-2, 2), min_size=3, max_size=3)))
        self.buffer.add(
            np.stack([step[0] for step in steps]).reshape(shape),
            np.stack([step[1] for step in steps]).reshape(shape),
            np.array([step[2] for step in steps]),
            rewards[: self.n_envs].astype(np.float32),
            np.array([step[3] for step in steps]),
            [{"TimeLimit.truncated": True} if step[4] else {} for step in steps],
        )
        for env, (obs, next_obs, action, done, timeout) in enumerate(steps):
            log = self.log[env]
            if log and (log[-1].next_obs == obs).all():
                frames_so_far, oldest = log[-1].frames_so_far, log[-1].oldest_frame
                # the oldest frame moves out once the stack is full of kept frames
                oldest = max(oldest, frames_so_far - self.stack)
            else:
                oldest = log[-1].frames_so_far if log else 0
                frames_so_far = oldest + self.frames_of_first_stack(obs)
            timeout = timeout and self.handle_timeouts
            log.append(
                Transition(
                    obs, next_obs, action, rewards[env], done, timeout, oldest, frames_so_far + 1
                )
            )
        self.stacks = next_stacks

    def sampleable(self):
        """Numbers of the newest transitions whose rows and frames both still fit."""
        total = len(self.log[0])
        ring = self.buffer.frames.shape[1]
        numbers = []
        for number in range(total - 1, max(total - self.rows, 0) - 1, -1):
            fits = [log[-1].frames_so_far - log[number].oldest_frame <= ring for log in self.log]
            if not all(fits):
                break
            numbers.append(number)
        return numbers

    @invariant()
    def samples_are_what_was_added(self):
        if not hasattr(self, "log") or not self.log[0]:
            return
        numbers = self.sampleable()
        assert self.buffer.size() == len(numbers) > 0
        self.buffer.rng = EveryIndex
        indices = self.buffer._draw_indices(len(numbers) * self.n_envs)
        expected = [
            (number % self.rows) * self.n_envs + env
            for number in numbers
            for env in range(self.n_envs)
        ]
        assert sorted(indices) == sorted(expected)

        samples = self.buffer._get_samples(np.array(expected))
        transitions = [self.expected(n, env) for n in numbers for env in range(self.n_envs)]
        fields = ("observations", "next_observations", "actions", "rewards", "dones", "discounts")
        for i, field in enumerate(fields):
            got = getattr(samples, field)
            if field == "discounts" and self.n_steps == 1:
                assert got is None
                continue
            wanted = np.stack([transition[i] for transition in transitions]).reshape(got.shape)
            # rewards and discounts: the same float32 additions in another order
            np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-6, atol=1e-6)
        states, discounts = self.buffer.path(np.array(expected))
        for i, (*_, passed) in enumerate(transitions):
            wanted = np.zeros(self.n_steps - 1)
            wanted[: len(passed)] = GAMMA ** np.arange(1, len(passed) + 1)
            np.testing.assert_allclose(discounts[i], wanted, rtol=1e-6)
            for got, obs in zip(states[i], passed, strict=False):
                np.testing.assert_array_equal(got.reshape(obs.shape), obs)

    def expected(self, number, env):
        """The n-step transition, step by step from the list."""
        log = self.log[env]
        total, discount, last, passed = 0.0, 1.0, number, []
        while True:
            step = log[last]
            total += discount * step.reward
            discount *= GAMMA
            newest = last == len(log) - 1
            if newest or step.done or last - number == self.n_steps - 1:
                break
            if not (log[last + 1].obs == step.next_obs).all():
                break
            last += 1
            passed.append(log[last].obs)
        end = float(step.done and not step.timeout)
        return log[number].obs, step.next_obs, log[number].action, total, end, discount, passed


AgainstFullStacks.TestCase.settings = settings(
    max_examples=60, stateful_step_count=15, deadline=None
)
TestAgainstFullStacks = AgainstFullStacks.TestCase


def fill(buffer, steps, episode=10, seed=0):
    """Add `steps` transitions of one environment; frame number t has the value t of 1..255."""
    shape = buffer.obs_shape
    stack = np.zeros((1, *shape), np.uint8)
    stack[0, -1] = 1
    for t in range(steps):
        next_stack = np.concatenate([stack[:, 1:], np.full((1, 1, *shape[1:]), t % 255 + 1)], 1)
        next_stack = next_stack.astype(np.uint8)
        done = (t + 1) % episode == 0
        buffer.add(
            stack, next_stack, np.array([t % 4]), np.array([float(t)]), np.array([done]), [{}]
        )
        stack = next_stack
        if done:
            stack = np.zeros_like(stack)
            stack[0, -1] = t % 255 + 1


def test_sampling_is_uniform_after_wrapping_and_early_eviction():
    space = spaces.Box(0, 255, (4, 2, 2), np.uint8)
    buffer = FrameReplayBuffer(40, space, ACTIONS, device="cpu", rng=np.random.default_rng(1))
    fill(buffer, 130, episode=4)
    assert buffer.size() < 40  # episodes of 4 steps: the ring of frames is the narrower limit
    rewards = buffer.sample(50_000).rewards.numpy().ravel()
    counts = np.bincount(rewards.astype(int), minlength=130)
    kept = counts[130 - buffer.size() :]
    assert counts[: 130 - buffer.size()].sum() == 0
    expected = 50_000 / len(kept)
    chi_square = ((kept - expected) ** 2 / expected).sum()
    freedom = len(kept) - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


class Drift(gym.Env):
    """A dot drifts over a small picture; leaving it at the right ends the episode."""

    observation_space = spaces.Box(0, 255, (36, 36, 1), np.uint8)
    action_space = spaces.Discrete(2)

    def picture(self):
        image = np.zeros((36, 36, 1), np.uint8)
        image[self.y, self.x] = 255
        return image

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.y = 0, int(self.np_random.integers(36))
        return self.picture(), {}

    def step(self, action):
        self.x += int(self.np_random.integers(2)) * (1 + action)
        self.y = (self.y + int(self.np_random.integers(3))) % 36
        ended = self.x > 35
        self.x = min(self.x, 35)
        return self.picture(), float(action), ended, False, {}


class DrawsOfSB3(FrameReplayBuffer):
    """The same transitions for the same state of NumPy's global generator as SB3's buffers."""

    def _draw_indices(self, batch_size):
        assert self.size() == (self.buffer_size if self.full else self.pos)
        rows = np.random.randint(0, self.size(), size=batch_size)  # noqa: NPY002
        envs = np.random.randint(0, self.n_envs, size=batch_size)  # noqa: NPY002
        return rows * self.n_envs + envs


def stack_last(buffer_class):
    """The same samples in other memory, which changes the rounding of convolutions."""

    def to_torch(self, array, copy=True):
        tensor = th.tensor(array)
        return tensor.contiguous(memory_format=th.channels_last) if tensor.dim() == 4 else tensor

    return type("StackLast", (buffer_class,), {"to_torch": to_torch})


def drift_env(n_envs, normalize=False):
    """Episodes of about 50 steps, of which the time limit cuts about half."""
    env = VecFrameStack(DummyVecEnv([lambda: TimeLimit(Drift(), 50)] * n_envs), n_stack=4)
    return VecNormalize(VecTransposeImage(env), norm_obs=False) if normalize else env


def train_drift(buffer_class, n_envs=1, n_steps=1, normalize=False, steps=300):
    kwargs = {} if n_steps == 1 else {"n_steps": n_steps, "gamma": 0.95}
    th.set_num_threads(1)
    model = DQN(
        "CnnPolicy",
        drift_env(n_envs, normalize),
        buffer_size=100 * n_envs,
        learning_starts=40,
        batch_size=8,
        train_freq=4,
        target_update_interval=50,
        gamma=0.95,
        seed=5,
        device="cpu",
        policy_kwargs={"features_extractor_kwargs": {"features_dim": 16}},
        replay_buffer_class=buffer_class,
        replay_buffer_kwargs=kwargs,
    )
    return model.learn(steps)


def weights(model):
    return {name: value.numpy() for name, value in model.policy.state_dict().items()}


@pytest.mark.parametrize(
    ("theirs", "n_envs", "n_steps", "normalize"),
    [
        (ReplayBuffer, 1, 1, False),
        (NStepReplayBuffer, 2, 3, False),
        (NStepReplayBuffer, 1, 2, True),
    ],
)
def test_dqn_learns_the_same_weights_as_with_sb3s_buffer(theirs, n_envs, n_steps, normalize):
    learned = weights(train_drift(DrawsOfSB3, n_envs, n_steps, normalize))
    reference = weights(train_drift(stack_last(theirs), n_envs, n_steps, normalize))
    for name, value in reference.items():
        np.testing.assert_array_equal(learned[name], value, err_msg=name)


def test_dqn_with_the_same_seed_learns_the_same_weights():
    first, second = (weights(train_drift(FrameReplayBuffer, steps=120)) for _ in range(2))
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value)


def test_the_default_generator_does_not_advance_numpys():
    np.random.seed(3)  # noqa: NPY002
    before = np.random.get_state()[2]  # noqa: NPY002
    buffers = [FrameReplayBuffer(50, ATARI, ACTIONS) for _ in range(2)]
    assert np.random.get_state()[2] == before  # noqa: NPY002
    draws = [buffer.rng.integers(1 << 60) for buffer in buffers]
    assert draws[0] == draws[1]
    np.random.random()  # noqa: NPY002
    assert FrameReplayBuffer(50, ATARI, ACTIONS).rng.integers(1 << 60) != draws[0]


def test_saving_and_loading_through_sb3_keeps_transitions_and_draws(tmp_path):
    model = train_drift(FrameReplayBuffer, steps=60)
    model.save_replay_buffer(tmp_path / "replay.pkl")
    kept = model.replay_buffer.sample(20)
    other = train_drift(FrameReplayBuffer, steps=50)
    other.load_replay_buffer(tmp_path / "replay.pkl")
    for left, right in zip(kept[:5], other.replay_buffer.sample(20)[:5], strict=True):
        assert th.equal(left, right)
    other.learn(60)  # starts with a reset, which no transition of the old buffer leads to


def test_two_batches_do_not_share_memory():
    buffer = FrameReplayBuffer(50, ATARI, ACTIONS, device="cpu")
    fill(buffer, 30)
    first = buffer.sample(8)
    copies = [tensor.clone() for tensor in first[:5]]
    buffer.sample(8).observations.zero_()
    for tensor, copy in zip(first[:5], copies, strict=True):
        assert th.equal(tensor, copy)


def test_memory_of_a_million_transitions():
    assert FrameReplayBuffer.bytes_needed(1_000_000, ATARI, ACTIONS) <= 7.3e9
    buffer = FrameReplayBuffer(1000, ATARI, ACTIONS)
    arrays = [value for value in vars(buffer).values() if isinstance(value, np.ndarray)]
    held = sum(array.nbytes for array in arrays) - buffer._frames_written.nbytes
    assert held == FrameReplayBuffer.bytes_needed(1000, ATARI, ACTIONS)
    # The pickle is all that it holds: no second copy hides behind a view.
    assert len(pickle.dumps(buffer)) < 1.02 * held


def test_too_little_memory_names_a_size_that_fits(monkeypatch):
    monkeypatch.setattr(frames, "available_bytes", lambda: 2_000_000_000)
    with pytest.raises(MemoryError, match=r"needs 7\.26 GB and 2\.00 GB .* buffer_size=247,") as e:
        FrameReplayBuffer(1_000_000, ATARI, ACTIONS)
    size = int(str(e.value).split("buffer_size=")[1].split(" ")[0].replace(",", ""))
    assert FrameReplayBuffer.bytes_needed(size, ATARI, ACTIONS) < 2_000_000_000
    monkeypatch.setattr(frames, "available_bytes", lambda: None)  # a system that does not tell
    FrameReplayBuffer(100, ATARI, ACTIONS)


def test_available_memory_is_between_nothing_and_all():
    available = frames.available_bytes()
    assert available is None or 0 < available < 1 << 50


def test_stacks_that_do_not_overlap_are_refused_and_leave_nothing_behind():
    space = spaces.Box(0, 255, (4, 5, 5), np.uint8)
    buffer = FrameReplayBuffer(10, space, ACTIONS, n_envs=2, device="cpu")
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 255, (2, 6, 5, 5), np.uint8)
    rest = (np.zeros(2, int), np.zeros(2), np.zeros(2, bool), [{}, {}])
    buffer.add(frames[:, :4], frames[:, 1:5], *rest)
    wrong = frames[:, 2:6].copy()
    wrong[1, 2, 4, 4] ^= 1
    before = pickle.dumps(buffer)
    with pytest.raises(ValueError, match=r"environment 1 .*replay_buffer_class=Replay"):
        buffer.add(frames[:, 1:5], wrong, *rest)
    assert pickle.dumps(buffer) == before
    with pytest.raises(ValueError, match=r"shape \(2, 5, 5, 4\)"):
        buffer.add(frames[:, 1:5], np.moveaxis(frames[:, 2:6], 1, 3), *rest)
    buffer.add(frames[:, 1:5], frames[:, 2:6], *rest)
    assert buffer.size() == 2


@pytest.mark.parametrize(
    ("space", "kwargs", "message"),
    [
        (spaces.Box(-1, 1, (4, 84, 84), np.float32), {}, "uint8 images"),
        (spaces.Box(0, 255, (1, 84, 84), np.uint8), {}, "at least two frames"),
        (spaces.Box(0, 255, (4, 84, 84), np.uint8), {"frame_channels": 3}, "at least two frames"),
        (spaces.Discrete(4), {}, "uint8 images"),
        (ATARI, {"optimize_memory_usage": True}, "leave optimize_memory_usage"),
        (ATARI, {"n_steps": 0}, "n_steps must be at least 1"),
        (ATARI, {"buffer_size": 0}, "buffer_size must be at least 1"),
    ],
)
def test_what_it_cannot_store_is_refused(space, kwargs, message):
    with pytest.raises(ValueError, match=message):
        FrameReplayBuffer(
            **{"buffer_size": 10, **kwargs}, observation_space=space, action_space=ACTIONS
        )


def test_an_empty_buffer_says_so():
    with pytest.raises(ValueError, match="empty"):
        FrameReplayBuffer(10, ATARI, ACTIONS).sample(1)


class GreyDrift(gym.ObservationWrapper):
    observation_space = spaces.Box(0, 255, (36, 36), np.uint8)

    def observation(self, observation):
        return observation[:, :, 0]


def test_stacked_frames_knows_where_frames_are_stacked():
    plain = DummyVecEnv([Drift])
    assert stacked_frames(plain) == 0
    assert stacked_frames(VecTransposeImage(VecFrameStack(plain, 4))) == 4
    three = VecTransposeImage(VecFrameStack(plain, 3))
    assert stacked_frames(VecNormalize(three, norm_obs=False)) == 3
    assert stacked_frames(VecNormalize(three)) == 0  # SB3 stores these as float32
    assert stacked_frames(VecFrameStack(plain, 4)) == 0  # stack on the last axis: not as SB3 stores
    assert stacked_frames(VecTransposeImage(VecFrameStack(plain, 1))) == 0
    inner = DummyVecEnv([lambda: Monitor(FrameStackObservation(GreyDrift(Drift()), 4))])
    assert stacked_frames(inner) == 4
    assert stacked_frames(DummyVecEnv([lambda: gym.make("CartPole-v1")])) == 0
