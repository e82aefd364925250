"""The soft update rule for tables: the only place where a tabular value changes.

It updates a table (states, actions, lanes), the lanes being learners that do not know each other;
a single learner is one lane. Arithmetic is done in loops over the lanes without branches, which the
compiler turns into vector instructions. Values at states that differ between lanes are read and
written in loops of their own, because those it cannot, and at places that were found beforehand.
"""

import math

import numpy as np
from numpy.typing import NDArray

from cbsql._jit import jit
from cbsql._vector_math import expm1, log1p

_EPS = float(np.finfo(np.float64).eps)


@jit()
def find(q: NDArray[np.float64], state: NDArray[np.integer]) -> NDArray[np.uint32]:
    """Where Q(state, 0) of each lane stands in the flat table; the next action is lanes further.

    The multiplications take longer than reading, unless they are done here, in vectors. Unsigned,
    so that no index is tested for being negative.
    """
    _, actions, lanes = q.shape
    cell = np.empty(lanes, np.uint32)
    for lane in range(lanes):
        cell[lane] = state[lane] * actions * lanes + lane
    return cell


@jit()
def mellowmax(
    q: NDArray[np.float64],
    cell: NDArray[np.uint32],
    beta: NDArray[np.float64],
    work: NDArray[np.float64],
) -> NDArray[np.float64]:
    """:func:`cbsql.operators.mellowmax` of Q(s, .) in each lane (lanes,), compiled.

    ``cell`` is where :func:`find` found s.

    It meets the actions one by one. ``total`` is the sum of expm1(beta (q - top)) over those met;
    when another one becomes the top it is corrected, which saves computing the exponential of zero.
    ``work`` (3, lanes) is overwritten, and its first row returned.
    """
    actions, lanes = q.shape[1:]
    top: NDArray[np.float64] = work[0]
    rise, total = work[1], work[2]
    total[:] = 0
    greedy = _all_infinite(beta)
    _read(q, cell, 0, top)
    for met in range(1, actions):
        _read(q, cell, met, rise)
        for lane in range(lanes):
            value, best = rise[lane], top[lane]
            rise[lane] = value - best
            top[lane] = max(value, best)
        if greedy:
            continue
        for lane in range(lanes):
            # Both are read here since the compiler cannot vectorise reading for one choice only.
            up, before = rise[lane], total[lane]
            exponent = -abs(up) * beta[lane]
            # Beyond -38, expm1 is -1 to the last bit.
            fall = expm1(exponent if exponent > -38.0 else -38.0)
            total[lane] = before + fall * (before + met if up > 0 else 1.0)
    if greedy:
        return top
    flat, share = 0, 1 / actions
    for lane in range(lanes):
        # Values that are equal at a large beta, as in states not met yet, need no correction.
        flat += (total[lane] > -_EPS) & (beta[lane] < 1)
        top[lane] += log1p(total[lane] * share) / beta[lane]
    if flat:  # where beta is too small to bend the mean, and may be zero
        for lane in range(lanes):
            if total[lane] > -_EPS:
                top[lane] = q.reshape(-1)[cell[lane] :: lanes][:actions].mean()
    return top


@jit()
def _all_infinite(beta: NDArray[np.float64]) -> bool:
    for inverse_temperature in beta:  # noqa: SIM110 (the first finite one ends it)
        if inverse_temperature < math.inf:
            return False
    return True


@jit()
def _read(
    q: NDArray[np.float64], cell: NDArray[np.uint32], action: int, value: NDArray[np.float64]
) -> None:
    values = q.reshape(-1)[action * len(value) :]
    for lane in range(len(value)):
        value[lane] = values[cell[lane]]


@jit()
def soft_update(
    q: NDArray[np.float64],
    cell: NDArray[np.uint32],
    action: NDArray[np.integer],
    reward: NDArray[np.float64],
    next_cell: NDArray[np.uint32],
    discount: float,
    beta: NDArray[np.float64],
    learning_rate: float,
    work: NDArray[np.float64],
    trust_region: bool = False,
) -> NDArray[np.float64]:
    """Move Q(s, a) to the soft backup r + discount mellowmax_beta(s') Q(s', .), and return that.

    With ``trust_region`` the difference to V(s) = mellowmax_beta Q(s, .) is added to Q(s, a),
    instead of the difference to Q(s, a) itself: Psi-learning (Rawlik et al., 2010), whose policy
    softmax(beta Q) becomes the old policy times exp(beta advantage).

    ``cell`` and ``next_cell`` are where :func:`find` found s and s'; the first becomes the place of
    Q(s, a). ``work`` (4, lanes) holds what is computed on the way, the result first.
    """
    target = mellowmax(q, next_cell, beta, work)
    for lane in range(len(target)):
        target[lane] = reward[lane] + discount * target[lane]
    value = mellowmax(q, cell, beta, work[1:]) if trust_region else target
    table = q.reshape(-1)
    for lane in range(len(target)):
        cell[lane] += action[lane] * len(target)
    for lane in range(len(target)):
        before = value[lane] if trust_region else table[cell[lane]]
        table[cell[lane]] += learning_rate * (target[lane] - before)
    return target
