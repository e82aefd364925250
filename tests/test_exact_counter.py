"""Exact counts, against collections.Counter."""

import collections
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from cbsql.counts import ExactCounter

SHAPES = st.tuples(st.integers(1, 30)) | st.tuples(st.integers(1, 30), *[st.integers(1, 3)] * 2)
DTYPES = st.sampled_from([np.bool_, np.uint8, np.int32, np.int64])


@given(st.data(), DTYPES, SHAPES)
def test_agrees_with_a_python_counter(data, dtype, shape):
    elements = st.booleans() if dtype is np.bool_ else st.integers(0, 2)
    states = data.draw(arrays.arrays(dtype, shape, elements=elements))
    counter, reference = ExactCounter(), collections.Counter()
    for start in range(0, len(states), 7):
        batch = states[start : start + 7]
        np.testing.assert_array_equal(
            counter.count(batch), [reference[str(row.tolist())] for row in batch]
        )
        counter.update(batch)
        reference.update(str(row.tolist()) for row in batch)
    assert len(counter) == len(reference)
    restored = ExactCounter()
    restored.load_state_dict(counter.state_dict())
    np.testing.assert_array_equal(restored.count(states), counter.count(states))


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Discrete(5),
        gym.spaces.MultiDiscrete([3, 4]),
        gym.spaces.MultiBinary(9),
        gym.spaces.Box(0, 1, (10, 10, 4), np.bool_),
        gym.spaces.Box(-5, 5, (2,), np.int16),
    ],
)
def test_counts_samples_of_every_countable_space(space):
    space.seed(0)
    states = np.array([space.sample() for _ in range(50)])
    counter = ExactCounter()
    counter.update(states)
    same = (states.reshape(50, 1, -1) == states.reshape(1, 50, -1)).all(-1)  # (50, 50)
    np.testing.assert_array_equal(counter.count(states), same.sum(0))


def test_integers_are_equal_whatever_their_width_and_container():
    counter = ExactCounter()
    counter.update(np.array([1, 2], dtype=np.int32))
    counter.update(torch.tensor([[1], [2]]))
    counter.update([1, 2])
    np.testing.assert_array_equal(counter.count(np.array([1, 2, 3], dtype=np.uint16)), [3, 3, 0])


def test_state_is_the_same_in_every_process():
    """Python salts the hash of bytes in each process; nothing of it may show."""
    program = (
        "from cbsql.counts import ExactCounter; c = ExactCounter(); c.update(range(50));"
        "print({k: v.tolist() for k, v in c.state_dict().items()})"
    )
    states = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(states) == 1


@pytest.mark.parametrize("bad", [np.zeros(3), np.int64(3), np.zeros((0, 2), dtype=int)])
def test_what_cannot_be_counted_is_refused_and_changes_nothing(bad):
    counter = ExactCounter()
    with pytest.raises(ValueError, match="batch of integers or booleans"):
        counter.update(bad)
    assert len(counter) == 0
    counter.update([1, 2])  # still free to count anything


def test_another_kind_of_state_is_refused():
    counter = ExactCounter()
    counter.update(np.zeros((2, 3), dtype=bool))
    with pytest.raises(ValueError, match="3 boolean elements"):
        counter.count(np.zeros((2, 4), dtype=bool))


def test_foreign_state_is_refused():
    with pytest.raises(ValueError, match="not the state of an ExactCounter"):
        ExactCounter().load_state_dict({"weights": torch.zeros(3)})
