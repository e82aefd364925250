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

Frames mostly agree in a pixel and its context, which makes this fast: the path of the (context,
symbol) pair last learnt at a position is held in a column of a small array, beside those of the
other positions of its image row. Vector instructions work on all columns of a row at once, and a
tree is gone back to only where the pair changes. Its nodes are created when their context first
occurs, next to each other, so that a path is together in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch

from cbsql._jit import jit
from cbsql._vector_math import log, log1p

_DEPTH = 4
_CHUNK = 32  # frames in one call of a kernel, which bounds its scratch memory
_NOTHING = 2**32 - 1  # as a key; the others have at most 20 bits
_MAX_THREADS: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]

Symbols = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
Keys = npt.NDArray[np.uint32]
Integers = npt.NDArray[np.int64]
Nodes = npt.NDArray[np.int32]


class CTS:
    """A CTS density model over images of a few grey levels, and the pseudo-counts it gives.

    Images are batches of symbols, uint8 of shape (B, *shape), each below `levels`.

    :param shape: height and width of the images
    :param levels: grey levels, a power of two from 2 to 16
    :param location_dependent: one tree for every pixel position (the default), or one shared by all
    :param max_count: the largest pseudo-count returned, also where the model has nothing left to
        learn from a frame (rho' <= rho), for which the formula has no value
    :param threads: worker threads of a location-dependent model; results do not depend on it. One
        is right for sweeps, which fill a machine with one process per core
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
        self._pool = self._new_pool()

    def update(self, frames: Symbols | torch.Tensor) -> None:
        """Learn frames (B, H, W) in order."""
        frames = self._framed(frames)
        height, width = self.shape
        for start in range(0, len(frames), _CHUNK):
            chunk = frames[start : start + _CHUNK]
            if self.location_dependent:
                self._pool.reserve(_DEPTH * len(chunk) * width)  # as many as a row could need
                model = (chunk, *self._pool.nodes, *self._pool.held, self._bits, self.updates)
                if self.threads == 1:
                    _learn(0, height, *model)
                else:
                    with _numba_threads(self.threads):
                        _learn_parallel(model, height, self.threads)
            else:
                self._pool.reserve(_DEPTH * len(chunk) * height * width)
                _learn_shared(chunk, *self._pool.nodes, self._bits, self.updates)
            self.updates += len(chunk)

    def log_prob(self, frames: Symbols | torch.Tensor) -> tuple[Floats, Floats]:
        """log rho of frames (B, H, W) now, and log rho' after one more update with each alone."""
        log_rho, gain = self._query(frames)
        return log_rho, log_rho + gain

    def pixel_log_prob(self, frames: Symbols | torch.Tensor) -> Floats:
        """log p of every pixel given those before it, (B, H, W); they add up to log rho."""
        frames = self._framed(frames)
        log_p = np.empty((len(frames), *self.shape))
        values, children, _ = self._pool.trees()
        for frame, out in zip(frames, log_p, strict=True):
            _query_pixels(frame, values, children, self._bits, self.location_dependent, out)
        return np.log(log_p, out=log_p)

    def count(self, frames: Symbols | torch.Tensor) -> Floats:
        """Pseudo-counts n = rho (1 - rho') / (rho' - rho) of frames (B, H, W).

        This is (1 - rho') / (exp(PG) - 1) with the prediction gain PG = log rho' - log rho.
        """
        return _pseudo_counts(*self._query(frames), self.max_count)

    def sample(self, rng: np.random.Generator) -> Symbols:
        """Draw one frame (H, W) from the model, pixel by pixel."""
        values, children, _ = self._pool.trees()
        return _sample(
            rng.random(self.shape), values, children, self._bits, self.location_dependent
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The model as tensors, as small as the contexts it has seen.

        Only leaf counts are kept, since those of a node are the sums of its children's. An `entry`
        numbers a (tree, context, symbol); `stay` has the weights of the inner nodes seen, each
        before those below it.
        """
        values, children, used = self._pool.trees()
        roots = self._pool.roots
        entry = np.empty(used.sum() * self.levels, np.int64)
        count, stay = np.empty(len(entry)), np.empty(used.sum())
        entries, inner = _export(values, children, roots, self._bits, entry, count, stay)
        return {
            "layout": self._layout(),
            "updates": torch.tensor(self.updates),
            "entry": torch.from_numpy(entry[:entries].copy()),
            "count": torch.from_numpy(count[:entries].astype(np.int64)),
            "stay": torch.from_numpy(stay[:inner].copy()),
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
        pool = self._new_pool()
        entries_per_tree = self.levels ** (_DEPTH + 1)
        trees = len(pool.nodes[0]) * pool.roots
        if (
            entry.shape != count.shape
            or np.any((entry < 0) | (entry >= trees * entries_per_tree))
            or np.any(np.diff(entry) <= 0)
        ):
            raise ValueError("The entries of this state must ascend, with a count for each.")
        updates = int(state["updates"])
        learnt = updates * (1 if self.location_dependent else self.shape[0] * self.shape[1])
        totals = np.bincount(entry // entries_per_tree, count, trees)
        if np.any(count < 1) or np.any(totals != learnt):
            raise ValueError(f"The counts of this state are not those of {updates} updates.")
        if not np.all((stay >= 0) & (stay <= 1)):
            raise ValueError("The stay weights of this state must lie between 0 and 1.")
        rows = np.bincount(entry // (pool.roots * entries_per_tree))
        pool.reserve(_DEPTH * int(rows.max(initial=0)))
        inner = _import(entry, count, stay, *pool.nodes, pool.roots, self._bits)
        if inner != len(stay):
            raise ValueError(f"This state needs {inner} stay weights, it has {len(stay)}.")
        self._pool, self.updates = pool, updates

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles are as small as `state_dict`."""
        arguments = ("shape", "levels", "location_dependent", "max_count", "threads")
        return {key: getattr(self, key) for key in arguments} | {"state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors = state.pop("state")
        state["threads"] = min(state["threads"], _MAX_THREADS)  # another machine may have more
        self.__init__(**state)  # type: ignore[misc]
        self.load_state_dict(tensors)

    def __repr__(self) -> str:
        shared = "" if self.location_dependent else ", location_dependent=False"
        return f"CTS({self.shape}, levels={self.levels}{shared})"

    def _new_pool(self) -> _Pool:
        height, width = self.shape if self.location_dependent else (1, 1)
        return _Pool(height, width, self.levels)

    def _layout(self) -> torch.Tensor:
        return torch.tensor([*self.shape, self.levels, int(self.location_dependent)])

    def _framed(self, frames: Symbols | torch.Tensor) -> Symbols:
        """Checked, and with the zeros that are read left, right and above of an image."""
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
        framed = np.zeros((len(frames), self.shape[0] + 1, self.shape[1] + 2), np.uint8)
        framed[:, 1:, 1:-1] = frames
        return framed

    def _query(self, frames: Symbols | torch.Tensor) -> tuple[Floats, Floats]:
        """log rho and the prediction gain log rho' - log rho of each frame."""
        frames = self._framed(frames)
        # One partial sum for every image row, added up in the same order whatever the threads did.
        sums = np.empty((len(frames), 2, self.shape[0]))
        values, children, _ = self._pool.nodes
        for start in range(0, len(frames), _CHUNK):
            chunk, part = frames[start : start + _CHUNK], sums[start : start + _CHUNK]
            model = (chunk, values, children, *self._pool.held, self._bits, self.updates, part)
            if not self.location_dependent:
                for i, frame in enumerate(chunk):
                    after = self._pool.copy()
                    after.reserve(_DEPTH * self.shape[0] * self.shape[1])
                    _learn_shared(frame[None], *after.nodes, self._bits, self.updates)
                    _query_shared(frame, values, children, *after.nodes[:2], self._bits, part[i])
            elif self.threads == 1:
                _query(0, self.shape[0], *model)
            else:
                with _numba_threads(self.threads):
                    _query_parallel(model, self.shape[0], self.threads)
        log_rho, gain = np.ascontiguousarray(sums.sum(axis=2).T)
        return log_rho, gain


class _Pool:
    """The nodes of the trees of each image row, numbered in the order of their creation.

    Node 0 stands for all nodes that do not exist yet, nodes 1 to `roots` are the roots.

    nodes: values (rows, capacity, 2 + A), holding N, w, c_0, c_1, ... of each node; the numbers of
        its children (rows, capacity, A); and how many nodes each row has (rows,).
    held: the key last learnt at each root (rows, roots), the nodes of its path (rows, roots,
        depths), and paths (rows, numbers) with a column for each, newer than the nodes.
    """

    def __init__(self, rows: int, roots: int, levels: int) -> None:
        self.roots = roots
        values = np.zeros((rows, roots + 1, 2 + levels))
        values[:, :, 1] = 0.5
        children = np.zeros((rows, roots + 1, levels), np.int32)
        self.nodes: tuple[Floats, Nodes, Integers]
        self.nodes = values, children, np.full(rows, roots + 1)
        self.held: tuple[Keys, Nodes, Floats]
        self.held = (
            np.full((rows, roots), _NOTHING, np.uint32),
            np.zeros((rows, roots, _DEPTH + 1), np.int32),
            np.zeros((rows, _blocks(roots) * _BLOCK)),
        )

    def trees(self) -> tuple[Floats, Nodes, Integers]:
        """The nodes, after writing to them what is held."""
        values, children, _ = self.nodes
        _put_back(values, *self.held, children.shape[2])
        return self.nodes

    def reserve(self, nodes: int) -> None:
        """Make room for this many new nodes in each row; doubling keeps the copies rare."""
        values, children, used = self.nodes
        rows, capacity, levels = children.shape
        most = 1 + self.roots * sum(levels**depth for depth in range(_DEPTH + 1))
        needed = min(int(used.max()) + nodes, most)
        if needed > capacity:
            room = min(max(needed, 2 * capacity), most)
            # Pages of zeros that are not written to take no memory.
            self.nodes = (
                np.zeros((rows, room, 2 + levels)),
                np.zeros((rows, room, levels), np.int32),
                used,
            )
            self.nodes[0][:, :capacity] = values
            self.nodes[1][:, :capacity] = children

    def copy(self) -> _Pool:
        """A copy that can grow on its own, of a pool that holds nothing."""
        pool = copy(self)
        values, children, used = self.nodes
        pool.nodes = values.copy(), children.copy(), used.copy()
        return pool


@contextmanager
def _numba_threads(threads: int) -> Iterator[None]:
    before = numba.get_num_threads()
    numba.set_num_threads(threads)
    try:
        yield
    finally:
        numba.set_num_threads(before)


# Kernels. A key is a context and a symbol in one number of `bits` bits each: left, up, up-left,
# up-right, symbol. Frames have their border of zeros. Values, children and used are those of a
# pool, or of one of its rows.
#
# Paths hold N, w and c_x of the nodes from the root to the leaf, for one key in each column. They
# are one-dimensional: blocks of _LANES columns, in which all first numbers come first. Distances
# within a block are constants, so the compiler knows that nothing overlaps, and a column's numbers
# stay in registers while it goes from the leaf to the root.

_LANES = 16
_WEIGHTS = (_DEPTH + 1) * _LANES  # where the w of a block begin
_COUNTS = 2 * _WEIGHTS  # where the c_x begin
_BLOCK = 3 * _WEIGHTS


@jit()
def _blocks(columns: int) -> int:
    """How many blocks so many columns take."""
    return (columns + _LANES - 1) // _LANES


@jit()
def _place(column: int) -> int:
    """Where the numbers of a column begin; they are _LANES apart."""
    return column // _LANES * _BLOCK + column % _LANES


@jit()
def _row_keys(frame: Symbols, y: int, bits: int, keys: Keys) -> None:
    """Keys (W,) of row y of a frame."""
    above, row = frame[y], frame[y + 1]
    for x in range(len(keys)):
        keys[x] = (
            (row[x] << (4 * bits))
            | (above[x + 1] << (3 * bits))
            | (above[x] << (2 * bits))
            | (above[x + 2] << bits)
            | row[x + 1]
        )


@jit()
def _equal(keys: Keys, others: Keys) -> bool:
    """Whether two rows of keys are one; without a branch for each, unlike array comparison."""
    differ = np.uint32(0)
    for x in range(len(keys)):
        differ |= keys[x] ^ others[x]
    return bool(differ == 0)


@jit()
def _fetch(values: Floats, nodes: Nodes, symbol: int, paths: Floats, place: int) -> None:
    """Copy the path of a symbol from its nodes."""
    for depth in range(_DEPTH + 1):
        at = place + depth * _LANES
        paths[at] = values[nodes[depth], 0]
        paths[at + _WEIGHTS] = values[nodes[depth], 1]
        paths[at + _COUNTS] = values[nodes[depth], 2 + symbol]


@jit()
def _store(values: Floats, nodes: Nodes, symbol: int, paths: Floats, place: int) -> None:
    """Copy the path of a symbol back to its nodes."""
    for depth in range(_DEPTH + 1):
        at = place + depth * _LANES
        values[nodes[depth], 0] = paths[at]
        values[nodes[depth], 1] = paths[at + _WEIGHTS]
        values[nodes[depth], 2 + symbol] = paths[at + _COUNTS]


@jit()
def _load(
    values: Floats, children: Nodes, bits: int, key: int, nodes: Nodes, paths: Floats, place: int
) -> None:
    """Find the nodes (depths,) of the path of a key from its root, and copy it."""
    mask = (1 << bits) - 1
    for depth in range(_DEPTH):
        branch = (key >> ((_DEPTH - depth) * bits)) & mask
        nodes[depth + 1] = children[nodes[depth], branch]
    _fetch(values, nodes, key & mask, paths, place)


@jit()
def _share(key: int, other: int, bits: int, paths: Floats, place: int, others_place: int) -> None:
    """Give a path the numbers of the nodes that it has in common with another of the same tree."""
    same_symbol = (key ^ other) & ((1 << bits) - 1) == 0
    for depth in range(_DEPTH + 1):
        if (key ^ other) >> ((_DEPTH + 1 - depth) * bits):
            break
        at, others_at = place + depth * _LANES, others_place + depth * _LANES
        paths[at] = paths[others_at]
        paths[at + _WEIGHTS] = paths[others_at + _WEIGHTS]
        if same_symbol:
            paths[at + _COUNTS] = paths[others_at + _COUNTS]


@jit()
def _grow(
    values: Floats, children: Nodes, used: Integers, row: int, bits: int, key: int, nodes: Nodes
) -> None:
    """Find the nodes (depths,) of the path of a key from its root, and create those missing."""
    mask = (1 << bits) - 1
    for depth in range(_DEPTH):
        branch = (key >> ((_DEPTH - depth) * bits)) & mask
        if children[row, nodes[depth], branch] == 0:
            children[row, nodes[depth], branch] = used[row]
            values[row, used[row], 1] = 0.5
            used[row] += 1
        nodes[depth + 1] = children[row, nodes[depth], branch]


# Both of these carry p as a fraction, mixed / scale, in which the divisions by N + 1 are put off.


@jit()
def _predict(paths: Floats, prior: float, p: Floats) -> None:
    """P(symbol | context) of each path, for whole blocks of them."""
    for block in range(len(p) // _LANES):
        numbers = paths[block * _BLOCK : (block + 1) * _BLOCK]
        for lane in range(_LANES):
            leaf = lane + _DEPTH * _LANES
            mixed, scale = numbers[leaf + _COUNTS] + prior, numbers[leaf] + 1.0
            for height in range(_DEPTH):
                at = lane + (_DEPTH - 1 - height) * _LANES
                count, seen, stay = numbers[at + _COUNTS], numbers[at] + 1.0, numbers[at + _WEIGHTS]
                mixed = stay * (count + prior) * scale + (1.0 - stay) * mixed * seen
                scale *= seen
            p[block * _LANES + lane] = mixed / scale


@jit()
def _learn_paths(paths: Floats, prior: float, alpha: float, blocks: int) -> None:
    """Update every path once, as the module's text says."""
    for block in range(blocks):
        numbers = paths[block * _BLOCK : (block + 1) * _BLOCK]
        for lane in range(_LANES):
            leaf = lane + _DEPTH * _LANES
            count, seen = numbers[leaf + _COUNTS], numbers[leaf] + 1.0
            mixed, scale = count + prior, seen
            numbers[leaf], numbers[leaf + _COUNTS] = seen, count + 1.0
            for height in range(_DEPTH):
                at = lane + (_DEPTH - 1 - height) * _LANES
                count, seen, stay = numbers[at + _COUNTS], numbers[at] + 1.0, numbers[at + _WEIGHTS]
                stayed = stay * (count + prior) * scale
                mixed = stayed + (1.0 - stay) * mixed * seen
                scale *= seen
                numbers[at], numbers[at + _COUNTS] = seen, count + 1.0
                numbers[at + _WEIGHTS] = alpha + (1.0 - 2.0 * alpha) * (stayed / mixed)


@jit()
def _take_logs(p: Floats, p_after: Floats) -> None:
    """Replace p and p' by log p and log p'/p; the latter keeps its digits when they are close."""
    for i in range(len(p)):
        p_after[i] = log1p((p_after[i] - p[i]) / p[i])
        p[i] = log(p[i])


@jit()
def _sum(log_p: Floats, gain: Floats, slots: Integers, sums: Floats) -> None:
    """Sums (2,) of log p and of log p'/p over the given slots."""
    log_rho, prediction_gain = 0.0, 0.0
    for slot in slots:
        log_rho += log_p[slot]
        prediction_gain += gain[slot]
    sums[0], sums[1] = log_rho, prediction_gain


@jit()
def _pseudo_counts(log_rho: Floats, gain: Floats, max_count: float) -> Floats:
    counts = np.full(len(gain), max_count)
    for i in range(len(gain)):
        if gain[i] > 0:  # exp(gain) may overflow, and then the count is 0
            count = -math.expm1(min(log_rho[i] + gain[i], 0.0)) / math.expm1(gain[i])
            counts[i] = min(count, max_count)
    return counts


@jit()
def _query(
    top: int,
    bottom: int,
    frames: Symbols,
    values: Floats,
    children: Nodes,
    held_keys: Keys,
    held_nodes: Nodes,
    held_paths: Floats,
    bits: int,
    updates: int,
    sums: Floats,
) -> None:
    """Sums (B, 2, H) of log p and of log p'/p over each image row from top to bottom."""
    batch, width = len(frames), held_keys.shape[1]
    prior, alpha = 1.0 / (1 << bits), 1.0 / (updates + 2.0)
    keys = np.empty((batch, width), np.uint32)
    slots = np.empty((batch, width), np.int64)  # the column in which the path of a pixel is
    held, held_sums = np.arange(width), np.empty(2)  # the slots of the paths that are held
    still = np.empty(batch, np.bool_)  # whether all of a row are
    nodes = np.empty(_DEPTH + 1, np.int32)
    held_blocks = _blocks(width)
    columns = (held_blocks + _blocks(batch * width)) * _LANES
    paths = np.zeros(columns // _LANES * _BLOCK)
    p, p_after = np.empty(columns), np.empty(columns)
    for y in range(top, bottom):
        paths[: held_blocks * _BLOCK] = held_paths[y]
        used = held_blocks * _LANES
        for b in range(batch):
            _row_keys(frames[b], y, bits, keys[b])
            still[b] = _equal(keys[b], held_keys[y])
            if still[b]:
                continue
            for x in range(width):
                key = keys[b, x]
                if key == held_keys[y, x]:
                    slots[b, x] = x
                elif b > 0 and key == keys[b - 1, x]:
                    slots[b, x] = slots[b - 1, x]
                else:
                    place = _place(used)
                    nodes[0] = 1 + x
                    _load(values[y], children[y], bits, key, nodes, paths, place)
                    _share(key, held_keys[y, x], bits, paths, place, _place(x))
                    slots[b, x] = used
                    used += 1
        blocks = _blocks(used)
        before, after = p[: blocks * _LANES], p_after[: blocks * _LANES]
        _predict(paths, prior, before)
        _learn_paths(paths, prior, alpha, blocks)
        _predict(paths, prior, after)
        _take_logs(before, after)
        _sum(before, after, held, held_sums)
        for b in range(batch):
            if still[b]:
                sums[b, :, y] = held_sums
            else:
                _sum(before, after, slots[b], sums[b, :, y])


@jit(parallel=True)
def _query_parallel(model: tuple[Any, ...], height: int, parts: int) -> None:
    for i in numba.prange(parts):
        _query(i * height // parts, (i + 1) * height // parts, *model)


@jit()
def _learn(
    top: int,
    bottom: int,
    frames: Symbols,
    values: Floats,
    children: Nodes,
    used: Integers,
    held_keys: Keys,
    held_nodes: Nodes,
    held_paths: Floats,
    bits: int,
    updates: int,
) -> None:
    """Learn the image rows from top to bottom."""
    prior, mask = 1.0 / (1 << bits), (1 << bits) - 1
    width = held_keys.shape[1]
    keys = np.empty(width, np.uint32)
    for y in range(top, bottom):
        held, nodes, paths = held_keys[y], held_nodes[y], held_paths[y]
        for b in range(len(frames)):
            _row_keys(frames[b], y, bits, keys)
            if not _equal(keys, held):
                for x in range(width):
                    if keys[x] == held[x]:
                        continue
                    if held[x] != _NOTHING:
                        _store(values[y], nodes[x], held[x] & mask, paths, _place(x))
                    nodes[x, 0] = 1 + x
                    _grow(values, children, used, y, bits, keys[x], nodes[x])
                    _fetch(values[y], nodes[x], keys[x] & mask, paths, _place(x))
                    held[x] = keys[x]
            _learn_paths(paths, prior, 1.0 / (updates + b + 2.0), _blocks(width))


@jit()
def _put_back(
    values: Floats, held_keys: Keys, held_nodes: Nodes, held_paths: Floats, levels: int
) -> None:
    """Write the paths that are held to their nodes, and go on holding them."""
    for y in range(len(held_keys)):
        for x in range(held_keys.shape[1]):
            if held_keys[y, x] != _NOTHING:
                symbol = held_keys[y, x] % levels
                _store(values[y], held_nodes[y, x], symbol, held_paths[y], _place(x))


@jit(parallel=True)
def _learn_parallel(model: tuple[Any, ...], height: int, parts: int) -> None:
    for i in numba.prange(parts):
        _learn(i * height // parts, (i + 1) * height // parts, *model)


@jit()
def _learn_shared(
    frames: Symbols, values: Floats, children: Nodes, used: Integers, bits: int, updates: int
) -> None:
    """Learn the pixels of frames (B, H, W) in reading order, all in one tree."""
    batch, height, width = len(frames), frames.shape[1] - 1, frames.shape[2] - 2
    prior, mask = 1.0 / (1 << bits), (1 << bits) - 1
    keys = np.empty(width, np.uint32)
    paths, nodes = np.zeros(_BLOCK), np.ones(_DEPTH + 1, np.int32)
    learnt = updates * height * width  # pixels
    for b in range(batch):
        for y in range(height):
            _row_keys(frames[b], y, bits, keys)
            for x in range(width):
                _grow(values, children, used, 0, bits, keys[x], nodes)
                _fetch(values[0], nodes, keys[x] & mask, paths, 0)
                _learn_paths(paths, prior, 1.0 / (learnt + 2.0), 1)
                _store(values[0], nodes, keys[x] & mask, paths, 0)
                learnt += 1


@jit()
def _query_shared(
    frame: Symbols,
    values: Floats,
    children: Nodes,
    values_after: Floats,
    children_after: Nodes,
    bits: int,
    sums: Floats,
) -> None:
    """Sums (2, H) of log p and of log p'/p over each image row, from two frozen trees."""
    height, width = frame.shape[0] - 1, frame.shape[1] - 2
    p, p_after = np.empty((height, width)), np.empty((height, width))
    _query_pixels(frame, values, children, bits, False, p)
    _query_pixels(frame, values_after, children_after, bits, False, p_after)
    for y in range(height):
        _take_logs(p[y], p_after[y])
        _sum(p[y], p_after[y], np.arange(width), sums[:, y])


@jit()
def _query_pixels(
    frame: Symbols, values: Floats, children: Nodes, bits: int, by_location: bool, p: Floats
) -> None:
    """P(symbol | context) of each pixel, (H, W)."""
    height, width = p.shape
    keys, nodes = np.empty(width, np.uint32), np.empty(_DEPTH + 1, np.int32)
    paths, row_p = np.zeros(_blocks(width) * _BLOCK), np.empty(_blocks(width) * _LANES)
    for y in range(height):
        _row_keys(frame, y, bits, keys)
        for x in range(width):
            row, nodes[0] = (y, 1 + x) if by_location else (0, 1)
            _load(values[row], children[row], bits, keys[x], nodes, paths, _place(x))
        _predict(paths, 1.0 / (1 << bits), row_p)
        p[y] = row_p[:width]


@jit()
def _sample(
    uniforms: Floats, values: Floats, children: Nodes, bits: int, location_dependent: bool
) -> Symbols:
    """A frame (H, W) drawn pixel by pixel with uniforms (H, W) in [0, 1)."""
    height, width = uniforms.shape
    levels = 1 << bits
    frame = np.zeros((height + 1, width + 2), np.uint8)
    pixels = frame[1:, 1:-1]
    keys, nodes = np.empty(width, np.uint32), np.empty(_DEPTH + 1, np.int32)
    paths, p = np.zeros(_BLOCK), np.empty(_LANES)
    for y in range(height):
        for x in range(width):
            _row_keys(frame, y, bits, keys)  # the pixel itself is still 0
            row, nodes[0] = (y, 1 + x) if location_dependent else (0, 1)
            for symbol in range(levels):
                _load(values[row], children[row], bits, keys[x] + symbol, nodes, paths, symbol)
            _predict(paths, 1.0 / levels, p)
            rest = uniforms[y, x]
            while rest >= p[pixels[y, x]] and pixels[y, x] < levels - 1:
                rest -= p[pixels[y, x]]
                pixels[y, x] += 1
    return pixels.copy()


@jit()
def _export(
    values: Floats,
    children: Nodes,
    roots: int,
    bits: int,
    entry: Integers,
    count: Floats,
    stay: Floats,
) -> tuple[int, int]:
    """Write the state of all trees, in order; return how many entries and stay weights it has."""
    levels = range(1 << bits)
    entries = inner = 0
    for tree in range(len(values) * roots):
        v, c = values[tree // roots], children[tree // roots]
        root = 1 + tree % roots
        if v[root, 0] == 0:
            continue
        stay[inner] = v[root, 1]
        inner += 1
        for left in levels:
            node_1 = c[root, left]
            if node_1 == 0:
                continue
            stay[inner] = v[node_1, 1]
            inner += 1
            for up in levels:
                node_2 = c[node_1, up]
                if node_2 == 0:
                    continue
                stay[inner] = v[node_2, 1]
                inner += 1
                for up_left in levels:
                    node_3 = c[node_2, up_left]
                    if node_3 == 0:
                        continue
                    stay[inner] = v[node_3, 1]
                    inner += 1
                    for up_right in levels:
                        leaf = c[node_3, up_right]
                        context = (((tree << bits) | left) << bits) | up
                        context = (((context << bits) | up_left) << bits) | up_right
                        for symbol in levels:
                            if v[leaf, 2 + symbol] > 0:  # never so for node 0, no leaf
                                entry[entries] = (context << bits) | symbol
                                count[entries] = v[leaf, 2 + symbol]
                                entries += 1
    return entries, inner


@jit()
def _import(
    entry: Integers,
    count: Integers,
    stay: Floats,
    values: Floats,
    children: Nodes,
    used: Integers,
    roots: int,
    bits: int,
) -> int:
    """Build the trees of a state in an empty pool; return how many stay weights they need.

    The entries are in order, so that new inner nodes come up in the order of their weights.
    """
    levels = 1 << bits
    nodes = np.empty(_DEPTH + 1, np.int32)
    inner = 0
    for i in range(len(entry)):
        tree = entry[i] >> ((_DEPTH + 1) * bits)
        row = tree // roots
        nodes[0] = 1 + tree % roots
        _grow(values, children, used, row, bits, entry[i], nodes)
        for depth, node in enumerate(nodes):
            if values[row, node, 0] == 0 and depth < _DEPTH:
                if inner < len(stay):
                    values[row, node, 1] = stay[inner]
                inner += 1
            values[row, node, 0] += count[i]
            values[row, node, 2 + entry[i] % levels] += count[i]
    return inner
