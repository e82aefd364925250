"""Munchausen-DQN, the soft method of a fixed temperature that others are compared with."""

import math
from typing import Any

import torch as th

from cbsql.deep.sql import SQL, Batch
from cbsql.operators import mellowmax
from cbsql.temperature import Constant


class Munchausen(SQL):
    """Munchausen-DQN (Vieillard et al., 2020): a bonus for actions that its policy finds likely.

    It takes the arguments of :class:`SQL` but for ``temperature``, ``double`` and ``soft_n_step``,
    and by name:

    :param beta: inverse of the temperature of the policy, which is 0.03 in the publication
    :param alpha: how much of the scaled log-probability of an action is added to its reward
    :param least_bonus: where the scaled log-probability is cut off below
    """

    def __init__(
        self,
        *args: Any,
        beta: float = 1 / 0.03,
        alpha: float = 0.9,
        least_bonus: float = -1.0,
        **kwargs: Any,
    ) -> None:
        for name in ("double", "soft_n_step"):  # it charges entropy in a way of its own
            if kwargs.get(name):
                raise ValueError(f"Munchausen-DQN is defined without {name}: leave {name}=False.")
        self.alpha = alpha
        self.least_bonus = least_bonus
        super().__init__(*args, beta=beta, **kwargs)

    def _setup_model(self) -> None:
        super()._setup_model()
        if not isinstance(self.temperature, Constant):  # which load() may be given
            raise ValueError(
                f"Munchausen-DQN is defined with a Constant temperature, not {self.temperature}."
            )

    def _target(self, batch: Batch, beta: float | th.Tensor) -> th.Tensor:
        assert isinstance(beta, float)
        next_q = self.q_net_target(batch.next_observations)  # (batch, actions)
        # Published with entropy in the place of the divergence from uniform.
        next_v = mellowmax(next_q, beta) + math.log(next_q.shape[1]) / beta
        q = self.q_net_target(batch.observations)
        log_policy = th.log_softmax(beta * q, 1).gather(1, batch.actions.long())  # (batch, 1)
        bonus = self.alpha * (log_policy / beta).clamp(self.least_bonus, 0)
        discounts = self.gamma if batch.discounts is None else batch.discounts
        return batch.rewards + bonus + (1 - batch.dones) * discounts * next_v.unsqueeze(1)
