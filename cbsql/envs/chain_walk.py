"""The noisy chain-walk of the paper: five states in a row, and a reward that hides in noise.

Action 1 steps forward; in the last state it earns +1. Everything else costs 0.1, and action 0 leads
back. Every reward is corrupted with standard Gaussian noise. Five steps just suffice to collect the
+1 once, so the best expected return of an episode is 0.6.
"""

from enum import IntEnum
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from cbsql._jit import jit

STATES = 5
ACTIONS = 2
EPISODE_STEPS = 5


class Retreat(IntEnum):
    """How many states action 0 leads towards the start, which the paper leaves to a figure."""

    back = 1
    """One."""
    stay = 0
    """None."""
    start = STATES - 1
    """All of them."""


class End(IntEnum):
    """What the end of an episode means to the learner."""

    timelimit = 0
    """A time limit that is not part of the problem: learners bootstrap from the last state."""
    terminal = 1
    """The end of the problem: nothing follows the last state."""


@jit()
def chain_step(state: int, action: int, retreat: int) -> tuple[int, float]:
    """The next state and the expected reward."""
    if action == 1:
        return min(state + 1, STATES - 1), 1.0 if state == STATES - 1 else -0.1
    return max(state - retreat, 0), -0.1


def chain_model(retreat: Retreat) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Transition probabilities (states, actions, states) and expected rewards (states, actions)."""
    transitions = np.zeros((STATES, ACTIONS, STATES))
    rewards = np.zeros((STATES, ACTIONS))
    for state, action in np.ndindex(STATES, ACTIONS):
        next_state, rewards[state, action] = chain_step(state, action, int(retreat))
        transitions[state, action, next_state] = 1
    return transitions, rewards


class ChainWalk(gym.Env[np.int64, np.int64]):
    """The chain-walk as a Gymnasium environment, registered as ``cbsql/ChainWalk-v0``.

    :param retreat: where action 0 leads: "back" (one state), "stay" or "start"
    :param end: what happens after five steps: "timelimit" truncates, "terminal" terminates
    :param noise: standard deviation of the Gaussian noise on every reward

    ``info["expected_reward"]`` is the reward without noise.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 (Gymnasium declares it as an instance variable)

    def __init__(self, retreat: str = "back", end: str = "timelimit", noise: float = 1.0) -> None:
        self._retreat = _member(Retreat, "retreat", retreat)
        self._end = _member(End, "end", end)
        if not 0 <= noise < np.inf:
            raise ValueError(f"noise must be a standard deviation of at least 0, not {noise!r}.")
        self._noise = float(noise)
        self.observation_space = spaces.Discrete(STATES)
        self.action_space = spaces.Discrete(ACTIONS)
        self._state = 0
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.int64, dict[str, Any]]:
        """Back to the first state."""
        super().reset(seed=seed)
        self._state = self._steps = 0
        return np.int64(0), {}

    def step(self, action: np.int64) -> tuple[np.int64, SupportsFloat, bool, bool, dict[str, Any]]:
        """Take one of the five steps of an episode."""
        self._state, expected = chain_step(self._state, int(action), int(self._retreat))
        self._steps += 1
        reward = expected + self._noise * self.np_random.standard_normal()
        over = self._steps >= EPISODE_STEPS
        terminated = over and self._end is End.terminal
        truncated = over and self._end is End.timelimit
        return np.int64(self._state), reward, terminated, truncated, {"expected_reward": expected}


def _member(kind: type[Any], name: str, value: str) -> Any:
    if value not in kind.__members__:
        raise ValueError(f"{name} must be one of {', '.join(kind.__members__)}, not {value!r}.")
    return kind[value]
