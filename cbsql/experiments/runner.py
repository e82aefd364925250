"""One run: train, log, save; and play test episodes afterwards."""

import csv
import ctypes
import json
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecEnv

from cbsql.deep import SQL
from cbsql.envs import make_atari_vec_env
from cbsql.envs.atari import FRAME_SKIP
from cbsql.experiments.provenance import provenance
from cbsql.experiments.spec import RunSpec, preset
from cbsql.experiments.video import film

COLUMNS = ("kind", "steps", "frames", "updates", "seconds", "score", "length_steps")
"""Of episodes.csv; kind is "game" or "life", length is in agent steps."""

LOGS = 500
"""How many times a run writes its logs."""

Report = Callable[[int, dict[str, float]], None]
"""Told the agent steps so far and what there is to see."""


def make_env(spec: RunSpec, seed: int | None = None, pictures: bool = False) -> VecEnv:
    """The environment of a run; with ``pictures``, one that can show itself."""
    seed = spec.seed if seed is None else seed
    if spec.is_atari:
        return make_atari_vec_env(spec.game, spec.protocol, seed=seed)  # type: ignore[arg-type]
    shown = {"render_mode": "rgb_array"} if pictures else None
    return make_vec_env(spec.game, seed=seed, env_kwargs=shown)


def make_model(spec: RunSpec, env: VecEnv) -> SQL:
    """The learner of a run, as its preset and settings say."""
    base = preset(spec)
    steps = spec.steps or base.steps
    settings = {"exploration_fraction": base.exploration_steps / steps, **base.settings}
    if spec.algorithm != "munchausen":  # it has a temperature of its own
        settings["temperature"] = spec.temperature()
    return spec.learner(base.policy, env, seed=spec.seed, **{**settings, **spec.settings})


def train(spec: RunSpec, folder: Path, command: str = "", report: Report | None = None) -> SQL:
    """Train ``spec`` and leave everything about it in ``folder``.

    ``episodes.csv`` has every score, ``progress.csv`` and the TensorBoard files the logs,
    ``model.zip`` the learner, ``run.json`` what was run, where and for how long.
    """
    keep_memory()
    with closing(make_env(spec)) as env:
        return _train(spec, folder, command, report, env)


def _train(spec: RunSpec, folder: Path, command: str, report: Report | None, env: VecEnv) -> SQL:
    model = make_model(spec, env)
    model.set_logger(configure(str(folder), ["csv", "tensorboard"]))
    steps = spec.steps or preset(spec).steps
    finished = False
    start = time.perf_counter()
    try:
        callback = RunLog(folder / "episodes.csv", steps, spec.is_atari, report)
        model.learn(steps, callback=callback, log_interval=None)  # type: ignore[arg-type]
        finished = True
    finally:
        model.save(folder / "model.zip")
        record = {
            "command": command,
            "spec": spec.describe(),
            "finished": finished,
            "steps": model.num_timesteps,
            "updates": model._n_updates,
            "seconds": round(time.perf_counter() - start, 1),
            **provenance(),
        }
        (folder / "run.json").write_text(json.dumps(record, indent=2) + "\n")
    return model


def keep_memory() -> None:
    """Have the C library keep what it frees in this process: the next update asks for it again.

    glibc would return it to the system, which clears it before it lends it again: thousands of page
    faults in every gradient step.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return  # not glibc
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # its numbers of these options
    for option, value_bytes in ((trim_threshold, 2**30), (top_pad, 2**26), (mmap_threshold, 2**25)):
        mallopt(option, value_bytes)


class RunLog(BaseCallback):
    """Writes every score, and the logs at even distances in steps instead of in episodes."""

    def __init__(self, path: Path, steps: int, is_atari: bool, report: Report | None) -> None:
        super().__init__()
        self._path = path
        self._interval = max(steps // LOGS, 1)
        self._frames_per_step = FRAME_SKIP if is_atari else 1
        self._report = report
        self._recent: deque[float] = deque(maxlen=20)

    def _on_training_start(self) -> None:
        self._file = self._path.open("w", newline="")
        self._rows = csv.writer(self._file, lineterminator="\n")
        self._rows.writerow(COLUMNS)
        self._start = time.perf_counter()

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "life" in info:
                self._write("life", info["life"]["score"], info["life"]["steps"])
            if "episode" in info:
                self._recent.append(info["episode"]["r"])
                self._write("game", info["episode"]["r"], info["episode"]["l"])
        if self.n_calls % self._interval == 0:
            self.logger.record("time/frames", self.num_timesteps * self._frames_per_step)
            model = self.model
            assert isinstance(model, SQL)
            model.dump_logs()
            self._file.flush()
            if self._report:
                shown = {"score": float(np.mean(self._recent))} if self._recent else {}
                if model._last_update is not None:
                    beta = model._last_update[1]
                    shown["beta"] = beta if isinstance(beta, float) else float(beta.mean())
                self._report(self.num_timesteps, shown)
        return True

    def _on_training_end(self) -> None:
        self._file.close()

    def _write(self, kind: str, score: float, length: int) -> None:
        assert isinstance(self.model, SQL)
        seconds = round(time.perf_counter() - self._start, 2)
        frames = self.num_timesteps * self._frames_per_step
        self._rows.writerow(
            (kind, self.num_timesteps, frames, self.model._n_updates, seconds, score, length)
        )


def evaluate(
    spec: RunSpec, model: SQL, episodes: int, seed: int, video: Path | None = None
) -> NDArray[np.float64]:
    """Scores of whole games under the preset's test policy; the first of them may be filmed."""
    epsilon = preset(spec).test_epsilon
    rng = np.random.default_rng(seed)
    scores: list[float] = []
    with ExitStack() as stack:
        env = stack.enter_context(closing(make_env(spec, seed, pictures=video is not None)))
        assert isinstance(env.action_space, gym.spaces.Discrete)
        fps: Any = 60 / FRAME_SKIP if spec.is_atari else env.metadata.get("render_fps", 15)
        camera = stack.enter_context(film(video, fps)) if video else None
        observation = env.reset()
        while len(scores) < episodes:
            if camera and not scores:
                picture = env.render()
                assert picture is not None
                camera.add(picture)
            action, _ = model.predict(observation, deterministic=True)
            if rng.random() < epsilon:
                action = rng.integers(env.action_space.n, size=1)
            observation, _, _, infos = env.step(action)
            scores += [info["episode"]["r"] for info in infos if "episode" in info]
    return np.array(scores)
