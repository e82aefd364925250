"""Rainbow on Breakout beside Tianshou's, which has to be installed: the same network and batches.

    pip install --no-deps tianshou==2.0.1    # and what it then says is missing
    python benchmarks/rainbow.py [--threads 2] [--blocks 7]

Both have 20,000 transitions stored, an update of 32 every four agent steps, three-step returns and
the convolutions of the Nature network. Figures are medians of turns of 200 agent steps.
"""

import argparse
import importlib.util
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import ale_py
import gymnasium as gym
import torch as th

from cbsql.experiments import bench
from cbsql.experiments.provenance import provenance
from cbsql.experiments.runner import make_env, make_model
from cbsql.experiments.spec import RunSpec, preset

gym.register_envs(ale_py)
STORED = 20_000  # transitions in the replay buffers
N_STEPS = 3


def ours(algorithm: str) -> Callable[[int], Any]:
    spec = RunSpec("breakout", algorithm)
    network = {"features_extractor_kwargs": {"channels": (32, 64, 64)}}
    settings = {
        "policy_kwargs": {**preset(spec).settings["policy_kwargs"], **network},
        "buffer_size": STORED,
        "learning_starts": 0,
        "n_steps": N_STEPS,
    }
    spec = RunSpec("breakout", algorithm, steps=10**6, settings=settings)
    return bench._learning(bench._filled(make_model(spec, make_env(spec))))


def tianshou() -> Callable[[int], Any]:
    os.environ["TQDM_DISABLE"] = "1"
    from tianshou.algorithm.modelfree.c51 import C51Policy
    from tianshou.algorithm.modelfree.rainbow import RainbowDQN
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.data import Collector, PrioritizedVectorReplayBuffer
    from tianshou.env import DummyVectorEnv
    from tianshou.env.atari.atari_network import RainbowNet, ScaledObsInputActionReprNet
    from tianshou.utils.torch_utils import policy_within_training_step

    def make() -> gym.Env[Any, Any]:
        env = gym.make("BreakoutNoFrameskip-v4")
        env = gym.wrappers.AtariPreprocessing(env, scale_obs=False)
        return gym.wrappers.FrameStackObservation(env, 4)

    env = DummyVectorEnv([make])
    space = env.action_space[0]
    net = ScaledObsInputActionReprNet(RainbowNet(c=4, h=84, w=84, action_shape=(space.n,)))
    policy = C51Policy(model=net, action_space=space)
    algorithm = RainbowDQN(
        policy=policy,
        optim=AdamOptimizerFactory(lr=6.25e-5, eps=1.5e-4),
        n_step_return_horizon=N_STEPS,
        target_update_freq=2_000,
    )
    buffer = PrioritizedVectorReplayBuffer(
        STORED,
        buffer_num=1,
        ignore_obs_next=True,
        save_only_last_obs=True,
        stack_num=4,
        alpha=0.5,
        beta=0.4,
    )
    collector = Collector(policy, env, buffer)
    collector.reset()
    collector.collect(n_step=STORED, random=True)

    def block(steps: int) -> None:
        for _ in range(steps // 4):
            with policy_within_training_step(policy):
                collector.collect(n_step=4)
                algorithm.update(buffer=buffer, sample_size=32)

    return block


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=7)
    arguments = parser.parse_args()
    th.set_num_threads(arguments.threads)
    if not importlib.util.find_spec("tianshou"):
        print("Nothing to compare Rainbow with: Tianshou is not installed.")
        return
    loops = {"Tianshou's Rainbow": tianshou}
    loops |= {name: partial(ours, name) for name in ("rainbow", "rainbow-cbsql")}
    record = provenance()
    print(f"{record['machine']}, {arguments.threads} torch threads, commit {record['commit']}\n")
    print(*bench.compare(loops, 200, arguments.blocks), sep="\n")


if __name__ == "__main__":
    main()
