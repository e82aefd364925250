"""Everything a learner needs to go on training as if it had never stopped."""

from collections import deque
from typing import Any

import numpy as np
import torch as th

from cbsql.deep.policies import RainbowNetwork
from cbsql.deep.sql import SQL
from cbsql.replay import IndexedReplayBuffer

_COUNTERS = ("num_timesteps", "_n_calls", "_n_updates", "_episode_num")
_SCHEDULES = ("_current_progress_remaining", "exploration_rate")
_MOMENT = ("_last_obs", "_last_episode_starts", "_last_original_obs")


def training_state(model: SQL) -> dict[str, Any]:
    """State of a learner between a training step and the next action, but for what replay holds.

    Nested dicts and lists of arrays, numbers and text. The rows of the replay buffer are its
    :meth:`~cbsql.replay.IndexedReplayBuffer.rings`.
    """
    buffer = _replay(model)
    assert model.ep_info_buffer is not None
    assert model.ep_success_buffer is not None
    return {
        "policy": model.policy.state_dict(),
        "noise": [_noise(network) for network in _noisy(model)],
        "optimizer": model.policy.optimizer.state_dict(),
        "temperature": model.temperature.state_dict(),
        "replay": buffer.state_dict(),
        "attributes": {name: getattr(model, name) for name in (*_COUNTERS, *_SCHEDULES, *_MOMENT)},
        "recent_episodes": list(model.ep_info_buffer),
        "recent_successes": [bool(success) for success in model.ep_success_buffer],
        "generators": {
            "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 (SB3 explores with it)
            "torch": th.get_rng_state(),
            "model": model._rng.bit_generator.state,
            "action_space": model.action_space.np_random.bit_generator.state,
        },
    }


def restore_training(model: SQL, state: dict[str, Any]) -> None:
    """Put a learner of the same construction into a state."""
    model.policy.load_state_dict(state["policy"])
    for network, noise in zip(_noisy(model), state["noise"], strict=True):
        _restore_noise(network, noise)
    model.policy.optimizer.load_state_dict(state["optimizer"])
    model.temperature.load_state_dict(state["temperature"])
    _replay(model).load_state_dict(state["replay"])
    for name, value in state["attributes"].items():
        setattr(model, name, value)
    model.ep_info_buffer = deque(state["recent_episodes"], maxlen=model._stats_window_size)
    successes = state.get("recent_successes", [])  # older checkpoints lack them
    model.ep_success_buffer = deque(successes, maxlen=model._stats_window_size)
    generators = state["generators"]
    np.random.set_state(generators["numpy"])  # noqa: NPY002
    th.set_rng_state(generators["torch"])
    model._rng.bit_generator.state = generators["model"]
    model.action_space.np_random.bit_generator.state = generators["action_space"]


def _replay(model: SQL) -> IndexedReplayBuffer:
    if not isinstance(model.replay_buffer, IndexedReplayBuffer):
        raise ValueError(
            f"A {type(model.replay_buffer).__name__} cannot be checkpointed: use a buffer of "
            "cbsql.replay."
        )
    return model.replay_buffer


def _noisy(model: SQL) -> list[RainbowNetwork]:
    networks = (model.q_net, model.q_net_target)
    return [network for network in networks if isinstance(network, RainbowNetwork)]


def _noise(network: RainbowNetwork) -> dict[str, Any]:
    return {
        "generator": network.generator.get_state(),
        "layers": [layer.noise for layer in network.noisy_layers],
    }


def _restore_noise(network: RainbowNetwork, state: dict[str, Any]) -> None:
    network.generator.set_state(state["generator"])
    for layer, noise in zip(network.noisy_layers, state["layers"], strict=True):
        layer.noise = None if noise is None else noise.to(layer.weight)
