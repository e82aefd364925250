"""Exact solutions of small problems whose model is known."""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from cbsql.operators import mellowmax


def soft_value_iteration(
    transitions: NDArray[np.float64],
    rewards: NDArray[np.float64],
    gamma: float,
    beta: float = math.inf,
    horizon_steps: int | None = None,
) -> NDArray[np.float64]:
    """Soft optimal values Q (states, actions): the fixed point of the soft Bellman operator.

    :param transitions: probabilities (states, actions, next states)
    :param rewards: expected rewards (states, actions)
    :param gamma: discount factor, below 1 unless there is a horizon
    :param beta: inverse temperature; infinite gives the optimum of the plain problem
    :param horizon_steps: how many steps remain; ``None`` for no end
    """
    if not (0 <= gamma < 1 or (gamma == 1 and horizon_steps is not None)):
        raise ValueError(f"gamma must be in [0, 1), or 1 with a horizon, not {gamma!r}.")
    model, reward = torch.from_numpy(transitions), torch.from_numpy(rewards)
    q = torch.zeros_like(reward)
    if horizon_steps is None:
        # The error shrinks by gamma in each sweep: enough sweeps for the last bit of a float64.
        scale = max(float(reward.abs().max()), 1e-300) / (1 - gamma)
        horizon_steps = 1 + math.ceil(math.log(1e-17 / scale) / math.log(gamma)) if gamma else 1
    for _ in range(max(horizon_steps, 1)):
        q = reward + gamma * model @ mellowmax(q, beta)
    return q.numpy()
