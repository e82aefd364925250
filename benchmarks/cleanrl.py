"""DQN on Breakout beside CleanRL's script, which is run as it is, from a clone of its repository.

    pip install tyro
    python benchmarks/cleanrl.py [--clone ../cleanrl] [--threads 2] [--blocks 7]

It has the network of Mnih et al., an update of 32 every four agent steps, and Adam without
clipping. Its loop runs in a thread, and waits in its environment while it is another's turn.
Figures are medians of turns of 200 agent steps, with 100,000 transitions stored.
"""

import argparse
import os
import runpy
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import Any

import ale_py
import gymnasium as gym
import torch as th

from cbsql.experiments import bench
from cbsql.experiments.provenance import provenance

SCRIPT = "cleanrl/dqn_atari.py"
gym.register_envs(ale_py)


class Turns(gym.Wrapper[Any, Any, Any, Any]):
    """An environment that goes on when it is allowed to.

    Gymnasium resets in a step of its own, so that either call is a step of the loop.
    """

    allowed, waiting = threading.Semaphore(0), threading.Semaphore(0)

    def _wait(self) -> None:
        self.waiting.release()
        self.allowed.acquire()

    def step(self, action: Any) -> Any:
        self._wait()
        return super().step(action)

    def reset(self, **kwargs: Any) -> Any:
        self._wait()
        return super().reset(**kwargs)


def cleanrl(clone: Path) -> bench.Block:
    """CleanRL's DQN, with its replay buffer filled."""
    sys.path.insert(0, str(clone))
    # It was written for a Gymnasium in which these have other names.
    wrappers: Any = gym.wrappers
    wrappers.FrameStack = lambda env, frames: Turns(wrappers.FrameStackObservation(env, frames))
    wrappers.GrayScaleObservation = wrappers.GrayscaleObservation
    sys.argv = [SCRIPT, f"--buffer-size={bench.STORED}", f"--learning-starts={bench.STORED}"]
    sys.argv += [f"--start-e={bench.EPSILON}", f"--end-e={bench.EPSILON}"]
    run = partial(runpy.run_path, str(clone / SCRIPT), run_name="__main__")
    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def block(steps: int) -> None:
        Turns.allowed.release(steps)
        for _ in range(steps):
            while not Turns.waiting.acquire(timeout=10):
                if not thread.is_alive():
                    sys.exit(f"{SCRIPT} has ended: see above.")

    block(bench.STORED + 100)
    return block


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clone", type=Path, default=Path("../cleanrl"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=7)
    arguments = parser.parse_args()
    clone, record = arguments.clone.resolve(), provenance()
    if not (clone / SCRIPT).exists():
        print(f"Nothing to compare DQN with: {clone} has no {SCRIPT}.")
        return
    th.set_num_threads(arguments.threads)
    print(f"{record['machine']}, {arguments.threads} torch threads, commit {record['commit']}\n")
    loops = {"CleanRL's DQN": partial(cleanrl, clone), "SB3 DQN": partial(bench._sb3, "breakout")}
    loops["DQN by hand"] = bench._by_hand
    loops |= {name: partial(bench._ours, "breakout", name) for name in ("dqn", "cbsql")}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # the script writes its logs where it runs
        print(*bench.compare(loops, 200, arguments.blocks), sep="\n")


if __name__ == "__main__":
    main()
