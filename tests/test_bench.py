"""Loops that are compared: in turns, each in a process of its own."""

import os
import time
from collections import Counter
from functools import partial

import pytest
import torch as th
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from cbsql.experiments import bench


def paced(milliseconds):
    """A loop whose speed is known."""
    return lambda steps: time.sleep(steps * milliseconds / 1e3)


def careless():
    """A loop that changes what it shares with whoever is in its process."""
    assert th.get_num_threads() == 2
    th.set_num_threads(1)
    return paced(1)


def test_speeds_and_their_ratio_to_the_first():
    threads = th.get_num_threads()
    th.set_num_threads(2)
    try:
        loops = {"slow": partial(paced, 4), "fast": careless, "other": careless}
        _, *rows = "\n".join(bench.compare(loops, 100, 5)).splitlines()[1:]
        assert th.get_num_threads() == 2
    finally:
        th.set_num_threads(threads)
    table = {name: (float(speed), float(ratio)) for name, speed, ratio in map(cells, rows)}
    # A busy machine sleeps longer, never less.
    assert 150 < table["slow"][0] <= 250
    assert table["slow"][1] == 1
    for name in ("fast", "other"):
        assert 500 < table[name][0] <= 1000
        assert 2.5 < table[name][1] < 6


def cells(row):
    return [cell.strip() for cell in row.strip("|").split("|")]


def ends():
    return lambda _: os._exit(3)


def test_a_loop_that_ends_is_no_measurement():
    with pytest.raises(RuntimeError, match="has ended"):
        list(bench.compare({"first": partial(paced, 1), "second": ends}, 1, 1))


def test_networks_alone_are_asked_as_often_as_those_of_dqn():
    """By images that a first convolution sees at once, with gradient and without."""
    dqn = asked(bench._ours("breakout", "dqn", 500), 80)
    alone = asked(bench._bare(), 80)
    assert dqn[32, True] == dqn[32, False] == alone[32, True] == alone[32, False] == 20
    assert dqn[1, False] == pytest.approx(72, abs=11)  # four deviations: epsilon is random
    assert alone[1, False] == pytest.approx(72, abs=11)
    assert dqn.keys() == alone.keys()


def asked(block, steps):
    calls = Counter()

    def count(module, _, output):
        if isinstance(module, nn.Conv2d) and module.in_channels == 4:
            calls[len(output), output.requires_grad] += 1

    with register_module_forward_hook(count):
        block(steps)
    return calls
