"""The chain-walk experiment: a batch of independent learners, compiled."""

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from cbsql._jit import jit, prefetch
from cbsql.envs.chain_walk import ACTIONS, EPISODE_STEPS, STATES, End, Retreat, chain_step
from cbsql.tabular.rule import find, soft_update


class Schedule(IntEnum):
    """Where beta(s) comes from."""

    constant = 0
    """A number; infinity is Q-learning."""
    linear = 1
    """kappa times the number of updates made anywhere (Fox et al., 2016)."""
    count = 2
    """kappa n(s), the paper's."""
    gap = 3
    """2 mu / sigma^2 of the gap between the two action values (Fox, 2019), without a parameter."""
    trust_region = 4
    """A constant kappa on the advantage in Psi-learning (Rawlik et al., 2010)."""


@dataclass(frozen=True)
class Algorithm:
    """A curve of the figure."""

    name: str
    schedule: Schedule
    parameter: float = 0.0
    """beta of a constant schedule, kappa of the others."""


@dataclass(frozen=True)
class Outcome:
    """What ``runs`` independent learners did and learnt."""

    returns: NDArray[np.float64]
    """Noise-free return of each training episode (runs, episodes)."""
    q: NDArray[np.float64]
    """Values after the last episode (runs, states, actions)."""
    n: NDArray[np.int64]
    """Value updates made in each state (runs, states)."""


@dataclass(frozen=True)
class Chance:
    """All that is random in a batch of runs, drawn beforehand.

    Every algorithm meets the same luck, so that a difference between two of them is no accident.
    """

    noise: NDArray[np.float64]
    """Added to the rewards (runs, episodes, steps)."""
    explore: NDArray[np.bool_]
    """Whether the action is random (runs, episodes, steps)."""
    coin: NDArray[np.uint8]
    """The action taken when exploring or when both values are equal (runs, episodes, steps)."""

    @classmethod
    def draw(cls, rng: np.random.Generator, runs: int, episodes: int, epsilon: float) -> "Chance":
        """Draw for ``runs`` runs of epsilon-greedy learners."""
        shape = (EPISODE_STEPS, episodes, runs)  # runs are neighbours in memory, as in the kernel
        size = math.prod(shape)
        noise = np.empty(shape)
        _draw_noise(rng, noise.reshape(-1))
        coin = np.unpackbits(np.frombuffer(rng.bytes(math.ceil(size / 8)), np.uint8), count=size)
        # How many, then which: the same as asking at each step, without a draw for each. It comes
        # last, so that the rest is the same for all epsilon.
        explore = np.zeros(size, np.bool_)
        explore[rng.choice(size, rng.binomial(size, epsilon), replace=False, shuffle=False)] = True
        return cls(noise.T, explore.reshape(shape).T, coin.reshape(shape).T)


@jit()
def _draw_noise(rng: np.random.Generator, noise: NDArray[np.float64]) -> None:
    """``rng.standard_normal(out=noise)``, a fifth faster."""
    for i in range(len(noise)):
        noise[i] = rng.standard_normal()


def simulate(
    algorithm: Algorithm,
    chance: Chance,
    *,
    retreat: Retreat = Retreat.back,
    end: End = End.timelimit,
    gamma: float = 0.99,
    learning_rate: float = 1.0,
) -> Outcome:
    """Train one learner for each run of ``chance``."""
    runs, episodes, _ = chance.noise.shape
    # Runs are neighbours in memory, here and in the luck.
    returns = np.empty((runs, episodes), order="F")
    q = np.zeros((STATES, ACTIONS, runs))
    n = np.zeros((runs, STATES), dtype=np.int64)
    _simulate(
        int(algorithm.schedule),
        float(algorithm.parameter),
        int(retreat),
        end is End.terminal,
        gamma,
        learning_rate,
        np.asfortranarray(chance.noise),
        np.asfortranarray(chance.explore),
        np.asfortranarray(chance.coin),
        returns,
        q,
        n,
    )
    return Outcome(returns, q.transpose(2, 0, 1), n)


# Numba sees these as constants, an IntEnum's members it would look up at each use.
_LINEAR, _COUNT, _GAP, _TRUST_REGION = (int(kind) for kind in list(Schedule)[1:])
_LANES_PER_LINE = 64 // 8  # float64 in a line of the cache


@jit()
def _simulate(  # type: ignore[no-untyped-def]
    schedule,
    parameter,
    retreat,
    terminal,
    gamma,
    learning_rate,
    noise,
    explore,
    coin,
    returns,
    q,
    n,
) -> None:
    """Each run is a lane, and all of them take a step together: see the update rule."""
    lanes, episodes, steps = noise.shape
    # Unsigned, so that no index is tested for being negative.
    state = np.zeros(lanes, np.uint32)
    next_state, action = np.zeros_like(state), np.zeros_like(state)
    gap, reward, beta = np.empty(lanes), np.empty(lanes), np.full(lanes, parameter)
    left, right = q.reshape(-1), q.reshape(-1)[lanes:]
    work = np.empty((4, lanes))
    evidence = np.zeros((lanes, STATES, ACTIONS, 3))  # number, mean, sum of squares of the targets
    updates = 0
    for episode in range(episodes):
        state[:] = 0
        cell = find(q, state)
        returns[:, episode] = 0.0
        for step in range(steps):
            for lane in range(lanes):
                gap[lane] = right[cell[lane]] - left[cell[lane]]
            for lane in range(lanes):
                # Without a branch: which of two values is larger, no processor can guess.
                by_lot = explore[lane, episode, step] | (gap[lane] == 0)
                action[lane] = (by_lot & coin[lane, episode, step]) | (~by_lot & (gap[lane] > 0))
            for lane in range(lanes):
                next_state[lane], expected = chain_step(state[lane], action[lane], retreat)
                returns[lane, episode] += expected
                reward[lane] = expected + noise[lane, episode, step]
            # Noise is the only thing that no cache can hold.
            for lane in range(0, lanes, _LANES_PER_LINE):
                prefetch(noise[:, min(episode + 1, episodes - 1), step], lane)
            next_cell = find(q, next_state)
            if schedule == _LINEAR:
                beta[:] = parameter * updates
            elif schedule == _COUNT:
                for lane in range(lanes):
                    beta[lane] = parameter * n[lane, next_state[lane]]
            elif schedule == _GAP:
                for lane in range(lanes):
                    beta[lane] = _gap_beta(evidence[lane], next_state[lane])
            target = soft_update(
                q,
                cell,
                action,
                reward,
                next_cell,
                0.0 if terminal and step == steps - 1 else gamma,
                beta,
                learning_rate,
                work,
                schedule == _TRUST_REGION,
            )
            if schedule == _GAP:
                for lane in range(lanes):
                    _learn_target(evidence[lane], state[lane], action[lane], target[lane])
            for lane in range(lanes):
                n[lane, state[lane]] += 1
            state, next_state, cell = next_state, state, next_cell
            updates += 1


@jit()
def _learn_target(evidence: NDArray[np.float64], state: int, action: int, target: float) -> None:
    """Welford's running mean and sum of squared deviations."""
    evidence[state, action, 0] += 1
    deviation = target - evidence[state, action, 1]
    evidence[state, action, 1] += deviation / evidence[state, action, 0]
    evidence[state, action, 2] += deviation * (target - evidence[state, action, 1])


@jit()
def _gap_beta(evidence: NDArray[np.float64], state: int) -> float:
    """2 mu / sigma^2, each action's value being estimated by the mean of its targets.

    mu is the difference of the two means and sigma^2 the sum of their squared standard errors.
    Before both actions have been seen twice there is no sigma, and no trust: 0.
    """
    variance = 0.0
    for action in range(ACTIONS):
        seen = evidence[state, action, 0]
        if seen < 2:
            return 0.0
        variance += evidence[state, action, 2] / (seen - 1) / seen
    gap: float = evidence[state, 1, 1] - evidence[state, 0, 1]
    return 2 * abs(gap) / variance
