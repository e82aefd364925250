import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from cbsql.counts import CTS, ExactCounter, PixelCounter, SimHash, default_counter, fit_counter
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
