"""What a policy scores in Q*bert that always chooses the same action.

    python results/table2/constant.py

It prints the scores of the four lives of three games for each action.
"""

import numpy as np

from cbsql.envs import make_atari_vec_env


def lives(action: int, seed: int) -> list[float]:
    """The scores of the lives of one game."""
    env = make_atari_vec_env("qbert", "nature", seed=seed)
    env.reset()
    scores = []
    while True:
        _, _, _, (info,) = env.step(np.array([action]))
        if "life" in info:
            scores.append(float(info["life"]["score"]))
        if "episode" in info:
            return scores


if __name__ == "__main__":
    for action, name in enumerate(("none", "fire", "up", "right", "left", "down")):
        print(name, *(lives(action, seed) for seed in range(3)))
