"""beta(s): how much the value of a state is trusted when it is backed up.

A temperature is asked for ``beta(x)`` at the next states of a batch, and told with ``update(x)``
which states then received a value update. It never sees a reward, an action or a network, so it
plugs into any learner that backs up with :func:`cbsql.operators.mellowmax`.
"""

import math
import warnings
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

Observations = Any
"""A batch of states: an array or tensor with one row each, or a dict of those."""


@runtime_checkable
class Counter(Protocol):
    """n(s): how many value updates each state has received, or whatever else is counted."""

    def count(self, x: Observations, /) -> NDArray[np.float64]:
        """The counts of a batch, shape (batch,), without changing the counter."""

    def update(self, x: Observations, /) -> None:
        """Count one value update for each row, in order."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All that was counted, as tensors."""

    def load_state_dict(self, state: dict[str, torch.Tensor], /) -> None:
        """Go on from what :meth:`state_dict` returned, or raise and stay as it is."""


class Temperature:
    """Base class: an inverse temperature that has nothing to learn."""

    def beta(self, x: Observations) -> float | NDArray[np.float64]:
        """Inverse temperature at each state of a batch: one number for all, or shape (batch,)."""
        raise NotImplementedError

    def update(self, x: Observations) -> None:
        """Take note that each row of ``x`` received one value update."""

    def config(self) -> dict[str, Any]:
        """The kind of temperature and the numbers it was made with, ready for JSON."""
        return {"kind": type(self).__name__}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What :meth:`update` has changed, as tensors."""
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        if state:
            raise ValueError(f"{self!r} has no state, but was given {sorted(state)}.")


class Greedy(Temperature):
    """beta = inf: no entropy, the hard maximum of Q-learning and DQN."""

    def beta(self, x: Observations) -> float:
        """Infinite everywhere."""
        return math.inf

    def __repr__(self) -> str:
        return "Greedy()"


class Constant(Temperature):
    """The same beta in every state at all times: soft Q-learning with a fixed temperature."""

    def __init__(self, beta: float) -> None:
        self._beta = _positive("beta", beta)

    def beta(self, x: Observations) -> float:
        """The constant."""
        return self._beta

    def config(self) -> dict[str, Any]:
        """The constant."""
        return {**super().config(), "beta": self._beta}

    def __repr__(self) -> str:
        return f"Constant({self._beta:g})"


class Linear(Temperature):
    """beta_i = kappa i in training step i, the same in every state (Fox et al., 2016).

    A training step is one call of :meth:`update`, whatever the size of its batch. (A learner that
    counts visits calls it for each step of its environments.)
    """

    def __init__(self, kappa: float) -> None:
        self.kappa = _positive("kappa", kappa)
        self._updates = 0

    def beta(self, x: Observations) -> float:
        """Proportional to the number of training steps so far."""
        return self.kappa * self._updates

    def update(self, x: Observations) -> None:
        """One training step more."""
        self._updates += 1

    def config(self) -> dict[str, Any]:
        """kappa."""
        return {**super().config(), "kappa": self.kappa}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The number of training steps."""
        return {"updates": torch.tensor(self._updates)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from a number of training steps."""
        if state["updates"] < 0:
            raise ValueError(f"There cannot be {int(state['updates'])} training steps.")
        self._updates = int(state["updates"])

    def __repr__(self) -> str:
        return f"Linear(kappa={self.kappa:g})"


class CountBased(Temperature):
    """beta(s) = kappa n(s): the temperature of the paper, for any counter.

    Without a counter, the learner it is given to installs the one that fits its observations, or
    the one that is named in its place, such as "simhash" (see :data:`cbsql.counts.COUNTERS`).
    """

    def __init__(self, counter: Counter | str | None = None, kappa: float = 0.01) -> None:
        self.counter_name = counter if isinstance(counter, str) else None
        self._installed = None if isinstance(counter, str) else counter
        self._handed_in = self._installed is not None
        self.kappa = _positive("kappa", kappa)

    @property
    def counter(self) -> Counter | None:
        """What counts, if there is something yet."""
        return self._installed

    @counter.setter
    def counter(self, counter: Counter) -> None:
        self.counter_name = None
        self._installed = counter
        self._handed_in = True

    def install(self, counter: Counter) -> None:
        """Count with the counter that was named, or left to the learner to choose."""
        self._installed = counter

    def beta(self, x: Observations) -> NDArray[np.float64]:
        """Proportional to the value updates that each state has received."""
        return self.kappa * self._counter.count(x)

    def update(self, x: Observations) -> None:
        """Count the states."""
        self._counter.update(x)

    def config(self) -> dict[str, Any]:
        """kappa, and the counter's name, or what it calls itself if it is an object handed in."""
        counter = {} if self.counter_name is None else {"counter": self.counter_name}
        if self._handed_in:
            counter["handed_in"] = repr(self.counter)
        return {**super().config(), **counter, "kappa": self.kappa}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The state of the counter."""
        return self._counter.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from the state of a counter of the same kind."""
        self._counter.load_state_dict(state)

    @property
    def _counter(self) -> Counter:
        if self.counter is None:
            raise ValueError(
                "This CountBased temperature has no counter yet: give it one, for example "
                "CountBased(ExactCounter()), or hand it to an algorithm, which chooses one."
            )
        return self.counter

    def __repr__(self) -> str:
        return f"CountBased({self.counter!r}, kappa={self.kappa:g})"


def from_config(config: dict[str, Any]) -> Temperature:
    """The temperature that :meth:`Temperature.config` described, as new and without a counter."""
    kinds = {kind.__name__: kind for kind in (Greedy, Constant, Linear, CountBased)}
    known = {name: value for name, value in config.items() if name not in ("kind", "handed_in")}
    if config["kind"] not in kinds:
        raise ValueError(
            f"{config['kind']} is not a temperature of cbsql: pass it as temperature= to load(), "
            "since a file holds numbers and no code."
        )
    if "handed_in" in config:
        warnings.warn(
            f"The counter {config['handed_in']!r} was an object of its own, and files have counts "
            "only. Unless it is the default one for the observations, pass "
            "temperature=CountBased(counter, kappa=...) to load().",
            stacklevel=2,
        )
    return kinds[config["kind"]](**known)


def _positive(name: str, value: float) -> float:
    if not isinstance(value, Real) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, not {value!r}.")
    return float(value)
