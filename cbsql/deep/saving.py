"""Stable-Baselines3's DQN with files that are safe to load."""

import pathlib
import warnings
from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar

import torch as th
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.utils import FloatSchedule, check_for_correct_spaces, get_system_info
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from cbsql import files
from cbsql.deep.policies import SafeCnnPolicy, SafeMultiInputPolicy, SafePolicy
from cbsql.deep.stored import (
    MOST_HER_STEPS,
    REPLAY_SUFFIX,
    check_steps,
    load_replay,
    save_replay,
)
from cbsql.replay import IndexedReplayBuffer, PrioritizedReplayBuffer
from cbsql.temperature import Temperature

Self = TypeVar("Self", bound="SafeDQN")

NEEDED = {"policy_class", "policy_kwargs", "observation_space", "action_space"}
"""What a model cannot be built again without."""


class SafeDQN(DQN):
    """DQN whose methods that write and read files do so without pickles.

    They take SB3's arguments. Those that read take ``trust`` besides: with it, they read files of
    SB3 too, and import classes from wherever a file says. Either can run any code, so give it for
    files of people you trust only.
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": SafePolicy,
        "CnnPolicy": SafeCnnPolicy,
        "MultiInputPolicy": SafeMultiInputPolicy,
    }
    _parts: ClassVar[tuple[str, ...]] = ()
    """Arguments that the constructor adds to ``policy_kwargs``."""
    temperature: Temperature
    temperature_config: dict[str, Any]
    """What :attr:`temperature` is made from again by ``load``."""

    def save(
        self,
        path: files.PathLike,
        exclude: Iterable[str] | None = None,
        include: Iterable[str] | None = None,
    ) -> None:
        """As SB3 saves, but what files cannot hold is left out with a warning."""
        self.temperature_config = self.temperature.config()  # it may have been replaced
        left_out = {*(exclude or ()), *self._excluded_save_params()} - {*(include or ())}
        document = files.Document("model")
        for name, value in vars(self).items():
            if name in left_out:
                continue
            try:
                document[name] = value
            except files.FileError as error:
                instead = (
                    "load() refuses the file" if name in NEEDED else "load() takes its default"
                )
                if name == "learning_rate":
                    document[name] = now = self.lr_schedule(self._current_progress_remaining)
                    instead = f"load() takes its present value, {now}"
                advice = f'Unless given custom_objects={{"{name}": ...}}, {instead}.'
                warnings.warn(f"{error} {advice}", stacklevel=2)
        for name, state in self.get_parameters().items():
            document[f"parameters/{name}"] = state
        document["parameters/temperature"] = self.temperature.state_dict()
        document["system"] = get_system_info(print_info=False)[1]
        document.write(path, "zip")

    @classmethod
    def load(
        cls: type[Self],
        path: files.PathLike,
        env: GymEnv | None = None,
        device: th.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        trust: bool = False,
        **kwargs: Any,
    ) -> Self:
        """As SB3 loads: a new model, with ``custom_objects`` in the place of what the file has.

        Another temperature is given as ``temperature``. It takes over the counts in the file if it
        is of the same kind; a counter that cannot take them counts from nothing, with a warning.
        """
        for name in kwargs.keys() & {"beta", "kappa", "counter"}:
            raise ValueError(
                f"load() takes no {name}: give it a temperature, such as "
                "temperature=CountBased(counter, kappa=0.01)."
            )
        if trust and not files.is_document(path, "zip"):
            return super().load(
                path, env, device, custom_objects, print_system_info, force_reset, **kwargs
            )
        document = files.read(path, "model", "zip", trust)
        given = custom_objects or {}
        with files.blame(path):
            if print_system_info:
                print("== CURRENT SYSTEM INFO ==")
                get_system_info()
                print("== SAVED MODEL SYSTEM INFO ==")
                print(
                    *(files.printable(line) for line in document["system"].splitlines()), sep="\n"
                )
            names = [name for name in document.content if name != "system" and "/" not in name]
            data = {name: document[name] for name in names if name not in given}
            cls._check_attributes(data)
            data |= {name: given[name] for name in (*names, *NEEDED) if name in given}
            if issubclass(data.get("replay_buffer_class") or object, HerReplayBuffer) and not trust:
                size = kwargs.get("buffer_size", data["buffer_size"])
                check_steps(size, data.get("n_envs", 1), MOST_HER_STEPS)
            for name in NEEDED - data.keys():
                raise ValueError(f'it has no {name}; pass custom_objects={{"{name}": ...}}.')
        log = pathlib.PurePath(data.get("tensorboard_log") or "")
        if not trust and (log.anchor or ".." in log.parts) and "tensorboard_log" not in given:
            warnings.warn(
                f"{path} would have logs written to {log}, which is not below this folder, and is "
                "ignored: pass tensorboard_log= to load().",
                stacklevel=2,
            )
            data["tensorboard_log"] = None
        stored = data["policy_kwargs"]
        specified = kwargs.pop("policy_kwargs", stored)
        if specified not in (stored, {k: v for k, v in stored.items() if k not in cls._parts}):
            raise ValueError(
                f"The file has the policy_kwargs {stored}, not those specified: {specified}."
            )
        for name in kwargs.keys() & {*cls._parts}:
            if kwargs.pop(name) != stored.get(name):
                raise ValueError(f"load() cannot change {name}: the file's networks are built so.")
        if env is not None:
            env = cls._wrap_env(env, data.get("verbose", 0))
            check_for_correct_spaces(env, data["observation_space"], data["action_space"])
            data["n_envs"] = env.num_envs
            if force_reset:
                data["_last_obs"] = None
        model = cls(data["policy_class"], env, device=device, _init_setup_model=False)  # type: ignore[arg-type]
        left_out = vars(model).keys() - data.keys() - {*model._excluded_save_params()}
        data |= {name: value for name, value in given.items() if name in left_out}
        del model.temperature  # made anew from the configuration in the file, if none is given
        if kwargs.get("prioritized", data.get("prioritized")) != data.get("prioritized"):
            data["replay_buffer_class"] = None  # it was chosen by that
        vars(model).update(data, **kwargs)
        with files.blame(path), document.budget():
            model._setup_model()
        saved = data.get("temperature_config", {}).get("kind")
        same_kind = model.temperature.config()["kind"] == saved
        another = "temperature" in kwargs
        model._load_parameters(path, document, True, temperature=same_kind and not another)
        if same_kind and another:
            with files.blame(path):
                state = document["parameters/temperature"]
            model._take_over(state, path)
        return model

    def _take_over(self, state: dict[str, th.Tensor], source: Any) -> None:
        """Go on from the counts of another temperature, if this one can."""
        try:
            self.temperature.load_state_dict(state)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            warnings.warn(
                f"{self.temperature} begins without the counts in {source}: {error!r}",
                stacklevel=3,
            )

    @classmethod
    def _check_attributes(cls, data: dict[str, Any]) -> None:
        """Refuse attributes of a file that are no settings of the class, or of another kind."""
        new = cls("MlpPolicy", None, _init_setup_model=False)  # type: ignore[arg-type]
        for name, value in data.items():
            hidden = getattr(cls, name, None)
            if name in new._excluded_save_params() or callable(hidden) or type(hidden) is property:
                raise ValueError(f"it sets {name}, which files do not.")
            if name in ("observation_space", "action_space"):
                files.check_kind(name, value, spaces.Space())
            elif name == "tensorboard_log":
                files.check_kind(name, value, value and "a path")
            elif name == "learning_rate" and not isinstance(value, int | float):
                files.check_kind(name, FloatSchedule(value)(1.0), 1.0)
            elif name != "train_freq":  # a number, a pair or a TrainFreq, which SB3 checks
                files.check_kind(name, value, vars(new).get(name))

    def set_parameters(
        self,
        load_path_or_dict: Any,
        exact_match: bool = True,
        device: th.device | str = "auto",
        trust: bool = False,
    ) -> None:
        """As SB3 does it; a temperature's state that comes along is loaded as well.

        One that does not fit is refused, and nothing changed; without ``exact_match`` it is left
        out, with a warning.
        """
        parameters = load_path_or_dict
        if not isinstance(parameters, dict):
            if not trust or files.is_document(parameters, "zip"):
                document = files.read(parameters, "model", "zip", trust)
                return self._load_parameters(parameters, document, exact_match)
            _, parameters, _ = load_from_zip_file(parameters, load_data=False, device=device)
        networks = {name: state for name, state in parameters.items() if name != "temperature"}
        if "temperature" in parameters and exact_match:
            self.temperature.load_state_dict(parameters["temperature"])
        elif "temperature" in parameters:
            self._take_over(parameters["temperature"], "what is loaded")
        super().set_parameters(networks, exact_match, device)
        return None

    def _load_parameters(
        self,
        path: files.PathLike,
        document: files.Document,
        exact_match: bool,
        temperature: bool = True,
    ) -> None:
        with files.blame(path):
            names = [name for name in document.content if name.startswith("parameters/")]
            if not temperature:  # another has taken its place
                names.remove("parameters/temperature")
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
        """Write the replay buffer as far as it is filled."""
        assert self.replay_buffer is not None, "The replay buffer is not defined"
        save_replay(path, self.replay_buffer)

    def load_replay_buffer(
        self, path: files.PathLike, truncate_last_traj: bool = True, trust: bool = False
    ) -> None:
        """Put the replay buffer of a file in the place of the present one.

        The steps and the discount of its returns are those of the model: a buffer of SB3 that has
        others is refused.
        """
        if trust and not files.is_document(path, REPLAY_SUFFIX):
            super().load_replay_buffer(path, truncate_last_traj)
        else:
            buffer = load_replay(path, self.env, self.device, trust)
            _refuse_other(path, "transitions", *map(_shape, (buffer, self)))
            if not isinstance(buffer, IndexedReplayBuffer):  # which takes them from the model
                _refuse_other(path, "returns", *map(_returns, (buffer, self.replay_buffer)))
            if isinstance(self.replay_buffer, PrioritizedReplayBuffer):
                mine = self.replay_buffer.priority_exponent
                stored = getattr(buffer, "priority_exponent", mine)
                _refuse_other(path, "a priority_exponent", stored, mine)
            self.replay_buffer = buffer
            if isinstance(self.replay_buffer, HerReplayBuffer) and truncate_last_traj:
                self.replay_buffer.truncate_last_trajectory()
        if isinstance(self.replay_buffer, IndexedReplayBuffer):
            self.replay_buffer.n_steps, self.replay_buffer.gamma = self.n_steps, float(self.gamma)

    def _excluded_save_params(self) -> list[str]:
        # What is made from other attributes is made again.
        own = "temperature _last_update _rng"
        made = "lr_schedule exploration_schedule batch_norm_stats batch_norm_stats_target"
        return [*super()._excluded_save_params(), *own.split(), *made.split()]


def _shape(owner: Any) -> tuple[Any, ...]:
    """What transitions are of."""
    return owner.observation_space, owner.action_space, f"environments: {owner.n_envs}"


def _returns(buffer: ReplayBuffer | None) -> str:
    if isinstance(buffer, NStepReplayBuffer | IndexedReplayBuffer) and buffer.n_steps > 1:
        return f"{buffer.n_steps} steps, gamma={buffer.gamma}"
    return "1 step"


def _refuse_other(path: files.PathLike, what: str, stored: object, mine: object) -> None:
    if stored != mine:
        raise files.FileError(f"{path} has {what} of {stored}, the model needs {mine}.")
