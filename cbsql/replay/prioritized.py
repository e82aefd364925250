"""Prioritised replay (Schaul et al., 2016, proportional variant) and its sum tree."""

import sys
from typing import Any, NamedTuple, cast

import numpy as np
import torch as th
from numpy.typing import ArrayLike, NDArray
from stable_baselines3.common.vec_env import VecNormalize

from cbsql._jit import jit
from cbsql.replay.frames import FrameReplayBuffer
from cbsql.replay.indexed import IndexedReplayBuffer

# A transition with an error of exactly zero stays in reach.
_SMALLEST_PRIORITY = 1e-6


class SumTree:
    """Priorities of `capacity` indices, from which an index is found in logarithmic time.

    All priorities are zero at first. Every sum is made anew from its two parts, so that sums do not
    drift however often priorities change.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}.")
        self.capacity = capacity
        self._first_leaf = 1 << (capacity - 1).bit_length()
        # Node i is the sum of nodes 2i and 2i + 1, node 1 the sum of all.
        self._nodes = np.zeros(2 * self._first_leaf)
        self._largest = sys.float_info.max / (2 * capacity)  # rounding must not make the sum inf

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self._nodes[1])

    def get(self, indices: ArrayLike) -> NDArray[np.float64]:
        """Return the priorities of these indices."""
        return self._nodes[self._first_leaf :][: self.capacity].take(np.asarray(indices, np.int64))

    def set(self, indices: ArrayLike, priorities: ArrayLike, *, keep_zeros: bool = False) -> None:
        """Give each index its priority; of an index that occurs twice, the later one counts.

        :param keep_zeros: pass over indices whose priority is zero
        :raises ValueError: if an index is out of range or a priority negative, not finite, or so
            large that the sum could overflow; nothing is changed then
        """
        indices = np.ascontiguousarray(indices, np.int64).ravel()
        priorities = np.ascontiguousarray(priorities, np.float64).ravel()
        self._check(indices, priorities)
        _set(self._nodes, self._first_leaf, indices, priorities, keep_zeros)

    def fill(self, start: int, count: int, priority: float) -> None:
        """Give one priority to `count` indices from `start` on; after the last comes the first."""
        if not 0 <= priority <= self._largest:
            self._refuse(start, priority)
        _fill(self._nodes, self._first_leaf, self.capacity, start, count, priority)

    def sample(self, uniforms: ArrayLike) -> NDArray[np.int64]:
        """Return an index for each number from [0, 1]: the one at that part of the total.

        Uniform numbers give indices with probabilities proportional to their priorities. An index
        of priority zero is never returned, whatever the numbers and their rounding.
        """
        if self.total == 0:
            raise ValueError("All priorities are zero: there is no index to sample.")
        uniforms = np.ascontiguousarray(uniforms, np.float64).ravel()
        return _find(self._nodes, self._first_leaf, uniforms)

    def _check(self, indices: NDArray[np.int64], priorities: NDArray[np.float64]) -> None:
        if len(indices) != len(priorities):
            raise ValueError(f"Got {len(indices)} indices and {len(priorities)} priorities.")
        wrong = _first_wrong(indices, priorities, self.capacity, self._largest)
        if wrong >= 0:
            self._refuse(indices[wrong], priorities[wrong])

    def _refuse(self, index: int, priority: float) -> None:
        raise ValueError(
            f"Got the priority {priority} for index {index}: indices go from 0 to "
            f"{self.capacity - 1}, priorities from 0 to {self._largest:.3g}. Nothing was changed."
        )


class PrioritizedSamples(NamedTuple):
    """SB3's `ReplayBufferSamples`, with what a prioritised learner needs besides."""

    observations: th.Tensor
    actions: th.Tensor
    next_observations: th.Tensor
    dones: th.Tensor
    rewards: th.Tensor
    discounts: th.Tensor | None
    indices: NDArray[np.int64]
    """(batch,), for `update_priorities`"""
    weights: th.Tensor
    """(batch, 1), for the loss of each transition"""


class PrioritizedReplayBuffer(IndexedReplayBuffer):
    """Replay buffer that draws transitions in proportion to a power of their priorities.

    It takes the place of SB3's `ReplayBuffer` and `NStepReplayBuffer` for observations that are one
    array. Of N transitions, i is drawn with the probability P_i = p_i^priority_exponent / sum, and
    has the importance weight (N P_i)^-importance_exponent, divided by the largest of its batch. A
    batch of b is stratified: one index from each b-th of the total, which leaves the probabilities
    as they are and varies less than independent draws.

    New transitions have the largest priority that was ever given, at first 1. A learner changes
    that of each batch with `update_priorities`, and lets the attribute `importance_exponent` go
    from its start to 1.

    The arguments are those of `IndexedReplayBuffer`, and by name:

    :param priority_exponent: from 0, which makes draws uniform, to 1
    :param importance_exponent: from 0, all weights 1, to 1, which makes up for uneven draws fully
    """

    def __init__(
        self,
        *args: Any,
        priority_exponent: float = 0.5,
        importance_exponent: float = 0.4,
        **kwargs: Any,
    ) -> None:
        for name, value in (
            ("priority_exponent", priority_exponent),
            ("importance_exponent", importance_exponent),
        ):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {value}.")
        self.priority_exponent = priority_exponent
        self.importance_exponent = importance_exponent
        super().__init__(*args, **kwargs)

    def reset(self) -> None:
        """Forget all transitions and their priorities."""
        super().reset()
        # Leaf i is the priority of index i to the power of `priority_exponent`, and zero where no
        # transition can be sampled.
        self._tree = SumTree(self.buffer_size * self.n_envs)
        self._max_priority = 1.0

    def state_dict(self) -> dict[str, Any]:
        """See `IndexedReplayBuffer.state_dict`; with the priorities."""
        leaves = self._tree.get(self._stored())
        return {**super().state_dict(), "leaves": leaves, "max_priority": self._max_priority}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `IndexedReplayBuffer.load_state_dict`."""
        super().load_state_dict(state)
        if not 0 < state["max_priority"] < np.inf or not np.all(state["leaves"] > 0):
            raise ValueError("Priorities must be positive.")
        self._tree.fill(0, self.buffer_size * self.n_envs, 0.0)  # what is there may be of more rows
        self._tree.set(self._stored(), state["leaves"])
        self._max_priority = state["max_priority"]

    def _stored(self) -> NDArray[np.int64]:
        """The indices of all transitions, oldest first."""
        indices = np.arange((self.pos - self.size()) * self.n_envs, self.pos * self.n_envs)
        return indices % (self.buffer_size * self.n_envs)

    def add(self, *args: Any, **kwargs: Any) -> None:
        """Store one transition of each environment, with the largest priority so far."""
        row, rows_before = self.pos, self.size()
        super().add(*args, **kwargs)
        oldest = row - rows_before
        rows_left = rows_before + 1 - self.size()
        leaf = self._max_priority**self.priority_exponent
        # In this order, as a full ring writes the new row where the oldest was.
        self._tree.fill(oldest * self.n_envs, rows_left * self.n_envs, 0.0)
        self._tree.fill(row * self.n_envs, self.n_envs, leaf)

    def update_priorities(self, indices: ArrayLike, priorities: ArrayLike | th.Tensor) -> None:
        """Give sampled transitions new priorities, such as the size of their TD errors.

        Do so before the next `add`. Indices whose transitions have left since are passed over, but
        a transition that has taken the place of another cannot be told from it.

        :raises ValueError: as `SumTree.set` does, with nothing changed
        """
        if isinstance(priorities, th.Tensor):
            priorities = priorities.detach().cpu().numpy()
        indices = np.asarray(indices, np.int64).ravel()
        priorities = np.asarray(priorities, np.float64).ravel()
        self._tree._check(indices, priorities)
        leaves = np.maximum(priorities, _SMALLEST_PRIORITY) ** self.priority_exponent
        self._tree.set(indices, leaves, keep_zeros=True)
        self._max_priority = float(priorities.max(initial=self._max_priority))

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> PrioritizedSamples:  # type: ignore[override]
        """Draw transitions by their priorities, with replacement; `env` normalises them."""
        return cast(PrioritizedSamples, super().sample(batch_size, env))

    def _draw_indices(self, batch_size: int) -> NDArray[np.int64]:
        return self._tree.sample((np.arange(batch_size) + self.rng.random(batch_size)) / batch_size)

    def _get_samples(  # type: ignore[override]
        self, batch_inds: NDArray[np.int64], env: VecNormalize | None = None
    ) -> PrioritizedSamples:
        samples = super()._get_samples(batch_inds, env)
        leaves = self._tree.get(batch_inds)[:, None]  # (batch, 1)
        # Divided by the largest weight, N and the sum of the probabilities cancel.
        weights = (leaves.min() / leaves) ** self.importance_exponent
        return PrioritizedSamples(
            *samples, indices=batch_inds, weights=self._tensor(weights.astype(np.float32))
        )


class PrioritizedFrameReplayBuffer(PrioritizedReplayBuffer, FrameReplayBuffer):
    """`FrameReplayBuffer` that draws as `PrioritizedReplayBuffer` does, with the arguments of both.

    Transitions that leave early because their frames do are not drawn any more.
    """


@jit()
def _first_wrong(
    indices: NDArray[np.int64], priorities: NDArray[np.float64], capacity: int, largest: float
) -> int:
    """Position of the first pair that a tree cannot take, or -1."""
    for i in range(indices.size):
        # A NaN compares as False.
        if not (0 <= indices[i] < capacity and 0 <= priorities[i] <= largest):
            return i
    return -1


# All indices of a batch go from level to level together: the processor then waits for the memory of
# many at a time, which more than halves the time in a large tree.
@jit()
def _set(
    nodes: NDArray[np.float64],
    first_leaf: int,
    indices: NDArray[np.int64],
    priorities: NDArray[np.float64],
    keep_zeros: bool,
) -> None:
    at = first_leaf + indices
    for i in range(at.size):
        if nodes[at[i]] > 0 or not keep_zeros:
            nodes[at[i]] = priorities[i]
    while first_leaf > 1:
        first_leaf //= 2
        for i in range(at.size):
            node = at[i] // 2
            nodes[node] = nodes[2 * node] + nodes[2 * node + 1]
            at[i] = node


@jit()
def _fill(
    nodes: NDArray[np.float64],
    first_leaf: int,
    capacity: int,
    start: int,
    count: int,
    priority: float,
) -> None:
    indices = np.arange(start, start + count) % capacity
    _set(nodes, first_leaf, indices, np.full(count, priority), False)


@jit()
def _find(
    nodes: NDArray[np.float64], first_leaf: int, uniforms: NDArray[np.float64]
) -> NDArray[np.int64]:
    at = np.ones(uniforms.size, np.int64)
    parts = np.zeros(uniforms.size)  # of the sum below each node
    for i in range(at.size):
        if uniforms[i] > 0:  # not so for a NaN
            parts[i] = uniforms[i] * nodes[1]
    level = 1
    while level < first_leaf:
        level *= 2
        for i in range(at.size):
            left, right = nodes[2 * at[i]], nodes[2 * at[i] + 1]
            # Rounding may lead past the end of a sum, but never into a half that is zero. The
            # choice is a number instead of a branch, which no processor could foresee.
            to_right = np.int64(parts[i] >= left) & np.int64(right > 0)
            parts[i] -= to_right * left
            at[i] = 2 * at[i] + to_right
    return at - first_leaf
