"""Replay buffers for Stable-Baselines3 that are usable alone."""

from cbsql.replay.frames import FrameReplayBuffer, stacked_frames
from cbsql.replay.indexed import IndexedReplayBuffer
from cbsql.replay.prioritized import (
    PrioritizedFrameReplayBuffer,
    PrioritizedReplayBuffer,
    PrioritizedSamples,
    SumTree,
)

__all__ = [
    "FrameReplayBuffer",
    "IndexedReplayBuffer",
    "PrioritizedFrameReplayBuffer",
    "PrioritizedReplayBuffer",
    "PrioritizedSamples",
    "SumTree",
    "stacked_frames",
]
