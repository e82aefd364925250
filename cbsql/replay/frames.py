"""Replay of stacked image frames in which every frame is stored once."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation
from numpy.typing import DTypeLike, NDArray
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.preprocessing import get_action_dim
from stable_baselines3.common.vec_env import (
    VecCheckNan,
    VecEnv,
    VecEnvWrapper,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
    VecVideoRecorder,
)

from cbsql._jit import jit
from cbsql.replay.indexed import IndexedReplayBuffer

# One frame in 40 is room for episode starts, which bring a frame besides that of their first step.
_STEPS_PER_SPARE_FRAME = 40


class FrameReplayBuffer(IndexedReplayBuffer):
    """Stable-Baselines3 replay buffer that stores each frame of a frame-stacked image once.

    It returns the samples that SB3's `ReplayBuffer` and `NStepReplayBuffer` would return, next
    observations at time-outs included, in an eighth of the memory: 7.3 GB instead of 56.5 GB for a
    million transitions of 4 x 84 x 84.

    Observations are uint8 with the stack on the first axis, oldest frame first: (stack, height,
    width), as SB3 passes them after `VecTransposeImage`. What the first stack of an episode holds
    before its first frame does not matter: zeros and repetitions of the first frame take no memory.
    Samples have the same axes, but on a CPU their memory has the stack last, pixel by pixel: the
    layout in which Torch's convolutions are fastest there, and which no later step could bring
    about for less than it saves.

    When episodes are shorter than 40 steps on average, the oldest transitions leave a little before
    `buffer_size` is reached, because each episode brings one frame more than it has steps.

    Indices, generator, n-step returns and arguments are those of `IndexedReplayBuffer`; by name:

    :param frame_channels: channels of one frame: 1 for grey, 3 for stacked RGB
    """

    def __init__(self, *args: Any, frame_channels: int = 1, **kwargs: Any) -> None:
        self.frame_channels = frame_channels
        super().__init__(*args, **kwargs)

    def _allocate(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str,
        n_envs: int,
        handle_timeout_termination: bool,
    ) -> None:
        channels = self.frame_channels
        layout = _layout(buffer_size, observation_space, action_space, n_envs, channels)
        _check_memory(buffer_size, _bytes(layout))
        # Past ReplayBuffer's constructor, which would allocate every stack twice.
        super(ReplayBuffer, self).__init__(
            buffer_size, observation_space, action_space, device, n_envs=n_envs
        )
        self.buffer_size = _rows(buffer_size, n_envs)
        self.optimize_memory_usage = False
        self.handle_timeout_termination = handle_timeout_termination

        arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in layout.items()}
        self.frames = arrays["frames"]  # (environments, ring, bytes of a frame)
        self.actions = arrays["actions"]  # (rows, environments, action_dim)
        self.rewards = arrays["rewards"]  # this and the following: (rows, environments)
        self.dones = arrays["dones"]
        self.timeouts = arrays["timeouts"]
        self._breaks = arrays["breaks"]  # the next row does not continue this one
        # The stack of a transition is its `_real` frames up to number `_newest` of the environment,
        # preceded by zeros or by repetitions of the oldest of them. Its next stack ends one later.
        self._newest = arrays["newest"]
        self._real = arrays["real"]
        self._repeats = arrays["repeats"]
        self._stack = observation_space.shape[0] // channels  # type: ignore[index]
        self._as_frames = (n_envs, self._stack, self.frames.shape[2])

    @staticmethod
    def bytes_needed(
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        n_envs: int = 1,
        frame_channels: int = 1,
    ) -> int:
        """Memory that a buffer of this size takes once it is full."""
        return _bytes(_layout(buffer_size, observation_space, action_space, n_envs, frame_channels))

    def reset(self) -> None:
        """Forget all transitions."""
        super().reset()
        self._rows_stored = 0
        self._frames_written = np.zeros(self.n_envs, np.int64)

    _per_row = (
        *("actions", "rewards", "dones", "timeouts", "_breaks"),
        *("_newest", "_real", "_repeats"),
    )

    def rings(self) -> dict[str, tuple[NDArray[Any], int]]:
        """See `IndexedReplayBuffer.rings`; the frames of each environment are one more ring."""
        frames = zip(self.frames, self._frames_written.tolist(), strict=True)
        return {**super().rings(), **{f"frames{i}": ring for i, ring in enumerate(frames)}}

    def state_dict(self) -> dict[str, Any]:
        """See `IndexedReplayBuffer.state_dict`."""
        written = self._frames_written.tolist()
        return {
            **super().state_dict(),
            "rows_stored": self._rows_stored,
            "frames_written": written,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `IndexedReplayBuffer.load_state_dict`."""
        super().load_state_dict(state)
        self._frames_written[:] = state["frames_written"]
        rows = state["rows_stored"]
        if rows not in range((self.buffer_size if self.full else self.pos) + 1):
            raise ValueError(f"{rows} rows cannot be stored.")
        stored = np.arange(self.pos - rows, self.pos)
        oldest = self._newest[stored] - self._real[stored] + 1
        if np.any(oldest < self._frames_written - self.frames.shape[1]) or np.any(
            self._newest[stored] + 1 >= self._frames_written
        ):
            raise ValueError("The stacks that are stored need frames that are not.")
        self._rows_stored = rows

    def size(self) -> int:
        """Return the number of rows that can be sampled; each has a transition per environment."""
        return self._rows_stored

    def add(
        self,
        obs: NDArray[Any],
        next_obs: NDArray[Any],
        action: NDArray[Any],
        reward: NDArray[Any],
        done: NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        """Store one transition of each environment; arrays have the environment as first axis.

        :raises ValueError: if an environment's `next_obs` is not its `obs` moved on by one frame
        """
        row = self.pos
        stored, broken_env = _append_frames(
            self.frames,
            self._frames_written,
            self._split(obs),
            self._split(next_obs),
            self._newest,
            self._real,
            self._repeats,
            self._breaks,
            row,
            self._rows_stored,
        )
        if broken_env >= 0:
            raise ValueError(
                f"next_obs of environment {broken_env} is not obs moved on by one frame: the older "
                f"{self._stack - 1} frames of next_obs must be the newer {self._stack - 1} of obs "
                f"(observations of shape {self.obs_shape}, stack on the first axis, oldest frame "
                "first). For observations that are not stacked frames give the algorithm "
                "replay_buffer_class=ReplayBuffer, of stable_baselines3.common.buffers."
            )
        self.actions[row] = action.reshape(self.n_envs, self.action_dim)
        self.rewards[row] = reward
        self.dones[row] = done
        if self.handle_timeout_termination:
            self.timeouts[row] = [info.get("TimeLimit.truncated", False) for info in infos]

        self.pos = (row + 1) % self.buffer_size
        self.full = self.full or self.pos == 0
        self._rows_stored = stored
        self._rows_written += 1

    def _split(self, obs: NDArray[Any]) -> NDArray[np.uint8]:
        """Observations as frames: (environments, stack, bytes of a frame)."""
        if obs.shape[-len(self.obs_shape) :] != self.obs_shape:
            raise ValueError(
                f"Observations of shape {obs.shape} were given to a buffer of {self.obs_shape} "
                "for each environment."
            )
        return np.ascontiguousarray(obs).reshape(self._as_frames)

    def _observations(
        self, rows: NDArray[np.int64], last_rows: NDArray[np.int64], envs: NDArray[np.int64]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        channels, *size = self.obs_shape
        stacks = np.empty((2, len(rows), math.prod(size), channels), np.uint8)
        _copy_stacks(
            self.frames,
            self._newest,
            self._real,
            self._repeats,
            rows,
            last_rows,
            envs,
            *stacks,  # (batch, pixels, channels) each
        )
        images = stacks.reshape(2, -1, *size, channels)
        # What np.moveaxis does, for a tenth of its time.
        obs, next_obs = images.transpose(0, 1, images.ndim - 1, *range(2, images.ndim - 1))
        return obs, next_obs


def stacked_frames(env: VecEnv) -> int:
    """Return how many frames each observation of `env` stacks in the form a buffer here stores.

    Zero means that the environment is not known to stack frames; use SB3's `ReplayBuffer` then.
    Known are SB3's `VecFrameStack`, Gymnasium's `FrameStackObservation`, and any vector environment
    with an integer attribute `frame_stack`, such as `make_atari_vec_env` returns.
    """
    space = env.observation_space
    if not (isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3):
        return 0
    # These pass observations through, move the channel axis only, or give the originals to replay.
    passing = (VecCheckNan, VecMonitor, VecNormalize, VecTransposeImage, VecVideoRecorder)
    transposed = False
    while isinstance(env, passing):
        transposed |= isinstance(env, VecTransposeImage)
        env = env.venv
    if isinstance(env, VecFrameStack):
        stack = env.stacked_obs
        first = stack.channels_first if hasattr(stack, "channels_first") else False
        frames = stack.n_stack if first or transposed else 0
    elif isinstance(env, VecEnvWrapper):
        return 0
    elif hasattr(env, "frame_stack"):
        frames = int(env.frame_stack)
    elif all(env.env_is_wrapped(FrameStackObservation)):
        frames = space.shape[0]
    else:
        return 0
    return frames if frames == space.shape[0] > 1 else 0


_Layout = dict[str, tuple[tuple[int, ...], DTypeLike]]


def _rows(buffer_size: int, n_envs: int) -> int:
    return max(buffer_size // n_envs, 1)


def _layout(
    buffer_size: int,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    n_envs: int,
    frame_channels: int,
) -> _Layout:
    """Shape and type of every array of a buffer, after checking that its frames are frames."""
    if buffer_size < 1:
        raise ValueError(f"buffer_size must be at least 1, got {buffer_size}.")
    shape = observation_space.shape
    if (
        not isinstance(observation_space, spaces.Box)
        or observation_space.dtype != np.uint8
        or not shape
        or len(shape) < 3
        or shape[0] % frame_channels
        or shape[0] // frame_channels < 2
    ):
        raise ValueError(
            "FrameReplayBuffer stores uint8 images with at least two frames stacked on the first "
            f"axis, (stack * {frame_channels}, height, width); got {observation_space}. For other "
            "observations use stable_baselines3.common.buffers.ReplayBuffer."
        )
    stack = shape[0] // frame_channels
    rows = _rows(buffer_size, n_envs)
    # Besides a frame for each row: those older and newer than the stored rows, and room for starts.
    ring = rows + stack + max(rows // _STEPS_PER_SPARE_FRAME, stack)
    action_dim = get_action_dim(action_space)
    per_row = (rows, n_envs)
    return {
        "frames": ((n_envs, ring, int(np.prod(shape)) // stack), np.uint8),
        "actions": (
            (*per_row, action_dim),
            ReplayBuffer._maybe_cast_dtype(action_space.dtype) or np.float32,
        ),
        "rewards": (per_row, np.float32),
        "dones": (per_row, np.float32),
        "timeouts": (per_row, np.float32),
        "breaks": (per_row, np.bool_),
        "newest": (per_row, np.int64),
        "real": (per_row, np.uint8),
        "repeats": (per_row, np.bool_),
    }


def _bytes(layout: _Layout) -> int:
    return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in layout.values())


def _check_memory(buffer_size: int, needed: int) -> None:
    """Refuse a buffer that memory cannot hold, before the system kills a half-done training.

    The arrays would be allocated without complaint: pages are taken only when they are written.
    """
    available = available_bytes()
    if available is None or needed <= available:
        return
    # A tenth stays free for the networks and the environments.
    fits = int(0.9 * available / needed * buffer_size)
    raise MemoryError(
        f"A replay buffer of {buffer_size:,} transitions needs {needed / 1e9:.2f} GB and "
        f"{available / 1e9:.2f} GB are available. buffer_size={fits:,} would fit; a model "
        "that is loaded to play needs no more than 1."
    )


def available_bytes() -> int | None:
    """Memory that this process could still take, or None where the system does not tell."""
    limits = []
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    try:  # a container's own limit; "max" means none
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text())
        statistics = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        reclaimable = int(dict(statistics)["inactive_file"])
        limits.append(int((group / "memory.max").read_text()) - used + reclaimable)
    except (OSError, KeyError, ValueError):
        pass
    return min(limits, default=None)


# These loops over the bytes of a frame are written out so that they are vectorised: assigning a
# slice takes seven times as long, and without the conversions Numba widens each byte to 64 bits.
@jit()
def _copy(source: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
    for i in range(source.size):
        target[i] = source[i]


@jit()
def _differ(left: NDArray[np.uint8], right: NDArray[np.uint8]) -> bool:
    difference = np.uint8(0)
    for i in range(left.size):
        difference = np.uint8(difference | (left[i] ^ right[i]))
    return bool(difference != 0)


@jit()
def _is_zero(frame: NDArray[np.uint8]) -> bool:
    bits = np.uint8(0)
    for i in range(frame.size):
        bits = np.uint8(bits | frame[i])
    return bool(bits == 0)


@jit()
def _append_frames(
    frames: NDArray[np.uint8],  # (environments, ring, bytes)
    frames_written: NDArray[np.int64],  # (environments,)
    obs: NDArray[np.uint8],  # (environments, stack, bytes)
    next_obs: NDArray[np.uint8],
    newest: NDArray[np.int64],  # this and the following: (rows, environments)
    real: NDArray[np.uint8],
    repeats: NDArray[np.bool_],
    breaks: NDArray[np.bool_],
    row: int,
    stored: int,
) -> tuple[int, int]:
    """Write the new frames of one row and where they are; forget rows whose frames they replace.

    Returns the number of rows that are then stored, and -1 or the number of an environment whose
    stacks do not overlap, in which case nothing was written.
    """
    n_envs, stack = obs.shape[:2]
    ring = frames.shape[1]
    size = newest.shape[0]
    previous = row - 1  # -1 is the last row, which is what precedes row 0 after a wrap
    for env in range(n_envs):
        for i in range(stack - 1):
            if _differ(obs[env, i + 1], next_obs[env, i]):
                return stored, env

    for env in range(n_envs):
        # Does this transition start where the previous one ended?
        continues = stored > 0
        if continues:
            last = newest[previous, env] + 1
            known = min(int(real[previous, env]) + 1, stack)
            repeat = bool(repeats[previous, env])
            for i in range(stack - 1, -1, -1):
                age = stack - 1 - i
                if age < known or repeat:
                    same = not _differ(
                        obs[env, i], frames[env, (last - min(age, known - 1)) % ring]
                    )
                else:
                    same = _is_zero(obs[env, i])
                if not same:
                    continues = False
                    break
            breaks[previous, env] = not continues
        if not continues:
            # A first stack: leave out leading frames that are zeros or all the same.
            known = stack
            while known > 1 and _is_zero(obs[env, stack - known]):
                known -= 1
            repeat = known == stack
            while repeat and known > 1 and not _differ(obs[env, 0], obs[env, stack - known + 1]):
                known -= 1
            for i in range(stack - known, stack):
                _copy(obs[env, i], frames[env, frames_written[env] % ring])
                frames_written[env] += 1
            last = frames_written[env] - 1
        newest[row, env] = last
        real[row, env] = known
        repeats[row, env] = repeat
        breaks[row, env] = False
        _copy(next_obs[env, stack - 1], frames[env, frames_written[env] % ring])
        frames_written[env] += 1

    stored = min(stored + 1, size)
    for env in range(n_envs):
        oldest_kept = frames_written[env] - ring
        while True:
            oldest = (row + 1 - stored) % size
            if newest[oldest, env] - real[oldest, env] + 1 >= oldest_kept:
                break
            stored -= 1
    return stored, -1


# In one loop over four frames the writes are vectorised, so that it takes no longer than copying
# the frames one after the other; with a loop for each frame it takes three times as long.
@jit()
def _interleave(
    first: NDArray[np.uint8],
    second: NDArray[np.uint8],
    third: NDArray[np.uint8],
    fourth: NDArray[np.uint8],
    out: NDArray[np.uint8],
) -> None:
    for i in range(first.size):
        out[4 * i] = first[i]
        out[4 * i + 1] = second[i]
        out[4 * i + 2] = third[i]
        out[4 * i + 3] = fourth[i]


@jit()
def _copy_stack(
    frames: NDArray[np.uint8],  # (ring, bytes)
    newest: int,
    real: int,
    repeat: bool,
    out: NDArray[np.uint8],  # (pixels, channels)
) -> None:
    """Rebuild the stack whose last `real` frames end with number `newest`."""
    ring = frames.shape[0]
    pixels, channels = out.shape
    planes = frames.shape[1] // pixels
    stack = channels // planes
    oldest = newest - real + 1
    if channels == stack == 4 and (real == 4 or repeat):
        _interleave(
            frames[max(newest - 3, oldest) % ring],
            frames[max(newest - 2, oldest) % ring],
            frames[max(newest - 1, oldest) % ring],
            frames[newest % ring],
            out.reshape(-1),
        )
        return
    for channel in range(channels):
        number = newest - (stack - 1 - channel // planes)
        if number >= oldest or repeat:
            frame = frames[max(number, oldest) % ring]
            start = channel % planes * pixels
            for i in range(pixels):
                out[i, channel] = frame[start + i]
        else:
            out[:, channel] = 0


@jit()
def _copy_stacks(
    frames: NDArray[np.uint8],  # (environments, ring, bytes)
    newest: NDArray[np.int64],  # this and the following: (rows, environments)
    real: NDArray[np.uint8],
    repeats: NDArray[np.bool_],
    rows: NDArray[np.int64],  # (batch,)
    last_rows: NDArray[np.int64],
    envs: NDArray[np.int64],
    obs: NDArray[np.uint8],  # (batch, pixels, channels), written
    next_obs: NDArray[np.uint8],  # likewise
) -> None:
    """Rebuild the stacks of `rows` and the next stacks of `last_rows`."""
    stack = obs.shape[1] * obs.shape[2] // frames.shape[2]
    for b in range(rows.size):
        row, last, env = rows[b], last_rows[b], envs[b]
        _copy_stack(frames[env], newest[row, env], int(real[row, env]), repeats[row, env], obs[b])
        _copy_stack(
            frames[env],
            newest[last, env] + 1,
            min(int(real[last, env]) + 1, stack),
            repeats[last, env],
            next_obs[b],
        )
