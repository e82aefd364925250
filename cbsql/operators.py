"""The equations of count-based soft Q-learning, as pure functions of tensors.

Actions are the last dimension of ``q``. The inverse temperature ``beta`` is a float, or a tensor
with one value for each row of ``q`` (its shape without the last dimension).
"""

import math

import numpy as np
import torch
from torch import Tensor


def mellowmax(q: Tensor, beta: float | Tensor) -> Tensor:
    r"""Soft maximum over actions, the value of the soft Bellman backup.

    .. math:: \frac1\beta \log \frac1{|A|} \sum_a \exp(\beta q_a)

    It is the mean of ``q`` at ``beta = 0`` and its maximum at ``beta = inf``, and both limits are
    exact. The derivative with respect to ``q`` is :func:`soft_policy`.
    """
    if isinstance(beta, float) and beta == math.inf:
        return q.amax(-1)  # the whole computation for DQN
    beta = _per_row(beta, q)
    # Relative to the maximum nothing overflows; expm1 and log1p keep all digits as beta -> 0.
    # The reference is a constant: it cancels out of the value, so it must not enter the gradient.
    top = q.detach().amax(-1)
    below = q - top.unsqueeze(-1)
    # A beta too small to bend the mean within the precision of q: dividing by it would only
    # amplify rounding, and at zero be undefined.
    mean = beta * below.detach().amin(-1).neg() < torch.finfo(q.dtype).eps
    greedy = torch.isinf(beta)
    # Rows at a limit compute with 1, so that the branch not taken has a finite gradient.
    soft_beta = torch.where(mean | greedy, 1.0, beta)
    soft = torch.log1p(torch.expm1(soft_beta.unsqueeze(-1) * below).mean(-1)) / soft_beta
    soft = torch.where(mean, below.mean(-1), soft) + top
    return torch.where(greedy, q.amax(-1), soft)


def soft_policy(q: Tensor, beta: float | Tensor) -> Tensor:
    r"""The optimiser of the soft backup, :math:`\pi(a) \propto \exp(\beta q_a)`.

    Uniform at ``beta = 0``; at ``beta = inf`` uniform over the actions that share the maximum.
    """
    below = q - q.amax(-1, keepdim=True)
    best = (below == 0).to(q.dtype)
    best = best / best.sum(-1, keepdim=True)
    if isinstance(beta, float) and beta == math.inf:
        return best
    beta = _per_row(beta, q).unsqueeze(-1)
    greedy = torch.isinf(beta)
    return torch.where(greedy, best, torch.softmax(torch.where(greedy, 1.0, beta) * below, -1))


def kl_from_uniform(policy: Tensor) -> Tensor:
    r"""Kullback-Leibler divergence :math:`D[\pi \| \pi_0]` from the uniform policy, in nats.

    Together with the other two, ``mellowmax(q, beta) = E_pi[q] - kl_from_uniform(pi) / beta``.
    """
    # With x = |A| pi the divergence is the mean of x log x - x + 1: no term is negative, so nothing
    # cancels near the uniform policy, where the caller may divide by a tiny beta.
    excess = policy * policy.shape[-1] - 1  # (..., actions)
    terms: Tensor = torch.special.xlog1py(excess + 1, excess) - excess
    return terms.mean(-1)


def kl_cost(policy: Tensor, beta: float | Tensor) -> Tensor:
    r"""What entropy costs a soft value, :math:`\frac1\beta D[\pi \| \pi_0]`.

    Zero at both ends: at ``beta = 0`` the soft policy is uniform, at ``inf`` deviation is free.
    """
    if isinstance(beta, float) and beta == math.inf:
        return policy.new_zeros(policy.shape[:-1])
    beta = _per_row(beta, policy)
    divergence = kl_from_uniform(policy)
    # A divergence this small is the rounding of a uniform policy, and a tiny beta would blow it up;
    # if it is more than that, then what is dropped is below the precision of the values.
    bent = divergence > 8 * torch.finfo(policy.dtype).eps ** 2
    return torch.where(bent, divergence / beta, 0.0).to(policy.dtype)


def soft_value(q: Tensor, policy_q: Tensor, beta: float | Tensor) -> Tensor:
    """The value by ``q`` of the soft policy of ``policy_q``, less what its entropy costs.

    With the online network as ``policy_q`` and the target network as ``q`` this is the soft form of
    double Q-learning; with one network as both it is :func:`mellowmax`.
    """
    policy = soft_policy(policy_q, beta)
    return (policy * q).sum(-1) - kl_cost(policy, beta)


def soft_categorical_target(
    next_probs: Tensor,
    policy_q: Tensor,
    beta: float | Tensor,
    rewards: Tensor,
    discounts: Tensor,
    atoms: Tensor,
) -> Tensor:
    r"""The soft backup of categorical return distributions, (batch, atoms).

    The distributions ``next_probs`` (batch, actions, atoms) of the next actions are mixed by the
    soft policy of ``policy_q`` (batch, actions), and the mixture is placed at
    :math:`r + \gamma (z - \frac1\beta D[\pi \| \pi_0])`, in place of the equidistant ``atoms``
    :math:`z`. At ``beta = inf`` this is the target of C51. A state that ends an episode has a
    discount of 0.
    """
    for name, given in (("rewards", rewards), ("discounts", discounts)):
        if given.shape != policy_q.shape[:-1]:
            raise ValueError(
                f"{name} has shape {tuple(given.shape)}; with policy_q of shape "
                f"{tuple(policy_q.shape)} it must be {tuple(policy_q.shape[:-1])}."
            )
    policy = soft_policy(policy_q, beta)
    mixture = (policy.unsqueeze(-2) @ next_probs).squeeze(-2)  # (batch, atoms)
    values = atoms - kl_cost(policy, beta).unsqueeze(-1)
    return _project(mixture, rewards.unsqueeze(-1) + discounts.unsqueeze(-1) * values, atoms)


def _project(probs: Tensor, values: Tensor, atoms: Tensor) -> Tensor:
    """Share the probability of each value between the two atoms around it, to keep the mean.

    Values beyond the ends go to the ends. Half the time of a product with a triangular kernel.
    """
    last = len(atoms) - 1
    position = ((values - atoms[0]) * (last / (atoms[-1] - atoms[0]))).clamp(0, last)
    below = position.floor()
    upper = probs * (position - below)
    index = below.long()
    projected = torch.zeros_like(probs).scatter_add_(-1, index, probs - upper)
    return projected.scatter_add_(-1, (index + 1).clamp_(max=last), upper)


def _per_row(beta: float | Tensor, q: Tensor) -> Tensor:
    """One inverse temperature for each row of ``q``; a shape that would only broadcast is refused.

    The values of a tensor are not checked: on an accelerator that would wait for the device.
    """
    if isinstance(beta, np.ndarray):  # as temperatures say it
        beta = torch.from_numpy(beta)
    if not isinstance(beta, Tensor):
        if not beta >= 0:
            raise ValueError(f"beta must be a number from 0 to inf, not {beta!r}.")
        beta = torch.as_tensor(beta, dtype=torch.float64).expand(q.shape[:-1])
    if beta.shape not in ((), q.shape[:-1]):
        raise ValueError(
            f"beta has shape {tuple(beta.shape)}; with q of shape {tuple(q.shape)} it must be a "
            f"number or have shape {tuple(q.shape[:-1])}."
        )
    return beta.to(q)  # what is beyond the range of its numbers is infinite there
