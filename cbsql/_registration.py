"""The names of environments in Gymnasium, which imports them when they are made."""

import gymnasium as gym

MINATAR_GAMES = ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders")


def register() -> None:
    """Register the chain-walk, and `MinAtar/<game>-v0` (all actions) and `-v1` (useful ones).

    MinAtar leaves this to an entry point that Gymnasium has not read since its version 1.0.
    """
    gym.register("cbsql/ChainWalk-v0", "cbsql.envs.chain_walk:ChainWalk")
    for name in MINATAR_GAMES:
        game = name.replace("SpaceInvaders", "space_invaders").lower()
        for version, minimal in (("v0", False), ("v1", True)):
            environment = f"MinAtar/{name}-{version}"
            if environment not in gym.registry:
                gym.register(
                    environment,
                    "cbsql.envs.minatar:make_minatar",
                    kwargs={"game": game, "use_minimal_action_set": minimal},
                    disable_env_checker=True,  # it complains of pictures with brightness 0 to 1
                )
