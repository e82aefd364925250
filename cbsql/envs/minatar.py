"""The MinAtar games as Gymnasium environments."""

import logging
from typing import Any

import gymnasium as gym

GAMES = ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders")


def register() -> None:
    """Register `MinAtar/<game>-v0` (all actions) and `-v1` (useful actions) as MinAtar would.

    MinAtar leaves this to an entry point that Gymnasium has not read since its version 1.0.
    """
    for name in GAMES:
        game = name.replace("SpaceInvaders", "space_invaders").lower()
        for version, minimal in (("v0", False), ("v1", True)):
            environment = f"MinAtar/{name}-{version}"
            if environment not in gym.registry:
                kwargs = {"game": game, "use_minimal_action_set": minimal}
                gym.register(
                    environment,
                    "cbsql.envs.minatar:make_minatar",
                    kwargs=kwargs,
                    disable_env_checker=True,  # it complains of pictures with brightness 0 to 1
                )


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
