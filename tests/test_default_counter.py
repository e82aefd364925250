import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from cbsql.counts import (
    CTS,
    CoinFlipNetwork,
    ExactCounter,
    PixelCounter,
    PlaneCounter,
    SimHash,
    default_counter,
    fit_counter,
    named_counter,
)
from cbsql.temperature import CountBased, Counter

IMAGE = spaces.Box(0, 255, (4, 84, 84), np.uint8)


@pytest.mark.parametrize(
    ("space", "kind"),
    [
        (IMAGE, PixelCounter),
        (spaces.Box(0, 255, (210, 160, 3), np.uint8), PixelCounter),
        (spaces.Box(0, 255, (210, 160), np.uint8), PixelCounter),
        (spaces.Box(0, 255, (20, 30, 1), np.uint8), PixelCounter),
        (spaces.Discrete(5), ExactCounter),
        (spaces.MultiDiscrete([3, 4]), ExactCounter),
        (spaces.MultiBinary(7), ExactCounter),
        (spaces.Box(0, 1, (10, 10, 4), bool), ExactCounter),
        (spaces.Box(0, 255, (128,), np.uint8), ExactCounter),
        (spaces.Box(-3, 3, (2,), np.int32), ExactCounter),
        (spaces.Box(-1, 1, (3,), np.float32), SimHash),
        (spaces.Box(0, 1, (4, 84, 84), np.float32), SimHash),
        (spaces.Dict(a=IMAGE, b=spaces.Box(-1, 1, (3,)), c=spaces.Discrete(2)), SimHash),
    ],
)
def test_every_space_gets_a_counter_that_counts_its_samples(space, kind):
    counter = default_counter(space)
    assert isinstance(counter, kind)
    assert isinstance(counter, Counter)
    space.seed(0)
    samples = [space.sample() for _ in range(3)]
    if isinstance(space, spaces.Dict):
        batch = {key: np.stack([sample[key] for sample in samples]) for key in space}
    else:
        batch = np.stack(samples)
    before = counter.count(batch)
    for _ in range(200):
        counter.update(batch)
    assert before.shape == (3,)
    assert np.all(counter.count(batch) > before)


def test_small_images_are_not_enlarged():
    counter = default_counter(spaces.Box(0, 255, (3, 30, 64), np.uint8))
    assert counter.density.shape == (30, 42)


def test_minatar_is_counted_exactly():
    env = gymnasium.make("MinAtar/Breakout-v1")
    counter = default_counter(env.observation_space)
    assert isinstance(counter, ExactCounter)
    first, _ = env.reset(seed=0)
    frames = [first] + [env.step(env.action_space.sample())[0] for _ in range(5)]
    counter.update(np.stack([*frames, first]))
    assert counter.count(first[None])[0] == 2


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Tuple([spaces.Discrete(2)]),
        spaces.Dict(a=spaces.Dict(b=spaces.Discrete(2))),
        spaces.Dict(a=spaces.Text(5)),
        spaces.Dict(),
    ],
)
def test_other_spaces_are_refused_with_a_list_of_those_supported(space):
    with pytest.raises(ValueError, match="Box, Discrete, MultiDiscrete, MultiBinary and Dict"):
        default_counter(space)


def test_a_bare_cts_is_fitted_to_the_space_and_other_counters_are_left_alone():
    counter = fit_counter(CTS((42, 42)), IMAGE)
    assert isinstance(counter, PixelCounter)
    exact = ExactCounter()
    assert fit_counter(exact, IMAGE) is exact
    beta = CountBased(counter).beta(np.zeros((2, 4, 84, 84), np.uint8))
    assert beta.shape == (2,)


MINATAR = spaces.Box(0, 1, (10, 10, 4), np.bool_)


@pytest.mark.parametrize(
    ("name", "space", "kind"),
    [
        ("cts", spaces.Box(0, 255, (84, 84, 1), np.uint8), PixelCounter),
        ("cts", MINATAR, PlaneCounter),
        ("exact", MINATAR, ExactCounter),
        ("simhash", MINATAR, SimHash),
        ("simhash", spaces.Box(0, 255, (84, 84, 1), np.uint8), SimHash),
        ("coin-flip", spaces.Box(-1, 1, (3,)), CoinFlipNetwork),
    ],
)
def test_counters_have_names(name, space, kind):
    counter = named_counter(name, space)
    assert type(counter) is kind
    states = np.stack([space.sample() for _ in range(3)])
    counter.update(states)
    assert counter.count(states).shape == (3,)


def test_planes_lie_side_by_side():
    planes = np.zeros((1, 10, 10, 4), np.bool_)
    planes[0, 2, 3, 0] = planes[0, 5, 9, 3] = True
    counter = fit_counter(CTS((10, 40), levels=2), MINATAR)
    symbols = counter.symbols(planes)[0]
    assert np.argwhere(symbols).tolist() == [[2, 3], [5, 39]]
    counter.update(np.repeat(planes, 100, axis=0))
    other = planes.copy()
    other[0, 2, 3, 0] = False
    assert 0 <= counter.count(other)[0] < counter.count(planes)[0]


def test_counters_that_do_not_fit_say_so():
    with pytest.raises(ValueError, match="one of cts, exact, simhash, coin-flip, not 'hash'"):
        named_counter("hash", MINATAR)
    with pytest.raises(ValueError, match="not a space of images"):
        named_counter("cts", spaces.Box(-1, 1, (3,)))
    with pytest.raises(
        ValueError, match=r"model is CTS\(\(10, 40\), levels=2\), not CTS\(\(10, 40\)"
    ):
        fit_counter(CTS((10, 40)), MINATAR)
    for space in (spaces.Box(-1, 1, (3,)), spaces.Dict(a=spaces.Discrete(2))):
        with pytest.raises(ValueError, match="Only integers and booleans can be counted exactly"):
            named_counter("exact", space)
    with pytest.raises(ValueError, match="takes booleans"):
        named_counter("cts", MINATAR).count(np.zeros((2, 10, 10, 4), np.uint8))
