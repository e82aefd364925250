import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from cbsql.counts import CoinFlipNetwork, ExactCounter
from cbsql.temperature import Counter


@pytest.fixture(autouse=True)
def _one_torch_thread():
    """These networks are too small for two, which wait for each other beside a second worker."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def states_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_counts_agree_with_exact_counts_on_a_small_domain():
    """27 states, updated 5 to 200 times each; 64 coins give a deviation of 18% at best."""
    states = 30
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, states + 1)
    share[-3:] = 0  # never updated
    network, exact = CoinFlipNetwork(spaces.Discrete(states)), ExactCounter()
    for _ in range(800):
        batch = rng.choice(states, 1, p=share / share.sum())
        network.update(batch)
        exact.update(batch)
    estimates, counts = (c.count(np.arange(states)) for c in (network, exact))
    log_error = np.log(estimates[:-3] / counts[:-3])
    assert np.abs(log_error).mean() < 0.4
    order = [np.argsort(np.argsort(c[:-3])) for c in (estimates, counts)]
    assert np.corrcoef(*order)[0, 1] > 0.9
    assert np.all(estimates[-3:] < 2)


def test_generalises_to_near_states_where_exact_counts_cannot():
    network = CoinFlipNetwork(spaces.Box(-1, 1, (2,)))
    rng = np.random.default_rng(1)
    for _ in range(300):
        network.update(rng.uniform([0.2, 0.2], [0.4, 0.4], (8, 2)))
    inside, outside = network.count(np.array([[0.3, 0.3], [-0.9, -0.9]]))
    assert inside > 20 * outside


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 255, (1, 36, 36), np.uint8),
        spaces.Box(0, 1, (4, 4, 2), bool),
        spaces.Box(0, 9, (2,), np.uint16),
        spaces.Box(0, 9, (2,), np.uint32),
        spaces.MultiDiscrete([3, 4]),
        spaces.MultiBinary(5),
        spaces.Dict(a=spaces.Box(-1, 1, (3,)), b=spaces.Discrete(2)),
    ],
)
def test_smoke_every_space(space):
    network = CoinFlipNetwork(space, memory=10)
    space.seed(0)
    samples = [space.sample() for _ in range(4)]
    if isinstance(space, spaces.Dict):
        batch = {key: np.stack([sample[key] for sample in samples]) for key in space}
    else:
        batch = np.stack(samples)
    assert network.count(batch).tolist() == [1, 1, 1, 1]
    for _ in range(4):
        network.update(batch)
    counts = network.count(batch)
    assert counts.dtype == np.float64
    assert np.all(np.isfinite(counts) & (counts > 0))
    assert isinstance(network, Counter)


def test_the_memory_keeps_the_latest_updates():
    network = CoinFlipNetwork(spaces.Discrete(100), memory=10)
    network.update(np.arange(7))
    network.update(np.arange(7, 14))
    assert sorted(network.state_dict()["seen."].tolist()) == list(range(4, 14))
    network.update(np.arange(50, 75))  # more than it holds
    assert sorted(network.state_dict()["seen."].tolist()) == list(range(65, 75))


def test_prior_statistics_are_those_of_all_updates():
    network = CoinFlipNetwork(spaces.Box(-1, 1, (3,)))
    x = np.random.default_rng(2).uniform(-1, 1, (60, 3)).astype(np.float32)
    for batch in np.split(x, [10, 11, 40]):
        network.update(batch)
    outputs = network._prior(torch.from_numpy(x))
    state = network.state_dict()
    torch.testing.assert_close(state["mean"], outputs.mean(dim=0))
    torch.testing.assert_close(state["variance"], outputs.var(dim=0, correction=0).clamp(min=1e-4))


def test_counting_changes_nothing_and_nobody_elses_random_numbers():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    network = CoinFlipNetwork(spaces.Discrete(5))
    network.update(np.arange(5))
    before = network.state_dict()
    network.count(np.arange(5))
    assert states_equal(before, network.state_dict())
    assert torch.equal(torch.rand(1), expected)


def test_state_loads_into_a_fresh_network_and_continues_with_the_same_bits():
    network = CoinFlipNetwork(spaces.Discrete(9), memory=20, seed=1)
    fresh = CoinFlipNetwork(spaces.Discrete(9), memory=20, seed=2)
    for _ in range(5):
        network.update(np.arange(9))
    fresh.load_state_dict(network.state_dict())
    for _ in range(5):
        network.update(np.arange(4))
        fresh.update(np.arange(4))
    assert states_equal(network.state_dict(), fresh.state_dict())
    assert np.array_equal(network.count(np.arange(9)), fresh.count(np.arange(9)))


def test_the_same_seed_gives_the_same_bits():
    a, b = (CoinFlipNetwork(spaces.Discrete(5), seed=3) for _ in range(2))
    for network in (a, b):
        network.update(np.arange(5))
    assert states_equal(a.state_dict(), b.state_dict())


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.full((2, 3), np.nan, np.float32), "finite"),
        (np.zeros((2, 4), np.float32), r"\(B, \*\(3,\)\)"),
        (np.zeros((0, 3), np.float32), "at least one"),
        ({}, "batch of"),
    ],
)
def test_bad_observations_are_refused_and_change_nothing(x, message):
    space = spaces.Dict(a=spaces.Box(-1, 1, (3,)))
    network = CoinFlipNetwork(space)
    network.update({"a": np.zeros((2, 3), np.float32)})
    before = network.state_dict()
    for method in (network.count, network.update):
        with pytest.raises(ValueError, match=message):
            method({"a": x} if isinstance(x, np.ndarray) else x)
    assert states_equal(before, network.state_dict())


def test_bad_states_are_refused_and_change_nothing():
    network = CoinFlipNetwork(spaces.Discrete(5), coins=8)
    network.update(np.arange(5))
    good = network.state_dict()
    others = [
        CoinFlipNetwork(spaces.Discrete(6), coins=8).state_dict(),
        CoinFlipNetwork(spaces.Discrete(5), coins=9).state_dict(),
        {key: value for key, value in good.items() if key != "prior.1.bias"},
        good | {"flips": good["flips"][1:]},
        {},
    ]
    for state in others:
        with pytest.raises(ValueError, match="not the state"):
            network.load_state_dict(state)
    assert states_equal(good, network.state_dict())


@pytest.mark.parametrize(
    "arguments", [{"coins": 0}, {"memory": -1}, {"learning_rate": math.nan}, {"max_count": 0.0}]
)
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match="must be positive"):
        CoinFlipNetwork(spaces.Discrete(2), **arguments)


def test_other_spaces_are_refused():
    with pytest.raises(ValueError, match="Box, Discrete"):
        CoinFlipNetwork(spaces.Text(3))
