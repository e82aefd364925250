"""Soft Q-learning with a table, for any environment with discrete observations and actions."""

import copy
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from rich.progress import track

from cbsql import files
from cbsql.counts import named_counter
from cbsql.tabular.rule import find, soft_update
from cbsql.temperature import CountBased, Temperature, from_config


class TabularSQL:
    """Soft Q-learning on a table Q (states, actions), with epsilon-greedy behaviour.

    :param env: an environment with Discrete observations and actions, or the id of one
    :param temperature: beta(s); by default the paper's, ``CountBased(ExactCounter(), kappa=0.01)``.
        ``Greedy()`` makes it Q-learning.
    :param learning_rate: how far a value moves to its target, in (0, 1]
    :param gamma: discount factor, in [0, 1)
    :param epsilon: probability of a random action
    :param seed: of the learner's own generator, from which it also seeds the environment
    """

    def __init__(
        self,
        env: gym.Env[Any, Any] | str,
        temperature: Temperature | None = None,
        learning_rate: float = 0.1,
        gamma: float = 0.99,
        epsilon: float = 0.1,
        seed: int | None = None,
    ) -> None:
        self.env = gym.make(env) if isinstance(env, str) else env
        self._first_state, states = _discrete(self.env.observation_space, "observations")
        self._first_action, actions = _discrete(self.env.action_space, "actions")
        if not 0 < learning_rate <= 1:
            raise ValueError(f"learning_rate must be in (0, 1], not {learning_rate!r}.")
        if not 0 <= gamma < 1:
            raise ValueError(f"gamma must be in [0, 1), not {gamma!r}.")
        if not 0 <= epsilon <= 1:
            raise ValueError(f"epsilon must be a probability, not {epsilon!r}.")
        self.temperature = CountBased() if temperature is None else temperature
        if isinstance(self.temperature, CountBased) and self.temperature.counter is None:
            self.temperature = copy.copy(self.temperature)  # others may be given the same
            name = self.temperature.counter_name or "exact"
            self.temperature.install(named_counter(name, self.env.observation_space))
        self.learning_rate, self.gamma, self.epsilon = learning_rate, gamma, epsilon
        self.q: NDArray[np.float64] = np.zeros((states, actions))
        self.num_timesteps = 0
        self._rng = np.random.default_rng(seed)

    def learn(self, total_timesteps: int, progress_bar: bool = False) -> "TabularSQL":
        """Take ``total_timesteps`` more steps, learning from each; starts with a new episode."""
        steps = range(total_timesteps)
        state = None
        for _ in track(steps, "learning") if progress_bar else steps:
            if state is None:
                observation, _ = self.env.reset(seed=int(self._rng.integers(2**31)))
                state = int(observation) - self._first_state
            action = self._act(state)
            observation, reward, terminated, truncated, _ = self.env.step(
                action + self._first_action
            )
            next_state = int(observation) - self._first_state
            beta = self.temperature.beta(np.array([next_state]))
            q = self.q[:, :, None]  # one lane
            soft_update(
                q,
                find(q, np.array([state])),
                np.array([action]),
                np.array([float(reward)]),
                find(q, np.array([next_state])),
                0.0 if terminated else self.gamma,
                np.asarray(beta, np.float64).reshape(1),
                self.learning_rate,
                np.empty((4, 1)),
            )
            self.temperature.update(np.array([state]))
            self.num_timesteps += 1
            state = None if terminated or truncated else next_state
        return self

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = True,
    ) -> tuple[NDArray[np.int64], Any]:
        """Actions for one observation or a batch, in the form of Stable-Baselines3's models.

        Greedy, or epsilon-greedy if not ``deterministic``; equal values are decided by lot.
        """
        states = np.asarray(observation) - self._first_state
        epsilon = 0.0 if deterministic else self.epsilon
        actions = np.array([self._act(int(s), epsilon) for s in states.reshape(-1)])
        return actions.reshape(states.shape) + self._first_action, state

    def save(self, path: str | Path) -> None:
        """Write one file of numbers: the table, the temperature's state, and the settings."""
        document = files.Document("tabular")
        for name in ("learning_rate", "gamma", "epsilon"):
            document[name] = getattr(self, name)
        document["num_timesteps"] = self.num_timesteps
        document["rng"] = self._rng.bit_generator.state
        document["q"] = torch.from_numpy(self.q)
        document["temperature"] = self.temperature.config()
        document["counts"] = self.temperature.state_dict()
        document.write(path, "zip")

    @classmethod
    def load(
        cls,
        path: str | Path,
        env: gym.Env[Any, Any] | str,
        temperature: Temperature | None = None,
    ) -> "TabularSQL":
        """Read what :meth:`save` wrote; it goes on learning as the saved learner would.

        A temperature that is not this package's, or counts with a counter that is neither the
        default one nor has a name, has to be given: files hold numbers, never code.
        """
        document = files.read(path, "tabular", "zip")
        with files.blame(path):
            if temperature is None:
                temperature = from_config(document["temperature"])
            settings = {name: document[name] for name in ("learning_rate", "gamma", "epsilon")}
            learner = cls(env, temperature, **settings)
            q = document["q"].numpy()
            if (q.shape, q.dtype) != (learner.q.shape, learner.q.dtype):
                raise ValueError(
                    f"it has a table of (states, actions) = {q.shape}; this environment needs "
                    f"{learner.q.shape}."
                )
            learner.q, learner.num_timesteps = q, document["num_timesteps"]
            learner._rng.bit_generator.state = document["rng"]
            learner.temperature.load_state_dict(document["counts"])
        return learner

    def _act(self, state: int, epsilon: float | None = None) -> int:
        row = self.q[state]
        if self._rng.random() < (self.epsilon if epsilon is None else epsilon):
            return int(self._rng.integers(len(row)))
        best = np.flatnonzero(row == row.max())
        return int(best[0] if len(best) == 1 else self._rng.choice(best))


def _discrete(space: spaces.Space[Any], what: str) -> tuple[int, int]:
    """First value and number of values of a Discrete space."""
    if not isinstance(space, spaces.Discrete):
        raise ValueError(
            f"TabularSQL needs an environment with Discrete {what}, and this one has {space}. "
            "For other observations use the deep algorithms."
        )
    return int(space.start), int(space.n)
