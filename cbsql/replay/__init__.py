"""Replay buffers for Stable-Baselines3 that are usable alone."""

from cbsql.replay.frames import FrameReplayBuffer, stacked_frames
from cbsql.replay.path import PathReplayBuffer, PathSamples

__all__ = ["FrameReplayBuffer", "PathReplayBuffer", "PathSamples", "stacked_frames"]
