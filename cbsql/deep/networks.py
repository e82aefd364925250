"""Networks that Stable-Baselines3 does not have."""

from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, NatureCNN
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812 (its usual name)

from cbsql._jit import jit

Floats = NDArray[np.float32]


class MinAtarCNN(BaseFeaturesExtractor):
    """The network of MinAtar's authors for its 10 x 10 boolean images, channels last.

    Young and Tian (2019), "MinAtar": one convolution with 16 filters of 3 x 3, and a hidden layer.
    The convolution is done as one product, which for images so small is faster on a CPU, and its
    output goes to the hidden layer with channels last, as it is.
    """

    def __init__(self, observation_space: spaces.Box, features_dim: int = 128) -> None:
        super().__init__(observation_space, features_dim)
        height, width, channels = observation_space.shape
        self.convolution = nn.Conv2d(channels, 16, kernel_size=3)
        self.hidden = nn.Linear(16 * (height - 2) * (width - 2), features_dim)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        """Features (batch, features_dim) of images (batch, height, width, channels)."""
        patches = observations.unfold(1, 3, 1).unfold(2, 3, 1)  # (batch, y, x, channels, 3, 3)
        patches = patches.permute(0, 1, 2, 4, 5, 3).flatten(3)  # (batch, y, x, 9 channels)
        filters = self.convolution.weight.permute(0, 2, 3, 1).flatten(1)  # (16, 9 channels)
        seen = F.linear(patches, filters, self.convolution.bias).relu()  # (batch, y, x, 16)
        return F.relu(self.hidden(seen.flatten(1)))


class RainbowCNN(NatureCNN):
    """The convolutions of the paper's Rainbow, without a hidden layer: the heads have theirs.

    ``features_dim`` adds one of that size, as in SB3's own network for images.
    """

    def __init__(
        self,
        observation_space: spaces.Box,
        features_dim: int | None = None,
        normalized_image: bool = False,
        channels: tuple[int, int, int] = (32, 32, 64),
    ) -> None:
        # SB3's network is what checks the observations, and knows how to apply the layers.
        super().__init__(observation_space, features_dim or 1, normalized_image)
        first, second, third = channels
        self.cnn = nn.Sequential(
            nn.Conv2d(observation_space.shape[0], first, kernel_size=8, stride=4),
            nn.ReLU(),
            nn.Conv2d(first, second, kernel_size=4, stride=2),
            nn.ReLU(),
            nn.Conv2d(second, third, kernel_size=3, stride=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        flat = self.cnn(th.zeros(1, *observation_space.shape)).shape[1]
        self._features_dim = features_dim or flat
        self.linear = nn.Sequential()
        if features_dim is not None:
            self.linear.extend([nn.Linear(flat, features_dim), nn.ReLU()])


class NoisyLinear(nn.Linear):
    """A linear layer with factorised noise on its weights, whose scale is learnt.

    Fortunato et al. (2018), "Noisy Networks for Exploration". ``weight`` and ``bias`` are the
    means; they alone are used before the first :meth:`reset_noise`, and whenever ``noise`` is None.

    For few rows, and if each has noise of its own, the noise multiplies the activations before and
    after the layer. That is the same as noisy weights, but no matrix of them is built. A single row
    without a gradient takes no longer than its means and sigmas take from memory.
    """

    noise: th.Tensor | None

    def __init__(self, in_features: int, out_features: int, sigma0: float = 0.5) -> None:
        super().__init__(in_features, out_features)  # uniform up to 1 / sqrt(in), as in the paper
        sigma = sigma0 * in_features**-0.5
        self.weight_sigma = nn.Parameter(th.full((out_features, in_features), sigma))
        self.bias_sigma = nn.Parameter(th.full((out_features,), sigma))
        self.register_buffer("noise", None, persistent=False)

    def reset_noise(self, generator: th.Generator | None = None, rows: int = 1) -> None:
        """Draw noise for a whole batch, or for each of its rows."""
        draw = factor_noise(rows, self.in_features + self.out_features, generator)
        self.noise = draw.to(self.weight)

    def forward(self, x: th.Tensor) -> th.Tensor:
        """The layer at its present noise: (batch, in) to (batch, out)."""
        if self.noise is None:
            return super().forward(x)
        if len(x) == 1 and not th.is_grad_enabled() and self._is_usual(x):
            out = th.empty(1, self.out_features)
            means, sigmas = (self.weight, self.bias), (self.weight_sigma, self.bias_sigma)
            tensors = (x[0], self.noise[0], *means, *sigmas, out[0])
            _noisy_row(*[tensor.detach().numpy() for tensor in tensors])
            return out
        noise_in, noise_out = self.noise[:, : self.in_features], self.noise[:, self.in_features :]
        if len(self.noise) == 1 and len(x) >= _ROWS_FOR_A_MATRIX:
            weights = self.weight, self.weight_sigma, noise_in, noise_out
            product: th.Tensor = _NoisyProduct.apply(x, *weights)  # type: ignore[no-untyped-call]
            return product + (self.bias + self.bias_sigma * noise_out)
        sigma = F.linear(x * noise_in, self.weight_sigma, self.bias_sigma)
        return super().forward(x) + noise_out * sigma

    def _is_usual(self, x: th.Tensor) -> bool:
        return x.device.type == "cpu" and x.dtype == self.weight.dtype == th.float32


_ROWS_FOR_A_MATRIX = 16
"""From so many on, one product with it, and its gradient, take less time than two products."""


@jit(reorder=True)
def _noisy_row(
    x: Floats,
    noise: Floats,
    weight: Floats,
    bias: Floats,
    weight_sigma: Floats,
    bias_sigma: Floats,
    out: Floats,
) -> None:
    """Four outputs at a time: the processor then fetches eight rows from memory at once."""
    last = out.size - 1
    for i in range(0, out.size, 4):
        j, k, m = min(i + 1, last), min(i + 2, last), min(i + 3, last)
        noise_i, noise_j = noise[x.size + i], noise[x.size + j]
        noise_k, noise_m = noise[x.size + k], noise[x.size + m]
        out_i = bias[i] + noise_i * bias_sigma[i]
        out_j = bias[j] + noise_j * bias_sigma[j]
        out_k = bias[k] + noise_k * bias_sigma[k]
        out_m = bias[m] + noise_m * bias_sigma[m]
        for c in range(x.size):
            out_i += x[c] * (weight[i, c] + noise_i * noise[c] * weight_sigma[i, c])
            out_j += x[c] * (weight[j, c] + noise_j * noise[c] * weight_sigma[j, c])
            out_k += x[c] * (weight[k, c] + noise_k * noise[c] * weight_sigma[k, c])
            out_m += x[c] * (weight[m, c] + noise_m * noise[c] * weight_sigma[m, c])
        out[i], out[j], out[k], out[m] = out_i, out_j, out_k, out_m


class _NoisyProduct(th.autograd.Function):
    """x times weights of mean mu and noise sigma * outer(noise_out, noise_in), transposed.

    Autograd would need memory for each of their terms. With the larger matrix as the first of a
    product, two threads have more to share.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: th.Tensor,
        mu: th.Tensor,
        sigma: th.Tensor,
        noise_in: th.Tensor,
        noise_out: th.Tensor,
    ) -> th.Tensor:
        weight = sigma * noise_in
        th.addcmul(mu, weight, noise_out.T, out=weight)
        ctx.save_for_backward(x, weight, noise_in, noise_out)
        return (weight @ x.T).T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: th.Tensor) -> tuple[th.Tensor | None, ...]:
        x, weight, noise_in, noise_out = ctx.saved_tensors
        grad_x = (weight.T @ grad.T).T if ctx.needs_input_grad[0] else None
        grad_mu = grad.T @ x
        return grad_x, grad_mu, (grad_mu * noise_out.T).mul_(noise_in), None, None


def factor_noise(rows: int, width: int, generator: th.Generator | None) -> th.Tensor:
    """Factors of noise f(x) = sgn(x) sqrt(|x|) of standard normal x, (rows, width)."""
    draw = th.randn(rows, width, generator=generator)
    return draw.abs().sqrt_().copysign_(draw)
