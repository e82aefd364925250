"""RMSProp and the clipping of gradients, against Torch's."""

import copy

import numpy as np
import pytest
import torch as th

from cbsql.deep.optim import RMSprop, clip_grad_norm


def parameters(seed: int = 0) -> list[th.nn.Parameter]:
    generator = th.Generator().manual_seed(seed)
    return [th.nn.Parameter(th.randn(shape, generator=generator)) for shape in ((7, 5, 3), (7,))]


def steps(optimizer: th.optim.Optimizer, learnt: list[th.nn.Parameter], number: int) -> None:
    generator = th.Generator().manual_seed(1)
    for _ in range(number):
        for parameter in learnt:
            parameter.grad = th.randn(parameter.shape, generator=generator) * 0.1
        optimizer.step()


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": 0.95, "eps": 0.01, "centered": True},
        {"alpha": 0.9},
        {"centered": True, "momentum": 0.9},  # this and the next are left to Torch
        {"weight_decay": 0.1},
    ],
)
def test_does_what_torch_does(options):
    ours, theirs = parameters(), parameters()
    one = RMSprop(ours, lr=1e-2, **options)
    other = th.optim.RMSprop(theirs, lr=1e-2, **options)
    steps(one, ours, 300)
    steps(other, theirs, 300)
    for mine, its in zip(ours, theirs, strict=True):
        th.testing.assert_close(mine, its, rtol=1e-5, atol=1e-5)
        assert one.state[mine].keys() == other.state[its].keys()
        for name, value in other.state[its].items():
            th.testing.assert_close(one.state[mine][name], value, rtol=1e-5, atol=1e-6)


def test_goes_on_from_a_state_of_torch():
    theirs = parameters()
    other = th.optim.RMSprop(theirs, lr=1e-2, centered=True)
    steps(other, theirs, 10)
    ours = copy.deepcopy(theirs)
    one = RMSprop(ours, lr=1e-2, centered=True)
    one.load_state_dict(copy.deepcopy(other.state_dict()))
    steps(one, ours, 50)
    steps(other, theirs, 50)
    for mine, its in zip(ours, theirs, strict=True):
        th.testing.assert_close(mine, its, rtol=1e-5, atol=1e-5)


def test_parameters_without_a_gradient_stay():
    learnt = parameters()
    before = learnt[1].detach().clone()
    learnt[0].grad = th.ones_like(learnt[0])
    RMSprop(learnt, lr=1.0).step()
    assert th.equal(learnt[1], before)
    # The first step of a mean of squares: g / (sqrt((1 - alpha) g^2) + eps), which is 10.
    expected = parameters()[0].detach() - 10
    th.testing.assert_close(learnt[0].detach(), expected, rtol=1e-5, atol=1e-5)


def test_a_constant_gradient_never_makes_a_weight_nan():
    # Its variance is zero in the end, and by rounding a little less, which has no square root.
    weight = th.nn.Parameter(th.zeros(1000))
    gradient = th.linspace(0.1, 3, 1000)
    optimizer = RMSprop([weight], lr=1e-3, alpha=0.9, eps=0.01, centered=True)
    for _ in range(500):
        weight.grad = gradient.clone()
        optimizer.step()
    assert np.isfinite(weight.detach().numpy()).all()


@pytest.mark.parametrize("max_norm", [0.5, 7.0, 1e9, float("inf")])
def test_clips_as_torch_does(max_norm):
    ours, theirs = parameters(), parameters()
    for mine, its in zip(ours, theirs, strict=True):
        mine.grad, its.grad = mine.detach().clone(), its.detach().clone()
    ours.append(th.nn.Parameter(th.ones(3)))  # one without a gradient
    clip_grad_norm(ours, max_norm)
    th.nn.utils.clip_grad_norm_(theirs, max_norm)
    for mine, its in zip(ours, theirs, strict=False):
        assert th.equal(mine.grad, its.grad)
