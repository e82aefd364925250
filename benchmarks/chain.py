"""Chain-walk: the compiled experiment against the same experiment in plain Python and in NumPy.

    python benchmarks/chain.py

All rows are measured in turns in one run, as medians, so that a busy machine slows all of them.
"""

import math
import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from cbsql.experiments.chain import ChainSpec, run_chain
from cbsql.experiments.provenance import provenance

STATES, STEPS, EPISODES = 5, 5, 300
REPEATS = 21
FIXED_BETAS: list[float | None] = [math.inf, 10.0, 100.0, 1000.0, None]  # None: count-based


def plain_run(beta, episodes, rng, kappa=0.01, retreat="back", terminal=False):
    """One learner in plain Python: returns its noise-free returns and its values."""
    q = [[0.0, 0.0] for _ in range(STATES)]
    n = [0] * STATES
    returns = []
    for _ in range(episodes):
        state, total = 0, 0.0
        for step in range(STEPS):
            if rng.random() < 0.01:
                action = rng.randrange(2)
            else:
                action = rng.choice(
                    [a for a, value in enumerate(q[state]) if value == max(q[state])]
                )
            expected = 1.0 if (state, action) == (STATES - 1, 1) else -0.1
            if action == 1:
                next_state = min(state + 1, STATES - 1)
            else:
                next_state = {"back": max(state - 1, 0), "stay": state, "start": 0}[retreat]
            soft = plain_mellowmax(q[next_state], kappa * n[next_state] if beta is None else beta)
            discount = 0.0 if terminal and step == STEPS - 1 else 0.99
            q[state][action] = expected + rng.gauss(0, 1) + discount * soft
            n[state] += 1
            total += expected
            state = next_state
        returns.append(total)
    return returns, q


def plain_mellowmax(values, beta):
    top = max(values)
    if beta == 0:
        return sum(values) / len(values)
    if beta == math.inf:
        return top
    return top + math.log(sum(math.exp(beta * (v - top)) for v in values) / len(values)) / beta


def numpy_run(beta, episodes, rng, kappa=0.01):
    """The same with a NumPy table, as such scripts are usually written."""
    q, n = np.zeros((STATES, 2)), np.zeros(STATES)
    returns = np.zeros(episodes)
    for episode in range(episodes):
        state = 0
        for _ in range(STEPS):
            best = np.flatnonzero(q[state] == q[state].max())
            action = rng.integers(2) if rng.random() < 0.01 else rng.choice(best)
            expected = 1.0 if (state, action) == (STATES - 1, 1) else -0.1
            next_state = min(state + 1, STATES - 1) if action == 1 else max(state - 1, 0)
            inverse = kappa * n[next_state] if beta is None else beta
            row = q[next_state]
            if inverse == 0:
                soft = row.mean()
            elif inverse == math.inf:
                soft = row.max()
            else:
                soft = row.max() + np.log(np.exp(inverse * (row - row.max())).mean()) / inverse
            q[state, action] = expected + rng.normal() + 0.99 * soft
            n[state] += 1
            returns[episode] += expected
            state = next_state
    return returns


def seconds_per_step(work: Callable[[], object], runs: int) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) / (runs * len(FIXED_BETAS) * EPISODES * STEPS)


def main() -> None:
    spec = ChainSpec()
    run_chain(ChainSpec(runs=1))  # compile
    rows = {
        "cbsql, 10,000 runs": (lambda: run_chain(spec), spec.runs),
        "plain Python, 2 runs": (
            lambda: [plain_run(b, EPISODES, random.Random(i)) for b in FIXED_BETAS for i in (0, 1)],
            2,
        ),
        "NumPy, 1 run": (
            lambda: [numpy_run(b, EPISODES, np.random.default_rng(0)) for b in FIXED_BETAS],
            1,
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(REPEATS):
        for name, (work, runs) in rows.items():
            times[name].append(seconds_per_step(work, runs))
    medians = {name: statistics.median(values) for name, values in times.items()}
    ours = medians["cbsql, 10,000 runs"]
    whole = spec.runs * len(FIXED_BETAS) * EPISODES * STEPS
    print(f"## Chain-walk: five algorithms, {spec.runs:,} runs, {EPISODES} episodes\n")
    print("| implementation | ns per step | whole experiment, s | times cbsql |")
    print("|---|---|---|---|")
    for name, value in medians.items():
        print(f"| {name} | {value * 1e9:,.1f} | {value * whole:,.1f} | {value / ours:,.0f} |")
    print(f"\n{provenance()['machine']}\n")


if __name__ == "__main__":
    main()
