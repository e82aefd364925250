"""Replay in which every transition has an index, with n-step returns."""

from typing import Any, ClassVar

import numpy as np
import torch as th
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from cbsql._jit import jit


class IndexedReplayBuffer(ReplayBuffer):
    """Stable-Baselines3 replay buffer whose draws and returns can be changed one at a time.

    It stores what SB3's `ReplayBuffer` stores and returns the samples of SB3's `ReplayBuffer` or,
    with `n_steps` above 1, of `NStepReplayBuffer`. Returns stop at the end of an episode, at the
    newest transition and, unlike SB3's, at a reset that no `done` announced, such as that of a
    second `learn()`.

    Indices are drawn from an own generator, `rng`. By default it is derived from the state of
    NumPy's global generator, which SB3 seeds with its `seed=`, without advancing it. A transition
    has the index `row * n_envs + environment`; `_draw_indices` chooses indices and `_get_samples`
    turns them into transitions, so that a subclass can choose differently.

    :param buffer_size: transitions to keep, over all environments
    :param optimize_memory_usage: SB3's own option, which loses the last observation of an episode;
        it must stay False
    :param handle_timeout_termination: bootstrap at `info["TimeLimit.truncated"]`, as SB3 does
    :param n_steps: steps of the return; with more than one, samples carry their `discounts`
    :param gamma: discount of the return, used only with `n_steps` above 1
    :param rng: generator of the sampled indices
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_steps: int = 1,
        gamma: float = 0.99,
        rng: np.random.Generator | None = None,
    ) -> None:
        if isinstance(observation_space, spaces.Dict):
            raise ValueError(
                f"{type(self).__name__} stores observations that are one array, got "
                f"{observation_space}. Use stable_baselines3.common.buffers.DictReplayBuffer, or "
                "gymnasium.wrappers.FlattenObservation."
            )
        if optimize_memory_usage:
            raise ValueError(
                f"{type(self).__name__} needs the last observation of every episode, which SB3's "
                "option would lose: leave optimize_memory_usage=False. To save memory with stacked "
                "frames, use cbsql.replay.FrameReplayBuffer, which stores each frame once."
            )
        if n_steps < 1:
            raise ValueError(f"n_steps must be at least 1, got {n_steps}.")
        if rng is not None and not isinstance(rng.bit_generator, np.random.PCG64):
            raise ValueError(
                f"rng must be made by np.random.default_rng, which files can hold, got {rng}."
            )
        self.n_steps = n_steps
        self.gamma = float(gamma)  # one of NumPy's would make float64 of returns
        # Seeding from the state of the global generator instead of from a draw leaves the draws of
        # SB3's own exploration as they would be with SB3's buffer.
        _, key, position, *_ = np.random.get_state()  # noqa: NPY002
        seeds = np.random.SeedSequence([*key, position]).generate_state(4)
        self.rng = rng or np.random.default_rng(seeds)
        self._allocate(
            buffer_size,
            observation_space,
            action_space,
            device,
            n_envs=n_envs,
            handle_timeout_termination=handle_timeout_termination,
        )
        self.reset()

    def _allocate(self, *args: Any, **kwargs: Any) -> None:
        """Make the arrays, given arguments of SB3's buffer: what other storage overrides."""
        super().__init__(*args, **kwargs)
        # Whether the next row does not continue this one.
        self._breaks: NDArray[np.bool_] = np.zeros(self.dones.shape, np.bool_)

    def reset(self) -> None:
        """Forget all transitions."""
        super().reset()
        self._rows_written = 0

    def rings(self) -> dict[str, tuple[NDArray[Any], int]]:
        """Arrays that are written round and round, and how many rows each has been given so far.

        Row i is at position i modulo the length. A row never changes once its successor is there.
        """
        return {name: (getattr(self, name), self._rows_written) for name in self._per_row}

    _per_row: ClassVar[tuple[str, ...]] = (
        *("observations", "next_observations"),
        *("actions", "rewards", "dones", "timeouts", "_breaks"),
    )

    def state_dict(self) -> dict[str, Any]:
        """What else there is to know, besides `rings`, to go on with the same samples."""
        return {"rows_written": self._rows_written, "generator": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, with the arrays of `rings` in place.

        :raises ValueError: if it does not fit the arrays, on which compiled code relies
        """
        written = state["rows_written"]
        if type(written) is not int or written < 0:
            raise ValueError(f"{written!r} is no number of rows.")
        self._rows_written = written
        self.pos, self.full = written % self.buffer_size, written >= self.buffer_size
        self.rng.bit_generator.state = state["generator"]

    def add(
        self,
        obs: NDArray[Any],
        next_obs: NDArray[Any],
        action: NDArray[Any],
        reward: NDArray[Any],
        done: NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        """Store one transition of each environment; arrays have the environment as first axis."""
        row = self.pos
        super().add(obs, next_obs, action, reward, done, infos)
        if self._rows_written:
            # Row -1 is the last one, which is what precedes row 0 after a wrap.
            differs = self.observations[row] != self.next_observations[row - 1]
            self._breaks[row - 1] = differs.reshape(self.n_envs, -1).any(axis=1)
        self._rows_written += 1

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> ReplayBufferSamples:
        """Draw transitions, uniformly and with replacement; `env` normalises them."""
        if self.size() == 0:
            raise ValueError("The buffer is empty: add transitions before sampling.")
        return self._get_samples(self._draw_indices(batch_size), env)

    def _draw_indices(self, batch_size: int) -> NDArray[np.int64]:
        """Draw the indices of transitions, uniformly over all that can be sampled."""
        start = (self.pos - self.size()) % self.buffer_size * self.n_envs
        draws = self.rng.integers(self.size() * self.n_envs, size=batch_size)
        return (start + draws) % (self.buffer_size * self.n_envs)

    def _get_samples(
        self, batch_inds: NDArray[np.int64], env: VecNormalize | None = None
    ) -> ReplayBufferSamples:
        """Build the transitions with these indices; every call returns new tensors."""
        rows, envs = np.divmod(batch_inds, self.n_envs)
        last_rows, rewards, ends, steps = self._follow(rows, envs)
        obs, next_obs = self._observations(rows, last_rows, envs)
        returns = self._normalize_reward(rewards, env)  # (batch, n_steps), zero after an end
        discounts = None  # the algorithm's own gamma, as with SB3's one-step buffer
        if self.n_steps > 1:
            weights = self.gamma ** np.arange(self.n_steps, dtype=np.float32)
            returns = (returns * weights).sum(axis=1, keepdims=True)
            discounts = self._tensor(self.gamma**steps)
        return ReplayBufferSamples(
            observations=self._tensor(self._normalize_obs(obs, env)),
            actions=self._tensor(self.actions[rows, envs]),
            next_observations=self._tensor(self._normalize_obs(next_obs, env)),
            dones=self._tensor(ends),
            rewards=self._tensor(returns),
            discounts=discounts,
        )

    def path(
        self, indices: NDArray[np.int64], env: VecNormalize | None = None
    ) -> tuple[th.Tensor, th.Tensor]:
        """Return the states s_{t+1} to s_{t+n-1} that the n-step return of each index passes.

        They are (batch, n_steps - 1, *observation). With them come their discounts gamma^k,
        (batch, n_steps - 1), which are zero after the end of a shorter return; the states there
        are the first one again.
        """
        rows, envs = np.divmod(indices, self.n_envs)
        *_, steps = self._follow(rows, envs)
        ahead = np.arange(1, self.n_steps)
        passed = ahead < steps  # (batch, n_steps - 1)
        path_rows = ((rows[:, None] + passed * ahead) % self.buffer_size).ravel()
        states, _ = self._observations(path_rows, path_rows, envs.repeat(len(ahead)))
        discounts = np.where(passed, np.float32(self.gamma) ** ahead.astype(np.float32), 0)
        return (
            self._tensor(self._normalize_obs(states, env)).view(*passed.shape, *self.obs_shape),
            self._tensor(discounts.astype(np.float32)),
        )

    def _follow(self, rows: NDArray[np.int64], envs: NDArray[np.int64]) -> Any:
        storage = self.rewards, self.dones, self.timeouts, self._breaks
        return _follow(*storage, rows, envs, self.pos, self.n_steps)

    def _observations(
        self, rows: NDArray[np.int64], last_rows: NDArray[np.int64], envs: NDArray[np.int64]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Observations of `rows` and next observations of `last_rows`, in new arrays."""
        return self.observations[rows, envs], self.next_observations[last_rows, envs]

    def _tensor(self, array: Any) -> th.Tensor:
        """Give the memory of a new array to a tensor."""
        tensor = th.from_numpy(array)
        # Stacks of frames come with channels last, which pays on the CPU only.
        return tensor if self.device.type == "cpu" else tensor.to(self.device).contiguous()


@jit()
def _follow(
    all_rewards: NDArray[np.float32],  # this and the following: (rows, environments)
    dones: NDArray[np.float32],
    timeouts: NDArray[np.float32],
    breaks: NDArray[np.bool_],
    rows: NDArray[np.int64],  # (batch,)
    envs: NDArray[np.int64],
    pos: int,
    n_steps: int,
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Follow each transition over the steps of its return.

    Returns its last row (batch,), its rewards (batch, n_steps), whether a true end of the episode
    closes it (batch, 1), and its number of steps (batch, 1).
    """
    last_rows = np.empty(rows.size, np.int64)
    rewards = np.zeros((rows.size, n_steps), np.float32)
    ends = np.empty((rows.size, 1), np.float32)
    steps = np.empty((rows.size, 1), np.float32)
    for b in range(rows.size):
        row, env = rows[b], envs[b]
        step = 0
        rewards[b, 0] = all_rewards[row, env]
        while step + 1 < n_steps:
            following = (row + 1) % all_rewards.shape[0]
            ended = dones[row, env] != 0 or timeouts[row, env] != 0 or breaks[row, env]
            if ended or following == pos:
                break
            row = following
            step += 1
            rewards[b, step] = all_rewards[row, env]
        last_rows[b] = row
        ends[b, 0] = dones[row, env] * (1 - timeouts[row, env])
        steps[b, 0] = step + 1
    return last_rows, rewards, ends, steps
