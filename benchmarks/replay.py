"""Replay and Atari: this package beside Stable-Baselines3's own buffers and wrappers.

    python benchmarks/replay.py

All rows of a table are measured in turns in one run, as medians, so that a busy machine slows all
of them. Stable-Baselines3's Atari wrappers need OpenCV, which the `dev` extra installs.
"""

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack

from cbsql.envs import make_atari_vec_env
from cbsql.experiments.provenance import provenance
from cbsql.experiments.runner import keep_memory
from cbsql.replay import (
    FrameReplayBuffer,
    PrioritizedFrameReplayBuffer,
    PrioritizedReplayBuffer,
    SumTree,
)

TRANSITIONS = 10_000
PRIORITIES = 1_000_000
ROUNDS = 15
SPACE = spaces.Box(0, 255, (4, 84, 84), np.uint8)
ACTIONS = spaces.Discrete(4)
WORK_SECONDS = 0.003


def transitions() -> Iterator[tuple]:
    """Endless episodes of 250 steps over the same random frames, as `add` takes them."""
    frames = np.random.default_rng(0).integers(0, 256, (255, 84, 84), np.uint8)
    action, reward = np.zeros(1, np.int64), np.zeros(1, np.float32)
    while True:
        for t in range(250):
            obs, next_obs = frames[None, t : t + 4], frames[None, t + 1 : t + 5]
            yield obs, next_obs, action, reward, np.array([t == 249]), [{}]


def add_all(buffer: ReplayBuffer, rows: list[tuple]) -> None:
    for row in rows:
        buffer.add(*row)


def sample_and_drop(buffer: ReplayBuffer, times: int) -> None:
    """As a learner does: keeping the batches would measure the system's page faults."""
    for _ in range(times):
        buffer.sample(32)


def bench_replay() -> None:
    common = (TRANSITIONS, SPACE, ACTIONS, "cpu")
    buffers: dict[str, ReplayBuffer] = {
        "cbsql FrameReplayBuffer": FrameReplayBuffer(*common),
        "the same, 3-step returns": FrameReplayBuffer(*common, n_steps=3),
        "the same, prioritised": PrioritizedFrameReplayBuffer(*common, n_steps=3),
        "SB3 ReplayBuffer": ReplayBuffer(*common),
        "SB3, optimize_memory_usage": ReplayBuffer(
            *common, optimize_memory_usage=True, handle_timeout_termination=False
        ),
    }
    source = transitions()
    for buffer in buffers.values():
        for _ in range(TRANSITIONS):
            buffer.add(*next(source))
        buffer.sample(32)
    adds: dict[str, list[float]] = {name: [] for name in buffers}
    samples: dict[str, list[float]] = {name: [] for name in buffers}
    for _ in range(ROUNDS):
        for name, buffer in buffers.items():
            rows = [next(source) for _ in range(200)]
            adds[name].append(seconds(lambda b=buffer, rows=rows: add_all(b, rows)) / 200)
            samples[name].append(seconds(lambda b=buffer: sample_and_drop(b, 60)) / 60)
    print(f"## Replay of 4 x 84 x 84 transitions, {TRANSITIONS:,} held\n")
    print("| buffer | GB per 1M | add, us | sample of 32, us |")
    print("|---|---|---|---|")
    for name, buffer in buffers.items():
        arrays = [value for value in vars(buffer).values() if isinstance(value, np.ndarray)]
        size = sum(array.nbytes for array in arrays) / TRANSITIONS * 1e6 / 1e9
        add, sample = (statistics.median(times[name]) * 1e6 for times in (adds, samples))
        print(f"| {name} | {size:.2f} | {add:.1f} | {sample:.0f} |")


class NumpyTree:
    """The usual vectorised sum tree, to compare with: a batch goes up or down in NumPy calls."""

    def __init__(self, capacity: int) -> None:
        self.first_leaf = 1 << (capacity - 1).bit_length()
        self.nodes = np.zeros(2 * self.first_leaf)

    def set(self, indices: np.ndarray, priorities: np.ndarray) -> None:
        nodes = self.first_leaf + indices
        self.nodes[nodes] = priorities
        while nodes[0] > 1:
            nodes = nodes // 2
            self.nodes[nodes] = self.nodes[2 * nodes] + self.nodes[2 * nodes + 1]

    def sample(self, uniforms: np.ndarray) -> np.ndarray:
        parts = uniforms * self.nodes[1]
        nodes = np.ones(len(parts), np.int64)
        while nodes[0] < self.first_leaf:
            left = self.nodes[2 * nodes]
            to_right = parts >= left
            parts = parts - left * to_right
            nodes = 2 * nodes + to_right
        return nodes - self.first_leaf


def bench_tree() -> None:
    ours, usual = SumTree(PRIORITIES), NumpyTree(PRIORITIES)
    buffer = PrioritizedReplayBuffer(PRIORITIES, spaces.Box(-1, 1, (4,)), ACTIONS, "cpu")
    for tree in (ours, usual, buffer._tree):  # as if a million transitions had been added
        tree.set(np.arange(PRIORITIES), np.ones(PRIORITIES))
    rows: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
        "cbsql SumTree": (ours.set, ours.sample),
        "the same in NumPy": (usual.set, usual.sample),
        "cbsql PrioritizedReplayBuffer": (
            buffer.update_priorities,
            lambda uniforms: buffer._draw_indices(len(uniforms)),
        ),
    }
    rng = np.random.default_rng(0)
    sets: dict[str, list[float]] = {name: [] for name in rows}
    draws: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(ROUNDS):
        indices = rng.integers(PRIORITIES, size=(400, 32))
        priorities, uniforms = rng.random((2, 400, 32))
        for name, (change, draw) in rows.items():
            sets[name].append(seconds(lambda f=change: [*map(f, indices, priorities)]) / 400)  # noqa: B023
            draws[name].append(seconds(lambda f=draw: [*map(f, uniforms)]) / 400)  # noqa: B023
    print(f"\n## Sum tree of {PRIORITIES:,} priorities\n")
    print("| tree | change 32, us | draw 32, us |")
    print("|---|---|---|")
    for name in rows:
        change, draw = (statistics.median(times[name]) * 1e6 for times in (sets, draws))
        print(f"| {name} | {change:.1f} | {draw:.1f} |")


def bench_atari() -> None:
    def theirs(n_envs: int) -> VecEnv:
        return VecFrameStack(make_atari_env("BreakoutNoFrameskip-v4", n_envs), 4)

    def step(env: VecEnv, actions: np.ndarray) -> None:
        env.step(actions)

    def step_beside_work(env: VecEnv, actions: np.ndarray) -> None:
        env.step_async(actions)
        stop = time.perf_counter() + WORK_SECONDS
        while time.perf_counter() < stop:
            pass
        env.step_wait()

    rows: dict[str, tuple[VecEnv, Callable[[VecEnv, np.ndarray], None]]] = {}
    for n_envs in (1, 4):
        rows[f"cbsql make_atari_vec_env, {n_envs}"] = (
            make_atari_vec_env("breakout", n_envs=n_envs),
            step,
        )
        rows[f"SB3 AtariWrapper, DummyVecEnv, VecFrameStack, {n_envs}"] = theirs(n_envs), step
    beside = f"beside {WORK_SECONDS * 1e3:.0f} ms of other work"
    rows[f"cbsql, 1, {beside}"] = make_atari_vec_env("breakout"), step_beside_work
    rows[f"SB3, 1, {beside}"] = theirs(1), step_beside_work

    rng = np.random.default_rng(0)
    rates: dict[str, list[float]] = {name: [] for name in rows}
    for env, _ in rows.values():
        env.reset()
    for _ in range(ROUNDS):
        for name, (env, play) in rows.items():
            actions = rng.integers(4, size=(60, env.num_envs))
            took = seconds(lambda e=env, p=play, a=actions: [p(e, row) for row in a])
            rates[name].append(60 * env.num_envs / took)
    print("\n## Atari environments (Breakout)\n")
    print("| environment, games at a time | agent steps/s |")
    print("|---|---|")
    for name, values in rates.items():
        print(f"| {name} | {statistics.median(values):,.0f} |")


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    th.set_num_threads(1)  # as in sweeps; otherwise SB3's copies wait for a second core
    keep_memory()  # as in runs
    bench_replay()
    bench_tree()
    bench_atari()
    print(f"\n{provenance()['machine']}\n")


if __name__ == "__main__":
    main()
