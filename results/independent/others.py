"""DQN and Rainbow by other people on MinAtar, with the settings of our own runs beside them.

    python results/independent/others.py dqn Breakout 0 --authors MinAtar/examples >> others.csv
    python results/independent/others.py rainbow Breakout 0 >> others.csv

The first is the script of MinAtar's authors (github.com/kenjyoung/MinAtar, examples/dqn.py), the
second Tianshou's Rainbow (tianshou 2.0.1). Neither is installed with cbsql. Prints a line: who,
game, seed, agent steps, games that ended, mean score of the last 100 of them, seconds.
"""

import argparse
import random
import sys
import tempfile
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th

import cbsql  # noqa: F401 (registers MinAtar)
from cbsql.experiments.spec import RAINBOW_MINATAR


def authors_dqn(game: str, steps: int, folder: str) -> list[float]:
    """With an update every 4 steps, and the exploration of our preset."""
    sys.path.insert(0, folder)
    import dqn
    from minatar import Environment

    dqn.NUM_FRAMES = steps
    dqn.TRAINING_FREQ = 4
    dqn.TARGET_NETWORK_UPDATE_FREQ = 250  # updates: 1,000 steps
    # Ours falls from 1 to 0.1 in 20,000 steps from the first; this one begins after 5,000.
    dqn.EPSILON, dqn.FIRST_N_FRAMES = 0.775, 15_000
    with tempfile.TemporaryDirectory() as out:
        name = {"SpaceInvaders": "space_invaders"}.get(game, game.lower())
        dqn.dqn(Environment(name), False, False, f"{out}/run")
        returns: list[float] = th.load(f"{out}/run_data_and_weights", weights_only=False)["returns"]
    return returns[:-1]  # the last game did not end


class Scores(gym.Wrapper[Any, Any, Any, Any]):
    """Keeps the scores of all games that ended."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.finished: list[float] = []
        self.score = 0.0

    def reset(self, **kwargs: Any) -> Any:
        """Begin a game."""
        self.score = 0.0
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        """Add a reward."""
        observation, reward, end, late, info = super().step(int(action))
        self.score += float(reward)
        if end or late:
            self.finished.append(self.score)
        return observation, reward, end, late, info


def tianshou_rainbow(game: str, steps: int, seed: int) -> list[float]:
    """With one-step returns: of several steps it takes the distribution at the next state."""
    from tianshou.algorithm.modelfree.c51 import C51Policy
    from tianshou.algorithm.modelfree.rainbow import RainbowDQN
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.data import Collector, PrioritizedVectorReplayBuffer
    from tianshou.env import DummyVectorEnv
    from tianshou.utils.net.common import ActionReprNet
    from tianshou.utils.net.discrete import NoisyLinear
    from tianshou.utils.torch_utils import policy_within_training_step, torch_train_mode

    settings = RAINBOW_MINATAR.settings
    network, atoms = settings["policy_kwargs"], 51
    scores = Scores(gym.make(f"MinAtar/{game}-v1"))
    height, width, channels = scores.observation_space.shape
    space = scores.action_space

    class Net(ActionReprNet):
        """The network of MinAtar's authors with Rainbow's last layer, as in our preset."""

        def __init__(self) -> None:
            super().__init__()
            self.features = th.nn.Sequential(
                th.nn.Conv2d(channels, 16, 3),
                th.nn.ReLU(),
                th.nn.Flatten(),
                th.nn.Linear(16 * (height - 2) * (width - 2), 128),
                th.nn.ReLU(),
            )
            self.advantage = NoisyLinear(128, int(space.n) * atoms, 0.5)
            self.value = NoisyLinear(128, atoms, 0.5)

        def forward(self, obs: Any, state: Any = None, info: Any = None) -> tuple[th.Tensor, Any]:
            images = th.as_tensor(np.asarray(obs), dtype=th.float32).permute(0, 3, 1, 2)
            features = self.features(images)
            advantage = self.advantage(features).view(-1, int(space.n), atoms)
            value = self.value(features).view(-1, 1, atoms)
            return (value + advantage - advantage.mean(1, keepdim=True)).softmax(2), state

    policy = C51Policy(
        model=Net(),
        action_space=space,
        num_atoms=atoms,
        v_min=network["v_min"],
        v_max=network["v_max"],
    )
    adam = AdamOptimizerFactory(lr=settings["learning_rate"], eps=1.5e-4)
    algorithm = RainbowDQN(policy=policy, optim=adam, gamma=0.99, target_update_freq=250)
    buffer = PrioritizedVectorReplayBuffer(100_000, buffer_num=1, alpha=0.5, beta=0.4)
    env = DummyVectorEnv([lambda: scores])
    env.seed(seed)
    collector = Collector(policy, env, buffer)
    collector.reset()
    # By lot, because its noise stays the same until the first update.
    collector.collect(n_step=settings["learning_starts"], random=True)
    with policy_within_training_step(policy), torch_train_mode(algorithm):
        for step in range(settings["learning_starts"], steps, 4):
            collector.collect(n_step=4)
            buffer.set_beta(0.4 + 0.6 * step / steps)
            algorithm.update(buffer=buffer, sample_size=32)
    return scores.finished


def main() -> None:
    """Train one learner and print its line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("algorithm", choices=("dqn", "rainbow"))
    parser.add_argument("game")
    parser.add_argument("seed", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--authors", default=".", help="folder with dqn.py of MinAtar's authors")
    given = parser.parse_args()
    th.set_num_threads(1)
    random.seed(given.seed)
    np.random.seed(given.seed)  # noqa: NPY002 (theirs)
    th.manual_seed(given.seed)
    start = time.perf_counter()
    if given.algorithm == "dqn":
        steps = given.steps or 50_000
        scores = authors_dqn(given.game, steps, given.authors)
    else:
        steps = given.steps or 30_000
        scores = tianshou_rainbow(given.game, steps, given.seed)
    seconds = time.perf_counter() - start
    key = (given.algorithm, given.game, given.seed, steps, len(scores))
    print(",".join(map(str, (*key, f"{np.mean(scores[-100:]):.4g}", f"{seconds:.1f}"))))


if __name__ == "__main__":
    main()
