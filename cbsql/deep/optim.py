"""Steps of optimisation with fewer passes over the memory of a network."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch as th
from numpy.typing import NDArray
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from cbsql._jit import jit


def clip_grad_norm(parameters: Sequence[th.Tensor], max_norm: float) -> None:
    """:func:`torch.nn.utils.clip_grad_norm_`, which also multiplies what needs no clipping by 1."""
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    # On an accelerator, to ask would be to wait for it.
    if norm.device.type != "cpu" or not norm + 1e-6 < max_norm:
        clip_grads_with_norm_(parameters, max_norm, norm)


class RMSprop(th.optim.RMSprop):
    """:class:`torch.optim.RMSprop`, several times as fast for networks on the CPU.

    Torch goes through the memory of a network once for each operation of the update; this does so
    once in all. Options, state and, to rounding, results are Torch's, which also does the work
    wherever this cannot: with momentum or weight decay, and for parameters elsewhere.
    """

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        if closure is not None or not all(_is_plain(group) for group in self.param_groups):
            return super().step(closure)
        for group in self.param_groups:
            rates = [np.float32(group[name]) for name in ("lr", "alpha", "eps")]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = th.zeros(())
                    state["square_avg"] = th.zeros_like(parameter)
                    if group["centered"]:
                        state["grad_avg"] = th.zeros_like(parameter)
                state["step"] += 1
                mean = state.get("grad_avg", state["square_avg"])  # unused without centring
                memory = (parameter.detach(), parameter.grad, state["square_avg"], mean)
                arrays = [tensor.numpy().reshape(-1) for tensor in memory]
                _update(*arrays, *rates, group["centered"])  # type: ignore[call-arg]
        return None


def _is_plain(group: dict[str, Any]) -> bool:
    """Whether the compiled update can do what a group of parameters asks for."""
    options = ("momentum", "weight_decay", "maximize", "differentiable", "capturable")
    return not any(group[name] for name in options) and all(
        p.device.type == "cpu" and p.dtype == th.float32 and p.is_contiguous()
        for p in group["params"]
    )


@jit()
def _update(
    weights: NDArray[np.float32],  # all arrays: (parameters,)
    gradients: NDArray[np.float32],
    square_mean: NDArray[np.float32],
    mean: NDArray[np.float32],
    learning_rate: np.float32,
    alpha: np.float32,
    eps: np.float32,
    centered: bool,
) -> None:
    rest = np.float32(1) - alpha
    for i in range(weights.size):
        gradient = gradients[i]
        square_mean[i] = alpha * square_mean[i] + rest * gradient * gradient
        variance = square_mean[i]
        if centered:
            mean[i] += rest * (gradient - mean[i])
            # Rounding takes the variance of a constant gradient below zero.
            variance = max(variance - mean[i] * mean[i], np.float32(0))
        weights[i] -= learning_rate * gradient / (np.sqrt(variance) + eps)
