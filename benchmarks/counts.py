"""Speed of the counters beside a Nature-CNN gradient step, on real Seaquest frames.

    python benchmarks/counts.py > results/counts/benchmark.md

Every batch is timed right after a gradient step, as in training, when the caches hold the network.
Figures are CPU time of the thread, except for two threads, which can only be timed by the clock.
They are lower quartiles of repeats, since other work on the machine only ever adds to them.
"""

import argparse
import datetime
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import gymnasium
import numpy as np
import torch
from ale_py.vector_env import AtariVectorEnv
from stable_baselines3.common.torch_layers import NatureCNN

from cbsql.counts import CTS, CoinFlipNetwork, PixelCounter, SimHash
from cbsql.temperature import Counter

BATCH = 32
REPEATS = 40
POOL = 4096  # observations from which batches are drawn, as from a replay buffer
SPACE = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)


def play(game: str, seed: int) -> Iterator[np.ndarray]:
    """Observations (8, 4, 84, 84) of random play in 8 environments."""
    env = AtariVectorEnv(game, num_envs=8)
    rng = np.random.default_rng(seed)
    env.reset(seed=seed)
    while True:
        yield env.step(rng.integers(env.single_action_space.n, size=8))[0]


def gradient_step() -> Callable[[], None]:
    """A DQN update of the Nature CNN with a batch of 32."""
    torch.manual_seed(0)
    q, target = (
        torch.nn.Sequential(NatureCNN(SPACE, normalized_image=True), torch.nn.Linear(512, 18))
        for _ in range(2)
    )
    optimizer = torch.optim.RMSprop(q.parameters(), lr=2.5e-4, centered=True)
    x = torch.rand(BATCH, *SPACE.shape)

    def step() -> None:
        with torch.no_grad():
            backup = target(x).max(dim=1).values
        loss = (q(x)[:, 0] - backup).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def milliseconds(
    action: Callable[[], object], clock: Callable[[], float] = time.thread_time
) -> float:
    start = clock()
    action()
    return 1e3 * (clock() - start)


def typical(times: Iterable[float]) -> float:
    return float(np.quantile(list(times), 0.25))


def resident_megabytes() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def naive_milliseconds(frames: np.ndarray) -> float:
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from naive_cts import NaiveCTS

    naive = NaiveCTS((42, 42), 8)

    def query_and_update(frame: np.ndarray) -> None:
        naive.log_prob(frame)
        naive.log_prob_after(frame)
        naive.update(frame)

    return milliseconds(lambda: [query_and_update(frame) for frame in frames])


def table(rows: list[list[str]]) -> None:
    head, *body = rows
    for row in (head, ["---"] * len(head), *body):
        print("| " + " | ".join(row) + " |")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=100_000, help="Seaquest frames to learn")
    total_frames = parser.parse_args().frames
    stages = sorted({0, min(10_000, total_frames), total_frames})

    torch.set_num_threads(1)
    step = gradient_step()
    stream = play("seaquest", seed=0)
    rng = np.random.default_rng(0)
    pool = np.concatenate([next(stream) for _ in range(POOL // 8)])
    density = CTS((42, 42))
    counter = PixelCounter(density, SPACE)
    for _ in range(3):  # compile and warm up
        step()
        for threads in (1, 2):
            warm = CTS((42, 42), threads=threads)
            warm.update(counter.symbols(pool[:BATCH]))
            warm.count(counter.symbols(pool[:BATCH]))

    def batch() -> np.ndarray:
        return pool[rng.integers(POOL, size=BATCH)]

    def symbols() -> np.ndarray:
        return counter.symbols(batch())

    steps: list[float] = []  # ms of the gradient steps among which counters are timed

    def timed(
        counter: Counter,
        make_input: Callable[[], np.ndarray],
        clock: Callable[[], float] = time.thread_time,
    ) -> tuple[float, float]:
        """Of a query and of an update, with inputs that have just been made, as by sampling."""
        steps.append(milliseconds(step))
        queried, learnt = make_input(), make_input()
        return (
            milliseconds(lambda: counter.count(queried), clock),
            milliseconds(lambda: counter.update(learnt), clock),
        )

    columns = (
        "frames learnt, query ms, update ms, both ms, two threads ms (clock), gradient step ms, "
    )
    rows = [(columns + "both / step, resident growth MB").split(", ")]
    before = resident_megabytes()
    totals, shares = [], []
    for stage in stages:
        while density.updates < stage - 2 * BATCH * REPEATS * (stage > 0):
            observations = np.concatenate([next(stream) for _ in range(BATCH // 8)])
            pool[rng.integers(POOL, size=BATCH)] = observations
            counter.update(observations)
        one_thread, two_threads = [], []
        steps.clear()
        for _ in range(REPEATS):
            density.threads = 1
            one_thread.append(timed(density, symbols))
            density.threads = 2
            two_threads.append(sum(timed(density, symbols, time.perf_counter)))
        query, update = (typical(times) for times in zip(*one_thread, strict=True))
        two = typical(two_threads)
        step_time = typical(steps)
        totals.append(query + update)
        shares.append(totals[-1] / step_time)
        milliseconds_each = [query, update, totals[-1], two, step_time]
        rows.append([f"{stage:,}", *(f"{ms:.2f}" for ms in milliseconds_each)])
        rows[-1] += [f"{shares[-1]:.1%}", f"{resident_megabytes() - before:.0f}"]
    density.threads = 1

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    print("# Speed of the counters\n")
    print(f"`python {' '.join(sys.argv)}` at commit {commit},")
    print(f"{datetime.date.today()}, {platform.processor() or platform.machine()}, ", end="")
    print(f"Python {platform.python_version()}, torch {torch.__version__}, one torch thread,")
    print(f"CPU time; {os.cpu_count()} cores with a load of {os.getloadavg()[0]:.1f} at the end.\n")
    print("## CTS, 42x42 pixels, 8 levels, Seaquest\n")
    table(rows)

    cts = totals[-1]
    naive = min(naive_milliseconds(symbols()) for _ in range(3))
    print("## The same batch of 32, once queried and once learnt, by other means\n")
    rows = [["counter", "both, ms", "relative to CTS"]]
    rows.append(["CTS", f"{cts:.2f}", "1"])
    rows.append(["naive Python tree of the tests", f"{naive:.0f}", f"{naive / cts:,.0f}"])
    others = {
        "CTS from 84x84 observations": counter,
        "SimHash, 17 components": SimHash(17),
        "CoinFlipNetwork, 17 components": CoinFlipNetwork(
            gymnasium.spaces.Box(-np.inf, np.inf, (17,))
        ),
    }
    for name, other in others.items():
        inputs = batch if other is counter else lambda: rng.standard_normal((BATCH, 17))
        other.update(inputs())
        other.count(inputs())
        both = typical([sum(timed(other, inputs)) for _ in range(REPEATS)])
        rows.append([name, f"{both:.2f}", f"{both / cts:.2g}"])
    table(rows)
    rows = [["target", "measured, at worst"]]
    rows.append(["at most 1.5 ms on one thread", f"{max(totals):.2f} ms"])
    rows.append(["at most 3% of a gradient step", f"{max(shares):.1%}"])
    rows.append(["flat in the frames learnt", f"{max(totals) / min(totals):.2f} times the least"])
    rows.append(["at least 1000 times the naive tree", f"{naive / max(totals):,.0f} times"])
    rows.append(["resident below 400 MB", f"{resident_megabytes() - before:.0f} MB"])
    table(rows)


if __name__ == "__main__":
    main()
