"""Soft Q-learning and count-based soft Q-learning, as Stable-Baselines3 algorithms."""

import warnings
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.type_aliases import (
    DictReplayBufferSamples,
    GymEnv,
    ReplayBufferSamples,
)
from stable_baselines3.common.utils import check_for_correct_spaces, get_system_info
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer
from torch.nn import functional as F  # noqa: N812 (its usual name)

from cbsql import files
from cbsql.counts import default_counter, fit_counter
from cbsql.operators import kl_cost, kl_from_uniform, mellowmax, soft_policy, soft_value
from cbsql.replay import FrameReplayBuffer, IndexedReplayBuffer, stacked_frames
from cbsql.replay.stored import REPLAY_SUFFIX, load_replay, save_replay
from cbsql.temperature import Constant, CountBased, Counter, Temperature, from_config

SelfSQL = TypeVar("SelfSQL", bound="SQL")
Batch = ReplayBufferSamples | DictReplayBufferSamples
LOSSES = {"mse": F.mse_loss, "huber": F.smooth_l1_loss}

NEEDED = {"policy_class", "policy_kwargs", "observation_space", "action_space"} | {
    f"replay_buffer_{part}" for part in ("class", "kwargs")
}
"""What a model cannot be built again without."""


class SQL(DQN):
    """Soft Q-learning: DQN whose backup is a mellowmax, with any inverse temperature.

    It takes all arguments of :class:`stable_baselines3.DQN` in their order, and by name:

    :param beta: a constant inverse temperature; 100 if nothing is said
    :param temperature: in its place, any of :mod:`cbsql.temperature`; ``Greedy()`` makes it DQN
    :param loss: "mse" as in the paper, or "huber" as in SB3's DQN
    :param double: choose the soft policy by the online network, judge it by the target network
    :param soft_n_step: with ``n_steps`` above 1, take what the soft policy costs at the states
        between from the return, each at its own inverse temperature (the paper's soft return)
    """

    temperature: Temperature

    def __init__(
        self,
        *args: Any,
        beta: float | None = None,
        temperature: Temperature | None = None,
        loss: str = "mse",
        double: bool = False,
        soft_n_step: bool = False,
        **kwargs: Any,
    ) -> None:
        if beta is not None and temperature is not None:
            raise ValueError(f"Give beta ({beta}) or temperature ({temperature}), not both.")
        if loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, not {loss!r}.")
        if temperature is None:
            temperature = Constant(100.0 if beta is None else beta)
        self.temperature_config = temperature.config()
        # SB3's load() constructs without set-up, puts the saved attributes in place, then sets up.
        if kwargs.get("_init_setup_model", True):
            self.temperature = temperature
        self.loss = loss
        self.double = double
        self.soft_n_step = soft_n_step
        self._last_update: tuple[Batch, float | th.Tensor] | None = None
        super().__init__(*args, **kwargs)

    def _setup_model(self) -> None:
        self._choose_replay()
        with warnings.catch_warnings():
            if self._own_replay():
                # SB3 warns that its n_steps has no effect on a given class of buffer; it has.
                warnings.filterwarnings("ignore", message="`n_steps=")
            super()._setup_model()
        if not hasattr(self, "temperature"):
            self.temperature = from_config(self.temperature_config)
        if isinstance(self.temperature, CountBased):
            counter = self.temperature.counter or default_counter(self.observation_space)
            self.temperature.counter = fit_counter(counter, self.observation_space)

    def _choose_replay(self) -> None:
        """Choose a buffer where SB3's own would not do, unless another is asked for.

        The frames of stacked images are stored once; a soft return needs the states it passes.
        """
        if self.replay_buffer_class is None and not self.optimize_memory_usage:
            if self.env is not None and stacked_frames(self.env):
                self._use_replay(FrameReplayBuffer)
            elif self.soft_n_step:
                self._use_replay(IndexedReplayBuffer)
        if self.soft_n_step and self.n_steps == 1:
            raise ValueError("soft_n_step softens returns of several steps: give n_steps above 1.")
        if self.soft_n_step and not self._own_replay():
            raise ValueError(
                "soft_n_step needs the states that a return passes, so a buffer of cbsql.replay, "
                f"not {self.replay_buffer_class}."
            )

    def _use_replay(self, buffer_class: type[IndexedReplayBuffer], **kwargs: Any) -> None:
        if self.n_steps > 1:
            kwargs.update(n_steps=self.n_steps, gamma=self.gamma)
        self.replay_buffer_class = buffer_class
        self.replay_buffer_kwargs = {**kwargs, **self.replay_buffer_kwargs}
        if self.verbose > 0:
            print(f"Using {buffer_class.__name__}")

    def _own_replay(self) -> bool:
        return issubclass(self.replay_buffer_class or object, IndexedReplayBuffer)

    def set_random_seed(self, seed: int | None = None) -> None:
        """Seed SB3's global generators, and this model's own."""
        super().set_random_seed(seed)
        self._rng = np.random.default_rng(seed)

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Algorithm 1 of the paper, its inner loop."""
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)

        losses = []
        for _ in range(gradient_steps):
            batch, counted = self._sample(batch_size)
            with th.no_grad():
                # The temperature is that of the evidence before this update.
                beta = self._beta(counted.next_observations)
                target = self._target(batch, beta)  # (batch, 1)

            loss = self._loss(batch, target)
            losses.append(loss.item())
            self.policy.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            th.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()

            self.temperature.update(counted.observations)

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
        return buffer.sample(batch_size, env=env), counted

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
        part = next(iter(observation.values())) if isinstance(observation, dict) else observation
        several = self.policy.is_vectorized_observation(observation) and len(part) > 1
        if deterministic or not several:
            return super().predict(observation, state, episode_start, deterministic)
        actions, state = self.policy.predict(observation, state, episode_start, deterministic)
        assert isinstance(self.action_space, spaces.Discrete)
        explore = self._rng.random(len(part)) < self.exploration_rate
        random_actions = self._rng.integers(self.action_space.n, size=len(part))
        return np.where(explore, random_actions, actions), state

    def _store_transition(self, *args: Any, **kwargs: Any) -> None:
        _, _, _, reward, *_ = args
        if not np.isfinite(reward).all():
            raise ValueError(
                f"The environment returned the rewards {reward} at step {self.num_timesteps}: "
                "they must be finite numbers."
            )
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

    def save(
        self,
        path: files.PathLike,
        exclude: Iterable[str] | None = None,
        include: Iterable[str] | None = None,
    ) -> None:
        """Write a file that is safe to load: JSON and tensors, no code.

        What cannot be stored so is left out with a warning, which says what :meth:`load` needs.
        """
        left_out = {*(exclude or ()), *self._excluded_save_params()} - {*(include or ())}
        document = files.Document("model")
        for name, value in vars(self).items():
            if name in left_out:
                continue
            try:
                document[name] = value
            except files.FileError as error:
                instead = "it keeps its default"
                if name == "learning_rate":
                    document[name] = self.lr_schedule(self._current_progress_remaining)
                    instead = f"it stays at {document[name]}"
                elif name in NEEDED:
                    instead = "load() fails"
                given = f'custom_objects={{"{name}": ...}}'
                warnings.warn(
                    f"{error} Unless {given} is given to load(), {instead}.", stacklevel=2
                )
        for name, state in self.get_parameters().items():
            document[f"parameters/{name}"] = state
        document["parameters/temperature"] = self.temperature.state_dict()
        document["system"] = get_system_info(print_info=False)[1]
        document.write(path, "zip")

    @classmethod
    def load(
        cls: type[SelfSQL],
        path: files.PathLike,
        env: GymEnv | None = None,
        device: th.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        trust: bool = False,
        **kwargs: Any,
    ) -> SelfSQL:
        """As SB3 loads, without running what a file contains.

        :param trust: load files of SB3 too, and import the classes that a file names; either can
            run any code, so give it for files of people you trust only
        """
        if trust and not files.is_document(path, "zip"):
            return super().load(
                path, env, device, custom_objects, print_system_info, force_reset, **kwargs
            )
        document = files.read(path, "model", "zip", trust)
        given = custom_objects or {}
        with files.blame(path):
            if print_system_info:
                print("== SAVED MODEL SYSTEM INFO ==", document["system"], sep="\n")
            names = [name for name in document.content if name != "system" and "/" not in name]
            data = {name: document[name] for name in names if name not in given}
            cls._check_attributes(data)
            data |= {name: given[name] for name in (*names, *NEEDED) if name in given}
            for name in NEEDED - data.keys():
                raise ValueError(f'it has no {name}; pass custom_objects={{"{name}": ...}}.')
        if kwargs.get("policy_kwargs", data["policy_kwargs"]) != data["policy_kwargs"]:
            raise ValueError(
                f"The file has the policy_kwargs {data['policy_kwargs']}, not those specified: "
                f"{kwargs['policy_kwargs']}."
            )
        if env is not None:
            env = cls._wrap_env(env, data.get("verbose", 0))
            check_for_correct_spaces(env, data["observation_space"], data["action_space"])
            data["n_envs"] = env.num_envs
            if force_reset:
                data["_last_obs"] = None
        model = cls(data["policy_class"], env, device=device, _init_setup_model=False)
        vars(model).update(data, **kwargs)
        with files.blame(path), document.budget():
            model._setup_model()
        model._load_parameters(path, document, exact_match=True)
        return model

    @classmethod
    def _check_attributes(cls, data: dict[str, Any]) -> None:
        """Refuse attributes of a file that are no settings of the class, or of another kind."""
        new = cls("MlpPolicy", None, _init_setup_model=False)
        for name, value in data.items():
            hidden = getattr(cls, name, None)
            if name in new._excluded_save_params() or callable(hidden) or type(hidden) is property:
                raise ValueError(f"it sets {name}, which files do not.")
            if name == "learning_rate" and callable(value):
                continue
            if name != "train_freq":  # a number, a pair or a TrainFreq, which SB3 checks
                files.check_kind(name, value, vars(new).get(name))

    def set_parameters(
        self,
        load_path_or_dict: Any,
        exact_match: bool = True,
        device: th.device | str = "auto",
        trust: bool = False,
    ) -> None:
        """As SB3 does it; a temperature's state that comes along is loaded as well."""
        parameters = load_path_or_dict
        if not isinstance(parameters, dict):
            if not trust or files.is_document(parameters, "zip"):
                document = files.read(parameters, "model", "zip", trust)
                return self._load_parameters(parameters, document, exact_match)
            _, parameters, _ = load_from_zip_file(parameters, load_data=False, device=device)
        networks = {name: state for name, state in parameters.items() if name != "temperature"}
        super().set_parameters(networks, exact_match, device)
        if "temperature" in parameters:
            self.temperature.load_state_dict(parameters["temperature"])
        return None

    def _load_parameters(
        self, path: files.PathLike, document: files.Document, exact_match: bool
    ) -> None:
        with files.blame(path):
            names = [name for name in document.content if name.startswith("parameters/")]
            parameters = {name.removeprefix("parameters/"): document[name] for name in names}
            saved = parameters["policy.optimizer"]["param_groups"][0]["params"]
            mine = len(self.policy.optimizer.param_groups[0]["params"])
            if len(saved) == 2 * mine:  # as SB3 had it before its version 2.4
                warnings.warn(
                    "The optimiser's state of the target network is left out.", stacklevel=3
                )
                del saved[mine:]
            if exact_match:
                files.check_tensors(parameters["policy"], self.get_parameters()["policy"])
            files.check_optimizer(parameters["policy.optimizer"], self.policy.optimizer)
            self.set_parameters(parameters, exact_match)

    def save_replay_buffer(self, path: files.PathLike) -> None:
        """Write the replay buffer to a file that is safe to load."""
        assert self.replay_buffer is not None, "The replay buffer is not defined"
        save_replay(path, self.replay_buffer)

    def load_replay_buffer(
        self, path: files.PathLike, truncate_last_traj: bool = True, trust: bool = False
    ) -> None:
        """As SB3 does it.

        :param trust: load pickles of SB3 too, which can run any code
        """
        if trust and not files.is_document(path, REPLAY_SUFFIX):
            return super().load_replay_buffer(path, truncate_last_traj)
        buffer = load_replay(path, self.env, self.device)
        stored, mine = ((owner.observation_space, owner.action_space) for owner in (buffer, self))
        if stored != mine:
            raise files.FileError(f"{path} has transitions of {stored}, the model needs {mine}.")
        self.replay_buffer = buffer
        if isinstance(self.replay_buffer, HerReplayBuffer) and truncate_last_traj:
            self.replay_buffer.truncate_last_trajectory()
        return None

    def _excluded_save_params(self) -> list[str]:
        # The last four are made from the others.
        own = ["temperature", "_last_update", "_rng"]
        made = [
            "lr_schedule",
            "exploration_schedule",
            "batch_norm_stats",
            "batch_norm_stats_target",
        ]
        return [*super()._excluded_save_params(), *own, *made]


class CBSQL(SQL):
    """Count-based soft Q-learning: the inverse temperature of a state is kappa times its count.

    It takes the arguments of :class:`SQL` but for ``beta`` and ``temperature``, and by name:

    :param kappa: how fast trust grows with the number of value updates
    :param counter: what counts them; chosen from the observation space if not given
    """

    def __init__(
        self, *args: Any, kappa: float = 0.01, counter: Counter | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, temperature=CountBased(counter, kappa), **kwargs)


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    """Mean and 10, 50 and 90% quantiles."""
    quantiles = np.quantile(values, (0.1, 0.5, 0.9)).tolist()
    names = (f"{name}_{suffix}" for suffix in ("mean", "p10", "p50", "p90"))
    return dict(zip(names, (float(values.mean()), *quantiles), strict=True))
