"""Counts learnt by a network that predicts coin flips."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space, preprocess_obs
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, NatureCNN
from torch import nn


class CoinFlipNetwork:
    """Pseudo-counts from a Coin Flip Network.

    Lobel, Bagaria & Konidaris (2023), "Flipping coins to estimate pseudocounts for exploration in
    reinforcement learning". Every update of a state comes with a fresh vector of `coins` flips
    c in {-1, 1}. The least-squares fit f to them is, at a state updated n times, the mean of n
    vectors, so that E[f_i(s)^2] = 1/n and

        1 / n(s) = mean_i f_i(s)^2,

    with a relative deviation of sqrt(2 / coins) even for a perfect fit. As in the paper, f is a
    trained network plus a frozen random one, standardised to variance one over the states updated:
    a state unlike all others keeps its random outputs and counts about 1. The network generalises
    between states as the value network does, which hashing cannot; it needs an update for every
    change in counts, and remembers the latest `memory` updates only.

    :param observation_space: Box, Discrete, MultiDiscrete, MultiBinary or Dict of these; images
        with channels first, as Stable-Baselines3 gives them to its networks
    :param coins: flips for each update
    :param memory: updates remembered, with their observations; counts above it cannot be learnt
    :param hidden: width of the two layers after the features (for images, those of the Nature CNN)
    :param batch_size: remembered updates in a gradient step
    :param gradient_steps: for every call of `update`
    :param learning_rate: of Adam
    :param max_count: the largest count returned
    :param device: where networks and memory live
    :param seed: of the flips, of the initial weights and of the gradient steps
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        *,
        coins: int = 64,
        memory: int = 50_000,
        hidden: int = 128,
        batch_size: int = 256,
        gradient_steps: int = 1,
        learning_rate: float = 1e-3,
        max_count: float = 1e6,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        for name in ("coins", "memory", "hidden", "batch_size", "gradient_steps", "learning_rate"):
            if not locals()[name] > 0:
                raise ValueError(f"{name} must be positive, got {locals()[name]}.")
        if not max_count > 0:
            raise ValueError(f"max_count must be positive, got {max_count}.")
        self.space = observation_space
        self._parts = _parts(observation_space)
        self.coins = coins
        self.batch_size = batch_size
        self.gradient_steps = gradient_steps
        self.max_count = max_count
        self.device = torch.device(device)
        self._random = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):  # initial weights come from the global generator
            torch.manual_seed(seed)
            self._trained, self._prior = (
                _network(observation_space, hidden, coins).to(self.device) for _ in range(2)
            )
        for parameter in self._trained[-1].parameters():
            nn.init.zeros_(parameter)  # at first, f is the prior alone
        self._prior.requires_grad_(False)
        self._optimizer = torch.optim.Adam(self._trained.parameters(), lr=learning_rate)
        # A step with zero gradients changes no weight, but creates the moments that a state holds.
        for parameter in self._trained.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        self._updates = 0
        self._mean = torch.zeros(coins, device=self.device)  # of the prior's outputs
        self._variance = torch.ones(coins, device=self.device)
        self._flips = torch.zeros(memory, coins, dtype=torch.int8, device=self.device)
        self._seen = {
            # NumPy's zeros take no memory before they are written to.
            key: torch.from_numpy(np.zeros((memory, *shape), dtype)).to(self.device)
            for key, (shape, dtype) in self._parts.items()
        }

    def count(self, x: Any) -> npt.NDArray[np.float64]:
        """Pseudo-counts of a batch, shape (batch,)."""
        states = self._check(x)
        size = len(next(iter(states.values())))
        if self._updates == 0:  # the prior is not standardised yet
            return np.minimum(np.ones(size), self.max_count)
        with torch.no_grad():
            inverse = self._predict(states).double().square().mean(dim=1)  # (B,)
        return (1.0 / inverse).clamp(max=self.max_count).cpu().numpy()

    def update(self, x: Any) -> None:
        """Flip coins for every row, remember them, and train."""
        states = self._check(x)
        size = len(next(iter(states.values())))
        memory = len(self._flips)
        flips = torch.randint(2, (size, self.coins), generator=self._random) * 2 - 1
        slots = torch.arange(self._updates, self._updates + size) % memory
        slots = slots[-memory:].to(self.device)
        self._flips[slots] = flips[-memory:].to(self.device, torch.int8)
        for key, values in states.items():
            self._seen[key][slots] = values[-memory:]
        self._standardize(states)
        filled = min(self._updates, memory)
        for _ in range(self.gradient_steps):
            picked = torch.randint(filled, (self.batch_size,), generator=self._random)
            picked = picked.to(self.device)
            outputs = self._predict({key: values[picked] for key, values in self._seen.items()})
            loss = (outputs - self._flips[picked]).square().mean()
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Networks, optimiser, flips, generator, and the memory as far as it is filled."""
        filled = min(self._updates, len(self._flips))
        state = {
            "updates": torch.tensor(self._updates),
            "random": self._random.get_state(),
            "mean": self._mean,
            "variance": self._variance,
            "flips": self._flips[:filled],
        }
        state |= {f"seen.{key}": values[:filled] for key, values in self._seen.items()}
        for name, network in (("trained", self._trained), ("prior", self._prior)):
            state |= {f"{name}.{key}": value for key, value in network.state_dict().items()}
        for i, moments in self._optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{i}.{key}": value for key, value in moments.items()}
        return {key: value.detach().clone() for key, value in state.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from the state of a network built with the same arguments."""
        updates = int(state.get("updates", 0))
        filled = min(updates, len(self._flips))
        given = {key: tuple(value.shape) for key, value in state.items()}
        mine = {key: tuple(value.shape) for key, value in self.state_dict().items()}
        for key in ("flips", *(f"seen.{part}" for part in self._seen)):
            mine[key] = (filled, *mine[key][1:])
        if given != mine:
            differing = sorted({key for key, _ in given.items() ^ mine.items()})
            raise ValueError(
                f"This is not the state of a CoinFlipNetwork with these arguments: {differing} are "
                "missing, unknown or of another shape."
            )
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in _under("optimizer", state).items():
            i, name = key.split(".")
            moments.setdefault(int(i), {})[name] = value.clone()
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self._trained.load_state_dict(_under("trained", state))
        self._prior.load_state_dict(_under("prior", state))
        self._random.set_state(state["random"].cpu())
        self._mean = state["mean"].to(self.device, copy=True)
        self._variance = state["variance"].to(self.device, copy=True)
        self._flips[:filled] = state["flips"].to(self.device)
        for key, values in self._seen.items():
            values[:filled] = state[f"seen.{key}"].to(self.device)
        self._updates = updates

    def __repr__(self) -> str:
        return f"CoinFlipNetwork({self.space}, coins={self.coins})"

    def _predict(self, states: dict[str, torch.Tensor]) -> torch.Tensor:
        """f(s) of a batch: (B, coins)."""
        inputs = self._inputs(states)
        prior: torch.Tensor = (self._prior(inputs) - self._mean) / self._variance.sqrt()
        trained: torch.Tensor = self._trained(inputs)
        return prior + trained

    def _standardize(self, states: dict[str, torch.Tensor]) -> None:
        """Merge a batch of the prior's outputs into their running mean and variance."""
        with torch.no_grad():
            outputs = self._prior(self._inputs(states))
        size = len(outputs)
        share = size / (self._updates + size)
        shift = outputs.mean(dim=0) - self._mean
        variance = self._variance if self._updates else torch.zeros_like(self._variance)
        variance = (1 - share) * (variance + share * shift.square())
        variance += share * outputs.var(dim=0, correction=0)
        self._mean = self._mean + share * shift
        self._variance = variance.clamp(min=1e-4)  # while all states seen are alike
        self._updates += size

    def _inputs(self, states: dict[str, torch.Tensor]) -> Any:
        """What the networks take: one-hot, scaled and float, by the rules of Stable-Baselines3."""
        if isinstance(self.space, spaces.Dict):
            return preprocess_obs(dict(states), self.space)
        return preprocess_obs(states[""], self.space)

    def _check(self, x: Any) -> dict[str, torch.Tensor]:
        """A batch as tensors of the space's shapes and types, under "" unless it is a dict."""
        given = x if isinstance(self.space, spaces.Dict) else {"": x}
        if not isinstance(given, dict) or given.keys() != self._parts.keys():
            raise ValueError(f"Observations must be a batch of {self.space}, got {type(x)}.")
        states = {key: torch.as_tensor(value, device=self.device) for key, value in given.items()}
        sizes = {value.shape[:1] for value in states.values()}
        if len(sizes) != 1 or 0 in sizes.pop():
            raise ValueError(
                "Observations must be a batch of at least one state, with one row each."
            )
        for key, (shape, _) in self._parts.items():
            value = states[key]
            if shape == () and value.shape[1:] == (1,):  # of Discrete, as replay buffers have it
                value = value.squeeze(1)
            if value.shape[1:] != shape:
                raise ValueError(
                    f"Observations must have the shape (B, *{shape}), got {tuple(value.shape)}."
                )
            if value.is_floating_point() and not value.isfinite().all():
                raise ValueError("Observations must be finite, got NaN or infinity.")
            states[key] = value.to(self._seen[key].dtype)
        return states


def _under(name: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    prefix = f"{name}."
    return {key[len(prefix) :]: state[key] for key in state if key.startswith(prefix)}


def _network(space: spaces.Space[Any], hidden: int, outputs: int) -> nn.Sequential:
    if isinstance(space, spaces.Dict):
        features: CombinedExtractor | NatureCNN | FlattenExtractor = CombinedExtractor(space)
    elif is_image_space(space):
        assert isinstance(space, spaces.Box)
        features = NatureCNN(space)
    else:
        features = FlattenExtractor(space)
    return nn.Sequential(
        features,
        nn.Linear(features.features_dim, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )


def _parts(space: spaces.Space[Any]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shape and type of the arrays of a state."""
    parts = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    arrays = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    if not parts or not all(isinstance(part, arrays) for part in parts.values()):
        raise ValueError(
            f"CoinFlipNetwork takes Box, Discrete, MultiDiscrete, MultiBinary or a Dict of these, "
            f"got {space}."
        )
    # Torch cannot index with every type of whole numbers.
    wider: dict[np.dtype[Any], np.dtype[Any]]
    wider = {np.dtype("uint16"): np.dtype("int32"), np.dtype("uint32"): np.dtype("int64")}
    dtypes: dict[str, np.dtype[Any]] = {key: np.dtype(part.dtype) for key, part in parts.items()}
    return {key: (parts[key].shape or (), wider.get(kind, kind)) for key, kind in dtypes.items()}
