"""Soft Q-learning and count-based soft Q-learning, as Stable-Baselines3 algorithms."""

import copy
import math
import warnings
from typing import Any, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import NStepReplayBuffer
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import (
    DictReplayBufferSamples,
    MaybeCallback,
    ReplayBufferSamples,
    RolloutReturn,
    TrainFreq,
)
from torch.nn import functional as F  # noqa: N812 (its usual name)

from cbsql.counts import PixelCounter, default_counter, fit_counter, named_counter
from cbsql.deep.optim import clipped_step
from cbsql.deep.saving import SafeDQN
from cbsql.operators import kl_cost, kl_from_uniform, mellowmax, soft_policy, soft_value
from cbsql.replay import FrameReplayBuffer, IndexedReplayBuffer, stacked_frames
from cbsql.temperature import Constant, CountBased, Counter, Temperature, from_config

Model = TypeVar("Model", bound="SQL")
Batch = ReplayBufferSamples | DictReplayBufferSamples
LOSSES = {"mse": F.mse_loss, "huber": F.smooth_l1_loss}
COUNTED = ("updates", "visits")


class DivergenceError(RuntimeError):
    """A loss or a weight is not a number any more; ``batch`` is what was learnt from then."""

    def __init__(self, what: str, update: int, batch: Any) -> None:
        super().__init__(what, update, batch)  # what it is made from again in another process
        self.batch = batch

    def __str__(self) -> str:
        what, update, _ = self.args
        return (
            f"{what} of update {update} is not a finite number. A smaller learning_rate or rewards "
            "of a smaller scale may help."
        )


class SQL(SafeDQN):
    """Soft Q-learning: DQN whose backup is a mellowmax, with any inverse temperature.

    It takes all arguments of :class:`stable_baselines3.DQN` in their order, and by name:

    :param beta: a constant inverse temperature; 100 if nothing is said
    :param temperature: in its place, any of :mod:`cbsql.temperature`; ``Greedy()`` makes it DQN
    :param loss: "mse" as in the paper, or "huber" as in SB3's DQN
    :param double: choose the soft policy by the online network, judge it by the target network
    :param soft_n_step: with ``n_steps`` above 1, take what the soft policy costs at the states
        between from the return, each at its own inverse temperature (the paper's soft return)
    :param counted: what moves a temperature on: the "updates" of a state's value, as in the paper,
        or its "visits", one for each step taken from it
    """

    def __init__(
        self,
        *args: Any,
        beta: float | None = None,
        temperature: Temperature | None = None,
        loss: str = "mse",
        double: bool = False,
        soft_n_step: bool = False,
        counted: str = "updates",
        **kwargs: Any,
    ) -> None:
        if beta is not None and temperature is not None:
            raise ValueError(f"Give beta ({beta}) or temperature ({temperature}), not both.")
        if temperature is None:
            temperature = Constant(100.0 if beta is None else beta)
        if not isinstance(temperature, Temperature):
            raise ValueError(
                "temperature takes an object of cbsql.temperature, such as Greedy() or "
                f"Constant(100.0), not {temperature!r}."
            )
        self.temperature_config = temperature.config()
        self.temperature = temperature
        self.loss = loss
        self.double = bool(double)  # load() wants the kind that the default has
        self.soft_n_step = bool(soft_n_step)
        self.counted = counted
        self._last_update: tuple[Batch, float | th.Tensor] | None = None
        super().__init__(*args, **kwargs)

    def _setup_model(self) -> None:
        # Asked here, where load() comes by.
        for name in ("buffer_size", "batch_size", "n_steps", "target_update_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma must be from 0 to 1, not {self.gamma}.")
        if self.loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, not {self.loss!r}.")
        if self.counted not in COUNTED:
            raise ValueError(f"counted must be one of {', '.join(COUNTED)}, not {self.counted!r}.")
        self._choose_replay()
        given, buffer_class = self.replay_buffer_kwargs, self.replay_buffer_class
        with warnings.catch_warnings():
            self.replay_buffer_kwargs = dict(given)  # SB3 writes to it
            if self._own_replay():
                self.replay_buffer_kwargs = {**self._replay_arguments(), **given}
                # SB3 warns that its n_steps has no effect on a given class of buffer; it has.
                warnings.filterwarnings("ignore", message="`n_steps=")
            super()._setup_model()
        assert isinstance(self.train_freq, TrainFreq)  # since SB3 looked at it
        if self.train_freq.frequency < 1:
            raise ValueError(f"train_freq must be at least 1, not {self.train_freq.frequency}.")
        # Saved as given: a loaded model may have another gamma, or returns of another length.
        self.replay_buffer_kwargs = given
        if self.replay_buffer_class is NStepReplayBuffer:
            self.replay_buffer_class = buffer_class
        if not hasattr(self, "temperature"):  # as load() has it
            self.temperature = from_config(self.temperature_config)
        if isinstance(self.temperature, CountBased):
            self._install_counter(self.temperature)

    def _install_counter(self, temperature: CountBased) -> None:
        """Have it count with what was handed in, what is named, or what fits the observations."""
        space, buffer = self.observation_space, self.replay_buffer
        counter = given = temperature.counter
        if counter is None:  # an empty one is false
            self.temperature = temperature = copy.copy(temperature)  # others may be given the same
            name = temperature.counter_name
            counter = default_counter(space) if name is None else named_counter(name, space)
        counter = fit_counter(counter, space)
        by_us = counter is not given
        if by_us and isinstance(counter, PixelCounter) and isinstance(buffer, FrameReplayBuffer):
            # The buffer knows whether three channels are three grey frames or one in colour.
            counter = PixelCounter(counter.density, space, buffer.frame_channels)
        temperature.install(counter)

    def _choose_replay(self) -> None:
        """Choose a buffer where SB3's own would not do, unless another is asked for.

        The frames of stacked images are stored once; a soft return needs the states it passes.
        What ``replay_buffer_kwargs`` say about the return holds for the model too.
        """
        if self.replay_buffer_class is None and not self.optimize_memory_usage:
            if self.env is not None and stacked_frames(self.env):
                self._use_replay(FrameReplayBuffer)
            elif self.soft_n_step:
                self._use_replay(IndexedReplayBuffer)
        if self._own_replay():
            self.n_steps = self.replay_buffer_kwargs.get("n_steps", self.n_steps)
            gamma = self.replay_buffer_kwargs.get("gamma", self.gamma)
            if gamma != self.gamma:
                raise ValueError(
                    f"The replay buffer would have gamma={gamma}, the model has gamma={self.gamma}."
                )
        if self.soft_n_step and self.n_steps == 1:
            raise ValueError("soft_n_step softens returns of several steps: give n_steps above 1.")
        if self.soft_n_step and not self._own_replay():
            raise ValueError(
                "soft_n_step needs the states that a return passes, so a buffer of cbsql.replay, "
                f"not {self.replay_buffer_class}."
            )

    def _replay_arguments(self) -> dict[str, Any]:
        """What a buffer of ours takes from the model."""
        arguments: dict[str, Any] = {"n_steps": self.n_steps, "gamma": self.gamma}
        if self.seed is None:  # models that nobody seeded do not draw the same indices
            arguments["rng"] = np.random.default_rng()
        return arguments

    def _use_replay(self, buffer_class: type[IndexedReplayBuffer]) -> None:
        self.replay_buffer_class = buffer_class
        if self.verbose > 0:
            print(f"Using {buffer_class.__name__}")

    def _own_replay(self) -> bool:
        return issubclass(self.replay_buffer_class or object, IndexedReplayBuffer)

    def set_random_seed(self, seed: int | None = None) -> None:
        """Seed SB3's global generators, and this model's own."""
        super().set_random_seed(seed)
        self._rng = np.random.default_rng(seed)

    def learn(
        self: Model,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 4,
        tb_log_name: str | None = None,
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> Model:
        """As SB3 learns, with TensorBoard's folders called after the class."""
        name = tb_log_name or type(self).__name__
        return super().learn(
            total_timesteps, callback, log_interval, name, reset_num_timesteps, progress_bar
        )

    def collect_rollouts(self, *args: Any, **kwargs: Any) -> RolloutReturn:
        """As SB3 collects, but after a stop in the middle, the next one begins a new episode.

        SB3 would go on from the observation before the step in which a callback or Ctrl-C stopped
        it, and store a transition that never was.
        """
        whole = False
        try:
            rollout = super().collect_rollouts(*args, **kwargs)
            whole = rollout.continue_training
            return rollout
        finally:
            if not whole:
                self._last_obs = None

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Algorithm 1 of the paper, its inner loop."""
        if gradient_steps == 0:
            return
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        learnt = list(self.q_net.parameters())

        losses = []
        for _ in range(gradient_steps):
            batch, as_counted = self._sample(batch_size)
            # The temperature is that of the evidence before this update, which is counted now, not
            # at the end: the counter and the batch are in the processor's caches here.
            beta = self._beta(as_counted.next_observations)
            if self.counted == "updates":
                self.temperature.update(as_counted.observations)
            with th.no_grad():
                target = self._target(batch, beta)  # (batch, 1)

            loss = self._loss(batch, target)
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise DivergenceError("The loss", self._n_updates + len(losses), batch)
            for parameter in learnt:
                parameter.grad = None  # as zero_grad does, in a tenth of its time
            loss.backward()  # type: ignore[no-untyped-call]
            norm = clipped_step(self.policy.optimizer, learnt, self.max_grad_norm)
            if not math.isfinite(norm):
                raise DivergenceError("The gradient", self._n_updates + len(losses), batch)

        self._n_updates += gradient_steps
        self._last_update = batch, beta
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/loss", np.mean(losses))

    def _target(self, batch: Batch, beta: float | th.Tensor) -> th.Tensor:
        """Soft backups (batch, 1): what an algorithm changes that backs up in another way."""
        next_q = self.q_net_target(batch.next_observations)  # (batch, actions)
        if self.double:
            next_v = soft_value(next_q, self.q_net(batch.next_observations), beta)
        else:
            next_v = mellowmax(next_q, beta)
        discounts = self.gamma if batch.discounts is None else batch.discounts
        return batch.rewards + (1 - batch.dones) * discounts * next_v.unsqueeze(1)

    def _loss(self, batch: Batch, target: th.Tensor) -> th.Tensor:
        q = self.q_net(batch.observations).gather(1, batch.actions.long())  # (batch, 1)
        return LOSSES[self.loss](q, target)

    def _beta(self, observations: Any) -> float | th.Tensor:
        beta = self.temperature.beta(observations)
        if isinstance(beta, float):
            return beta
        return th.as_tensor(beta, dtype=th.float32, device=self.device)

    def _sample(self, batch_size: int) -> tuple[Batch, Batch]:
        """A batch as the networks see it, and as it is counted: before VecNormalize changed it."""
        assert self.replay_buffer is not None
        buffer, env = self.replay_buffer, self._vec_normalize_env
        if isinstance(buffer, IndexedReplayBuffer):
            indices = buffer._draw_indices(batch_size)
            batch = buffer._get_samples(indices, env)
            counted = batch if env is None else buffer._get_samples(indices)
            if self.soft_n_step:
                batch = batch._replace(rewards=batch.rewards - self._path_costs(indices))
            return batch, counted
        if env is None:
            batch = buffer.sample(batch_size)
            return batch, batch
        # SB3's own buffers choose while they build, so the same rows have to be drawn twice.
        before = np.random.get_state()  # noqa: NPY002
        counted = buffer.sample(batch_size)
        np.random.set_state(before)  # noqa: NPY002
        batch = buffer.sample(batch_size, env=env)
        if not th.equal(batch.actions, counted.actions):
            raise ValueError(
                f"A {type(buffer).__name__} draws from a generator of its own, so that what is "
                "learnt cannot be drawn once more as it was before VecNormalize: use NumPy's "
                "global one, or a buffer of cbsql.replay."
            )
        return batch, counted

    @th.no_grad()
    def _path_costs(self, indices: np.ndarray) -> th.Tensor:
        """What the soft policy costs at the states that n-step returns pass, (batch, 1)."""
        buffer, env = self.replay_buffer, self._vec_normalize_env
        assert isinstance(buffer, IndexedReplayBuffer)
        states, discounts = buffer.path(indices, env)  # (batch, n_steps - 1, ...)
        beta = self._beta((states if env is None else buffer.path(indices)[0]).flatten(0, 1))
        network = self.q_net if self.double else self.q_net_target
        policy = soft_policy(network(states.flatten(0, 1)), beta)
        return (discounts * kl_cost(policy, beta).view_as(discounts)).sum(1, keepdim=True)

    def predict(
        self,
        observation: Any,
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """Actions, epsilon-greedy unless ``deterministic``: each environment explores on its own.

        For a single environment this is SB3's ``predict``, with the numbers SB3 would draw.
        """
        if isinstance(observation, list):
            observation = np.asarray(observation)
        if deterministic or isinstance(observation, tuple):  # which SB3 refuses with advice
            return self._policy_actions(observation, state, episode_start, True)
        assert isinstance(self.action_space, spaces.Discrete)
        several = self.policy.is_vectorized_observation(observation)
        part = next(iter(observation.values())) if isinstance(observation, dict) else observation
        rows = len(part) if several else 1
        if rows > 1:
            actions, state = self._policy_actions(observation, state, episode_start, False)
            explore = self._rng.random(rows) < self.exploration_rate
            random_actions = self._rng.integers(self.action_space.n, size=rows)
            return np.where(explore, random_actions, actions), state
        if np.random.rand() < self.exploration_rate:  # noqa: NPY002 (SB3's own draw)
            action = self.action_space.sample()
            return np.array([action] if several else action), state
        return self._policy_actions(observation, state, episode_start, False)

    def _policy_actions(
        self, observation: Any, state: Any, episode_start: Any, deterministic: bool
    ) -> tuple[np.ndarray, Any]:
        """Actions of the policy; of a batch as environments return it, without SB3's checks."""
        shape = self.observation_space.shape
        if (
            self.policy.training
            or type(self.policy).predict is not BasePolicy.predict  # it may mask actions
            or not isinstance(observation, np.ndarray)
            or observation.ndim == 0
            or observation.shape[1:] != shape
        ):
            return self.policy.predict(observation, state, episode_start, deterministic)
        with th.no_grad():
            tensor = th.as_tensor(observation, device=self.device)
            return self.policy._predict(tensor, deterministic).cpu().numpy(), state

    def _store_transition(self, *args: Any, **kwargs: Any) -> None:
        _, _, _, reward, *_ = args
        if not np.isfinite(reward).all():
            raise ValueError(
                f"The environment returned the rewards {reward} at step {self.num_timesteps}: "
                "they must be finite numbers."
            )
        if self.counted == "visits":
            normalized = self._vec_normalize_env is not None
            self.temperature.update(self._last_original_obs if normalized else self._last_obs)
        super()._store_transition(*args, **kwargs)

    def dump_logs(self) -> None:
        """Add what the temperature does to SB3's logs; computed only when they are written."""
        if self._last_update is not None:
            for name, value in self._diagnose(*self._last_update).items():
                self.logger.record(f"train/{name}", value)
        super().dump_logs()

    def _diagnose(self, batch: Batch, beta: float | th.Tensor) -> dict[str, float]:
        """Of the latest batch: beta and count at s', entropy of the soft policy there, mean Q."""
        with th.no_grad():
            next_q = self.q_net_target(batch.next_observations)
            entropy = np.log(next_q.shape[1]) - kl_from_uniform(soft_policy(next_q, beta)).mean()
        figures = {"entropy": float(entropy), "q_mean": float(next_q.mean())}
        if isinstance(beta, float):
            return {**figures, "beta": beta}
        figures.update(_spread("beta", beta.cpu().numpy()))
        if isinstance(self.temperature, CountBased):
            figures.update(_spread("count", beta.cpu().numpy() / self.temperature.kappa))
        return figures


class CBSQL(SQL):
    """Count-based soft Q-learning: the inverse temperature of a state is kappa times its count.

    It takes the arguments of :class:`SQL` but for ``beta`` and ``temperature``, and by name:

    :param kappa: how fast trust grows with the number of value updates
    :param counter: what counts them, or its name (:data:`cbsql.counts.COUNTERS`); chosen from the
        observation space if not given
    """

    def __init__(
        self, *args: Any, kappa: float = 0.01, counter: Counter | str | None = None, **kwargs: Any
    ) -> None:
        for name in kwargs.keys() & {"beta", "temperature"}:
            raise ValueError(f"CBSQL has the temperature kappa n(s) and no {name}: SQL takes one.")
        super().__init__(*args, temperature=CountBased(counter, kappa), **kwargs)


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    """Mean and 10, 50 and 90% quantiles, which may be infinite."""
    # Between two infinite values there is nothing to interpolate.
    quantiles = np.quantile(values, (0.1, 0.5, 0.9), method="nearest").tolist()
    names = (f"{name}_{suffix}" for suffix in ("mean", "p10", "p50", "p90"))
    return dict(zip(names, (float(values.mean()), *quantiles), strict=True))
