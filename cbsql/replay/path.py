"""Samples of n-step returns that carry the states between their ends."""

from typing import Any, NamedTuple

import numpy as np
import torch as th
from numpy.typing import NDArray
from stable_baselines3.common.buffers import NStepReplayBuffer
from stable_baselines3.common.vec_env import VecNormalize


class PathSamples(NamedTuple):
    """SB3's samples, and the states s_{t+1} to s_{t+n-1} that an n-step return passes."""

    observations: th.Tensor
    actions: th.Tensor
    next_observations: th.Tensor
    dones: th.Tensor
    rewards: th.Tensor
    discounts: th.Tensor
    path_observations: th.Tensor
    """(batch, n_steps - 1, *observation); beyond the end of a shorter return, any state."""
    path_discounts: th.Tensor
    """(batch, n_steps - 1): gamma^k for s_{t+k}, and zero beyond the end."""


class PathReplayBuffer(NStepReplayBuffer):
    """SB3's n-step buffer, whose samples are `PathSamples`."""

    def _get_samples(  # type: ignore[override]
        self, batch_inds: NDArray[np.int64], env: VecNormalize | None = None
    ) -> PathSamples:
        # SB3 draws the environments in its own method: draw them here, and let it draw them again.
        before = np.random.get_state()  # noqa: NPY002
        envs = np.random.randint(0, self.n_envs, size=len(batch_inds))  # noqa: NPY002
        np.random.set_state(before)  # noqa: NPY002
        samples = super()._get_samples(batch_inds, env)

        rows = (batch_inds[:, None] + np.arange(1, self.n_steps)) % self.buffer_size
        before_rows = rows - 1  # -1 is the last row, which precedes row 0
        where = before_rows, envs[:, None]
        ended = (self.dones[where] + self.timeouts[where]) > 0
        passed = ~np.logical_or.accumulate(ended | (rows == self.pos), axis=1)
        observations = self.observations[rows, envs[:, None]]
        return PathSamples(
            **samples._asdict(),
            path_observations=self.to_torch(self._normalize_obs(observations, env)),  # type: ignore[arg-type]
            path_discounts=self.to_torch(path_discounts(passed, self.gamma)),
        )


def path_discounts(passed: NDArray[np.bool_], gamma: float) -> NDArray[Any]:
    """Discounts (batch, n_steps - 1) of the states that a return passes."""
    powers = gamma ** np.arange(1, passed.shape[1] + 1, dtype=np.float32)
    return np.where(passed, powers, np.float32(0))
