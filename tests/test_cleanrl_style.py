import runpy
from pathlib import Path

import numpy as np

from cbsql.counts import SimHash
from cbsql.temperature import CountBased, Greedy

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "cleanrl_style.py"))


def test_the_loop_learns():
    args = EXAMPLE["Args"](total_timesteps=6_000)
    returns = EXAMPLE["train"](args, CountBased(SimHash(4), kappa=0.01))
    assert np.mean(returns[-20:]) > 3 * np.mean(returns[:20])


def test_every_update_is_counted_where_it_began():
    counter = SimHash(4)
    args = EXAMPLE["Args"](total_timesteps=600)
    EXAMPLE["train"](args, CountBased(counter))
    counts = counter.state_dict()["counts"]
    updates = (600 - args.learning_starts) // args.train_frequency
    assert int(counts.sum()) == updates * args.batch_size


def test_counts_without_bound_are_dqn():
    class Trusting(SimHash):
        def count(self, x):
            return np.full(len(x), np.inf)

    args = EXAMPLE["Args"](total_timesteps=2_000)
    assert EXAMPLE["train"](args, CountBased(Trusting(4))) == EXAMPLE["train"](args, Greedy())
