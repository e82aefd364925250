"""One run: train, log, save; and play test episodes afterwards."""

import csv
import ctypes
import importlib
import json
import os
import shutil
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import CSVOutputFormat, Logger, TensorBoardOutputFormat
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import VecEnv, VecTransposeImage

from cbsql import files
from cbsql.checkpoint import CheckpointError, Checkpoints, Ring, only_process, write_file
from cbsql.deep import SQL, Rainbow
from cbsql.deep.sql import DivergenceError
from cbsql.deep.state import restore_training, training_state
from cbsql.envs import make_atari_vec_env
from cbsql.envs.atari import FRAME_SKIP
from cbsql.envs.episodes import ReplayableEpisodes, episodes, replay_episodes
from cbsql.experiments.provenance import provenance
from cbsql.experiments.spec import RunSpec, preset
from cbsql.experiments.video import film
from cbsql.replay import IndexedReplayBuffer, stacked_frames

COLUMNS = ("kind", "steps", "frames", "updates", "seconds", "score", "length_steps")
"""Of episodes.csv; kind is "game" or "life", length is in agent steps."""

LOGS = 500
"""How many times a run writes its logs."""

LONGEST_TEST_STEPS = 5_000
"""Agent steps after which a test game ends where no other limit is set.

A policy without chance can go on forever, for example at the surface of MinAtar's Seaquest.
"""

Report = Callable[[int, dict[str, float]], None]
"""Told the agent steps so far and what there is to see."""


class StoppedError(Exception):
    """A run was told to stop; what it says is who told it, and what was saved."""


class TrainingError(Exception):
    """A run failed while it trained, for the reason that this is raised from."""


def make_env(spec: RunSpec, seed: int | None = None, test: bool = False) -> VecEnv:
    """The environment of a run.

    For a ``test``, games without a limit of their own have :data:`LONGEST_TEST_STEPS`.
    """
    seed = spec.seed if seed is None else seed
    if spec.is_atari:
        return make_atari_vec_env(spec.game, spec.protocol, seed=seed)  # type: ignore[arg-type]
    module, _, name = spec.game.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(
                f"{spec.game} names a module that cannot be imported: {error}"
            ) from None
    options = {}  # SB3 adds render_mode, if the environment takes it
    if test and gym.spec(name).max_episode_steps is None:
        options["max_episode_steps"] = LONGEST_TEST_STEPS
    return make_vec_env(name, seed=seed, env_kwargs=options, wrapper_class=ReplayableEpisodes)


def make_model(spec: RunSpec, env: VecEnv) -> SQL:
    """The learner of a run, as its preset and settings say."""
    base = preset(spec)
    policy = base.policy
    if isinstance(env.observation_space, gym.spaces.Dict):
        policy = "MultiInputPolicy"
    elif is_image_space(env.observation_space):
        policy = "CnnPolicy"
    settings = settings_of(spec)
    prioritized = spec.learner is Rainbow and settings.get("prioritized", True)
    own_choice = prioritized or stacked_frames(env)
    if not own_choice and not isinstance(env.observation_space, gym.spaces.Dict):
        settings.setdefault("replay_buffer_class", IndexedReplayBuffer)  # it can be checkpointed
    try:
        return spec.learner(policy, env, seed=spec.seed, **settings)
    except MemoryError:
        steps = spec.steps or base.steps
        if steps >= settings["buffer_size"]:
            raise
        settings["buffer_size"] = steps  # it will not store more
        return spec.learner(policy, env, seed=spec.seed, **settings)


def settings_of(spec: RunSpec) -> dict[str, Any]:
    """Arguments of the algorithm, from the preset and from the run itself."""
    base = preset(spec)
    steps = spec.steps or base.steps
    settings = {"exploration_fraction": base.exploration_steps / steps, **base.settings}
    if spec.algorithm != "munchausen":  # it has a temperature of its own
        settings["temperature"] = spec.temperature()
    settings.update(spec.settings)
    network = base.settings.get("policy_kwargs", {})
    settings["policy_kwargs"] = {**network, **(spec.settings.get("policy_kwargs") or {})}
    return settings


def status(spec: RunSpec, folder: Path) -> str:
    """What a folder holds: "new", or an "unfinished" or "finished" run of ``spec``.

    :raises ValueError: if it is the run of something else
    """
    path = folder / "run.json"
    try:
        if not path.is_file():
            return "new"
        record = json.loads(path.read_bytes())
        finished, recorded = record["finished"], dict(record["spec"])
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({error!r}): move {folder} away, and the run is made anew."
        ) from None
    ours = json.loads(json.dumps(spec.describe()))
    recorded.setdefault("counter", "")  # older runs had no choice
    for described in (ours, recorded):
        described["steps"] = described.get("steps") or preset(spec).steps  # 0 means these
    different = [name for name in ours if ours[name] != recorded.get(name)]
    if different:
        name = different[0]
        raise ValueError(
            f"{folder} holds another run, with {name} {recorded.get(name)!r} and not "
            f"{ours[name]!r}: choose another --out."
        )
    return "finished" if finished else "unfinished"


def train(
    spec: RunSpec,
    folder: Path,
    command: str = "",
    report: Report | None = None,
    checkpoint_seconds: float = 600.0,
) -> SQL:
    """Train ``spec`` and leave everything about it in ``folder``.

    ``episodes.csv`` has every score, ``progress.csv`` and the TensorBoard files the logs,
    ``model.zip`` the learner, ``run.json`` what was run, where and for how long.

    An unfinished run of the same ``spec`` in ``folder`` goes on from its last checkpoint, and ends
    with the same weights and scores as if it had not been interrupted.

    :raises ValueError: if it is finished, or ``folder`` has another run
    """
    keep_memory()
    folder.mkdir(parents=True, exist_ok=True)
    with only_process(folder), closing(make_env(spec)) as env:
        if status(spec, folder) == "finished":
            raise ValueError(f"The run in {folder} is finished.")
        checkpoints = Checkpoints(folder / "checkpoints")
        resumed = any(checkpoints.folder.glob("*.json"))
        record = {"command": command, "spec": spec.describe(), "finished": False, **provenance()}
        record.update(_continued(spec, folder, resumed))
        (folder / "test.csv").unlink(missing_ok=True)  # of what was learnt so far
        model = make_model(spec, env)
        steps = spec.steps or preset(spec).steps
        log = RunLog(folder, steps, spec.is_atari, report)
        state = _restore(model, env, log, checkpoints)
        write_json(folder / "run.json", record)
        try:
            with stop_signals() as told_to_stop:
                saver = Saver(checkpoints, log, checkpoint_seconds, told_to_stop)
                model.learn(
                    steps - model.num_timesteps,
                    callback=[log, saver],
                    log_interval=None,  # type: ignore[arg-type]
                    reset_num_timesteps=state is None,
                )
                _check_weights(model)
        except DivergenceError as error:
            if error.batch is not None:
                tensors: dict[str, Any] = {}
                for name, value in error.batch._asdict().items():
                    files.encode(value, tensors, name)
                with files.whole_file(folder / "diverged.safetensors") as file:
                    files.write_tensors(file, tensors)
            raise
        except (StoppedError, CheckpointError, OSError):
            raise
        except Exception as error:  # of an environment, for example; no argument is wrong
            raise TrainingError(f"At step {model.num_timesteps}: {error!r}") from error
        finally:
            log.close()
        model.save(folder / "model.zip")
        # The last rollout may go beyond the steps that were asked for, by which runs are compared.
        figures = {"steps": steps, "updates": model._n_updates}
        record.update(finished=True, **figures, seconds=round(log.seconds(), 1))
        write_json(folder / "run.json", record)
    shutil.rmtree(checkpoints.folder, ignore_errors=True)
    return model


def _continued(spec: RunSpec, folder: Path, resumed: bool) -> dict[str, Any]:
    """For the record: all settings, and the commits that the run comes from.

    :raises ValueError: if it was begun with other settings, as another version may have had
    """
    settings = {name: repr(value) for name, value in settings_of(spec).items()}
    if not resumed:
        return {"settings": settings, "earlier_commits": []}
    before = json.loads((folder / "run.json").read_bytes())
    for name, value in before.get("settings", settings).items():
        if value != settings.get(name):
            raise ValueError(
                f"The run in {folder} was begun with {name} {value}, and this version has "
                f"{settings.get(name)}: go on with commit {before['commit']}, or begin anew."
            )
    commits = dict.fromkeys([*before.get("earlier_commits", []), before["commit"]])
    return {"settings": settings, "earlier_commits": list(commits)}


def _restore(model: SQL, env: VecEnv, log: "RunLog", checkpoints: Checkpoints) -> Any:
    """Put a run where its last checkpoint was, if there is one."""
    found = checkpoints.load(_rings(model)) if checkpoints.folder.is_dir() else None
    if found is None:
        log.open(None)
        return None
    state, damages = found
    for damage in damages:
        warnings.warn(damage, stacklevel=2)
    restore_training(model, state["model"])
    log.open(state["log"])
    replayed = replay_episodes(env, state["episodes"])
    exact = all(observation is not None for observation in replayed)
    if exact:
        observations: Any = np.stack(replayed)
        observations = observations.astype(env.observation_space.dtype)  # as vector environments do
        if isinstance(model.env, VecTransposeImage):
            observations = model.env.transpose_observations(observations)
        exact = np.array_equal(observations, state["model"]["attributes"]["_last_obs"])
    if not exact:
        warnings.warn(
            "The environment is not determined by its seed and actions: the run goes on with a new "
            "episode, and will not be exactly the one that was interrupted.",
            stacklevel=2,
        )
        env._reset_seeds()  # else the first seeds of the run would come again
        model._last_obs = model.env.reset()  # type: ignore[union-attr,assignment]
        model._last_episode_starts = np.ones(env.num_envs, bool)
    return state


def _rings(model: SQL) -> dict[str, Ring]:
    if not isinstance(model.replay_buffer, IndexedReplayBuffer):
        return {}
    return {name: Ring(*ring) for name, ring in model.replay_buffer.rings().items()}


def _check_weights(model: SQL) -> None:
    for parameter in model.policy.parameters():
        if not parameter.isfinite().all():
            batch = model._last_update[0] if model._last_update else None
            raise DivergenceError("A weight", model._n_updates, batch)


class Saver(BaseCallback):
    """Writes checkpoints between a training step and the next action."""

    def __init__(
        self, checkpoints: Checkpoints, log: "RunLog", seconds: float, told_to_stop: list[str]
    ) -> None:
        super().__init__()
        self._checkpoints = checkpoints
        self._log = log
        self._interval = seconds
        self._told_to_stop = told_to_stop
        self._next = time.perf_counter() + seconds

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        if not self._told_to_stop and time.perf_counter() < self._next:
            return
        model = self.model
        assert isinstance(model, SQL)
        storable = isinstance(model.replay_buffer, IndexedReplayBuffer)
        if storable and model.num_timesteps:
            self._save(model)
        self._next = time.perf_counter() + self._interval
        if self._told_to_stop:
            folder = self._checkpoints.folder.parent
            model.save(folder / "model.zip")
            raise StoppedError(
                f"{self._told_to_stop[0]}: saved in {folder}. The same command "
                + ("goes on." if storable else "begins anew, since this replay is not saved.")
            )

    def _save(self, model: SQL) -> None:
        _check_weights(model)
        state = {
            "model": training_state(model),
            "episodes": episodes(self.training_env),
            "log": self._log.state(),
        }
        self._checkpoints.save(f"{model.num_timesteps:012d}", state, _rings(model))


@contextmanager
def stop_signals() -> Iterator[list[str]]:
    """Within, the first Ctrl-C or SIGTERM only puts its name into a list."""
    told: list[str] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _: Any) -> None:
        told.append(signal.Signals(number).name)
        restore()

    if threading.current_thread() is threading.main_thread():  # no other may
        for number in before:
            signal.signal(number, note)
        try:
            yield told
        finally:
            restore()
    else:
        yield told


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a file of JSON in one go."""
    write_file(path, (json.dumps(record, indent=2) + "\n").encode())


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

    def __init__(self, folder: Path, steps: int, is_atari: bool, report: Report | None) -> None:
        super().__init__()
        self._folder = folder
        self._interval = max(steps // LOGS, 1)
        self._frames_per_step = FRAME_SKIP if is_atari else 1
        self._report = report
        self._recent: deque[float] = deque(maxlen=20)
        self._seconds_before = 0.0

    def open(self, state: dict[str, Any] | None) -> None:
        """Start the files, or cut them off where a checkpoint was and go on from there."""
        path = self._folder / "episodes.csv"
        if state is None:
            self._file = path.open("w", newline="")
            self._file.write(",".join(COLUMNS) + "\n")
        else:
            self._recent.extend(state["recent"])
            self._seconds_before = state["seconds"]
            self.n_calls = state["calls"]
            self._file = path.open("r+", newline="")
            there, then = path.stat().st_size, state["episodes_bytes"]
            if there < then:
                warnings.warn(f"{path} has lost {then - there} bytes of scores.", stacklevel=2)
            self._file.truncate(min(there, then))
            self._file.seek(0, os.SEEK_END)
        self._rows = csv.writer(self._file, lineterminator="\n")
        self._logs = _LogFile(self._folder / "progress.csv", state["log_lines"] if state else 0)
        self._start = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """What :meth:`open` needs to go on from here."""
        for file in (self._file, self._logs.file):  # on disk before the checkpoint is
            file.flush()
            os.fsync(file.fileno())
        return {
            "recent": list(self._recent),
            "seconds": self.seconds(),
            "calls": self.n_calls,
            "episodes_bytes": os.fstat(self._file.fileno()).st_size,
            "log_lines": self._logs.lines,
        }

    def seconds(self) -> float:
        """Time spent on training, interruptions not counted."""
        return self._seconds_before + time.perf_counter() - self._start

    def close(self) -> None:
        """Finish the files."""
        try:
            self._file.close()
        finally:
            self._logs.close()

    def _on_training_start(self) -> None:
        outputs = [self._logs, TensorBoardOutputFormat(str(self._folder))]
        self.model.set_logger(Logger(str(self._folder), outputs))

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

    def _write(self, kind: str, score: float, length: int) -> None:
        assert isinstance(self.model, SQL)
        seconds = round(self.seconds(), 2)
        frames = self.num_timesteps * self._frames_per_step
        self._rows.writerow(
            (kind, self.num_timesteps, frames, self.model._n_updates, seconds, score, length)
        )


class _LogFile(CSVOutputFormat):
    """SB3's log as CSV, which can go on after some lines of an old one."""

    def __init__(self, path: Path, lines: int) -> None:
        super().__init__(os.devnull)  # the file itself it would empty
        self.file.close()
        path.touch()
        self.file = path.open("r+")
        # Lines and not bytes: SB3 makes all of them longer when there is something new to log.
        kept = [self.file.readline() for _ in range(lines)]
        self.file.seek(self.file.tell())  # what follows is cut off
        self.file.truncate()
        self.keys = kept[0].rstrip("\n").split(",") if kept else []
        self.lines = len(list(filter(None, kept)))

    def write(self, *args: Any, **kwargs: Any) -> None:
        """Write one line, and at first the names."""
        self.lines += 1 if self.keys else 2
        super().write(*args, **kwargs)


class Episode(NamedTuple):
    """A test game, or one life of it: a line of test.csv."""

    kind: str
    """"game" or "life"; a game comes after its lives."""
    score: float
    length_steps: int


def seed_of_test(spec: RunSpec) -> int:
    """Seed of the test games: the same for every algorithm, and far from that of training."""
    return 1_000_000 + spec.seed


def policy_of_test(
    spec: RunSpec, model: SQL, env: VecEnv, seed: int, epsilon: float | None = None
) -> Callable[[Any], tuple[NDArray[np.int64], bool]]:
    """The policy of test games: for an observation, an action and whether it is random.

    :param epsilon: probability of a random action; None means the preset's
    """
    epsilon = preset(spec).test_epsilon if epsilon is None else epsilon
    rng = np.random.default_rng(seed)
    assert isinstance(env.action_space, gym.spaces.Discrete)
    n_actions = int(env.action_space.n)

    seen: Any = None
    action: Any = None

    def act(observation: Any) -> tuple[NDArray[np.int64], bool]:
        nonlocal seen, action
        if rng.random() < epsilon:
            return rng.integers(n_actions, size=1), True
        # A policy that never serves the ball of Breakout sees the same picture until the game is
        # cut off, for 27,000 steps.
        if seen is None or not np.array_equal(observation, seen):
            action, _ = model.predict(observation, deterministic=True)
            seen = observation.copy() if isinstance(observation, np.ndarray) else None
        return action, False

    return act


def frames_per_second(spec: RunSpec, env: VecEnv) -> float:
    """How fast a game is meant to be watched, in agent steps."""
    fps: Any = 60 / FRAME_SKIP if spec.is_atari else env.metadata.get("render_fps", 15)
    return float(fps)


def evaluate(
    spec: RunSpec,
    model: SQL,
    games: int,
    seed: int,
    video: Path | None = None,
    advance: Callable[[], None] = lambda: None,
    epsilon: float | None = None,
) -> list[Episode]:
    """Play whole games under the test policy; the first of them may be filmed.

    :param advance: called after each game
    :param epsilon: see :func:`policy_of_test`
    """
    played: list[Episode] = []
    games_played = 0
    with ExitStack() as stack:
        env = stack.enter_context(closing(make_env(spec, seed, test=True)))
        if video and env.render_mode is None:
            raise ValueError(f"{spec.game} has no pictures to film.")
        fps = frames_per_second(spec, env)
        camera = stack.enter_context(film(video, fps)) if video else None
        policy = policy_of_test(spec, model, env, seed, epsilon)
        observation = env.reset()
        while games_played < games:
            if camera and not games_played:
                picture = env.render()
                assert picture is not None
                camera.add(picture)
            observation, _, _, (info,) = env.step(policy(observation)[0])
            if "life" in info:
                played.append(Episode("life", info["life"]["score"], info["life"]["steps"]))
            if "episode" in info:
                played.append(Episode("game", info["episode"]["r"], info["episode"]["l"]))
                games_played += 1
                advance()
    return played


def write_test(folder: Path, played: list[Episode]) -> None:
    """Write test.csv in one go."""
    lines = [",".join(map(str, row)) for row in (Episode._fields, *played)]
    write_file(folder / "test.csv", ("\n".join(lines) + "\n").encode())


def read_test(folder: Path) -> list[Episode]:
    """The test games of a run; none if it was not tested.

    :raises ValueError: if its test.csv is damaged
    """
    path = folder / "test.csv"
    if not path.is_file():
        return []
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        return [Episode(r["kind"], float(r["score"]), int(r["length_steps"])) for r in rows]
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise ValueError(f"{path} is damaged: {error!r}.") from None
