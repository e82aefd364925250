"""From image observations to the symbols of a density model: newest frame, area average, levels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space, is_image_space_channels_first

from cbsql._jit import jit
from cbsql.counts.cts import CTS

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class DensityCounter:
    """Counts observations by the pseudo-counts of what a density model sees of them."""

    density: CTS

    def symbols(self, x: Any) -> Bytes:
        """What the density model sees of a batch of observations: (B, *density.shape)."""
        raise NotImplementedError

    def count(self, x: Any) -> Floats:
        """Pseudo-counts of a batch, shape (batch,)."""
        return self.density.count(self.symbols(x))

    def update(self, x: Any) -> None:
        """Learn a batch in order."""
        self.density.update(self.symbols(x))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The state of the density model."""
        return self.density.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from the state of a density model of the same kind."""
        self.density.load_state_dict(state)


class PixelCounter(DensityCounter):
    """Counts image observations with a density model over symbols.

    An observation is a frame or a stack of frames, oldest first, channels first or last as
    Stable-Baselines3 reads its space. The density model sees the newest frame, in grey, averaged
    over the area of each of its pixels and rounded, in as many grey levels as it has symbols.

    :param density: the model, for example ``CTS((42, 42))``; any size works with any image
    :param observation_space: of uint8 images in [0, 255]: (H, W), (H, W, C) or (C, H, W)
    :param frame_channels: how many channels are one frame: 1 for grey or 3 for RGB. By default 3
        where the number of channels is a multiple of 3, so that a stack of 3 grey frames needs a 1
    """

    def __init__(
        self, density: CTS, observation_space: spaces.Space[Any], frame_channels: int | None = None
    ) -> None:
        self.density = density
        self._shape, self._channel_axis = image_layout(observation_space)
        channels = self._shape[self._channel_axis] if self._channel_axis is not None else 1
        if frame_channels is None:
            frame_channels = 3 if channels % 3 == 0 else 1
        if frame_channels not in (1, 3) or channels % frame_channels:
            raise ValueError(
                f"frame_channels must be 1 (grey) or 3 (RGB) and divide the {channels} channels of "
                f"the observations, got {frame_channels}."
            )
        self.frame_channels = frame_channels

    def symbols(self, x: Bytes | torch.Tensor) -> Bytes:
        """What the density model sees of a batch of observations: (B, *density.shape)."""
        if isinstance(x, torch.Tensor):
            x = x.detach().cpu().numpy()
        if not isinstance(x, np.ndarray) or x.dtype != np.uint8:
            given = getattr(x, "dtype", type(x).__name__)
            raise TypeError(f"PixelCounter takes uint8 images in [0, 255], got {given}.")
        if x.shape[1:] != self._shape or len(x) == 0:
            raise ValueError(
                f"PixelCounter takes a batch of at least one image of shape {self._shape}, "
                f"got {x.shape}."
            )
        if self._channel_axis is None:
            grey = x
        else:
            x = np.moveaxis(x, 1 + self._channel_axis, -1)  # (B, H, W, C)
            grey = x[..., -1] if self.frame_channels == 1 else _luma(x[..., -3:])
        return shrink(grey, self.density.shape, self.density.levels)

    def __repr__(self) -> str:
        return f"PixelCounter({self.density!r}, observations={self._shape})"


class PlaneCounter(DensityCounter):
    """Counts boolean images, such as MinAtar's, with a density model over two symbols.

    The planes of an observation (H, W, C) lie side by side in what the model sees, (H, C W).
    """

    def __init__(self, density: CTS, observation_space: spaces.Space[Any]) -> None:
        self._shape = observation_space.shape or ()
        if observation_space.dtype != np.bool_ or len(self._shape) != 3:
            raise ValueError(f"{observation_space} is not a space of boolean images (H, W, C).")
        height, width, planes = self._shape
        needed = CTS((height, planes * width), levels=2)
        if (density.shape, density.levels) != (needed.shape, 2):
            raise ValueError(
                f"For {observation_space} the density model is {needed}, not {density}."
            )
        self.density = density

    def symbols(self, x: npt.NDArray[np.bool_] | torch.Tensor) -> Bytes:
        """What the density model sees of a batch of observations: (B, *density.shape)."""
        x = x.numpy(force=True) if isinstance(x, torch.Tensor) else np.asarray(x)
        if x.dtype != np.bool_ or x.shape[1:] != self._shape:
            raise ValueError(
                f"PlaneCounter takes booleans (B, *{self._shape}), got {x.dtype} of {x.shape}."
            )
        return np.moveaxis(x, 3, 2).reshape(len(x), *self.density.shape).astype(np.uint8)

    def __repr__(self) -> str:
        return f"PlaneCounter({self.density!r}, observations={self._shape})"


def image_layout(space: spaces.Space[Any]) -> tuple[tuple[int, ...], int | None]:
    """Shape of the images of a space and the axis of their channels, if they have one."""
    if is_image_space(space):
        assert isinstance(space, spaces.Box)
        return space.shape, 0 if is_image_space_channels_first(space) else 2
    if isinstance(space, spaces.Box) and len(space.shape) == 2:
        stacked = spaces.Box(space.low[..., None], space.high[..., None], dtype=space.dtype.type)
        if is_image_space(stacked):
            return space.shape, None
    raise ValueError(
        f"{space} is not a space of images; those are uint8 boxes in [0, 255] of shape (H, W), "
        "(H, W, C) or (C, H, W)."
    )


def shrink(images: Bytes, shape: tuple[int, int], levels: int) -> Bytes:
    """Symbols below `levels` (B, *shape) of grey images (B, H, W) by area averaging.

    A symbol is the rounded average of its area, cut into `levels` equal parts; with 8 of them that
    is ``average >> 5``. Images smaller than `shape` are spread out by the same rule.
    """
    symbols = np.empty((len(images), *shape), np.uint8)
    _shrink(np.ascontiguousarray(images), 256 // levels, symbols)
    return symbols


@jit()
def _luma(images: Bytes) -> Bytes:
    """Grey (B, H, W) of RGB (B, H, W, 3): ITU-R BT.601 in fixed point, rounded as OpenCV does."""
    batch, height, width, _ = images.shape
    grey = np.empty((batch, height, width), np.uint8)
    for b in range(batch):
        for y in range(height):
            for x in range(width):
                luma = 9798 * images[b, y, x, 0] + 19235 * images[b, y, x, 1]
                grey[b, y, x] = (luma + 3735 * images[b, y, x, 2] + (1 << 14)) >> 15
    return grey


@jit()
def _area_weights(inputs: int, outputs: int) -> tuple[Integers, Floats]:
    """First input cell under each output cell of an axis, and the overlaps with it and the next.

    Overlaps (span, outputs) are in units of 1 / (inputs outputs) of the axis: whole numbers, whose
    sum is `inputs` for every output.
    """
    first = np.arange(outputs) * inputs // outputs
    span = inputs // outputs + (2 if inputs % outputs else 0)
    overlaps = np.zeros((span, outputs))
    for i in range(outputs):
        for k in range(span):
            start = max(i * inputs, (first[i] + k) * outputs)
            end = min((i + 1) * inputs, (first[i] + k + 1) * outputs)
            overlaps[k, i] = max(end - start, 0)
    return first, overlaps


@jit()
def _shrink(images: Bytes, step: int, symbols: Bytes) -> None:
    batch, height, width = images.shape
    _, rows, columns = symbols.shape
    first_row, row_overlaps = _area_weights(height, rows)
    first_column, column_overlaps = _area_weights(width, columns)
    span = len(column_overlaps)
    area = float(height * width)
    line = np.empty(width + span)  # the input rows under one output row, weighted and added up
    sums = np.empty(columns)  # the same over the columns; whole numbers, like all before
    for b in range(batch):
        for i in range(rows):
            line[:] = 0.0
            for k in range(len(row_overlaps)):
                overlap = row_overlaps[k, i]
                if overlap > 0:
                    row = images[b, first_row[i] + k]
                    for x in range(width):
                        line[x] += overlap * row[x]
            sums[:] = 0.0
            for k in range(span):
                for j in range(columns):
                    sums[j] += column_overlaps[k, j] * line[first_column[j] + k]
            # floor(floor(average + 1/2) / step), of whole numbers and so exact in one division.
            for j in range(columns):
                symbols[b, i, j] = np.int32((2.0 * sums[j] + area) / (2.0 * area * step))
