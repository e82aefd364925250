import cv2
import numpy as np
import pytest
import torch
from gymnasium import spaces

from cbsql.counts import CTS, PixelCounter, fit_counter
from cbsql.counts.frames import shrink


def images(*shape: int) -> np.ndarray:
    """Smooth random images, so that averages cross the levels in many places."""
    rng = np.random.default_rng(0)
    noise = rng.random((shape[0], *shape[1:]))
    return (255 * noise**2).astype(np.uint8)


def space(*shape: int) -> spaces.Box:
    return spaces.Box(0, 255, shape, np.uint8)


def reference(grey: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    size = shape[::-1]
    return np.stack([cv2.resize(g, size, interpolation=cv2.INTER_AREA) >> 5 for g in grey])


@pytest.mark.parametrize("shape", [(84, 84), (126, 84), (42, 42)])
def test_equals_opencv_where_the_ratio_is_whole(shape):
    grey = images(16, *shape)
    assert np.array_equal(shrink(grey, (42, 42), 8), reference(grey, (42, 42)))


@pytest.mark.parametrize("shape", [(210, 160), (84, 100), (43, 97), (64, 64)])
def test_equals_opencv_but_for_its_rounding_elsewhere(shape):
    """OpenCV adds float32 products: averages that are n + 1/2 exactly may go either way there."""
    grey = images(16, *shape)
    differ = shrink(grey, (42, 42), 8).astype(int) - reference(grey, (42, 42))
    assert np.abs(differ).max() <= 1
    assert (differ != 0).mean() < 5e-4


def test_enlarging_and_odd_sizes_equal_the_average_over_a_fine_grid():
    grey = images(3, 5, 7)
    for rows, columns in [(10, 14), (3, 4), (8, 9), (1, 1)]:
        fine = grey.repeat(rows, axis=1).repeat(columns, axis=2).astype(np.int64)
        sums = fine.reshape(3, rows, 5, columns, 7).sum(axis=(2, 4))
        expected = (2 * sums + 35) // 70 >> 5
        assert np.array_equal(shrink(grey, (rows, columns), 8), expected)


@pytest.mark.parametrize("levels", [2, 4, 8, 16])
def test_levels_cut_the_grey_scale_into_equal_parts(levels):
    ramp = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    assert np.array_equal(shrink(ramp, (16, 16), levels), ramp // (256 // levels))


def test_the_newest_frame_is_taken_from_either_layout():
    stack = images(8, 4, 84, 84)
    expected = reference(stack[:, -1], (42, 42))
    first = PixelCounter(CTS((42, 42)), space(4, 84, 84))
    last = PixelCounter(CTS((42, 42)), space(84, 84, 4))
    assert np.array_equal(first.symbols(stack), expected)
    assert np.array_equal(first.symbols(torch.from_numpy(stack)), expected)
    assert np.array_equal(last.symbols(np.moveaxis(stack, 1, -1)), expected)
    flat = PixelCounter(CTS((42, 42)), space(84, 84))
    assert np.array_equal(flat.symbols(stack[:, -1]), expected)


def test_rgb_is_taken_as_grey():
    rgb = images(8, 84, 84, 6)  # two frames
    grey = np.stack([cv2.cvtColor(image[..., 3:], cv2.COLOR_RGB2GRAY) for image in rgb])
    counter = PixelCounter(CTS((42, 42)), space(84, 84, 6))
    assert np.array_equal(counter.symbols(rgb), reference(grey, (42, 42)))
    stack = PixelCounter(CTS((42, 42)), space(84, 84, 6), frame_channels=1)
    assert np.array_equal(stack.symbols(rgb), reference(rgb[..., -1], (42, 42)))


def test_counts_are_those_of_the_density_model():
    stack = images(8, 4, 20, 20)
    counter = fit_counter(CTS((10, 10), levels=4), space(4, 20, 20))
    assert isinstance(counter, PixelCounter)
    model = CTS((10, 10), levels=4)
    for _ in range(3):
        counter.update(stack)
        model.update(counter.symbols(stack))
    assert np.array_equal(counter.count(stack), model.count(counter.symbols(stack)))
    fresh = fit_counter(CTS((10, 10), levels=4), space(4, 20, 20))
    fresh.load_state_dict(counter.state_dict())
    assert np.array_equal(fresh.count(stack), counter.count(stack))
    assert fit_counter(counter, space(4, 20, 20)) is counter


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (np.zeros((2, 4, 84, 84), np.float32), TypeError, "uint8"),
        (np.full((2, 4, 84, 84), np.nan), TypeError, "uint8"),
        (np.zeros((2, 84, 84, 4), np.uint8), ValueError, r"\(4, 84, 84\)"),
        (np.zeros((4, 84, 84), np.uint8), ValueError, r"\(4, 84, 84\)"),
        (np.zeros((0, 4, 84, 84), np.uint8), ValueError, "at least one"),
        ({"image": 0}, TypeError, "dict"),
    ],
)
def test_bad_observations_are_refused_and_change_nothing(x, error, message):
    counter = PixelCounter(CTS((42, 42)), space(4, 84, 84))
    for method in (counter.count, counter.update):
        with pytest.raises(error, match=message):
            method(x)
    assert counter.density.updates == 0


@pytest.mark.parametrize(
    "bad",
    [
        spaces.Box(0, 1, (84, 84, 4), np.float32),
        spaces.Box(0, 1, (84, 84), np.uint8),
        spaces.Discrete(3),
    ],
)
def test_other_spaces_are_refused(bad):
    with pytest.raises(ValueError, match="not a space of images"):
        PixelCounter(CTS((42, 42)), bad)


def test_channels_that_make_no_frames_are_refused():
    with pytest.raises(ValueError, match="4 channels"):
        PixelCounter(CTS((42, 42)), space(4, 84, 84), frame_channels=3)
