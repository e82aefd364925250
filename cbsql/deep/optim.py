"""Optimisers that go once through the memory of a network, and clip its gradient on the way.

Torch goes through it once for each operation, and for small networks the time is that of calling
the operations. Its kernel for Adam in one pass is used here, without all that it does on the way
there. Options, state and, to rounding, results are Torch's, which also does the work wherever these
cannot: for parameters that are not on the CPU, and with options that are not here.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch as th
from numpy.typing import NDArray

from cbsql._jit import jit

Tensors = list[th.Tensor]
"""The memory of each parameter, or of something of the same shape for each."""
Arrays = tuple[NDArray[np.float32], ...]
"""The same for Numba."""


def clipped_step(
    optimizer: th.optim.Optimizer, parameters: list[th.nn.Parameter], max_norm: float
) -> float:
    """Clip the norm of the gradient as a whole, then update all parameters that have one.

    Returns the norm that it had.
    """
    if isinstance(optimizer, OnePass):
        return optimizer.clipped_step(max_norm)
    norm = th.nn.utils.clip_grad_norm_(parameters, max_norm)
    optimizer.step()
    return float(norm)


class OnePass(th.optim.Optimizer):
    """What the optimisers here have in common."""

    _slots: tuple[str, ...]
    """Names of the state that is as large as a parameter."""
    _refused: tuple[str, ...]
    """Options that only Torch has."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        if closure is not None:
            return super().step(closure)
        self.clipped_step(np.inf)
        return None

    # Not "step": Torch wraps that for its profiler, which in a small network takes as long as Adam.
    def clipped_step(self, max_norm: float) -> float:
        """Update all parameters that have a gradient, which is clipped; returns its norm."""
        if not all(self._is_plain(group) for group in self.param_groups):
            learnt = [p for group in self.param_groups for p in group["params"]]
            norm = float(th.nn.utils.clip_grad_norm_(learnt, max_norm))
            super().step()
            return norm
        given = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        gradients = [[p.grad.view(-1) for p in learnt] for learnt in given]
        norm = float(sum(th.dot(g, g).item() for of_group in gradients for g in of_group) ** 0.5)
        # As in Torch: what is below the norm is multiplied by 1.
        factor = min(max_norm / (norm + 1e-6), 1.0) if np.isfinite(norm) else norm
        for group, learnt, of_group in zip(self.param_groups, given, gradients, strict=True):
            if learnt:
                states = [self._state_of(p) for p in learnt]
                steps = [state["step"] for state in states]
                th._foreach_add_(steps, 1)
                slots = [[state[name].view(-1) for state in states] for name in self._slots]
                weights = [p.detach().view(-1) for p in learnt]
                self._update(group, steps, factor, weights, of_group, *slots)
        return norm

    def _update(
        self, group: dict[str, Any], steps: Tensors, factor: float, *tensors: Tensors
    ) -> None:
        """Update weights, the first of the tensors, by gradients, the second, times a factor."""
        raise NotImplementedError

    def _is_plain(self, group: dict[str, Any]) -> bool:
        learnt = [p for p in group["params"] if p.grad is not None]
        steps = {self.state[p]["step"].item() if p in self.state else 0 for p in learnt}
        usual = (p.device.type == "cpu" and p.dtype == th.float32 for p in learnt)
        no_option = not any(group.get(name) for name in self._refused)
        return (
            no_option and len(steps) <= 1 and all(usual) and all(p.is_contiguous() for p in learnt)
        )

    def _state_of(self, parameter: th.Tensor) -> dict[str, th.Tensor]:
        state: dict[str, th.Tensor] = self.state[parameter]
        if not state:
            state["step"] = th.zeros(())
            state.update((name, th.zeros_like(parameter)) for name in self._slots)
        return state


class RMSprop(OnePass, th.optim.RMSprop):
    """:class:`torch.optim.RMSprop`, centred."""

    _slots = ("square_avg", "grad_avg")
    _refused = ("momentum", "weight_decay", "maximize", "differentiable", "capturable")

    def _is_plain(self, group: dict[str, Any]) -> bool:
        return group["centered"] and super()._is_plain(group)

    def _update(
        self, group: dict[str, Any], steps: Tensors, factor: float, *tensors: Tensors
    ) -> None:
        alpha = group["alpha"]
        rates = [np.float32(rate) for rate in (factor, group["lr"], alpha, 1 - alpha, group["eps"])]
        arrays = [tuple(tensor.numpy() for tensor in of_kind) for of_kind in tensors]
        _rmsprop(*arrays, *rates)  # type: ignore[arg-type]


class Adam(OnePass, th.optim.Adam):
    """:class:`torch.optim.Adam`."""

    _slots = ("exp_avg", "exp_avg_sq")
    _refused = ("weight_decay", "amsgrad", "maximize", "differentiable", "capturable")

    def _update(
        self, group: dict[str, Any], steps: Tensors, factor: float, *tensors: Tensors
    ) -> None:
        weights, gradients, means, square_means = tensors
        beta1, beta2 = group["betas"]
        th._fused_adam_(
            weights,
            gradients,
            means,
            square_means,
            [],
            steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=0.0,
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=None if factor == 1 else 1 / th.tensor(factor),  # it divides
        )


@jit()
def _rmsprop(
    weights: Arrays,
    gradients: Arrays,
    square_means: Arrays,
    means: Arrays,
    factor: np.float32,
    learning_rate: np.float32,
    alpha: np.float32,
    rest: np.float32,  # 1 - alpha, which single precision cannot compute
    eps: np.float32,
) -> None:
    for k in range(len(weights)):
        weight, gradient = weights[k], gradients[k]
        square_mean, mean = square_means[k], means[k]
        for i in range(weight.size):
            g = factor * gradient[i]
            square_mean[i] = alpha * square_mean[i] + rest * g * g
            mean[i] += rest * (g - mean[i])
            # Rounding takes the variance of a constant gradient below zero.
            variance = max(square_mean[i] - mean[i] * mean[i], np.float32(0))
            weight[i] -= learning_rate * g / (np.sqrt(variance) + eps)
