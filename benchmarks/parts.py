"""What training is made of, each part beside the one of SB3 or Torch that it stands for.

    python benchmarks/parts.py [--threads 1]

Both of a pair are measured in turns, as medians, so that a busy machine slows both.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from stable_baselines3.common.torch_layers import NatureCNN

from cbsql.deep.networks import MinAtarCNN
from cbsql.deep.optim import Adam, RMSprop, clipped_step
from cbsql.experiments.bench import AsPublished
from cbsql.experiments.provenance import provenance
from cbsql.experiments.runner import keep_memory, make_env, make_model
from cbsql.experiments.spec import RunSpec

ROUNDS = 100
IMAGE = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)


def compare(name: str, theirs: Callable[[], Any], ours: Callable[[], Any]) -> None:
    """Print a row of the table, in microseconds."""
    times: dict[Any, list[float]] = {theirs: [], ours: []}
    for turn in range(ROUNDS + 5):
        for call, values in times.items():
            start = time.perf_counter()
            call()
            if turn >= 5:
                values.append(1e6 * (time.perf_counter() - start))
    before, after = (statistics.median(values) for values in times.values())
    print(f"| {name} | {before:,.0f} | {after:,.0f} | {before / after:.2f} |", flush=True)


def stepping(optimizer: Any, learnt: list[th.nn.Parameter], **options: Any) -> Callable[[], None]:
    made = optimizer(learnt, **options)
    return lambda: clipped_step(made, learnt, 10.0)


def passing(network: th.nn.Module, images: th.Tensor) -> Callable[[], None]:
    """A forward and a backward pass from a batch of images as a buffer has it."""

    def passes() -> None:
        network.zero_grad()
        network(images.float() / 255).sum().backward()

    return passes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    th.set_num_threads(arguments.threads)
    keep_memory()
    record = provenance()
    print(f"{record['machine']}, {arguments.threads} torch threads, commit {record['commit']}\n")
    print("| part | theirs, us | ours, us | ratio |\n|---|---|---|---|")
    rmsprop = {"lr": 1e-9, "alpha": 0.95, "eps": 0.01, "centered": True}
    sizes = {
        "Nature CNN": NatureCNN(IMAGE),
        "two layers of 256": th.nn.Sequential(*layers(4, 256, 256, 2)),
    }
    for size, network in sizes.items():
        learnt = list(network.parameters())
        for parameter in learnt:
            parameter.grad = th.randn_like(parameter)
        for their_class, our_class, options in (
            (th.optim.RMSprop, RMSprop, rmsprop),
            (th.optim.Adam, Adam, {"lr": 1e-9}),
        ):
            compare(
                f"{our_class.__name__} and clipping, {size}",
                stepping(their_class, learnt, **options),
                stepping(our_class, learnt, **options),
            )
    frames = th.randint(256, (32, *IMAGE.shape), dtype=th.uint8)
    compare(
        "forward and backward, Nature CNN, frames stacked or interleaved",
        passing(sizes["Nature CNN"], frames),
        passing(sizes["Nature CNN"], frames.contiguous(memory_format=th.channels_last)),
    )
    planes = gym.spaces.Box(0, 1, (10, 10, 4), bool)
    images = th.rand(32, *planes.shape) < 0.1
    compare(
        "forward and backward, MinAtar's network, as published or ours",
        passing(AsPublished(planes), images),
        passing(MinAtarCNN(planes), images),
    )
    for game, algorithm in (
        ("CartPole-v1", "dqn"),
        ("MinAtar/Breakout-v1", "dqn"),
        ("MinAtar/Breakout-v1", "rainbow"),
        ("breakout", "dqn"),
    ):
        spec = RunSpec(game, algorithm, settings={"buffer_size": 1_000})
        env = make_env(spec)
        model = make_model(spec, env)
        model.exploration_rate = 0.0
        model.policy.set_training_mode(False)
        _, obs = model._setup_learn(1), model._last_obs
        compare(
            f"an action in {game}, {algorithm}",
            lambda policy=model.policy, obs=obs: policy.predict(obs),
            lambda model=model, obs=obs: model.predict(obs),
        )
        env.close()


def layers(*widths: int) -> list[th.nn.Module]:
    return [th.nn.Linear(a, b) for a, b in pairwise(widths)]


if __name__ == "__main__":
    main()
