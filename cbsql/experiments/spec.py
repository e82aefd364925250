"""What one run is, and the settings it starts from."""

import difflib
import hashlib
import inspect
import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_origin

import gymnasium as gym
import yaml
from stable_baselines3 import DQN
from stable_baselines3.dqn.policies import DQNPolicy

from cbsql.counts import COUNTERS
from cbsql.deep import SQL, Munchausen, Rainbow
from cbsql.deep.networks import MinAtarCNN
from cbsql.deep.optim import Adam, RMSprop
from cbsql.deep.policies import Parts
from cbsql.envs.atari import PROTOCOLS, rom_name
from cbsql.temperature import Constant, CountBased, Greedy, Temperature

ALGORITHMS = ("dqn", "sql", "cbsql", "rainbow", "rainbow-sql", "rainbow-cbsql", "munchausen")


@dataclass(frozen=True)
class RunSpec:
    """One learner on one environment with one seed."""

    game: str
    """An Atari game ("pong", in any spelling), or the id of a Gymnasium environment, which may name
    the module that registers it, "module:Id-v0"."""
    algorithm: str = "cbsql"
    """"dqn" (the hard maximum), "sql" (constant beta) or "cbsql" (beta = kappa n), the same on top
    of "rainbow", or "munchausen"."""
    steps: int = 0
    """Agent steps of training; 0 means those of the preset."""
    seed: int = 0
    """Of the networks, exploration, replay and the environment."""
    beta: float = 100.0
    """Inverse temperature, if the algorithm has a constant one."""
    kappa: float = 0.01
    """Growth of the inverse temperature per count, if the algorithm counts."""
    protocol: str = "nature"
    """How an Atari game is played: "nature" or "machado"."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the algorithm that replace those of the preset; ``policy_kwargs`` one by one."""
    counter: str = ""
    """What counts, one of :data:`cbsql.counts.COUNTERS`; if empty, what fits the observations."""

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(
                f"algorithm must be one of {', '.join(ALGORITHMS)}, not {self.algorithm!r}."
            )
        for name in ("steps", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}.")
        if self.is_atari:
            with suppress(ValueError):  # of a game that is not there; who plays it says so
                object.__setattr__(self, "game", rom_name(self.game))
        arguments = _arguments(DQN) | _arguments(SQL) | _arguments(self.learner)
        known = arguments.keys() - _FIXED
        if self.learner is Munchausen:
            known.add("beta")  # with a default of its own
            if self.beta != 100.0:
                raise ValueError("beta of munchausen is one of its settings: --set beta=33.3.")
        learners = f"SB3's DQN and {self.learner.__name__}"
        _check_names("settings", self.settings, known, learners)
        for name, value in self.settings.items():
            _check_kind(name, value, arguments[name].annotation)
        if not isinstance(network := self.settings.get("policy_kwargs") or {}, Mapping):
            raise ValueError(f"policy_kwargs takes names and values, not {network!r}.")
        parts = [part.name for part in fields(Parts)] if self.learner is Rainbow else []
        _check_names("policy_kwargs", network, {*_arguments(DQNPolicy), *parts}, "the policy")
        if self.protocol not in PROTOCOLS:
            raise ValueError(
                f"protocol must be one of {', '.join(PROTOCOLS)}, not {self.protocol!r}."
            )
        self.temperature()  # checks beta and kappa
        if self.counter and self.counter not in COUNTERS:
            raise ValueError(f"counter must be one of {', '.join(COUNTERS)}, not {self.counter!r}.")

    def check_effects(self) -> "RunSpec":
        """Refuse fields that are set but have no effect on the algorithm, for who asks for a run.

        :raises ValueError: if there are any
        """
        temperature = self.temperature()
        for name, kind in (("beta", Constant), ("kappa", CountBased), ("counter", CountBased)):
            given = getattr(self, name)
            if given != getattr(RunSpec, name) and not isinstance(temperature, kind):
                raise ValueError(
                    f"{name} ({given}) has no effect on {self.algorithm}: leave it out."
                )
        if self.protocol != RunSpec.protocol and not self.is_atari:
            raise ValueError(f"A protocol ({self.protocol}) has no effect on {self.game}.")
        return self

    @property
    def is_atari(self) -> bool:
        """Whether the game is one of ale-py's, and not the id of a Gymnasium environment."""
        found = gym.registry.get(self.game)  # PongNoFrameskip-v4 is, too
        if found is None:
            return ":" not in self.game  # the module that registers it may not be imported yet
        return bool(found.entry_point == "ale_py.env:AtariEnv")

    @property
    def learner(self) -> type[SQL]:
        """The class of the algorithm."""
        if self.algorithm == "munchausen":
            return Munchausen
        return Rainbow if self.algorithm.startswith("rainbow") else SQL

    def temperature(self) -> Temperature:
        """A new temperature for this run."""
        if self.algorithm.endswith("cbsql"):
            return CountBased(self.counter or None, self.kappa)
        return Constant(self.beta) if self.algorithm.endswith("sql") else Greedy()

    @property
    def name(self) -> str:
        """What the run's folder is called in a sweep: other runs have other names."""
        constant = isinstance(self.temperature(), Constant)
        usual = replace(self, steps=0, kappa=0.01, counter="", protocol="nature")
        usual = usual if constant else replace(usual, beta=100.0)
        different = {
            key: getattr(self, key)
            for key in ("steps", "beta", "kappa", "counter", "protocol")
            if getattr(self, key) != getattr(usual, key)
        }
        if self.steps == preset(self).steps:
            different.pop("steps", None)
        different.update(sorted(self.settings.items()))
        parts = [re.sub(r"[^\w.-]+", "-", self.game), self.algorithm]
        if constant:
            parts.append(str(float(self.beta)).removesuffix(".0"))
        text = "-".join(f"{key}={value}" for key, value in different.items())
        if not re.fullmatch(r"[\w.+=-]{0,100}", text):
            text = "settings=" + hashlib.sha256(repr(different).encode()).hexdigest()[:8]
        return "-".join([*parts, *filter(None, [text]), str(self.seed)])

    def describe(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return {**asdict(self), "settings": {name: repr(v) for name, v in self.settings.items()}}


_FIXED = {"policy", "env", "seed", "beta", "temperature", "args", "kwargs"}
"""Arguments of the learners that are fields of a run, or none."""


def _arguments(built: type[Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(built).parameters)


def _check_names(what: str, given: Mapping[str, Any], known: Collection[str], of: str) -> None:
    if wrong := sorted(set(given) - set(known), key=str):
        nearest = difflib.get_close_matches(str(wrong[0]), known, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"{what} take the arguments of {of}, not {wrong[0]!r}; the nearest is {nearest!r}."
        )


def _check_kind(name: str, value: Any, kind: Any) -> None:
    """Refuse what would fail late or, as the text "false" does, pass for something else."""
    if kind is bool and not isinstance(value, bool):
        raise ValueError(f"{name} takes True or False, not {value!r}.")
    if kind is int and type(value) is not int:
        raise ValueError(f"{name} takes a whole number, not {value!r}.")
    if kind == int | None and type(value) is not int and value is not None:
        raise ValueError(f"{name} takes a whole number or None, not {value!r}.")
    if kind is float and type(value) not in (int, float):
        raise ValueError(f"{name} takes a number, not {value!r}.")


@dataclass(frozen=True)
class Preset:
    """Where a kind of environment starts from."""

    policy: str
    steps: int
    """Agent steps of a run, if it does not say."""
    test_epsilon: float
    """Probability of a random action in test episodes."""
    settings: Mapping[str, Any]
    """Arguments of the algorithm."""
    exploration_steps: int
    """Agent steps in which epsilon falls from 1 to its final value."""
    step_seconds: float
    """Time of an agent step, learning included, on one core: see docs/scaling.md."""


def _rmsprop(eps: float) -> dict[str, Any]:
    kwargs = {"alpha": 0.95, "eps": eps, "centered": True}
    return {"optimizer_class": RMSprop, "optimizer_kwargs": kwargs}


ATARI = Preset(
    # The second table of the paper's appendix; what it leaves open is from Mnih et al. (2015).
    policy="CnnPolicy",
    steps=750_000,  # 3M frames
    test_epsilon=0.05,
    settings={
        "learning_rate": 2.5e-4,
        "buffer_size": 1_000_000,
        "learning_starts": 12_500,  # 50,000 frames
        "batch_size": 32,
        "gamma": 0.99,
        "train_freq": 4,
        "target_update_interval": 10_000,
        "exploration_final_eps": 0.1,
        # Their program sums gradients over the batch, and adds 0.01 under the root. Torch adds eps
        # to the root, and the gradients here are means: with this, small ones are treated alike.
        "policy_kwargs": _rmsprop(eps=0.01**0.5 / 32),
    },
    exploration_steps=250_000,  # 1M frames
    step_seconds=0.015,
)

MINATAR = Preset(
    # Young and Tian (2019), but for the number of steps and a gradient step every 4 of them.
    policy="CnnPolicy",
    steps=100_000,
    test_epsilon=0.05,
    settings={
        "learning_rate": 2.5e-4,
        "buffer_size": 100_000,
        "learning_starts": 5_000,
        "batch_size": 32,
        "gamma": 0.99,
        "train_freq": 4,
        "target_update_interval": 1_000,
        "exploration_final_eps": 0.1,
        # MinAtarCNN is the whole network but for its last layer.
        "policy_kwargs": {
            **_rmsprop(eps=0.01),
            "features_extractor_class": MinAtarCNN,
            "net_arch": [],
        },
    },
    exploration_steps=20_000,
    step_seconds=0.0012,
)

CARTPOLE = Preset(
    # The values with which SB3's DQN is usually run on it.
    policy="MlpPolicy",
    steps=50_000,
    test_epsilon=0.0,
    settings={
        "learning_rate": 2.3e-3,
        "buffer_size": 100_000,
        "learning_starts": 1_000,
        "batch_size": 64,
        "gamma": 0.99,
        "train_freq": 256,
        "gradient_steps": 128,
        "target_update_interval": 10,
        "exploration_final_eps": 0.04,
        "policy_kwargs": {"net_arch": [256, 256], "optimizer_class": Adam},
    },
    exploration_steps=8_000,
    step_seconds=0.0017,
)

OTHER = Preset(
    policy="MlpPolicy",
    steps=100_000,
    test_epsilon=0.0,
    settings={"buffer_size": 100_000, "learning_starts": 1_000, "target_update_interval": 1_000},
    exploration_steps=10_000,
    step_seconds=0.0017,  # as CartPole's
)


_ADAM = {
    "optimizer_class": Adam,
    "optimizer_kwargs": {"eps": 1.5e-4},
}


def _rainbow(
    base: Preset, steps: int, step_seconds: float, settings: Mapping[str, Any], **network: Any
) -> Preset:
    """A preset for Rainbow: no epsilon anywhere, Adam, and what else differs."""
    policy_kwargs = {**base.settings.get("policy_kwargs", {}), **_ADAM, **network}
    without = {k: v for k, v in base.settings.items() if not k.startswith("exploration_")}
    return replace(
        base,
        steps=steps,
        step_seconds=step_seconds,
        test_epsilon=0.0,
        settings={**without, **settings, "policy_kwargs": policy_kwargs},
    )


RAINBOW_ATARI = _rainbow(
    # The third table of the paper's appendix; what it leaves open is from Hessel et al. (2018).
    ATARI,
    125_000,  # 500K frames
    0.031,
    {
        "learning_rate": 6.25e-5,
        "learning_starts": 20_000,  # 80,000 frames
        "target_update_interval": 8_000,  # 32,000 frames
    },
)
# Discounted returns of good play are above the 10 to which Atari's clipped rewards are fitted. The
# range is even about 0, where a new network's values then are: from -10 they start at 10, and
# learning is slower (results/rainbow-minatar).
RAINBOW_MINATAR = _rainbow(MINATAR, MINATAR.steps, 0.0023, {}, v_min=-30.0, v_max=30.0)
RAINBOW_CARTPOLE = _rainbow(CARTPOLE, CARTPOLE.steps, 0.0059, {}, v_min=0.0, v_max=100.0)
RAINBOW_OTHER = _rainbow(OTHER, OTHER.steps, 0.0059, {})


def preset(spec: RunSpec) -> Preset:
    """The settings a run starts from."""
    rainbow = spec.learner is Rainbow
    if spec.is_atari:
        return RAINBOW_ATARI if rainbow else ATARI
    if spec.game.startswith("MinAtar/"):
        return RAINBOW_MINATAR if rainbow else MINATAR
    if spec.game.startswith("CartPole"):
        return RAINBOW_CARTPOLE if rainbow else CARTPOLE
    return RAINBOW_OTHER if rainbow else OTHER


def read_specs(path: Path) -> tuple[list[RunSpec], int]:
    """The runs that a YAML file lists, and how many test games each of them plays.

    ``runs`` is a list of runs, whose keys are the fields of :class:`RunSpec`. Where one of them
    (but ``settings``) has a list of values, it stands for a run with each.

    :raises ValueError: if the file, or anything in it, is not of this form
    """
    try:
        content = yaml.load(path.read_bytes(), _Loader)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}.") from None
    _check_keys(content, ("runs", "test_games"), str(path))
    runs, test_games = content.get("runs"), content.get("test_games", 100)
    if type(test_games) is not int or test_games < 1:
        raise ValueError(f"{path}: test_games takes a positive integer, not {test_games!r}.")
    if not isinstance(runs, list) or not runs:
        raise ValueError(f"{path}: runs takes a list of runs, not {runs!r}.")
    specs = []
    for number, run in enumerate(runs, start=1):
        where = f"{path}, run {number}"
        _check_keys(run, _FIELDS, where)
        if "game" not in run:
            raise ValueError(f"{where} has no game.")
        try:
            specs += [RunSpec(**choice).check_effects() for choice in _combinations(run)]
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return specs, test_games


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads 1e-4 as the number it is, which YAML 1.1 takes for a text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)

_FIELDS: dict[str, Any] = {f.name: get_origin(f.type) or f.type for f in fields(RunSpec)}
_MEANING = {str: "a text", int: "an integer", float: "a number", Mapping: "names and values"}


def _check_keys(given: Any, known: Collection[str], where: str) -> None:
    if not isinstance(given, dict):
        raise ValueError(f"{where} must have the keys {', '.join(known)}; it is {given!r}.")
    for key in given:
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
            raise ValueError(f"{where} has the unknown key {key!r}; the nearest is {nearest!r}.")


def _combinations(run: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One dict for each choice among the values of a run."""
    choices = {
        key: value if isinstance(value, list) and key != "settings" else [value]
        for key, value in run.items()
    }
    if [] in choices.values():
        raise ValueError(f"the list of {list(choices)[list(choices.values()).index([])]} is empty.")
    for values in itertools.product(*choices.values()):
        yield {key: _typed(key, value) for key, value in zip(choices, values, strict=True)}


def _typed(key: str, value: Any) -> Any:
    wanted = _FIELDS[key]
    if wanted is float and type(value) is int:
        return float(value)
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise ValueError(f"{key} takes {_MEANING[wanted]}, not {value!r}.")
    return value
