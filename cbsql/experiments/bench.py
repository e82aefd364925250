"""How fast training is: beside Stable-Baselines3 and a loop by hand, and as a run grows.

Whatever is compared is built first and then trains in turns, a block of agent steps each, so that a
busy machine slows all of it. Figures are medians over the blocks, by the wall clock. Loops of
different libraries have a process each: what one does to Torch's threads would slow the others.
"""

import gc
import importlib.util
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import torch as th
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.logger import configure
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack
from torch import nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from cbsql.experiments.provenance import provenance
from cbsql.experiments.runner import keep_memory, make_env, make_model
from cbsql.experiments.spec import RunSpec, preset

gym.register_envs(ale_py)

Block = Callable[[int], Any]
"""Trains for a number of agent steps."""

BLOCK_STEPS = {"breakout": 200, "MinAtar/Breakout-v1": 2_000, "CartPole-v1": 2_560}
"""Games that are measured, and the agent steps of a block."""
ALGORITHMS = ("dqn", "sql", "cbsql", "rainbow", "rainbow-cbsql")
STORED = 100_000  # transitions in the replay buffers
GROWTH = (10_000, 100_000, 1_000_000)
BATCHES = (32, 128, 512)
PLAYED = 3_000
"""Transitions of random play, with copies of which a buffer is filled."""
EPSILON = 0.1
_EXPLORATION = {"exploration_initial_eps": EPSILON, "exploration_final_eps": EPSILON}


def report(parts: list[str], games: list[str], threads: int, blocks: int) -> Iterator[str]:
    """Lines of a report in Markdown, as they are measured."""
    th.set_num_threads(threads)
    keep_memory()
    record = provenance()
    yield f"{record['machine']}, {threads} torch threads, commit {record['commit']}"
    yield ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    if "loops" in parts:
        for game in games:
            yield from _loops(game, blocks)
    if "growth" in parts:
        yield from _growth(blocks)
    if "batches" in parts:
        yield from _batches(blocks)
    if "pair" in parts:
        yield from _pair()


PARTS: tuple[str, ...] = ("loops", "growth", "batches", "pair")


def _loops(game: str, blocks: int) -> Iterator[str]:
    yield from ("", f"## Training on {game}, {STORED:,} transitions stored", "")
    loops: dict[str, Callable[[], Block]] = {}
    if game != "breakout" or importlib.util.find_spec("cv2"):
        loops["SB3 DQN"] = partial(_sb3, game)
    else:
        yield "SB3's DQN is left out: its Atari wrappers need OpenCV (opencv-python-headless).\n"
    if game == "breakout":
        loops |= {"DQN by hand": _by_hand, "networks and game alone": _bare}
    loops |= {f"cbsql {name}": partial(_ours, game, name) for name in ALGORITHMS}
    yield from compare(loops, BLOCK_STEPS[game], blocks)


def compare(loops: Mapping[str, Callable[[], Block]], steps: int, blocks: int) -> Iterator[str]:
    """A table of loops, each built and run in a process of its own."""
    with ExitStack() as stack:
        there = {name: stack.enter_context(_elsewhere(make)) for name, make in loops.items()}
        speeds = _in_turns(there, steps, blocks)
    yield "| loop | steps/s | of the first row |\n|---|---|---|"
    first = next(iter(speeds.values()))
    for name, speed in speeds.items():
        yield f"| {name} | {speed:.0f} | {speed / first:.2f} |"


@contextmanager
def _elsewhere(make: Callable[[], Block]) -> Iterator[Block]:
    """A loop in a process of its own, with as many Torch threads as here."""
    spawning = multiprocessing.get_context("spawn")
    here, there = spawning.Pipe()
    process = spawning.Process(target=_serve, args=(there, make, th.get_num_threads()), daemon=True)
    process.start()
    there.close()  # else its end would go unnoticed here

    def block(steps: int) -> None:
        here.send(steps)
        here.recv()

    try:
        here.recv()
        yield block
    except (EOFError, ConnectionError):
        raise RuntimeError("A loop has ended: see above.") from None
    finally:
        process.terminate()
        process.join()


def _serve(pipe: Connection, make: Callable[[], Block], threads: int) -> None:
    th.set_num_threads(threads)
    keep_memory()
    block = make()
    while True:
        pipe.send(None)
        block(pipe.recv())


def _growth(blocks: int) -> Iterator[str]:
    yield from ("", "## CBSQL on Breakout by stored transitions", "")
    yield "| stored | steps/s | of the first row | resident MB of the buffer |\n|---|---|---|---|"
    loops, memory = {}, []
    for stored in GROWTH:
        before = _resident_bytes()
        loops[f"{stored:,}"] = _ours("breakout", "cbsql", stored)
        memory.append((_resident_bytes() - before) / 1e6)
    speeds = _in_turns(loops, BLOCK_STEPS["breakout"], blocks)
    first = next(iter(speeds.values()))
    for (name, speed), megabytes in zip(speeds.items(), memory, strict=True):
        yield f"| {name} | {speed:.0f} | {speed / first:.2f} | {megabytes:.0f} |"


def _batches(blocks: int) -> Iterator[str]:
    yield from ("", "## Milliseconds of an update by batch size, with 3 and with 18 actions", "")
    yield f"| algorithm, game | {' | '.join(map(str, BATCHES))} |\n|---|" + "---|" * len(BATCHES)
    for algorithm in ("cbsql", "rainbow-cbsql"):
        for game in ("freeway", "seaquest"):
            model = _model(game, algorithm, 4_000)
            updates = {str(batch): _update(model, batch) for batch in BATCHES}
            speeds = _in_turns(updates, 1, 3 * blocks)
            shown = " | ".join(f"{1e3 / speed:.1f}" for speed in speeds.values())
            yield f"| {algorithm}, {game} | {shown} |"


def _pair() -> Iterator[str]:
    yield from ("", "## Two runs at once, CBSQL on Breakout, a torch thread each", "")
    yield "| runs at once | steps/s of all |\n|---|---|"
    for runs in (1, 2):
        with multiprocessing.get_context("spawn").Pool(runs) as pool:
            yield f"| {runs} | {sum(pool.map(_alone, range(runs))):.0f} |"


def _alone(_: int) -> float:
    th.set_num_threads(1)
    keep_memory()
    return _in_turns({"": _ours("breakout", "cbsql", 10_000)}, BLOCK_STEPS["breakout"], 9)[""]


def _in_turns(loops: dict[str, Block], steps: int, blocks: int) -> dict[str, float]:
    """Median steps per second of each loop."""
    speeds: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(blocks + 1):
        for name, block in loops.items():
            start = time.perf_counter()
            block(steps)
            if turn:  # the first one warms up
                speeds[name].append(steps / (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in speeds.items()}


def _ours(game: str, algorithm: str, stored: int = STORED) -> Block:
    return _learning(_model(game, algorithm, stored))


def _model(game: str, algorithm: str, stored: int) -> DQN:
    settings: dict[str, Any] = {"buffer_size": stored, "learning_starts": 0}
    if not algorithm.startswith("rainbow"):
        settings |= _EXPLORATION
    spec = RunSpec(game, algorithm, steps=10**6, settings=settings)
    return _filled(make_model(spec, make_env(spec)))


def _sb3(game: str) -> Block:
    """SB3's DQN as its users run it, with the layers and the frequencies of our preset."""
    base = preset(RunSpec(game, "dqn"))
    keys = {"batch_size", "train_freq", "gradient_steps", "target_update_interval"}
    settings: dict[str, Any] = {k: v for k, v in base.settings.items() if k in keys}
    if game == "breakout":
        env: VecEnv = VecFrameStack(make_atari_env("BreakoutNoFrameskip-v4", seed=0), 4)
    else:
        env = make_vec_env(game, seed=0)
        settings["policy_kwargs"] = {"net_arch": base.settings["policy_kwargs"]["net_arch"]}
        if base.policy == "CnnPolicy":
            settings["policy_kwargs"]["features_extractor_class"] = AsPublished
    settings |= {"buffer_size": STORED, "learning_starts": 0, **_EXPLORATION}
    return _learning(_filled(DQN(base.policy, env, **settings)))


class AsPublished(BaseFeaturesExtractor):
    """The network for MinAtar as its authors write it, for want of one in SB3."""

    def __init__(self, space: gym.spaces.Box) -> None:
        super().__init__(space, 128)
        height, width, channels = space.shape
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, 16, 3), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(16 * (height - 2) * (width - 2), 128), nn.ReLU()),
        )

    def forward(self, images: th.Tensor) -> th.Tensor:
        """Features (batch, 128) of images (batch, height, width, channels)."""
        features: th.Tensor = self.layers(images.permute(0, 3, 1, 2))
        return features


def _filled(model: DQN) -> DQN:
    """A learner with its replay buffer full of random play, the same over and over."""
    model.set_logger(configure(None, []))
    model._setup_learn(1)
    env, buffer = model.env, model.replay_buffer
    assert env is not None
    assert buffer is not None
    assert isinstance(env.action_space, gym.spaces.Discrete)
    rng = np.random.default_rng(0)
    transitions = []
    obs = np.asarray(env.reset())
    for _ in range(PLAYED):
        action = rng.integers(env.action_space.n, size=1)
        new_obs, reward, done, infos = env.step(action)
        last = np.array(new_obs)
        if done[0]:
            last[0] = infos[0]["terminal_observation"]
        transitions.append((obs, last, action, reward, done, infos))
        obs = np.array(new_obs)
    for i in range(buffer.buffer_size):
        buffer.add(*transitions[i % PLAYED])
    model._last_obs = env.reset()  # type: ignore[assignment]
    return model


def _learning(model: DQN) -> Block:
    def block(steps: int) -> None:
        model.learn(steps, reset_num_timesteps=False, log_interval=None)  # type: ignore[arg-type]

    return block


def _update(model: DQN, batch: int) -> Block:
    return lambda updates: model.train(updates, batch)


def _by_hand() -> Block:
    """DQN on Breakout as one script would have it, without anything that can be left out."""
    env: gym.Env[Any, Any] = gym.make("BreakoutNoFrameskip-v4")
    env = gym.wrappers.AtariPreprocessing(env, scale_obs=False)
    env = gym.wrappers.FrameStackObservation(env, 4)
    assert isinstance(env.action_space, gym.spaces.Discrete)
    n_actions = int(env.action_space.n)

    online, target = _nature_network(n_actions), _nature_network(n_actions)
    optimizer = th.optim.Adam(online.parameters(), lr=1e-4)
    buffer = ReplayBuffer(STORED, env.observation_space, env.action_space, "cpu")
    rng = np.random.default_rng(0)
    obs, _ = env.reset(seed=0)
    step = 0

    def act(epsilon: float) -> None:
        nonlocal obs, step
        if rng.random() < epsilon:
            action = int(rng.integers(n_actions))
        else:
            with th.no_grad():
                action = int(online(th.as_tensor(np.asarray(obs)[None]) / 255.0).argmax())
        new_obs, reward, end, late, info = env.step(action)
        rewards, ends = np.sign([float(reward)]), np.array([end])
        buffer.add(obs, new_obs, np.array([action]), rewards, ends, [info])
        obs = env.reset()[0] if end or late else new_obs
        step += 1

    for _ in range(PLAYED):
        act(1.0)
    for array in (buffer.observations, buffer.next_observations):
        array[PLAYED:] = array[np.arange(len(array) - PLAYED) % PLAYED]
    buffer.full = True

    def block(steps: int) -> None:
        for _ in range(steps):
            act(EPSILON)
            if step % 4 == 0:
                batch = buffer.sample(32)
                with th.no_grad():
                    best = target(batch.next_observations / 255.0).amax(1)
                    backup = batch.rewards.flatten() + 0.99 * best * (1 - batch.dones.flatten())
                q = online(batch.observations / 255.0).gather(1, batch.actions).squeeze(1)
                optimizer.zero_grad()
                F.mse_loss(q, backup).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            if step % 10_000 == 0:
                target.load_state_dict(online.state_dict())

    return block


def _bare() -> Block:
    """The networks of DQN, asked as often as it asks them, and the game: what none can leave out.

    Nothing is stored, sampled, counted or learnt; the networks always see the same frames. What a
    loop takes longer than this is its own; whoever uses Torch's kernels in turn is not faster.
    """
    env = make_env(RunSpec("breakout", "dqn"))
    online, target = _nature_network(4), _nature_network(4)
    rng = np.random.default_rng(0)
    frames = th.rand(32, 4, 84, 84).to(memory_format=th.channels_last)
    backup = th.zeros(32)
    env.reset()
    step = 0

    def block(steps: int) -> None:
        nonlocal step
        for _ in range(steps):
            if rng.random() >= EPSILON:
                with th.inference_mode():
                    online(frames[:1])
            env.step(rng.integers(4, size=1))
            step += 1
            if step % 4 == 0:
                with th.no_grad():
                    target(frames)
                online.zero_grad()
                F.mse_loss(online(frames)[:, 0], backup).backward()  # type: ignore[no-untyped-call]

    return block


def _nature_network(n_actions: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(4, 32, 8, stride=4), nn.ReLU()),
        *(nn.Conv2d(32, 64, 4, stride=2), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, n_actions)),
    )


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
