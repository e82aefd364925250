"""The equations, against 50-digit arithmetic and their algebraic properties."""

import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cbsql.operators import kl_from_uniform, mellowmax, soft_policy, soft_value

DTYPES = (torch.float32, torch.float64)
BETAS = st.one_of(st.just(0.0), st.floats(1e-300, 1e12), st.just(math.inf))


@st.composite
def rows(draw, count=1):
    """``count`` rows of 1 to 18 action values of one magnitude, as float64 tensors."""
    scale = draw(st.sampled_from([2.0**-20, 1.0, 2.0**10, 2.0**20]))  # up to a million
    size = draw(st.integers(1, 18))
    values = st.lists(st.floats(-scale, scale, width=32), min_size=size, max_size=size)
    tensors = [torch.tensor(draw(values), dtype=torch.float64) for _ in range(count)]
    return tensors[0] if count == 1 else tensors


def exact(q, beta):
    """mellowmax and soft policy at 50 digits."""
    with mpmath.workdps(50):
        values = [mpmath.mpf(v) for v in q.tolist()]
        top = max(values)
        if beta == math.inf:
            weights = [mpmath.mpf(v == top) for v in values]
        else:
            weights = [mpmath.exp(mpmath.mpf(beta) * (v - top)) for v in values]
        policy = [w / sum(weights) for w in weights]
        if beta == 0:
            value = sum(values) / len(values)
        elif beta == math.inf:
            value = top
        else:  # at beta = 1e-300 even 50 digits cannot tell exp from 1
            below_one = sum(mpmath.expm1(mpmath.mpf(beta) * (v - top)) for v in values)
            value = top + mpmath.log1p(below_one / len(values)) / mpmath.mpf(beta)
        return float(value), [float(p) for p in policy]


def rounding(q, dtype):
    """What an operator on these values may lose to rounding."""
    return 8 * torch.finfo(dtype).eps * max(float(q.abs().max()), 1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
@given(q=rows(), beta=BETAS)
def test_values_agree_with_50_digits(dtype, q, beta):
    q = q.to(dtype)
    beta = float(torch.tensor(beta, dtype=dtype))  # what a float32 can say of it
    value, policy = exact(q, beta)
    assert float(mellowmax(q, beta)) == pytest.approx(value, abs=rounding(q, dtype))
    # The exponent beta (q - max) is rounded once, which shifts a log-probability by that much.
    spread = float(q.max() - q.min()) * (beta if beta < math.inf else 0)
    eps = torch.finfo(dtype).eps
    assert soft_policy(q, beta).tolist() == pytest.approx(policy, abs=eps * (8 + min(spread, 100)))


@given(q=rows(), beta=st.floats(1e-3, 1e6))
def test_kl_agrees_with_50_digits(q, beta):
    policy = soft_policy(q, beta)
    with mpmath.workdps(50):
        kl = mpmath.fsum(
            mpmath.mpf(p) * mpmath.log(mpmath.mpf(p) * len(q)) for p in policy.tolist() if p > 0
        )
    assert float(kl_from_uniform(policy)) == pytest.approx(float(kl), abs=1e-14)
    assert float(kl_from_uniform(policy)) >= 0


@pytest.mark.parametrize("dtype", DTYPES)
@given(q=rows(), beta=st.just(0.0) | st.floats(1e-12, 1e12) | st.just(math.inf))
def test_mellowmax_is_expected_value_minus_kl_over_beta(dtype, q, beta):
    """Also at tiny beta, where a careless divergence would be rounding divided by beta."""
    q = q.to(dtype)
    bend = float(q.max() - q.min()) * (beta if beta < math.inf else 0)
    slack = 4 * rounding(q, dtype) * (2 + min(bend, 100))
    assert float(soft_value(q, q, beta)) == pytest.approx(float(mellowmax(q, beta)), abs=slack)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("actions", [2, 6, 18, 41, 49, 107])  # 41 / 41 and 49 / 49 are not quite 1
def test_the_smallest_beta_costs_nothing(dtype, actions):
    """A frame never seen before may have a pseudo-count of 1e-40."""
    q = torch.randn(50, actions, dtype=dtype, generator=torch.Generator().manual_seed(actions))
    for exponent in range(-40, -5):
        soft = soft_value(q, q, 10.0**exponent)
        torch.testing.assert_close(soft, q.mean(-1), rtol=0, atol=1e-5 + 2 * 10.0**exponent)


@given(pair=rows(count=2), beta=st.floats(1e-3, 1e3))
def test_soft_value_judges_the_policy_of_another(pair, beta):
    q, policy_q = pair
    policy = soft_policy(policy_q, beta).tolist()
    naive = sum(
        p * (v - math.log(p * len(policy)) / beta)
        for p, v in zip(policy, q.tolist(), strict=True)
        if p > 0
    )
    slack = 8 * rounding(torch.cat(pair), torch.float64) + 1e-13 / beta
    assert float(soft_value(q, policy_q, beta)) == pytest.approx(naive, abs=slack)


@given(q=rows(), betas=st.tuples(BETAS, BETAS))
def test_monotone_in_beta_between_mean_and_max(q, betas):
    low, high = sorted(betas)
    ordered = [float(mellowmax(q, beta)) for beta in (0.0, low, high, math.inf)]
    assert ordered[0] == pytest.approx(float(q.mean()), abs=rounding(q, torch.float64))
    assert ordered[-1] == float(q.max())
    for smaller, larger in itertools.pairwise(ordered):
        assert smaller <= larger + rounding(q, torch.float64)


@given(pair=rows(count=2), beta=BETAS)
def test_non_expansion_in_the_supremum_norm(pair, beta):
    q, other = pair
    distance = abs(float(mellowmax(q, beta) - mellowmax(other, beta)))
    slack = rounding(torch.cat(pair), torch.float64)
    assert distance <= float((q - other).abs().max()) + slack


@given(q=rows(), beta=BETAS, shift=st.floats(-1e6, 1e6))
def test_shift_equivariant(q, beta, shift):
    moved = float(mellowmax(q + shift, beta))
    slack = rounding(torch.cat([q, torch.tensor([shift], dtype=torch.float64)]), torch.float64)
    assert moved == pytest.approx(float(mellowmax(q, beta)) + shift, abs=slack)


@pytest.mark.parametrize("dtype", DTYPES)
@given(q=rows(), beta=BETAS)
def test_gradient_is_the_soft_policy(dtype, q, beta):
    q = q.to(dtype).requires_grad_()
    (gradient,) = torch.autograd.grad(mellowmax(q, beta), q)
    eps = torch.finfo(dtype).eps
    # Close to the mean, mellowmax drops the bend that is below the precision of q.
    torch.testing.assert_close(gradient, soft_policy(q.detach(), beta), rtol=8 * eps, atol=8 * eps)


@given(pair=rows(count=2), betas=st.tuples(BETAS, BETAS))
def test_a_tensor_of_betas_is_row_by_row_the_same_as_floats(pair, betas):
    q = torch.stack(pair)
    beta = torch.tensor(betas, dtype=torch.float64)
    for operator in (mellowmax, soft_policy):
        alone = torch.stack([operator(row, b) for row, b in zip(q, betas, strict=True)])
        torch.testing.assert_close(operator(q, beta), alone, rtol=0, atol=rounding(q, q.dtype))


@settings(max_examples=300)
@given(q=rows(), beta=BETAS)
def test_gradient_is_finite_in_every_branch_of_a_mixed_batch(q, beta):
    q = q.float().expand(3, -1).clone().requires_grad_()
    mellowmax(q, torch.tensor([0.0, beta, math.inf])).sum().backward()
    assert q.grad is not None
    assert torch.isfinite(q.grad).all()


def test_betas_may_be_as_a_temperature_says_them():
    q, beta = torch.randn(3, 2), np.array([0.0, 1.5, math.inf])
    assert torch.equal(mellowmax(q, beta), mellowmax(q, torch.from_numpy(beta)))
    assert torch.equal(soft_policy(q, beta), soft_policy(q, torch.from_numpy(beta)))


def test_policy_is_shared_between_equal_best_actions():
    q = torch.tensor([1.0, 3.0, 3.0, 2.0])
    assert soft_policy(q, math.inf).tolist() == [0, 0.5, 0.5, 0]
    for huge in (1e39, torch.tensor(1e39, dtype=torch.float64)):  # no number of 32 bits is so large
        assert soft_policy(q.float(), huge).tolist() == [0, 0.5, 0.5, 0]
        assert mellowmax(q.float(), huge) == q.max()
    assert mellowmax(q.float(), 1e-300) == pytest.approx(float(q.mean()))
    assert soft_policy(q, 0.0).tolist() == [0.25] * 4


def test_kl_of_a_certain_policy_is_log_of_the_number_of_actions():
    assert float(kl_from_uniform(torch.tensor([0.0, 1.0, 0.0]))) == pytest.approx(math.log(3))


@pytest.mark.parametrize("operator", [mellowmax, soft_policy])
@pytest.mark.parametrize("beta", [-1.0, math.nan, torch.ones(3, 1), torch.ones(2)])
def test_bad_beta_is_refused(operator, beta):
    with pytest.raises(ValueError, match="beta"):
        operator(torch.zeros(3, 4), beta)


@given(q=rows(), beta=BETAS)
def test_one_action_has_nothing_to_soften(q, beta):
    assert float(mellowmax(q[:1], beta)) == float(q[0])
