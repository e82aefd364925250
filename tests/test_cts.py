import copy
import io
import math
import pickle

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_cts import NaiveCTS

from cbsql.counts import CTS
from cbsql.counts import cts as kernels
from cbsql.temperature import Counter

VARIANTS = pytest.mark.parametrize("location_dependent", [True, False])


def blobs(rng: np.random.Generator, frames: int, shape: tuple[int, int], levels: int):
    """Frames with structure: a few base images that recur, each with some noisy pixels."""
    base = rng.integers(0, levels, (3, *shape), np.uint8)
    images = base[rng.integers(0, 3, frames)]
    noise = rng.random(images.shape) < 0.1
    images[noise] = rng.integers(0, levels, noise.sum())
    return images


def states_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@VARIANTS
@pytest.mark.parametrize("levels", [2, 4, 8])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (6, 1), (3, 5), (4, 17)])
def test_equals_the_naive_tree(shape, levels, location_dependent):
    rng = np.random.default_rng(levels)
    frames = blobs(rng, 160, shape, levels)
    model = CTS(shape, levels, location_dependent=location_dependent)
    naive = NaiveCTS(shape, levels, location_dependent)
    for start in range(0, len(frames), 8):
        batch = frames[start : start + 8]
        log_rho, log_rho_after = model.log_prob(batch)
        expected = [naive.log_prob(frame) for frame in batch]
        np.testing.assert_allclose(log_rho, expected, rtol=0, atol=1e-9)
        expected = [naive.log_prob_after(frame) for frame in batch]
        np.testing.assert_allclose(log_rho_after, expected, rtol=0, atol=1e-9)
        model.update(batch)
        for frame in batch:
            naive.update(frame)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_hypothesis_finds_no_difference_from_the_naive_tree(data):
    levels = data.draw(st.sampled_from([2, 4, 8, 16]))
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 5)))
    location_dependent = data.draw(st.booleans())
    symbols = st.integers(0, levels - 1)
    frame = st.lists(symbols, min_size=math.prod(shape), max_size=math.prod(shape))
    frames = data.draw(st.lists(frame, min_size=1, max_size=12))
    frames = np.array(frames, np.uint8).reshape(-1, *shape)
    split = data.draw(st.integers(0, len(frames)))
    model = CTS(shape, levels, location_dependent=location_dependent)
    naive = NaiveCTS(shape, levels, location_dependent)
    for batch in (frames[:split], frames[split:]):
        if len(batch):
            model.update(batch)
    for image in frames:
        naive.update(image)
    log_rho, log_rho_after = model.log_prob(frames)
    np.testing.assert_allclose(log_rho, [naive.log_prob(f) for f in frames], rtol=0, atol=1e-9)
    naive.update(frames[-1])
    np.testing.assert_allclose(log_rho_after[-1], naive.log_prob(frames[-1]), rtol=0, atol=1e-9)


@VARIANTS
@pytest.mark.parametrize("shape", [(1, 7), (4, 5)])
def test_pixels_are_those_of_the_naive_tree(shape, location_dependent):
    frames = blobs(np.random.default_rng(0), 40, shape, 8)
    model = CTS(shape, location_dependent=location_dependent)
    naive = NaiveCTS(shape, 8, location_dependent)
    model.update(frames)
    for frame in frames:
        naive.update(frame)
    expected = [
        [
            math.log(naive.trees[tree].probability(context, symbol))
            for tree, context, symbol in naive._pixels(frame)
        ]
        for frame in frames
    ]
    log_p = model.pixel_log_prob(frames)  # (frames, height, width)
    np.testing.assert_allclose(log_p.reshape(len(frames), -1), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(log_p.sum((1, 2)), model.log_prob(frames)[0], rtol=1e-12)


@VARIANTS
def test_log_rho_after_is_what_a_copy_returns_after_a_real_update(location_dependent):
    rng = np.random.default_rng(0)
    frames = blobs(rng, 96, (9, 11), 8)
    model = CTS((9, 11), location_dependent=location_dependent)
    model.update(frames[:64])
    _, log_rho_after = model.log_prob(frames[56:72])  # some seen, some new
    for frame, expected in zip(frames[56:72], log_rho_after, strict=True):
        learnt = copy.deepcopy(model)
        learnt.update(frame[None])
        np.testing.assert_allclose(learnt.log_prob(frame[None])[0], expected, rtol=0, atol=1e-9)


@VARIANTS
def test_probabilities_of_all_symbols_sum_to_one(location_dependent):
    rng = np.random.default_rng(1)
    shape, levels = (5, 6), 8
    model = CTS(shape, levels, location_dependent=location_dependent)
    frames = blobs(rng, 50, shape, levels)
    model.update(frames)
    values, children, _ = model._pool.trees()
    keys, nodes = np.empty(shape[1], np.uint32), np.empty(5, np.int32)
    paths, p = np.zeros(kernels._BLOCK), np.empty(kernels._LANES)
    for y in range(shape[0]):
        kernels._row_keys(model._framed(frames)[0], y, 3, keys)
        for x in range(shape[1]):
            row, nodes[0] = (y, 1 + x) if location_dependent else (0, 1)
            for symbol in range(levels):
                key = (int(keys[x]) & ~7) | symbol
                kernels._load(values[row], children[row], 3, key, nodes, paths, symbol)
            kernels._predict(paths, 1 / levels, p)
            assert abs(p[:levels].sum() - 1) < 1e-12


def test_probabilities_of_all_images_sum_to_one():
    model = CTS((2, 2), levels=2, location_dependent=False)
    images = np.array(list(np.ndindex(2, 2, 2, 2)), np.uint8).reshape(16, 2, 2)
    model.update(images[[3, 3, 7, 12, 3]])
    log_rho, _ = model.log_prob(images)
    assert abs(np.exp(log_rho).sum() - 1) < 1e-12


@pytest.mark.parametrize("shape", [(1, 1), (42, 42)])
@pytest.mark.parametrize("levels", [2, 8])
def test_count_of_one_frame_learnt_k_times_has_a_closed_form(shape, levels):
    """All nodes on a path then hold the same counts, so p = (k + 1/A) / (k + 1) for every pixel."""
    frame = np.random.default_rng(0).integers(0, levels, (1, *shape), np.uint8)
    model = CTS(shape, levels, max_count=math.inf)
    pixels = math.prod(shape)
    for k in range(400):
        if k in (0, 1, 2, 3, 10, 99, 399):
            log_rho, log_rho_after = (
                pixels * math.log((n + 1 / levels) / (n + 1)) for n in (k, k + 1)
            )
            with np.errstate(over="ignore"):  # for k = 0 the image gives exp(-1e3)
                expected = (1 - np.exp(log_rho_after)) / np.expm1(log_rho_after - log_rho)
            np.testing.assert_allclose(model.count(frame), expected, rtol=1e-9)
        model.update(frame)


def test_count_of_one_pixel_is_k_plus_a_constant_and_of_an_image_approaches_k():
    """One pixel: n = k + 1/A. P pixels: about k (1 - exp(-x)) / x with x = P (1 - 1/A) / k."""
    pixel = CTS((1, 1), levels=8)
    pixel.update(np.full((1000, 1, 1), 5, np.uint8))
    np.testing.assert_allclose(pixel.count(np.full((1, 1, 1), 5, np.uint8)), 1000 + 1 / 8)

    frame = np.zeros((1, 42, 42), np.uint8)
    model = CTS((42, 42))
    model.update(frame)
    state = model.state_dict()
    for k, share in ((1_000, 0.51), (10_000, 0.93), (100_000, 0.992)):
        state["updates"].fill_(k)
        state["count"].fill_(k)
        model.load_state_dict(state)
        x = 42 * 42 * 7 / 8 / k
        assert model.count(frame)[0] / k == pytest.approx(-math.expm1(-x) / x, rel=0.01)
        assert model.count(frame)[0] / k == pytest.approx(share, abs=0.01)


@VARIANTS
def test_updating_a_frame_again_never_lowers_its_count(location_dependent):
    rng = np.random.default_rng(3)
    frames = blobs(rng, 40, (6, 7), 8)
    model = CTS((6, 7), location_dependent=location_dependent)
    model.update(frames)
    counts = []
    for _ in range(100):
        counts.append(model.count(frames[:1])[0])
        model.update(frames[:1])
    assert np.all(np.diff(counts) >= 0)


@VARIANTS
@pytest.mark.parametrize("levels", [2, 8])
def test_counts_are_never_nan_negative_or_above_the_limit(levels, location_dependent):
    rng = np.random.default_rng(4)
    model = CTS((5, 5), levels, location_dependent=location_dependent, max_count=20.0)
    for _ in range(60):
        frames = rng.integers(0, levels, (4, 5, 5), np.uint8)
        frames[0] = 0
        counts = model.count(frames)
        assert counts.dtype == np.float64
        assert np.all((counts >= 0) & (counts <= 20))
        model.update(frames)
    model.update(np.zeros((500, 5, 5), np.uint8))
    assert model.count(frames[:1])[0] == 20


@VARIANTS
def test_queries_change_nothing(location_dependent):
    rng = np.random.default_rng(5)
    frames = blobs(rng, 64, (8, 8), 8)
    model = CTS((8, 8), location_dependent=location_dependent)
    model.update(frames[:32])
    before = model.state_dict()
    arrays = (*model._pool.nodes, *model._pool.held)
    copies = [array.copy() for array in arrays]
    model.count(frames)
    model.log_prob(frames)
    model.sample(rng)
    assert states_equal(before, model.state_dict())
    assert all(map(np.array_equal, copies, arrays))


def test_batches_give_the_same_bits_as_single_frames():
    frames = blobs(np.random.default_rng(6), 64, (9, 20), 8)
    batched, single = CTS((9, 20)), CTS((9, 20))
    batched.update(frames)
    for frame in frames:
        single.update(frame[None])
    assert states_equal(batched.state_dict(), single.state_dict())
    counts = np.concatenate([single.count(frame[None]) for frame in frames])
    assert np.array_equal(batched.count(frames), counts)


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one core")
def test_threads_give_the_same_bits_and_are_given_back():
    frames = blobs(np.random.default_rng(7), 64, (13, 20), 8)
    one, two = CTS((13, 20), threads=1), CTS((13, 20), threads=2)
    numba.set_num_threads(1)
    one.update(frames)
    two.update(frames)
    assert states_equal(one.state_dict(), two.state_dict())
    for a, b in zip(one.log_prob(frames), two.log_prob(frames), strict=True):
        assert np.array_equal(a, b)
    assert numba.get_num_threads() == 1


def test_a_model_moves_to_a_machine_with_fewer_threads(monkeypatch):
    pickled = pickle.dumps(CTS((4, 5), threads=2))
    monkeypatch.setattr(kernels, "_MAX_THREADS", 1)
    assert pickle.loads(pickled).threads == 1


@VARIANTS
def test_counts_stay_exact_beyond_2_to_the_24(location_dependent):
    model = CTS((2, 2), levels=2, location_dependent=location_dependent)
    frame = np.zeros((1, 2, 2), np.uint8)
    model.update(frame)
    state = model.state_dict()
    k = 2**40
    state["updates"].fill_(k)
    state["count"].fill_(k if location_dependent else 4 * k)
    model.load_state_dict(state)
    for _ in range(3):
        model.update(frame)
    assert int(model.state_dict()["updates"]) == k + 3
    assert set(model.state_dict()["count"].tolist()) == {(1 if location_dependent else 4) * (k + 3)}


def test_counts_are_accurate_when_the_gain_is_far_below_the_log_probability():
    """After k = 2^20 updates a pixel's p'/p is 1 + 8e-13."""
    model = CTS((42, 42), max_count=math.inf)
    frame = np.zeros((1, 42, 42), np.uint8)
    model.update(frame)
    state = model.state_dict()
    state["updates"].fill_(2**20)
    state["count"].fill_(2**20)
    model.load_state_dict(state)
    x = 42 * 42 * 7 / 8 / 2**20
    expected = 2**20 * -math.expm1(-x) / x
    np.testing.assert_allclose(model.count(frame), expected, rtol=1e-3)


@VARIANTS
def test_state_loads_into_a_fresh_model_and_continues_with_the_same_bits(location_dependent):
    frames = blobs(np.random.default_rng(8), 96, (7, 9), 4)
    model = CTS((7, 9), 4, location_dependent=location_dependent)
    model.update(frames[:50])
    fresh = CTS((7, 9), 4, location_dependent=location_dependent)
    fresh.load_state_dict(model.state_dict())
    for m in (model, fresh):
        m.update(frames[50:])
    assert states_equal(model.state_dict(), fresh.state_dict())
    assert np.array_equal(model.count(frames), fresh.count(frames))
    assert isinstance(fresh, Counter)


def test_state_is_small_on_disk():
    model = CTS((42, 42))
    model.update(np.zeros((32, 42, 42), np.uint8))
    for saved in (model.state_dict(), model):
        file = io.BytesIO()
        torch.save(saved, file) if isinstance(saved, dict) else pickle.dump(saved, file)
        assert file.tell() < 100_000  # bytes


@pytest.mark.parametrize("location_dependent", [True, False])
def test_sampled_frequencies_are_the_probabilities(location_dependent):
    model = CTS((1, 2), levels=2, location_dependent=location_dependent)
    images = np.array(list(np.ndindex(2, 2)), np.uint8).reshape(4, 1, 2)
    model.update(images[[0, 0, 0, 1, 2, 2]])
    rng = np.random.default_rng(9)
    draws = 20_000
    samples = np.array([model.sample(rng) for _ in range(draws)])
    codes = samples[:, 0, 0] * 2 + samples[:, 0, 1]
    expected = np.exp(model.log_prob(images)[0])
    error = np.abs(np.bincount(codes, minlength=4) / draws - expected)
    assert np.all(error < 4 * np.sqrt(expected * (1 - expected) / draws))


def bad_frames():
    good = np.zeros((2, 4, 5), np.uint8)
    yield "dtype", good.astype(np.int64), TypeError, "uint8"
    yield "NaN", np.full((2, 4, 5), np.nan), TypeError, "uint8"
    yield "not an array", [[0]], TypeError, "uint8"
    yield "symbol", good + np.uint8(8), ValueError, "below levels = 8, got 8"
    yield "shape", np.zeros((2, 5, 4), np.uint8), ValueError, r"\(2, 5, 4\)"
    yield "no batch", good[0], ValueError, r"\(4, 5\)"
    yield "empty", good[:0], ValueError, "at least one"


@pytest.mark.parametrize(
    ("frames", "error", "message"), [pytest.param(*case, id=name) for name, *case in bad_frames()]
)
@pytest.mark.parametrize("method", ["count", "update", "log_prob"])
def test_bad_frames_are_refused_and_change_nothing(method, frames, error, message):
    model = CTS((4, 5))
    model.update(np.ones((3, 4, 5), np.uint8))
    before = model.state_dict()
    with pytest.raises(error, match=message):
        getattr(model, method)(frames)
    assert states_equal(before, model.state_dict())


def bad_states():
    yield "another shape", lambda s: s["layout"].copy_(torch.tensor([5, 4, 8, 1])), "same arguments"
    yield "a missing tensor", lambda s: s.pop("stay"), "has the tensors"
    yield "another type", lambda s: s.update(count=s["count"].double()), "has the tensors"
    yield "counts", lambda s: s["count"].add_(1), "not those of 3 updates"
    yield "an entry", lambda s: s["entry"].sub_(10**6), "must ascend"
    yield "too few weights", lambda s: s.update(stay=s["stay"][1:]), "stay weights"
    yield "NaN", lambda s: s["stay"].fill_(math.nan), "stay weights"


@pytest.mark.parametrize(
    ("spoil", "message"), [pytest.param(*case, id=name) for name, *case in bad_states()]
)
def test_bad_states_are_refused_and_change_nothing(spoil, message):
    model = CTS((4, 5))
    model.update(np.ones((3, 4, 5), np.uint8))
    before = model.state_dict()
    bad = model.state_dict()
    spoil(bad)
    with pytest.raises(ValueError, match=message):
        model.load_state_dict(bad)
    assert states_equal(before, model.state_dict())


@pytest.mark.parametrize(
    "arguments",
    [
        {"shape": (0, 4)},
        {"shape": (4,)},
        {"shape": (4, 4), "levels": 7},
        {"shape": (4, 4), "max_count": 0.0},
        {"shape": (4, 4), "max_count": math.nan},
        {"shape": (4, 4), "threads": 0},
        {"shape": (4, 4), "threads": 10**6},
    ],
)
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match="must be"):
        CTS(**arguments)
