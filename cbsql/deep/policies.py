"""Stable-Baselines3 policies: DQN's own with files that are safe, and the networks of Rainbow."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, TypeVar

import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BaseModel
from stable_baselines3.common.torch_layers import (
    BaseFeaturesExtractor,
    CombinedExtractor,
    create_mlp,
)
from stable_baselines3.common.type_aliases import PyTorchObs
from stable_baselines3.common.utils import ConstantSchedule, get_device
from stable_baselines3.dqn import policies as dqn_policies
from stable_baselines3.dqn.policies import DQNPolicy, QNetwork
from torch import nn

from cbsql import files
from cbsql.deep.networks import NoisyLinear, RainbowCNN, factor_noise

Model = TypeVar("Model", bound="SafeFiles")


@dataclass(frozen=True)
class Parts:
    """What Rainbow changes in the network of DQN."""

    dueling: bool = True
    """Separate streams for the value of a state and the advantages of its actions."""
    categorical: bool = True
    """A distribution over ``n_atoms`` returns from ``v_min`` to ``v_max`` for each action."""
    noisy: bool = True
    """Noise on the weights of the streams, which starts at ``sigma0``."""
    n_atoms: int = 51
    v_min: float = -10.0
    v_max: float = 10.0
    sigma0: float = 0.5

    def __post_init__(self) -> None:
        if self.n_atoms < 2:
            raise ValueError(f"n_atoms must be at least 2, not {self.n_atoms}.")
        if not self.v_min < self.v_max:
            raise ValueError(f"v_min ({self.v_min}) must be less than v_max ({self.v_max}).")


class SafeFiles(BaseModel):
    """Saves as JSON and tensors what SB3 would pickle, and loads no pickles unless told to."""

    def _made_by(self) -> tuple[type[DQNPolicy], dict[str, Any]]:
        """The policy that this is or is a part of, and its arguments."""
        raise NotImplementedError

    def save(self, path: files.PathLike) -> None:
        """Write a file that is safe to load."""
        document = files.Document("policy")
        document["policy_class"], document["arguments"] = self._made_by()
        document["state"] = self.state_dict()
        document.write(path)

    @classmethod
    def load(
        cls: type[Model],
        path: files.PathLike,
        device: th.device | str = "auto",
        trust: bool = False,
    ) -> Model:
        """Build what :meth:`save` wrote.

        :param trust: load files of SB3 too, and import the classes that a file names; either can
            run any code
        """
        if trust and not files.is_document(path):
            return super().load(path, device)  # type: ignore[arg-type]
        document = files.read(path, "policy", trust=trust)
        with files.blame(path), document.budget():
            policy = document["policy_class"](**document["arguments"])
            model = policy if isinstance(policy, cls) else policy.q_net
            if not isinstance(model, cls):
                raise ValueError(f"it has a {type(policy).__name__}, not a {cls.__name__}.")
            files.check_tensors(document["state"], model.state_dict())
            model.load_state_dict(document["state"])
        return model.to(get_device(device))


class SafeNetwork(SafeFiles, QNetwork):
    """SB3's network of DQN, which knows the policy that made it."""

    maker: tuple[type[DQNPolicy], dict[str, Any]] | None = None

    def _made_by(self) -> tuple[type[DQNPolicy], dict[str, Any]]:
        if self.maker is None:
            raise files.FileError("A network is saved by the policy that made it; this has none.")
        return self.maker


class SafePolicy(SafeFiles, DQNPolicy):
    """SB3's policy of DQN."""

    def make_q_net(self) -> QNetwork:
        """One network, with a features extractor of its own."""
        network = self._make_network(self._update_features_extractor(self.net_args))
        network.maker = self._made_by()
        return network.to(self.device)

    def _make_network(self, arguments: dict[str, Any]) -> SafeNetwork:
        return SafeNetwork(**arguments)

    def _made_by(self) -> tuple[type[DQNPolicy], dict[str, Any]]:
        arguments = self._get_constructor_parameters()
        return type(self), {**arguments, "lr_schedule": ConstantSchedule(0.0)}


class SafeCnnPolicy(SafePolicy, dqn_policies.CnnPolicy):
    """SB3's policy of DQN for images."""


class SafeMultiInputPolicy(SafePolicy, dqn_policies.MultiInputPolicy):
    """SB3's policy of DQN for dicts of observations."""


class RainbowNetwork(SafeNetwork):
    """Q-values from dueling, noisy streams of categorical return distributions.

    The last layer of ``net_arch`` is the hidden layer of each stream; those before it are shared.
    With an empty ``net_arch`` a stream is one layer on top of the features.

    Noise is there whenever the network is called, independent of SB3's training mode, and stays the
    same until :meth:`reset_noise`. Only :meth:`temporary_noise` is an exception, for acting. It is
    drawn from ``generator``, the whole state that a continued run needs.
    """

    atoms: th.Tensor

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Discrete,
        features_extractor: BaseFeaturesExtractor,
        features_dim: int,
        net_arch: list[int],
        parts: Parts,
        activation_fn: type[nn.Module] = nn.ReLU,
        normalize_images: bool = True,
    ) -> None:
        # Not QNetwork's own constructor, which would build its layers too.
        super(QNetwork, self).__init__(
            observation_space,
            action_space,
            features_extractor=features_extractor,
            normalize_images=normalize_images,
        )
        self.features_dim = features_dim
        self.net_arch = net_arch
        self.activation_fn = activation_fn
        self.parts = parts

        linear = partial(NoisyLinear, sigma0=parts.sigma0) if parts.noisy else nn.Linear
        shared, in_stream = net_arch[:-1], net_arch[-1:]

        def stream(outputs: int) -> nn.Sequential:
            layers: list[nn.Module] = []
            for hidden in in_stream:  # one, or none
                layers += [linear([features_dim, *shared][-1], hidden), activation_fn()]
            return nn.Sequential(*layers, linear([features_dim, *net_arch][-1], outputs))

        n_atoms = parts.n_atoms if parts.categorical else 1
        self.shared = nn.Sequential(*create_mlp(features_dim, -1, shared, activation_fn))
        self.advantage = stream(int(action_space.n) * n_atoms)
        self.value = stream(n_atoms) if parts.dueling else None
        self.register_buffer(
            "atoms", th.linspace(parts.v_min, parts.v_max, parts.n_atoms), persistent=False
        )
        self.generator = th.Generator().manual_seed(int(th.randint(2**63 - 1, ())))
        self.noisy_layers = [layer for layer in self.modules() if isinstance(layer, NoisyLinear)]
        self.reset_noise()

    def forward(self, obs: PyTorchObs) -> th.Tensor:
        """Expected values of the actions, (batch, actions)."""
        return self._expected(self.extract_features(obs, self.features_extractor))

    def logits(self, obs: PyTorchObs) -> th.Tensor:
        """Logits of the probabilities of the returns of the actions, (batch, actions, atoms)."""
        if not self.parts.categorical:
            raise ValueError("A network with categorical=False has values, not probabilities.")
        return self._logits(self.extract_features(obs, self.features_extractor))

    def _expected(self, features: th.Tensor) -> th.Tensor:
        logits = self._logits(features)
        return logits.softmax(-1) @ self.atoms if self.parts.categorical else logits.squeeze(-1)

    def _logits(self, features: th.Tensor) -> th.Tensor:
        """What the streams say together, (batch, actions, atoms); one atom if not categorical."""
        shared = self.shared(features)
        advantage: th.Tensor = self.advantage(shared).unflatten(1, (int(self.action_space.n), -1))
        if self.value is None:
            return advantage
        value: th.Tensor = self.value(shared).unsqueeze(1)  # (batch, 1, atoms)
        return value + advantage - advantage.mean(1, keepdim=True)

    def reset_noise(self, rows: int = 1) -> None:
        """Draw the noise that all calls see from now on: one for all rows, or one for each."""
        widths = [layer.in_features + layer.out_features for layer in self.noisy_layers]
        noise = factor_noise(rows, sum(widths), self.generator).to(self.atoms)
        self._set_noise(th.split(noise, widths, 1))

    def _set_noise(self, noise: Sequence[th.Tensor | None]) -> None:
        for layer, of_layer in zip(self.noisy_layers, noise, strict=True):
            layer._buffers["noise"] = of_layer  # setattr takes longer than the layer itself

    @contextmanager
    def temporary_noise(self, rows: int) -> Iterator[None]:
        """Within, as many rows of fresh noise, or none at all; then, what was there before."""
        before = [layer.noise for layer in self.noisy_layers]
        try:
            if rows:
                self.reset_noise(rows)
            else:
                self._set_noise([None] * len(before))
            yield
        finally:
            self._set_noise(before)

    def _predict(self, observation: PyTorchObs, deterministic: bool = True) -> th.Tensor:
        """Best actions: by the mean weights, or else with noise of its own in each row."""
        features = self.extract_features(observation, self.features_extractor)
        with self.temporary_noise(0 if deterministic else len(features)):
            return self._expected(features).argmax(1)


class RainbowPolicy(SafePolicy):
    """SB3's policy of DQN with Rainbow's networks.

    It takes all arguments of SB3's, and by name those of :class:`Parts`. ``predict`` explores by
    noise unless ``deterministic``.
    """

    q_net: RainbowNetwork
    q_net_target: RainbowNetwork

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # SB3's constructor builds the networks, so their parts must be known before.
        given = {part.name for part in fields(Parts)} & kwargs.keys()
        self.parts = Parts(**{name: kwargs.pop(name) for name in given})
        super().__init__(*args, **kwargs)

    def _make_network(self, arguments: dict[str, Any]) -> SafeNetwork:
        return RainbowNetwork(**arguments, parts=self.parts)

    def reset_noise(self) -> None:
        """Fresh noise in both networks, independent of each other."""
        self.q_net.reset_noise()
        self.q_net_target.reset_noise()

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {**super()._get_constructor_parameters(), **asdict(self.parts)}


MlpPolicy = RainbowPolicy


class CnnPolicy(RainbowPolicy):
    """For images: the paper's convolutions, and 512 hidden units in each stream."""

    def __init__(
        self,
        *args: Any,
        net_arch: list[int] | None = None,
        features_extractor_class: type[BaseFeaturesExtractor] = RainbowCNN,
        **kwargs: Any,
    ) -> None:
        if net_arch is None and features_extractor_class is RainbowCNN:
            net_arch = [512]
        kwargs.update(net_arch=net_arch, features_extractor_class=features_extractor_class)
        super().__init__(*args, **kwargs)


class MultiInputPolicy(RainbowPolicy):
    """For dicts of observations."""

    def __init__(
        self,
        *args: Any,
        features_extractor_class: type[BaseFeaturesExtractor] = CombinedExtractor,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, features_extractor_class=features_extractor_class, **kwargs)
