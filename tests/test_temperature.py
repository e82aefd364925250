"""Where beta comes from."""

import math

import numpy as np
import pytest
import torch

from cbsql.counts import ExactCounter
from cbsql.temperature import Constant, CountBased, Counter, Greedy, Linear

STATES = np.array([3, 3, 7])


def test_fixed_temperatures_ignore_updates():
    for temperature, beta in ((Greedy(), math.inf), (Constant(100), 100.0)):
        temperature.update(STATES)
        assert temperature.beta(STATES) == beta
        assert temperature.state_dict() == {}


def test_linear_counts_training_steps_not_rows():
    temperature = Linear(kappa=0.5)
    assert temperature.beta(STATES) == 0
    for _ in range(4):
        temperature.update(STATES)
    assert temperature.beta(STATES) == 2.0


def test_count_based_is_kappa_times_the_count():
    temperature = CountBased(ExactCounter(), kappa=0.01)
    temperature.update(STATES)
    np.testing.assert_array_equal(temperature.beta([3, 7, 9]), [0.02, 0.01, 0.0])


def test_asking_changes_nothing():
    temperature = CountBased(ExactCounter())
    temperature.update(STATES)
    before = temperature.state_dict()
    temperature.beta([1, 2, 3])
    for name, tensor in temperature.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("make", [Greedy, lambda: Linear(0.1), lambda: CountBased(ExactCounter())])
def test_state_dict_carries_on(make):
    old, new = make(), make()
    old.update(STATES)
    new.load_state_dict(old.state_dict())
    for temperature in (old, new):
        temperature.update(STATES)
    np.testing.assert_array_equal(old.beta([3, 7]), new.beta([3, 7]))


def test_representations_say_what_they_are():
    described = [Greedy(), Constant(10), Linear(0.01), CountBased(ExactCounter(), 0.02)]
    assert [repr(t) for t in described] == [
        "Greedy()",
        "Constant(10)",
        "Linear(kappa=0.01)",
        "CountBased(ExactCounter(), kappa=0.02)",
    ]


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
@pytest.mark.parametrize("make", [Constant, Linear, lambda k: CountBased(ExactCounter(), k)])
def test_numbers_that_are_not_positive_are_refused(make, value):
    with pytest.raises(ValueError, match="must be a positive number"):
        make(value)


def test_a_temperature_without_counter_says_what_to_do():
    with pytest.raises(ValueError, match="has no counter yet"):
        CountBased().beta(STATES)


def test_a_state_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="has no state"):
        Greedy().load_state_dict(Linear(1).state_dict())


def test_exact_counter_fits_the_protocol():
    assert isinstance(ExactCounter(), Counter)
