"""Loops that are compared: in turns, each in a process of its own."""

import os
import time
from functools import partial

import pytest
import torch as th

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
