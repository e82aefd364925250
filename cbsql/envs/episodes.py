"""Episodes that can be played again: each has a seed of its own, so it is its seed and actions."""

from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.vec_env import VecEnv


class ReplayableEpisodes(gym.Wrapper[Any, Any, Any, Any]):
    """Resets every episode with a new seed, and remembers that seed and the actions since.

    A process that knows these can bring its own copy of any environment to the same moment, without
    the environment's help, as long as seed and actions are all that an episode depends on.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._rng = np.random.default_rng()
        self._seed = 0
        self._actions: list[Any] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode; a seed is that of all episodes from here on."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        return self._start(int(self._rng.integers(2**31)), options)

    def _start(
        self, seed: int, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self._seed, self._actions = seed, []
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        """Step, and remember the action."""
        self._actions.append(np.asarray(action).tolist())
        return self.env.step(action)

    def episode(self) -> dict[str, Any]:
        """Everything needed to come back to this moment, ready for JSON."""
        generator = self._rng.bit_generator.state
        return {"generator": generator, "seed": self._seed, "actions": self._actions}

    def replay(self, episode: dict[str, Any]) -> Any:
        """Come back to a moment; returns the observation there, or None if there is no way back."""
        self._rng.bit_generator.state = episode["generator"]
        observation, _ = self._start(episode["seed"])
        ended = False
        for action in episode["actions"]:
            if ended:
                return None
            # The kind of number that the environment was given at first.
            action = np.asarray(action, self.action_space.dtype)[()]
            observation, _, end, late, _ = self.step(action)
            ended = end or late
        return None if ended else observation


def episodes(env: VecEnv) -> list[dict[str, Any]]:
    """The moment of each environment of a vector."""
    inner: Any = env.unwrapped
    if hasattr(inner, "replay_episodes"):  # it does so itself
        return list(inner.episodes())
    return list(env.env_method("episode"))


def replay_episodes(env: VecEnv, moments: list[dict[str, Any]]) -> list[Any]:
    """Bring each environment of a vector to its moment; returns the observations there.

    None stands for an environment that went another way, which is then at its end or before it.
    """
    inner: Any = env.unwrapped
    if hasattr(inner, "replay_episodes"):
        return list(inner.replay_episodes(moments))
    return [env.env_method("replay", moment, indices=i)[0] for i, moment in enumerate(moments)]
