"""Networks that Stable-Baselines3 does not have."""

import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn


class MinAtarCNN(BaseFeaturesExtractor):
    """The network of MinAtar's authors for its 10 x 10 boolean images, channels last.

    Young and Tian (2019), "MinAtar": one convolution with 16 filters of 3 x 3, and a hidden layer.
    """

    def __init__(self, observation_space: spaces.Box, features_dim: int = 128) -> None:
        super().__init__(observation_space, features_dim)
        height, width, channels = observation_space.shape
        self._layers = nn.Sequential(
            nn.Conv2d(channels, 16, kernel_size=3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * (height - 2) * (width - 2), features_dim),
            nn.ReLU(),
        )

    def forward(self, observations: th.Tensor) -> th.Tensor:
        """Features (batch, features_dim) of images (batch, height, width, channels)."""
        features: th.Tensor = self._layers(observations.permute(0, 3, 1, 2))
        return features
