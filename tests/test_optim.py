"""Optimisers in one pass, against Torch's."""

import copy

import numpy as np
import pytest
import torch as th

from cbsql.deep.optim import Adam, RMSprop, clipped_step


def parameters():
    generator = th.Generator().manual_seed(0)
    return [th.nn.Parameter(th.randn(shape, generator=generator)) for shape in ((7, 5, 3), (7,))]


def steps(optimizer, learnt, number, max_norm=np.inf):
    generator = th.Generator().manual_seed(1)
    for _ in range(number):
        for parameter in learnt:
            parameter.grad = th.randn(parameter.shape, generator=generator) * 0.1
        clipped_step(optimizer, learnt, max_norm)


OPTIMIZERS = [
    (RMSprop, th.optim.RMSprop, {"alpha": 0.95, "eps": 0.01, "centered": True}),
    (Adam, th.optim.Adam, {}),
    (Adam, th.optim.Adam, {"betas": (0.8, 0.99), "eps": 1.5e-4}),
    # What follows is left to Torch.
    (RMSprop, th.optim.RMSprop, {"alpha": 0.9}),
    (RMSprop, th.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (Adam, th.optim.Adam, {"weight_decay": 0.1}),
    (Adam, th.optim.Adam, {"amsgrad": True}),
]


@pytest.mark.parametrize("max_norm", [0.3, np.inf])
@pytest.mark.parametrize(("our_class", "torch_class", "options"), OPTIMIZERS)
def test_does_what_torch_does(our_class, torch_class, options, max_norm):
    ours, theirs = parameters(), parameters()
    one = our_class(ours, lr=1e-2, **options)
    other = torch_class(theirs, lr=1e-2, **options)
    steps(one, ours, 300, max_norm)
    steps(other, theirs, 300, max_norm)
    for mine, its in zip(ours, theirs, strict=True):
        th.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
        assert one.state[mine].keys() == other.state[its].keys()
        for name, value in other.state[its].items():
            th.testing.assert_close(one.state[mine][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("our_class", "torch_class", "options"), OPTIMIZERS[:3])
def test_goes_on_from_a_state_of_torch(our_class, torch_class, options):
    theirs = parameters()
    other = torch_class(theirs, lr=1e-2, **options)
    steps(other, theirs, 10)
    ours = copy.deepcopy(theirs)
    one = our_class(ours, lr=1e-2, **options)
    one.load_state_dict(copy.deepcopy(other.state_dict()))
    steps(one, ours, 50)
    steps(other, theirs, 50)
    for mine, its in zip(ours, theirs, strict=True):
        th.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def test_parameters_without_a_gradient_stay():
    learnt = parameters()
    before = learnt[1].detach().clone()
    learnt[0].grad = th.ones_like(learnt[0])
    Adam(learnt, lr=1.0).step()
    assert th.equal(learnt[1], before)
    # The first step of Adam has the size of the learning rate, whatever the gradient is.
    th.testing.assert_close(learnt[0].detach(), parameters()[0].detach() - 1, rtol=1e-5, atol=1e-5)


def test_each_group_has_its_options():
    learnt = parameters()
    for parameter in learnt:
        parameter.grad = th.ones_like(parameter)
    Adam([{"params": learnt[:1], "lr": 1.0}, {"params": learnt[1:], "lr": 2.0}]).step()
    for parameter, before, rate in zip(learnt, parameters(), (1, 2), strict=True):
        expected = before.detach() - rate
        th.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-5)


def test_a_constant_gradient_never_makes_a_weight_nan():
    # Its variance is zero in the end, and by rounding a little less, which has no square root.
    weight = th.nn.Parameter(th.zeros(1000))
    gradient = th.linspace(0.1, 3, 1000)
    optimizer = RMSprop([weight], lr=1e-3, alpha=0.9, eps=0.01, centered=True)
    for _ in range(500):
        weight.grad = gradient.clone()
        optimizer.step()
    assert np.isfinite(weight.detach().numpy()).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_no_number_shows(bad):
    """As in Torch, so that a run can be stopped, instead of being clipped away."""
    learnt = parameters()
    for parameter in learnt:
        parameter.grad = th.ones_like(parameter)
    learnt[0].grad[0, 0, 0] = bad
    clipped_step(Adam(learnt), learnt, 1.0)
    assert not all(parameter.isfinite().all() for parameter in learnt)


def test_parameters_may_get_gradients_at_different_times():
    ours, theirs = parameters(), parameters()
    one, other = Adam(ours, lr=1e-2), th.optim.Adam(theirs, lr=1e-2)
    for step in range(20):
        for learnt, optimizer in ((ours, one), (theirs, other)):
            learnt[0].grad = th.full_like(learnt[0], np.sin(step))
            learnt[1].grad = th.full_like(learnt[1], np.cos(step)) if step % 3 else None
            optimizer.step()
    for mine, its in zip(ours, theirs, strict=True):
        th.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
