"""The backup of return distributions, against a naive loop and the backup of values."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cbsql.operators import mellowmax, soft_categorical_target, soft_policy, soft_value

ATOMS = torch.linspace(-10, 10, 51, dtype=torch.float64)
BETAS = [0.0, 1e-30, 1e-3, 0.7, 40.0, math.inf]


def naive(next_probs, policy_q, beta, reward, discount, atoms):
    """One row, action by action and atom by atom, in Python's own numbers."""
    top = max(policy_q)
    if beta == math.inf:
        weights = [float(q == top) for q in policy_q]
    else:
        weights = [math.exp(beta * (q - top)) for q in policy_q]
    policy = [w / sum(weights) for w in weights]
    cost = 0.0
    if 1e-9 < beta < math.inf:  # at less, below the precision of the comparison
        cost = sum(p * math.log(p * len(policy)) for p in policy if p > 0) / beta
    target, step = [0.0] * len(atoms), atoms[1] - atoms[0]
    for action, probs in enumerate(next_probs):
        for z, p in zip(atoms, probs, strict=True):
            value = min(max(reward + discount * (z - cost), atoms[0]), atoms[-1])
            for i, atom in enumerate(atoms):
                share = max(0.0, 1 - abs(value - atom) / step)
                target[i] += policy[action] * p * share
    return target


def random_batch(seed, rows=12, actions=3, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seed)
    probs = torch.softmax(2 * torch.randn(rows, actions, 51, generator=rng, dtype=dtype), -1)
    policy_q = 2 * torch.randn(rows, actions, generator=rng, dtype=dtype)
    beta = torch.tensor(np.resize(BETAS, rows), dtype=dtype)
    rewards = 6 * torch.randn(rows, generator=rng, dtype=dtype)  # so that both ends are passed
    discounts = torch.tensor(np.resize([0.99, 0.99**4, 0.0, 1.0, 0.5], rows), dtype=dtype)
    return probs, policy_q, beta, rewards, discounts


@pytest.mark.parametrize(("dtype", "slack"), [(torch.float64, 1e-13), (torch.float32, 3e-6)])
@pytest.mark.parametrize("actions", [1, 3, 18])
def test_agrees_with_a_naive_loop(dtype, slack, actions):
    batch = random_batch(actions, actions=actions)
    target = soft_categorical_target(*(x.to(dtype) for x in (*batch, ATOMS)))
    assert target.dtype == dtype
    for i in range(len(target)):
        expected = naive(*(x[i].tolist() for x in batch), ATOMS.tolist())
        assert target[i].tolist() == pytest.approx(expected, abs=slack)


@pytest.mark.parametrize("beta", BETAS)
def test_one_beta_for_all_rows_is_a_tensor_of_it(beta):
    probs, policy_q, _, *rest = random_batch(1)
    betas = torch.full((12,), beta, dtype=torch.float64)
    one = soft_categorical_target(probs, policy_q, beta, *rest, ATOMS)
    assert torch.equal(one, soft_categorical_target(probs, policy_q, betas, *rest, ATOMS))


def target_of(probs, policy_q, beta, reward, discount):
    """A batch of one."""
    row = (torch.tensor([x], dtype=torch.float64) for x in (reward, discount))
    target = soft_categorical_target(probs[None], policy_q[None], beta, *row, ATOMS)
    return target[0].numpy()


def test_an_infinite_beta_takes_the_distribution_of_the_best_action():
    probs, policy_q = (x[0] for x in random_batch(2)[:2])
    target = target_of(probs, policy_q, math.inf, reward=0.0, discount=1.0)
    assert target == pytest.approx(probs[policy_q.argmax()].numpy(), abs=1e-14)


def test_a_beta_of_zero_mixes_all_actions_alike():
    probs, policy_q = (x[0] for x in random_batch(3)[:2])
    target = target_of(probs, policy_q, 0.0, reward=0.0, discount=1.0)
    assert target == pytest.approx(probs.mean(0).numpy(), abs=1e-14)


def test_values_on_the_grid_stay_whole():
    """The atoms are 0.4 apart: a reward of 0.8 moves everything by two, and the top piles up."""
    probs = torch.softmax(torch.arange(51.0, dtype=torch.float64) / 10, 0)[None]
    target = target_of(probs, torch.zeros(1, dtype=torch.float64), 1.0, reward=0.8, discount=1.0)
    expected = np.concatenate([[0, 0], probs[0, :48], [probs[0, 48:].sum()]])
    assert target == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize(("reward", "atom"), [(-10.0, 0), (-1e6, 0), (10.0, 50), (1e6, 50)])
def test_all_beyond_an_end_is_at_that_end(reward, atom):
    probs, policy_q = (x[0] for x in random_batch(4)[:2])
    assert target_of(probs, policy_q, 2.0, reward, 0.0).tolist() == pytest.approx(np.eye(51)[atom])


@pytest.mark.parametrize("beta", BETAS)
def test_a_terminal_state_is_worth_its_reward_alone(beta):
    probs, policy_q = (x[0] for x in random_batch(5)[:2])
    target = target_of(probs, policy_q, beta, reward=1.1, discount=0.0)
    expected = np.zeros(51)
    expected[27], expected[28] = 0.25, 0.75  # between 0.8 and 1.2
    assert target == pytest.approx(expected, abs=1e-12)


@given(
    index=st.lists(st.integers(15, 35), min_size=1, max_size=18),
    beta=st.sampled_from(BETAS) | st.floats(1e-6, 1e6),
    reward=st.floats(-1, 1),
)
def test_certain_returns_are_backed_up_like_values(index, beta, reward):
    """All of an action's probability at one atom, from which no cost reaches the ends."""
    q = ATOMS[index]
    target = target_of(torch.eye(51, dtype=torch.float64)[index], q, beta, reward, discount=0.7)
    expected = reward + 0.7 * float(mellowmax(q, beta))
    assert target @ ATOMS.numpy() == pytest.approx(expected, abs=1e-11)


@given(seed=st.integers(0, 10**6), beta=st.sampled_from(BETAS), scale=st.floats(0, 100))
def test_rows_sum_to_one_and_none_is_negative(seed, beta, scale):
    probs, policy_q, _, rewards, discounts = random_batch(seed)
    for dtype, slack in ((torch.float64, 1e-13), (torch.float32, 2e-6)):
        inputs = (x.to(dtype) for x in (scale * rewards, discounts, ATOMS))
        target = soft_categorical_target(probs.to(dtype), policy_q.to(dtype), beta, *inputs)
        assert float(target.min()) >= 0
        torch.testing.assert_close(target.sum(-1), torch.ones(12, dtype=dtype), rtol=0, atol=slack)


@given(seed=st.integers(0, 10**6), beta=st.sampled_from(BETAS))
def test_the_mean_is_kept_where_nothing_is_clipped(seed, beta):
    probs, policy_q, _, rewards, _ = random_batch(seed)
    rewards, discounts = rewards.clamp(-1, 1), torch.full((12,), 0.4, dtype=torch.float64)
    target = soft_categorical_target(probs, policy_q, beta, rewards, discounts, ATOMS)
    expected = rewards + discounts * soft_value(probs @ ATOMS, policy_q, beta)
    torch.testing.assert_close(target @ ATOMS, expected, rtol=0, atol=1e-11)


def test_equal_best_actions_share_the_target():
    probs, _ = (x[0] for x in random_batch(6)[:2])
    policy_q = torch.tensor([1.0, 3.0, 3.0], dtype=torch.float64)
    assert soft_policy(policy_q, math.inf).tolist() == [0, 0.5, 0.5]
    target = target_of(probs, policy_q, math.inf, reward=0.0, discount=1.0)
    assert target == pytest.approx(((probs[1] + probs[2]) / 2).numpy(), abs=1e-14)


@pytest.mark.parametrize("name", ["rewards", "discounts"])
def test_columns_are_refused(name):
    """As replay buffers return them: they would broadcast to all pairs of rows."""
    probs, policy_q, beta, *rest = random_batch(7)
    columns = {"rewards": rest[0], "discounts": rest[1]}
    columns[name] = columns[name].unsqueeze(1)
    with pytest.raises(ValueError, match=rf"{name} has shape \(12, 1\)"):
        soft_categorical_target(probs, policy_q, beta, **columns, atoms=ATOMS)
