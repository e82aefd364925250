"""Replay buffers for Stable-Baselines3 that are usable alone."""

from cbsql.replay.frames import FrameReplayBuffer, stacked_frames
from cbsql.replay.indexed import IndexedReplayBuffer

__all__ = ["FrameReplayBuffer", "IndexedReplayBuffer", "stacked_frames"]
