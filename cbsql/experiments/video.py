"""An episode as a film."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
from numpy.typing import NDArray

LEAST_HEIGHT = 320  # pixels; smaller pictures are enlarged by a whole factor


class Film:
    """Takes pictures (height, width, 3), of any number type, all of one size."""

    def __init__(self, path: Path, frames_per_second: float) -> None:
        self._path = path
        self._frames_per_second = frames_per_second
        self._writer: Any = None

    def add(self, picture: NDArray[Any]) -> None:
        """Add one picture; fractions are brightness from 0 to 1."""
        if not np.issubdtype(picture.dtype, np.integer):
            picture = np.rint(picture * 255)
        enlarge = max(1, -(-LEAST_HEIGHT // picture.shape[0]))
        picture = picture.astype(np.uint8).repeat(enlarge, 0).repeat(enlarge, 1)
        if self._writer is None:
            self._writer = imageio_ffmpeg.write_frames(
                str(self._path),
                (picture.shape[1], picture.shape[0]),
                fps=self._frames_per_second,
                macro_block_size=2,  # what H.264 needs
            )
            self._writer.send(None)
        self._writer.send(np.ascontiguousarray(picture))

    def close(self) -> None:
        """Finish the file."""
        if self._writer is not None:
            self._writer.close()


@contextmanager
def film(path: Path, frames_per_second: float) -> Iterator[Film]:
    """An H.264 file, which browsers play; it appears when it is complete."""
    unfinished = path.with_name(f".unfinished-{path.name}")
    new = Film(unfinished, frames_per_second)
    try:
        yield new
        new.close()
        unfinished.replace(path)
    finally:
        new.close()
        unfinished.unlink(missing_ok=True)
