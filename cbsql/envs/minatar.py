"""The MinAtar games as Gymnasium environments."""

import logging
from typing import Any

import gymnasium as gym


def make_minatar(**kwargs: Any) -> gym.Env[Any, Any]:
    """Make a MinAtar game without the warning about seaborn, which only its renderer needs."""
    logging.disable(logging.WARNING)
    try:
        from minatar.gym import BaseEnv
    finally:
        logging.disable(logging.NOTSET)

    class MinAtar(BaseEnv):  # type: ignore[misc]
        def reset(self, **kwargs: Any) -> Any:
            # A sticky first action would otherwise repeat the last one of the episode before.
            self.game.last_action = 0
            return super().reset(**kwargs)

    return MinAtar(**kwargs)
