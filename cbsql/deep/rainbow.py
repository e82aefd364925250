"""Rainbow (Hessel et al., 2018), with any inverse temperature."""

import warnings
from typing import Any, ClassVar

import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from torch.nn import functional as F  # noqa: N812 (its usual name)

from cbsql.deep.policies import (
    CnnPolicy,
    MlpPolicy,
    MultiInputPolicy,
    RainbowNetwork,
    RainbowPolicy,
)
from cbsql.deep.sql import LOSSES, SQL, Batch
from cbsql.operators import soft_categorical_target
from cbsql.replay import (
    PrioritizedFrameReplayBuffer,
    PrioritizedReplayBuffer,
    PrioritizedSamples,
    stacked_frames,
)
from cbsql.temperature import Greedy, Temperature


class Rainbow(SQL):
    """DQN with six extensions, each of which can be turned off, at any inverse temperature.

    ``temperature=Greedy()``, the default, is Rainbow as published; ``CountBased()`` makes it
    Rainbow-CBSQL. It takes all arguments of :class:`stable_baselines3.DQN`, ``n_steps`` and what
    follows it by name, and by name:

    :param temperature: any of :mod:`cbsql.temperature`
    :param double: choose the policy by the online network, judge it by the target network
    :param prioritized: replay transitions in proportion to their loss; ``replay_buffer_class``, if
        given, is used as it is
    :param dueling: separate streams for values of states and advantages of actions
    :param categorical: learn the distribution of returns, on ``n_atoms`` values from ``v_min`` to
        ``v_max``, which are 51, -10 and 10 unless ``policy_kwargs`` says otherwise
    :param noisy: explore by noise on the weights, from the first step on; there is no
        epsilon-greedy exploration unless ``exploration_initial_eps`` asks for it
    :param n_steps: steps of the return; 4 where the maximum is backed up, else 1
    :param priority_exponent: how much priorities matter, from 0 to 1
    :param importance_exponent: how much uneven draws are made up for at the start; it grows to 1
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": MlpPolicy,
        "CnnPolicy": CnnPolicy,
        "MultiInputPolicy": MultiInputPolicy,
    }
    _parts = ("dueling", "categorical", "noisy")
    policy: RainbowPolicy
    q_net: RainbowNetwork
    q_net_target: RainbowNetwork

    def __init__(
        self,
        *args: Any,
        temperature: Temperature | None = None,
        double: bool = True,
        prioritized: bool = True,
        dueling: bool = True,
        categorical: bool = True,
        noisy: bool = True,
        n_steps: int | None = None,
        priority_exponent: float = 0.5,
        importance_exponent: float = 0.4,
        **kwargs: Any,
    ) -> None:
        if temperature is None and kwargs.get("beta") is None:
            temperature = Greedy()
        if n_steps is None:
            n_steps = 4 if isinstance(temperature, Greedy) else 1
        if noisy:
            kwargs = {"exploration_initial_eps": 0.0, "exploration_final_eps": 0.0, **kwargs}
        self.prioritized = bool(prioritized)
        self.priority_exponent = priority_exponent
        self.importance_exponent = importance_exponent
        parts = dict(zip(self._parts, (dueling, categorical, noisy), strict=True))
        given = kwargs.get("policy_kwargs") or {}
        for name in parts:
            if given.get(name, parts[name]) != parts[name]:
                raise ValueError(
                    f"policy_kwargs has {name}={given[name]}, Rainbow has {name}={parts[name]}: "
                    f"give it {name}={given[name]} as an argument of its own."
                )
        kwargs["policy_kwargs"] = {**given, **parts}
        super().__init__(*args, temperature=temperature, double=double, n_steps=n_steps, **kwargs)

    def _setup_model(self) -> None:
        if not issubclass(self.policy_class, RainbowPolicy):  # as the file of another algorithm has
            raise ValueError(f"Rainbow needs a RainbowPolicy, not {self.policy_class.__name__}.")
        super()._setup_model()

    def _choose_replay(self) -> None:
        if self.replay_buffer_class is None:
            if isinstance(self.observation_space, spaces.Dict):
                if self.prioritized or self.n_steps > 1:
                    warnings.warn(
                        "Dict observations are replayed uniformly and with one-step returns: there "
                        "is no other buffer for them.",
                        stacklevel=2,
                    )
                self.n_steps = 1
            elif self.prioritized:
                frames = self.env is not None and stacked_frames(self.env)
                self._use_replay(
                    PrioritizedFrameReplayBuffer if frames else PrioritizedReplayBuffer
                )
        for name in ("priority_exponent", "importance_exponent"):
            setattr(self, name, self.replay_buffer_kwargs.get(name, getattr(self, name)))
        super()._choose_replay()

    def _replay_arguments(self) -> dict[str, Any]:
        arguments = super()._replay_arguments()
        if issubclass(self.replay_buffer_class or object, PrioritizedReplayBuffer):
            arguments["priority_exponent"] = self.priority_exponent
            arguments["importance_exponent"] = self.importance_exponent
        return arguments

    def _sample_action(self, learning_starts: int, *args: Any, **kwargs: Any) -> Any:
        """Where noise explores it does so from the start, instead of acting uniformly at first."""
        return super()._sample_action(
            0 if self.q_net.parts.noisy else learning_starts, *args, **kwargs
        )

    def _sample(self, batch_size: int) -> tuple[Batch, Batch]:
        if isinstance(self.replay_buffer, PrioritizedReplayBuffer):
            done = min(1 - self._current_progress_remaining, 1.0)  # the last rollout may go beyond
            start = self.importance_exponent
            self.replay_buffer.importance_exponent = start + done * (1 - start)
        return super()._sample(batch_size)

    def _target(self, batch: Batch, beta: float | th.Tensor) -> th.Tensor:
        """Distributions of returns (batch, atoms), or values (batch, 1) if not categorical."""
        self.policy.reset_noise()
        if not self.q_net.parts.categorical:
            return super()._target(batch, beta)
        next_probs = self.q_net_target.logits(batch.next_observations).softmax(-1)
        policy_q = (
            self.q_net(batch.next_observations)
            if self.double
            else next_probs @ self.q_net_target.atoms
        )
        discounts = self.gamma if batch.discounts is None else batch.discounts
        discounts = (discounts * (1 - batch.dones)).flatten()
        return soft_categorical_target(
            next_probs, policy_q, beta, batch.rewards.flatten(), discounts, self.q_net.atoms
        )

    def _loss(self, batch: Batch, target: th.Tensor) -> th.Tensor:
        """Importance-weighted loss; what it is for each transition becomes its priority."""
        self.policy.q_net.reset_noise()
        actions = batch.actions.long()  # (batch, 1)
        if self.q_net.parts.categorical:
            rows = th.arange(len(actions), device=actions.device)
            logits = self.q_net.logits(batch.observations)[rows, actions.flatten()]
            log_probs = logits.log_softmax(-1)  # (batch, atoms)
            # The divergence of the prediction from the target, (batch, 1).
            losses = F.kl_div(log_probs, target, reduction="none").sum(1, keepdim=True)
            errors = losses.clamp(min=0)  # rounding takes a divergence of zero below it
        else:
            q = self.q_net(batch.observations).gather(1, actions)
            losses = LOSSES[self.loss](q, target, reduction="none")
            errors = (q - target).abs()
        if not isinstance(batch, PrioritizedSamples):
            return losses.mean()
        assert isinstance(self.replay_buffer, PrioritizedReplayBuffer)
        if errors.isfinite().all():  # else the loss is not, which ends the run
            self.replay_buffer.update_priorities(batch.indices, errors)
        return (batch.weights * losses).mean()
