import math

import numpy as np
import pytest
import torch

from cbsql.counts import SimHash
from cbsql.temperature import Counter


def test_cells_are_the_signs_of_the_projection():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((500, 3))
    scale = np.array([1.0, 2.0, 0.5])
    counter = SimHash(3, k=5, scale=scale, seed=7)
    planes = counter.state_dict()["planes"].numpy()
    signs = [
        tuple(
            math.fsum(a * b for a, b in zip([*(row / scale), 1.0], planes[:, bit], strict=True)) > 0
            for bit in range(5)
        )
        for row in x
    ]
    counter.update(x)
    assert counter.count(x).tolist() == [signs.count(cell) for cell in signs]
    assert len(counter) == len(set(signs))


def test_more_bits_split_cells_and_equal_states_always_meet():
    x = np.random.default_rng(1).standard_normal((400, 4))
    cells = []
    for k in (1, 8, 16, 32, 100):
        counter = SimHash(4, k=k)
        counter.update(x)
        cells.append(len(counter))
        assert np.all(counter.count(x) >= 1)
    assert cells == sorted(cells)
    assert cells[0] == 2
    assert cells[-1] > 350


def test_collisions_of_near_states_follow_the_angle():
    """P(a random plane through the origin separates u and v) = angle(u, v) / pi."""
    u, v = np.zeros(201), np.zeros(201)
    u[0], (v[0], v[1]) = 1e6, 1e6 * np.array([math.cos(0.3), math.sin(0.3)])  # the 1 is negligible
    k, separated = 64, 0
    for seed in range(60):
        counter = SimHash(201, k=k, seed=seed)
        planes = counter.state_dict()["planes"].numpy()[:-1]
        separated += int(np.sum((u @ planes > 0) != (v @ planes > 0)))
        counter.update(u[None])
        same = np.all((u @ planes > 0) == (v @ planes > 0))
        assert counter.count(v[None])[0] == float(same)
    assert separated / (60 * k) == pytest.approx(0.3 / math.pi, abs=0.02)


def test_scale_sets_the_distance_at_which_states_are_told_apart():
    around_one = np.linspace(0.5, 1.5, 200)[:, None]
    cells = []
    for scale in (100.0, 1.0, 0.01):
        counter = SimHash(1, k=64, scale=scale)
        counter.update(around_one)
        cells.append(len(counter))
    assert cells[1] > 5 * max(cells[0], cells[2])  # those planes lie about 100 and 0.01


def test_dicts_are_concatenated_in_sorted_key_order():
    a, b = np.ones((2, 2)), np.array([[[5.0]], [[-5.0]]])
    counter, flat = SimHash(3), SimHash(3)
    counter.update({"b": b, "a": torch.from_numpy(a)})
    flat.update(np.concatenate([a, b.reshape(2, 1)], axis=1))
    assert torch.equal(counter.state_dict()["codes"], flat.state_dict()["codes"])


def test_a_state_has_the_same_code_in_any_batch():
    x = np.random.default_rng(2).standard_normal((64, 17)).astype(np.float32)
    counter = SimHash(17, k=64)
    counter.update(x)
    single = np.concatenate([counter.count(row[None]) for row in x])
    assert np.array_equal(counter.count(x), single)
    assert np.array_equal(counter.count(torch.from_numpy(x)), single)


def test_standardized_statistics_are_those_of_the_updates():
    x = np.random.default_rng(3).normal([5.0, -2.0], [0.1, 30.0], (1000, 2))
    counter, plain = SimHash(2, standardize=True), SimHash(2)
    for batch in np.split(x, 10):
        counter.update(batch)
        plain.update(batch)
    state = counter.state_dict()
    np.testing.assert_allclose(state["mean"], x.mean(axis=0))
    np.testing.assert_allclose(state["squares"] / 1000, x.var(axis=0))
    # A component of deviation 0.1 beside one of 30 is invisible without standardisation.
    near = np.array([[4.8, 0.0], [5.2, 0.0]])
    assert len({*counter._codes(near)}) == 2
    assert not plain.state_dict()["mean"].any()


def test_state_loads_into_a_fresh_counter_of_another_seed():
    x = np.random.default_rng(4).standard_normal((300, 6))
    counter, fresh = SimHash(6, standardize=True), SimHash(6, standardize=True, seed=1)
    counter.update(x[:200])
    fresh.load_state_dict(counter.state_dict())
    for each in (counter, fresh):
        each.update(x[200:])
    assert np.array_equal(counter.count(x), fresh.count(x))
    assert isinstance(counter, Counter)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (np.full((2, 3), np.nan), ValueError, "finite"),
        (np.full((2, 3), np.inf), ValueError, "finite"),
        (np.zeros((2, 4)), ValueError, "3 components, got 4"),
        (np.zeros((0, 3)), ValueError, "at least one"),
        (np.float64(3), ValueError, "at least one"),
        ({"a": np.zeros((2, 1)), "b": np.zeros((1, 2))}, ValueError, "one row each"),
        ({}, ValueError, "at least one"),
        (np.array([["a", "b", "c"]]), TypeError, "numbers"),
    ],
)
def test_bad_observations_are_refused_and_change_nothing(x, error, message):
    counter = SimHash(3, standardize=True)
    counter.update(np.ones((2, 3)))
    before = counter.state_dict()
    for method in (counter.count, counter.update):
        with pytest.raises(error, match=message):
            method(x)
    after = counter.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_bad_states_are_refused_and_change_nothing():
    counter = SimHash(3, k=8)
    counter.update(np.ones((2, 3)))
    good = counter.state_dict()
    bad = [
        SimHash(4, k=8).state_dict(),
        SimHash(3, k=9).state_dict(),
        {key: value for key, value in good.items() if key != "mean"},
        good | {"counts": -good["counts"]},
        good | {"counts": good["counts"][:0]},
        good | {"mean": torch.full((3,), math.nan)},
    ]
    for state in bad:
        with pytest.raises(ValueError, match="state"):
            counter.load_state_dict(state)
    after = counter.state_dict()
    assert all(torch.equal(good[key], after[key]) for key in good)


@pytest.mark.parametrize(
    "arguments",
    [
        {"size": 0},
        {"size": 2, "k": 0},
        {"size": 2, "scale": 0.0},
        {"size": 2, "scale": [1.0, 2.0, 3.0]},
        {"size": 2, "scale": math.nan},
    ],
)
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match="must be"):
        SimHash(**arguments)
