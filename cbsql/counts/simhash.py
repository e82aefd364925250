"""Counts of float vectors by locality-sensitive hashing: SimHash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]


class SimHash:
    """Counts states by the k-bit code of the cell they fall into.

    Tang et al. (2017), "#Exploration: a study of count-based exploration for deep RL". The code of
    a state s is sgn(A g(s)), where A has k rows of independent N(0, 1) entries and g(s) =
    [s / scale, 1]: k random planes cut the space into cells, and a cell is counted exactly. More
    bits make smaller cells. The constant 1 keeps the planes off the origin, at distances of about
    `scale`, so that magnitudes are told apart as well as directions: choose `scale` as the typical
    size of each component.

    A dict observation is the concatenation of its values in the order of their sorted keys.

    :param size: number of components of a state
    :param k: bits of a code. 32 suits vectors of up to some dozens of components
    :param scale: one typical size for all components, or one for each
    :param standardize: hash (s - mean) / deviation with the running statistics of the updates
        instead of s. As they move, so do the cells, and a state may lose counts: better with a
        fixed `scale` where the sizes are known
    :param seed: of A. Codes are comparable between counters with equal arguments only
    """

    def __init__(
        self,
        size: int,
        k: int = 32,
        *,
        scale: float | npt.ArrayLike = 1.0,
        standardize: bool = False,
        seed: int = 0,
    ) -> None:
        if size < 1 or k < 1:
            raise ValueError(f"size and k must be at least 1, got {size} and {k}.")
        scales = np.asarray(scale, np.float64)
        if scales.shape not in ((), (size,)) or not np.all((scales > 0) & np.isfinite(scales)):
            raise ValueError(f"scale must be positive, one or {size} numbers, got {scale!r}.")
        self.size = size
        self.k = k
        self.standardize = standardize
        self._scale = np.broadcast_to(scales, size).copy()
        self._planes = np.random.default_rng(seed).standard_normal((size + 1, k))
        self._counts: dict[bytes, int] = {}
        self._updates = 0
        self._mean = np.zeros(size)
        self._squares = np.zeros(size)  # sum of squared deviations from the mean

    def count(self, x: Any) -> Floats:
        """How many updates each row's cell has had, shape (batch,)."""
        codes = self._codes(flatten(x, self.size))
        return np.array([self._counts.get(code, 0) for code in codes], np.float64)

    def update(self, x: Any) -> None:
        """Count the cell of every row once more."""
        rows = flatten(x, self.size)
        if self.standardize:
            for row in rows:  # Welford's algorithm
                self._updates += 1
                off = row - self._mean
                self._mean += off / self._updates
                self._squares += off * (row - self._mean)
        for code in self._codes(rows):
            self._counts[code] = self._counts.get(code, 0) + 1

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Planes, scale, running statistics, and the table of codes and their counts."""
        codes = np.frombuffer(bytearray().join(self._counts), np.uint8)
        return {
            "planes": torch.tensor(self._planes),
            "scale": torch.tensor(self._scale),
            "updates": torch.tensor(self._updates),
            "mean": torch.tensor(self._mean),
            "squares": torch.tensor(self._squares),
            "codes": torch.from_numpy(codes.reshape(len(self), (self.k + 7) // 8)),
            "counts": torch.tensor(list(self._counts.values()), dtype=torch.int64),
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from a state of a counter with the same `size` and `k`, taking over its planes."""
        mine = self.state_dict()
        if state.keys() != mine.keys():
            raise ValueError(f"A SimHash state has {sorted(mine)}, this one {sorted(state)}.")
        for key in ("planes", "scale", "mean", "squares"):
            if state[key].shape != mine[key].shape or not torch.all(state[key].isfinite()):
                raise ValueError(
                    f"{key} of this state must be finite of shape {tuple(mine[key].shape)}, "
                    f"as SimHash(size={self.size}, k={self.k}) has it; got the shape "
                    f"{tuple(state[key].shape)}."
                )
        shape = (len(state["counts"]), (self.k + 7) // 8)
        if state["codes"].shape != shape or torch.any(state["counts"] < 1):
            raise ValueError("A SimHash state needs a positive count for each of its codes.")
        arrays = {key: tensor.cpu().numpy().copy() for key, tensor in state.items()}
        codes = [row.tobytes() for row in arrays["codes"]]
        self._counts = dict(zip(codes, arrays["counts"].tolist(), strict=True))
        self._planes, self._scale = arrays["planes"], arrays["scale"]
        self._mean, self._squares = arrays["mean"], arrays["squares"]
        self._updates = int(state["updates"])

    def __len__(self) -> int:
        """The number of cells counted."""
        return len(self._counts)

    def __repr__(self) -> str:
        return f"SimHash({self.size}, k={self.k}, standardize={self.standardize})"

    def _codes(self, rows: Floats) -> list[bytes]:
        if self.standardize and self._updates > 1:
            deviation = np.sqrt(self._squares / self._updates)
            rows = (rows - self._mean) / np.where(deviation > 0, deviation, 1.0)
        else:
            rows = rows / self._scale
        # einsum sums each row on its own: a state's bits do not depend on the rest of its batch.
        bits = np.einsum("bi,ik->bk", rows, self._planes[:-1]) + self._planes[-1] > 0
        return [row.tobytes() for row in np.packbits(bits, axis=1)]


def flatten(x: Any, size: int) -> Floats:
    """Rows (B, size) of a batch: an array, a tensor, or a dict of those in sorted-key order."""
    parts = [x[key] for key in sorted(x)] if isinstance(x, Mapping) else [x]
    arrays = [
        part.numpy(force=True) if isinstance(part, torch.Tensor) else np.asarray(part)
        for part in parts
    ]
    shapes = [array.shape for array in arrays]
    batch_sizes = {shape[0] if shape else 0 for shape in shapes}
    if any(array.dtype.kind not in "biuf" for array in arrays):
        raise TypeError(f"Observations must be numbers, got {[str(a.dtype) for a in arrays]}.")
    if len(batch_sizes) != 1 or batch_sizes == {0}:
        raise ValueError(
            f"Observations must be a batch of at least one state, with one row each, got {shapes}."
        )
    rows = np.concatenate([a.reshape(len(a), -1) for a in arrays], axis=1, dtype=np.float64)
    if rows.shape[1] != size:
        raise ValueError(f"States must have {size} components, got {rows.shape[1]} from {shapes}.")
    if not np.all(np.isfinite(rows)):
        raise ValueError("Observations must be finite, got NaN or infinity; check the environment.")
    return rows
