"""Pseudo-counts of images: a context-tree-switching (CTS) density model over pixels.

Bellemare, Veness & Talvitie (2014), "Skip context tree switching"; Bellemare et al. (2016),
"Unifying count-based exploration and intrinsic motivation".

Each pixel is predicted from four neighbours, read in the order left, up, up-left, up-right; a
neighbour outside the image reads as symbol 0. The context tree of a position has one node for every
beginning of that list, the root for the empty one, a leaf for all four. A node holds symbol counts
c with sum N, the estimate (Perks prior, A symbols)

    p_e(x) = (c_x + 1/A) / (N + 1),

and a stay weight w, initially 1/2. From the leaf, where p = p_e, up to the root:

    p = w p_e + (1 - w) p_child.

Update number t of a tree, with switching rate alpha = 1 / (t + 1), sets

    stay  = (1 - alpha) w p_e + alpha (1 - w) p_child
    split = (1 - alpha) (1 - w) p_child + alpha w p_e
    w    <- stay / (stay + split)

from the old w and the old estimates, then adds one to c_x. As stay + split = p, the last line is
w <- alpha + (1 - 2 alpha) w p_e / p.

Neighbouring frames of a batch mostly agree in a pixel and its context. The kernels therefore copy
the path of a (context, symbol) pair into the column of a small array, work on whole rows of columns
with vector instructions, and go back to the tree only where the pair changes.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch

from cbsql._jit import jit

_DEPTH = 4
_MAX_THREADS: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]

Symbols = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
Keys = npt.NDArray[np.uint32]
Integers = npt.NDArray[np.int64]


class CTS:
    """A CTS density model over images of a few grey levels, and the pseudo-counts it gives.

    Images are batches of symbols, uint8 of shape (B, *shape), each below `levels`.

    Args:
        shape: height and width of the images.
        levels: grey levels, a power of two from 2 to 16.
        location_dependent: one tree for every pixel position (the default), or one shared by all.
        max_count: the largest pseudo-count returned, also where the model has nothing left to
            learn from a frame (rho' <= rho), for which the formula has no value.
        threads: worker threads of a location-dependent model; results do not depend on it. One is
            right for sweeps, which fill a machine with one process per core.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        levels: int = 8,
        *,
        location_dependent: bool = True,
        max_count: float = 1e6,
        threads: int = 1,
    ) -> None:
        if len(shape) != 2 or min(shape) < 1:
            raise ValueError(f"shape must be (height, width), both at least 1, got {shape}.")
        if levels not in (2, 4, 8, 16):
            raise ValueError(f"levels must be 2, 4, 8 or 16, got {levels}.")
        if not max_count > 0:
            raise ValueError(f"max_count must be positive, got {max_count}.")
        if not 1 <= threads <= _MAX_THREADS:
            raise ValueError(
                f"threads must be from 1 to {_MAX_THREADS} "
                f"(Numba's limit, NUMBA_NUM_THREADS), got {threads}."
            )
        self.shape = (int(shape[0]), int(shape[1]))
        self.levels = levels
        self.location_dependent = location_dependent
        self.max_count = float(max_count)
        self.threads = threads
        self.updates = 0  # frames learnt
        self._bits = levels.bit_length() - 1
        self._trees = self.shape[0] * self.shape[1] if location_dependent else 1
        self._tables = self._empty()

    def _empty(self) -> Floats:
        nodes = sum(self.levels**depth for depth in range(_DEPTH + 1))
        return _zero_pages((self._trees, nodes, 2 + self.levels))

    def update(self, frames: Symbols | torch.Tensor) -> None:
        """Learn frames (B, H, W) in order."""
        frames = self._check(frames)
        if not self.location_dependent:
            for i, frame in enumerate(frames):
                pixels = (self.updates + i) * frame.size
                _learn_shared(frame, self._tables[0], self._bits, pixels)
        elif self.threads == 1:
            _learn(frames, self._tables, self._bits, self.updates, 0, self.shape[0])
        else:
            with _numba_threads(self.threads):
                _learn_parallel(frames, self._tables, self._bits, self.updates, self.threads)
        self.updates += len(frames)

    def log_prob(self, frames: Symbols | torch.Tensor) -> tuple[Floats, Floats]:
        """log rho of frames (B, H, W) now, and log rho' after one more update with each alone."""
        log_rho, gain = self._query(frames)
        return log_rho, log_rho + gain

    def count(self, frames: Symbols | torch.Tensor) -> Floats:
        """Pseudo-counts n = rho (1 - rho') / (rho' - rho) of frames (B, H, W).

        This is (1 - rho') / (exp(PG) - 1) with the prediction gain PG = log rho' - log rho.
        """
        log_rho, gain = self._query(frames)
        with np.errstate(over="ignore", divide="ignore"):  # an unseen frame: exp(PG) may overflow
            counts = -np.expm1(np.minimum(log_rho + gain, 0.0)) / np.expm1(np.maximum(gain, 0.0))
        return np.minimum(np.where(gain > 0, counts, np.inf), self.max_count)

    def sample(self, rng: np.random.Generator) -> Symbols:
        """Draw one frame (H, W) from the model, pixel by pixel."""
        return _sample(rng.random(self.shape), self._tables, self._bits)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The model as tensors, as small as the contexts it has seen.

        Only leaf counts are kept, since those of a node are the sums of its children's. An `entry`
        numbers a (tree, context, symbol); `stay` has the weights of the inner nodes on their paths.
        """
        size = _leaf_entries(self._tables, self._bits, np.empty(0, np.int64), np.empty(0))
        entry, count = np.empty(size, np.int64), np.empty(size)
        _leaf_entries(self._tables, self._bits, entry, count)
        inner = np.unique(np.concatenate(self._paths(entry)[:-1]))
        return {
            "layout": self._layout(),
            "updates": torch.tensor(self.updates),
            "entry": torch.from_numpy(entry),
            "count": torch.from_numpy(count.astype(np.int64)),
            "stay": torch.from_numpy(self._tables.reshape(-1, 2 + self.levels)[inner, 1]),
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Become the model that `state_dict` described, bit for bit."""
        dtypes = {key: str(tensor.dtype) for key, tensor in state.items()}
        expected = dict.fromkeys(("layout", "updates", "entry", "count"), "torch.int64")
        expected["stay"] = "torch.float64"
        if dtypes != expected:
            raise ValueError(f"A CTS state has the tensors {expected}, this one {dtypes}.")
        if state["layout"].tolist() != self._layout().tolist():
            raise ValueError(
                "This state has [height, width, levels, location_dependent] = "
                f"{state['layout'].tolist()}, the model {self._layout().tolist()}; "
                "build the model with the same arguments."
            )
        entry, count, stay = (state[key].cpu().numpy() for key in ("entry", "count", "stay"))
        entries_per_tree = self.levels ** (_DEPTH + 1)
        if (
            entry.shape != count.shape
            or np.any((entry < 0) | (entry >= self._trees * entries_per_tree))
            or np.any(np.diff(entry) <= 0)
        ):
            raise ValueError(
                "The entries of a CTS state must ascend within the model, with a count each."
            )
        updates = int(state["updates"])
        learnt = updates * (1 if self.location_dependent else self.shape[0] * self.shape[1])
        totals = np.bincount(entry // entries_per_tree, count, self._trees)
        if np.any(count < 1) or np.any(totals != learnt):
            raise ValueError(f"The counts of this state are not those of {updates} updates.")
        paths = self._paths(entry)
        inner = np.unique(np.concatenate(paths[:-1]))
        if stay.shape != inner.shape or not np.all((stay >= 0) & (stay <= 1)):
            raise ValueError(
                f"This state needs {len(inner)} stay weights from 0 to 1, one for every inner node."
            )
        tables = self._empty()
        rows = tables.reshape(-1, 2 + self.levels)
        for nodes in paths:
            np.add.at(rows[:, 0], nodes, count)
            np.add.at(rows.reshape(-1), nodes * rows.shape[1] + 2 + entry % self.levels, count)
        rows[inner, 1] = stay
        self._tables, self.updates = tables, updates

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles are sparse too: the tables would be mostly zeros."""
        arguments = ("shape", "levels", "location_dependent", "max_count", "threads")
        return {key: getattr(self, key) for key in arguments} | {"state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors = state.pop("state")
        self.__init__(**state)  # type: ignore[misc]
        self.load_state_dict(tensors)

    def __repr__(self) -> str:
        shared = "" if self.location_dependent else ", location_dependent=False"
        return f"CTS({self.shape}, levels={self.levels}{shared})"

    def _paths(self, entry: Integers) -> list[Integers]:
        """The nodes on the paths of entries, root first, numbered through all trees."""
        tree, key = np.divmod(entry, self.levels ** (_DEPTH + 1))
        root = tree * self._tables.shape[1]
        return [root + node for node in _path(self._bits, key)]  # type: ignore[arg-type]

    def _layout(self) -> torch.Tensor:
        return torch.tensor([*self.shape, self.levels, int(self.location_dependent)])

    def _check(self, frames: Symbols | torch.Tensor) -> Symbols:
        if isinstance(frames, torch.Tensor):
            frames = frames.detach().cpu().numpy()
        if not isinstance(frames, np.ndarray) or frames.dtype != np.uint8:
            given = getattr(frames, "dtype", type(frames).__name__)
            raise TypeError(
                f"CTS takes uint8 symbols, got {given}; PixelCounter turns images into symbols."
            )
        if frames.shape[1:] != self.shape or len(frames) == 0:
            raise ValueError(
                f"CTS takes a batch of at least one frame, (B, {self.shape[0]}, {self.shape[1]}), "
                f"got shape {frames.shape}."
            )
        if (largest := int(frames.max())) >= self.levels:
            raise ValueError(
                f"Symbols must be below levels = {self.levels}, got {largest}; "
                "PixelCounter turns images into symbols."
            )
        return np.ascontiguousarray(frames)

    def _query(self, frames: Symbols | torch.Tensor) -> tuple[Floats, Floats]:
        """log rho and the prediction gain log rho' - log rho of each frame."""
        frames = self._check(frames)
        # One partial sum for every image row, added up in the same order whatever the threads did.
        sums = np.empty((2, len(frames), self.shape[0]))
        if not self.location_dependent:
            for i, frame in enumerate(frames):
                after = self._tables[0].copy()
                _learn_shared(frame, after, self._bits, self.updates * frame.size)
                _query_shared(frame, self._tables[0], after, self._bits, sums[:, i])
        elif self.threads == 1:
            _query(frames, self._tables, self._bits, self.updates, 0, self.shape[0], sums)
        else:
            with _numba_threads(self.threads):
                _query_parallel(frames, self._tables, self._bits, self.updates, self.threads, sums)
        log_rho, gain = sums.sum(axis=2)
        return log_rho, gain


def _zero_pages(shape: tuple[int, ...]) -> Floats:
    """Zeros in memory of which only the pages that are written to become resident.

    NumPy's own zeros ask for huge pages, of which each would bring in the nodes of many trees.
    """
    size = math.prod(shape) * 8
    if not hasattr(mmap, "MAP_ANONYMOUS"):  # Windows
        return np.zeros(shape)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, size, flags=flags)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.float64).reshape(shape)


@contextmanager
def _numba_threads(threads: int) -> Iterator[None]:
    before = numba.get_num_threads()
    numba.set_num_threads(threads)
    try:
        yield
    finally:
        numba.set_num_threads(before)


# Kernels. A key is a context and a symbol in one number of `bits` bits each: left, up, up-left,
# up-right, symbol. A table (nodes, 2 + A) holds N, w, c_0, c_1, ... of the nodes of one tree, each
# followed by the subtrees of its A children. Paths (3, depths, columns) hold N, w and c_x of the
# nodes from the root to the leaf, for one key in each column.


@jit()
def _row_keys(frame: Symbols, y: int, bits: int, keys: Keys) -> None:
    """Keys (W,) of row y of a frame (H, W)."""
    last = len(keys) - 1
    row = frame[y]
    for x in range(last + 1):
        keys[x] = row[x]
    for x in range(last):
        keys[x + 1] |= row[x] << (4 * bits)
    if y > 0:
        above = frame[y - 1]
        for x in range(last + 1):
            keys[x] |= above[x] << (3 * bits)
        for x in range(last):
            keys[x + 1] |= above[x] << (2 * bits)
            keys[x] |= above[x + 1] << bits


@jit()
def _path(bits: int, key: int) -> tuple[int, int, int, int, int]:
    """The nodes from the root to the leaf that fit the key."""
    levels = 1 << bits
    mask = levels - 1
    size_3 = levels + 1  # nodes in the subtree of a node at depth 3, 2, 1
    size_2 = levels * size_3 + 1
    size_1 = levels * size_2 + 1
    node_1 = 1 + ((key >> (4 * bits)) & mask) * size_1
    node_2 = node_1 + 1 + ((key >> (3 * bits)) & mask) * size_2
    node_3 = node_2 + 1 + ((key >> (2 * bits)) & mask) * size_3
    return 0, node_1, node_2, node_3, node_3 + 1 + ((key >> bits) & mask)


@jit()
def _load(table: Floats, bits: int, key: int, paths: Floats, column: int) -> None:
    """Copy the path of a key from its tree."""
    symbol = 2 + (key & ((1 << bits) - 1))
    for depth, node in enumerate(_path(bits, key)):
        paths[0, depth, column] = table[node, 0]
        paths[1, depth, column] = table[node, 1] if table[node, 0] > 0 else 0.5
        paths[2, depth, column] = table[node, symbol]


@jit()
def _store(table: Floats, bits: int, key: int, paths: Floats, column: int) -> None:
    """Copy the path of a key back into its tree."""
    symbol = 2 + (key & ((1 << bits) - 1))
    for depth, node in enumerate(_path(bits, key)):
        table[node, 0] = paths[0, depth, column]
        table[node, 1] = paths[1, depth, column]
        table[node, symbol] = paths[2, depth, column]


@jit()
def _predict(paths: Floats, prior: float, p: Floats) -> None:
    """P(symbol | context) of the path in each of the first len(p) columns."""
    total, count = paths[0, _DEPTH], paths[2, _DEPTH]
    for i in range(len(p)):
        p[i] = (count[i] + prior) / (total[i] + 1.0)
    for depth in range(_DEPTH - 1, -1, -1):
        total, stay, count = paths[0, depth], paths[1, depth], paths[2, depth]
        for i in range(len(p)):
            p_e = (count[i] + prior) / (total[i] + 1.0)
            p[i] = stay[i] * p_e + (1.0 - stay[i]) * p[i]


@jit()
def _learn_paths(paths: Floats, prior: float, alpha: float, p: Floats) -> None:
    """As `_predict`, then update every path once."""
    total, count = paths[0, _DEPTH], paths[2, _DEPTH]
    for i in range(len(p)):
        p[i] = (count[i] + prior) / (total[i] + 1.0)
        total[i] += 1.0
        count[i] += 1.0
    for depth in range(_DEPTH - 1, -1, -1):
        total, stay, count = paths[0, depth], paths[1, depth], paths[2, depth]
        for i in range(len(p)):
            p_e = (count[i] + prior) / (total[i] + 1.0)
            stayed = stay[i] * p_e
            mixed = stayed + (1.0 - stay[i]) * p[i]
            stay[i] = alpha + (1.0 - 2.0 * alpha) * (stayed / mixed)
            p[i] = mixed
            total[i] += 1.0
            count[i] += 1.0


@jit()
def _take_logs(p: Floats, p_after: Floats) -> None:
    """Replace p and p' by log p and log p'/p; the latter keeps its digits when they are close."""
    for i in range(len(p)):
        p_after[i] = np.log1p((p_after[i] - p[i]) / p[i])
        p[i] = np.log(p[i])


@jit()
def _sum(log_p: Floats, gain: Floats, slots: Integers, sums: Floats) -> None:
    """Sums (2,) of log p and of log p'/p over the given slots."""
    log_rho, prediction_gain = 0.0, 0.0
    for slot in slots:
        log_rho += log_p[slot]
        prediction_gain += gain[slot]
    sums[0], sums[1] = log_rho, prediction_gain


@jit()
def _query(
    frames: Symbols, tables: Floats, bits: int, updates: int, top: int, bottom: int, sums: Floats
) -> None:
    """Sums (2, B, H) of log p and of log p'/p over each image row from top to bottom."""
    batch, _, width = frames.shape
    prior, alpha = 1.0 / (1 << bits), 1.0 / (updates + 2.0)
    keys = np.empty((batch, width), np.uint32)
    slots = np.empty((batch, width), np.int64)  # the column in which the path of a pixel is
    paths = np.empty((3, _DEPTH + 1, batch * width))
    p, p_after = np.empty(batch * width), np.empty(batch * width)
    for y in range(top, bottom):
        used = 0
        for b in range(batch):
            _row_keys(frames[b], y, bits, keys[b])
            for x in range(width):
                if b > 0 and keys[b, x] == keys[b - 1, x]:
                    slots[b, x] = slots[b - 1, x]
                else:
                    _load(tables[y * width + x], bits, keys[b, x], paths, used)
                    slots[b, x] = used
                    used += 1
        _learn_paths(paths, prior, alpha, p[:used])
        _predict(paths, prior, p_after[:used])
        _take_logs(p[:used], p_after[:used])
        for b in range(batch):
            _sum(p, p_after, slots[b], sums[:, b, y])


@jit(parallel=True)
def _query_parallel(
    frames: Symbols, tables: Floats, bits: int, updates: int, parts: int, sums: Floats
) -> None:
    height = frames.shape[1]
    for i in numba.prange(parts):
        top, bottom = i * height // parts, (i + 1) * height // parts
        _query(frames, tables, bits, updates, top, bottom, sums)


@jit()
def _learn(frames: Symbols, tables: Floats, bits: int, updates: int, top: int, bottom: int) -> None:
    """Learn the image rows from top to bottom."""
    batch, _, width = frames.shape
    prior = 1.0 / (1 << bits)
    keys = np.empty((batch, width), np.uint32)
    paths = np.empty((3, _DEPTH + 1, width))
    p = np.empty(width)
    for y in range(top, bottom):
        for b in range(batch):
            _row_keys(frames[b], y, bits, keys[b])
            for x in range(width):
                table = tables[y * width + x]
                if b == 0:
                    _load(table, bits, keys[b, x], paths, x)
                elif keys[b, x] != keys[b - 1, x]:
                    _store(table, bits, keys[b - 1, x], paths, x)
                    _load(table, bits, keys[b, x], paths, x)
            _learn_paths(paths, prior, 1.0 / (updates + b + 2.0), p)
        for x in range(width):
            _store(tables[y * width + x], bits, keys[batch - 1, x], paths, x)


@jit(parallel=True)
def _learn_parallel(frames: Symbols, tables: Floats, bits: int, updates: int, parts: int) -> None:
    height = frames.shape[1]
    for i in numba.prange(parts):
        _learn(frames, tables, bits, updates, i * height // parts, (i + 1) * height // parts)


@jit()
def _learn_shared(frame: Symbols, table: Floats, bits: int, updates: int) -> None:
    """Learn the pixels of one frame (H, W) in reading order, all in one tree."""
    height, width = frame.shape
    prior = 1.0 / (1 << bits)
    keys = np.empty(width, np.uint32)
    paths = np.empty((3, _DEPTH + 1, 1))
    p = np.empty(1)
    for y in range(height):
        _row_keys(frame, y, bits, keys)
        for x in range(width):
            _load(table, bits, keys[x], paths, 0)
            _learn_paths(paths, prior, 1.0 / (updates + y * width + x + 2.0), p)
            _store(table, bits, keys[x], paths, 0)


@jit()
def _query_shared(
    frame: Symbols, table: Floats, table_after: Floats, bits: int, sums: Floats
) -> None:
    """Sums (2, H) of log p and of log p'/p over each image row, from two frozen trees."""
    height, width = frame.shape
    prior = 1.0 / (1 << bits)
    keys, slots = np.empty(width, np.uint32), np.arange(width)
    paths = np.empty((3, _DEPTH + 1, width))
    p, p_after = np.empty(width), np.empty(width)
    for y in range(height):
        _row_keys(frame, y, bits, keys)
        for x in range(width):
            _load(table, bits, keys[x], paths, x)
        _predict(paths, prior, p)
        for x in range(width):
            _load(table_after, bits, keys[x], paths, x)
        _predict(paths, prior, p_after)
        _take_logs(p, p_after)
        _sum(p, p_after, slots, sums[:, y])


@jit()
def _sample(uniforms: Floats, tables: Floats, bits: int) -> Symbols:
    """A frame (H, W) drawn pixel by pixel with uniforms (H, W) in [0, 1)."""
    height, width = uniforms.shape
    levels = 1 << bits
    frame = np.zeros((height, width), np.uint8)
    keys = np.empty(width, np.uint32)
    paths = np.empty((3, _DEPTH + 1, levels))
    p = np.empty(levels)
    for y in range(height):
        for x in range(width):
            table = tables[(y * width + x) % len(tables)]
            _row_keys(frame, y, bits, keys)  # the pixel itself is still 0
            for symbol in range(levels):
                _load(table, bits, keys[x] + symbol, paths, symbol)
            _predict(paths, 1.0 / levels, p)
            rest = uniforms[y, x]
            while rest >= p[frame[y, x]] and frame[y, x] < levels - 1:
                rest -= p[frame[y, x]]
                frame[y, x] += 1
    return frame


@jit()
def _leaf_entries(tables: Floats, bits: int, entry: Integers, count: Floats) -> int:
    """Write the non-zero symbol counts of all leaves as far as there is room; return their number.

    An entry is the number (tree, context, symbol) of a count among all.
    """
    contexts = 1 << (_DEPTH * bits)
    found = 0
    for tree in range(len(tables)):
        context = 0
        while context < contexts:
            path = _path(bits, context << bits)
            depth = 0
            while depth < _DEPTH and tables[tree, path[depth], 0] > 0:
                depth += 1
            node = path[depth]
            if tables[tree, node, 0] > 0:
                for symbol in range(1 << bits):
                    if tables[tree, node, 2 + symbol] > 0:
                        if found < len(entry):
                            entry[found] = (((tree * contexts) + context) << bits) + symbol
                            count[found] = tables[tree, node, 2 + symbol]
                        found += 1
            # There is nothing below an unseen node: go on with the next context outside it.
            step = bits * (_DEPTH - depth)
            context = ((context >> step) + 1) << step
    return found
