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


def test_beta_is_asked_for_at_the_next_states_then_the_states_are_counted():
    calls = []

    class Recording(SimHash):
        def count(self, x):
            calls.append(("count", np.array(x)))
            return super().count(x)

        def update(self, x):
            calls.append(("update", np.array(x)))
            super().update(x)

    args = EXAMPLE["Args"](total_timesteps=600)
    EXAMPLE["train"](args, CountBased(Recording(4)))
    updates = (600 - args.learning_starts) // args.train_frequency
    assert [name for name, _ in calls] == ["count", "update"] * updates
    for (_, after), (_, before) in zip(calls[::2], calls[1::2], strict=True):
        assert len(after) == args.batch_size
        # CartPole moves on for 0.02 seconds at the speed it has.
        np.testing.assert_allclose(after[:, 0], before[:, 0] + 0.02 * before[:, 1], atol=1e-6)


def test_counts_without_bound_are_dqn():
    class Trusting(SimHash):
        def count(self, x):
            return np.full(len(x), np.inf)

    args = EXAMPLE["Args"](total_timesteps=2_000)
    assert EXAMPLE["train"](args, CountBased(Trusting(4))) == EXAMPLE["train"](args, Greedy())
