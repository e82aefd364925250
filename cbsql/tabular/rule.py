"""The soft update rule for tables: the only place where a tabular value changes."""

import math

import numpy as np
from numpy.typing import NDArray

from cbsql._jit import jit

_EPS = float(np.finfo(np.float64).eps)


@jit()
def mellowmax(q: NDArray[np.float64], state: int, beta: float) -> float:
    """:func:`cbsql.operators.mellowmax` of one row of a table, compiled.

    It takes the table and an index because slicing a row costs more than the arithmetic here.
    """
    actions = q.shape[1]
    top = q[state, 0]
    for action in range(1, actions):
        top = max(top, q[state, action])
    if beta == math.inf:
        return float(top)
    total = linear = 0.0
    for action in range(actions):
        below = q[state, action] - top
        linear += below
        # Beyond -38, expm1 is -1 to the last bit.
        total += math.expm1(beta * below) if beta * below > -38.0 else -1.0
    if total > -_EPS:
        return float(top + linear / actions)
    return float(top + math.log1p(total / actions) / beta)


@jit()
def soft_update(
    q: NDArray[np.float64],
    state: int,
    action: int,
    reward: float,
    next_state: int,
    discount: float,
    beta: float,
    learning_rate: float,
    trust_region: bool = False,
) -> float:
    """Move Q(s, a) to the soft backup r + discount mellowmax_beta(s') Q(s', .), and return that.

    With ``trust_region`` the difference to V(s) = mellowmax_beta Q(s, .) is added to Q(s, a),
    instead of the difference to Q(s, a) itself: Psi-learning (Rawlik et al., 2010), whose policy
    softmax(beta Q) becomes the old policy times exp(beta advantage).
    """
    target = reward + discount * mellowmax(q, next_state, beta)
    before = mellowmax(q, state, beta) if trust_region else q[state, action]
    q[state, action] += learning_rate * (target - before)
    return target
