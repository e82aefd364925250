"""Exact counts, for states that can be told apart: integers, booleans and arrays of them."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_KINDS = {"b": "boolean", "B": "byte", "i": "integer"}


class ExactCounter:
    """A table of counts keyed by the exact content of a state.

    It serves Discrete, MultiDiscrete and MultiBinary spaces and integer or boolean arrays. A batch
    has one state per row; all states of one counter have the same number of elements and the same
    kind (boolean, byte or other integer).
    """

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}
        self._layout: tuple[str, int] | None = None  # (kind, elements) of the states counted

    def count(self, x: Any) -> NDArray[np.float64]:
        """How often each row was updated, shape (batch,)."""
        keys, _ = self._keys(x)
        return np.array([self._counts.get(key, 0) for key in keys], dtype=np.float64)

    def update(self, x: Any) -> None:
        """Count every row once more."""
        keys, self._layout = self._keys(x)
        for key in keys:
            self._counts[key] = self._counts.get(key, 0) + 1

    def __len__(self) -> int:
        """The number of different states counted."""
        return len(self._counts)

    def __repr__(self) -> str:
        return "ExactCounter()"

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The table: one row of bytes for each state, its counts, and the layout of a state."""
        kind, elements = self._layout or ("i", 0)
        table = np.frombuffer(bytearray().join(self._counts), dtype=np.uint8)
        return {
            "keys": torch.from_numpy(table.reshape(len(self), -1 if self._counts else 0)),
            "counts": torch.tensor(list(self._counts.values()), dtype=torch.int64),
            "layout": torch.tensor([ord(kind), elements]),
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Replace the table."""
        if state.keys() != {"keys", "counts", "layout"}:
            raise ValueError(f"This is not the state of an ExactCounter: it has {sorted(state)}.")
        keys, counts = state["keys"].numpy(), state["counts"].tolist()
        kind, elements = state["layout"].tolist()
        if len(keys) != len(counts) or keys.dtype != np.uint8:
            raise ValueError(f"The state has {len(keys)} keys but {len(counts)} counts.")
        if min(counts, default=1) < 1 or chr(kind) not in _KINDS:
            raise ValueError("The counts of this state must be positive, and its layout known.")
        self._counts = {row.tobytes(): count for row, count in zip(keys, counts, strict=True)}
        self._layout = (chr(kind), elements) if elements else None

    def _keys(self, x: Any) -> tuple[list[bytes], tuple[str, int]]:
        """The bytes that identify each row, and the layout they follow."""
        states = x.numpy(force=True) if isinstance(x, torch.Tensor) else np.asarray(x)
        if states.dtype.kind not in "biu" or states.ndim == 0 or states.size == 0:
            raise ValueError(
                f"ExactCounter was given {states.dtype} of shape {states.shape}; it counts a batch "
                "of integers or booleans, one state per row. For floats use SimHash."
            )
        rows = states.reshape(len(states), -1)
        if states.dtype == np.bool_:
            kind, rows = "b", np.packbits(rows, axis=1)
        elif states.dtype == np.uint8:
            kind = "B"
        else:  # one width and byte order for all other integers, so that equal states are equal
            kind, rows = "i", rows.astype("<i8", copy=False)
        layout = (kind, states.size // len(states))
        if self._layout and self._layout != layout:
            raise ValueError(
                f"ExactCounter was given states of {_describe(layout)}, but those it has counted "
                f"have {_describe(self._layout)}. Use one counter for each kind of state."
            )
        return [row.tobytes() for row in rows], layout


def _describe(layout: tuple[str, int]) -> str:
    kind, elements = layout
    return f"{elements} {_KINDS[kind]} elements"
