"""Replay buffers as files: of this package and of Stable-Baselines3."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch as th
from numpy.typing import NDArray
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from cbsql import files
from cbsql.replay.frames import FrameReplayBuffer
from cbsql.replay.indexed import IndexedReplayBuffer

REPLAY_SUFFIX = "replay.zip"
"""Of files whose name has none: a model of the same name must not be overwritten."""

_ARGUMENTS = (
    "optimize_memory_usage",
    "handle_timeout_termination",
    "n_steps",
    "gamma",
    "frame_channels",
    "priority_exponent",
    "importance_exponent",
    "n_sampled_goal",
    "goal_selection_strategy",
)
# Steps of an HerReplayBuffer take 200 bytes as soon as it is built; memory of the others is taken
# step by step.
MOST_STEPS, MOST_HER_STEPS = 10**10, 10**6


def save_replay(path: files.PathLike, buffer: ReplayBuffer) -> None:
    """Write a buffer as far as it is filled."""
    if ":" in files.class_name(type(buffer)) or getattr(buffer, "copy_info_dict", False):
        raise files.FileError(
            f"{type(buffer).__name__} can hold objects of any kind, which files do not. Use "
            "stable_baselines3.common.save_util.save_to_pkl, and load_replay_buffer(trust=True)."
        )
    document = files.Document("replay")
    document["replay_buffer_class"] = type(buffer)
    document["arguments"] = {
        "buffer_size": buffer.buffer_size * buffer.n_envs,
        "observation_space": buffer.observation_space,
        "action_space": buffer.action_space,
        "n_envs": buffer.n_envs,
        **{name: value for name, value in vars(buffer).items() if name in _ARGUMENTS},
    }
    document["position"] = {"pos": buffer.pos, "full": buffer.full}
    document["arrays"] = {name: part for name, _, _, part in _used(buffer)}
    if isinstance(buffer, IndexedReplayBuffer):
        document["more"] = buffer.state_dict()
    document.write(path, REPLAY_SUFFIX)


def load_replay(
    path: files.PathLike, env: VecEnv | None, device: th.device, trust: bool = False
) -> ReplayBuffer:
    """Build the buffer that :func:`save_replay` wrote; one for hindsight needs its environment."""
    document = files.read(path, "replay", REPLAY_SUFFIX)
    with files.blame(path):
        kind, arguments = document["replay_buffer_class"], document["arguments"]
        most = MOST_STEPS
        if issubclass(kind, HerReplayBuffer):
            if env is None:
                raise ValueError("a HerReplayBuffer needs the environment of the model.")
            arguments["env"], most = env, MOST_STEPS if trust else MOST_HER_STEPS
        check_steps(arguments["buffer_size"], arguments["n_envs"], most)
        buffer: ReplayBuffer = kind(**arguments)
        _fill(buffer, document["position"], document["arrays"])
        if isinstance(buffer, IndexedReplayBuffer):
            buffer.load_state_dict(document["more"])
            if {"pos": buffer.pos, "full": buffer.full} != document["position"]:
                raise ValueError("it says two things about how many rows it has.")
    buffer.device = device
    return buffer


def check_steps(buffer_size: int, n_envs: int, most: int) -> None:
    """Refuse what a buffer cannot have, or what would take too much memory."""
    if not 0 < n_envs <= buffer_size <= most:
        raise ValueError(
            f"it has {buffer_size} steps of {n_envs} environments; at least one of each and at "
            f"most {most} are allowed."
        )


def _fill(buffer: ReplayBuffer, position: dict[str, Any], arrays: dict[str, Any]) -> None:
    buffer.pos, buffer.full = position["pos"], position["full"]
    if type(buffer.full) is not bool or buffer.pos not in range(buffer.buffer_size):
        raise ValueError(f"{position} is not a position in {buffer.buffer_size} rows.")
    if {name for name, *_ in _used(buffer)} != arrays.keys():
        raise ValueError(f"it has the arrays {sorted(arrays)}.")
    # Those with one axis first: they tell how much of the others is used.
    for axes in (range(1, 2), range(2, 99)):
        for name, owner, key, part in list(_used(buffer)):
            given = arrays[name]
            if part.ndim not in axes:
                continue
            if (given.shape, given.dtype) != (part.shape, part.dtype):
                raise ValueError(
                    f"{name} is {given.dtype} of shape {given.shape}, and must be {part.dtype} of "
                    f"shape {part.shape}."
                )
            if part.shape == owner[key].shape:
                owner[key] = given  # a full buffer is not copied
            else:
                part[...] = given


def _used(buffer: ReplayBuffer) -> Iterator[tuple[str, dict[str, Any], str, NDArray[Any]]]:
    """The arrays of a buffer: name, the dict it is in and under which key, and the filled part."""
    # The last observation of SB3's option is in the row after the last.
    rows = buffer.buffer_size if buffer.full else buffer.pos + buffer.optimize_memory_usage
    for name, value in vars(buffer).items():
        parts = value if isinstance(value, dict) else {"": value}
        for key, array in parts.items():
            if not isinstance(array, np.ndarray) or array.dtype == object:
                continue
            if name == "frames" and isinstance(buffer, FrameReplayBuffer):
                part = array[:, : max(buffer._frames_written)]
            else:
                part = array if array.ndim == 1 else array[:rows]
            if key:
                yield f"{name}/{key}", value, key, part
            else:
                yield name, vars(buffer), name, part
