"""Replay buffers for Stable-Baselines3 that are usable alone."""

from cbsql.replay.frames import FrameReplayBuffer, stacked_frames

__all__ = ["FrameReplayBuffer", "stacked_frames"]
