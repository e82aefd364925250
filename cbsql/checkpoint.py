"""Checkpoints of a run that are exact, written in one go, and free of code.

A checkpoint is everything that a run needs to go on as if nothing had happened. Its files hold
arrays (safetensors, compressed) and JSON. What a replay buffer holds is written in segments, each
once, so that a checkpoint costs what is new since the one before. All checkpoints share them, so
there is a file of their parity, from which any one of them can be restored.
"""

import hashlib
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from numpy.typing import NDArray

from cbsql import files

FORMAT = 2
KEPT = 2
"""Checkpoints that stay on disk: if the newest one is damaged, the one before it is used."""
SEGMENT_BYTES = 2**24
"""About how much a segment holds before compression: bounds the memory it takes to write, and the
size of the parity, which each checkpoint writes anew."""


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message says which and why."""


@dataclass(frozen=True)
class Ring:
    """An array that is written round and round: item i is at row i modulo its length."""

    rows: NDArray[Any]
    written: int
    """Items so far, those included that have been overwritten."""


class Checkpoints:
    """The checkpoints in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._segments: list[dict[str, Any]] = []
        """Of the latest checkpoint: file, checksum, and the items of each ring in it."""
        self._parity: NDArray[np.uint8] = np.empty(0, np.uint8)
        """Exclusive or of these files."""

    def save(self, name: str, state: Any, rings: Mapping[str, Ring]) -> int:
        """Write a checkpoint of what :mod:`cbsql.files` can hold; returns its new bytes.

        Names sort in the order of the checkpoints. When this returns, the checkpoint is on disk.
        """
        try:
            self.folder.mkdir(exist_ok=True)
            segments, parity, segment_bytes = self._write_segments(name, rings)
            tensors: dict[str, th.Tensor] = {}
            tree = files.encode(state, tensors, "state")
            entry = self._write(f"{name}.state", tensors)
            manifest = {"format": FORMAT, "tree": tree, "tensors": entry, "segments": segments}
            manifest["parity"] = self._write_file(f"{name}.parity", parity.tobytes())
            text = json.dumps(manifest)
            sealed = json.dumps({"sha256": _digest(text.encode()), "manifest": text})
            write_file(self.folder / f"{name}.json", sealed.encode())
        except OSError as error:
            raise CheckpointError(
                f"The checkpoint {self.folder / name} could not be written: {error.strerror}. "
                "The one before it is as it was."
            ) from error
        self._segments, self._parity = segments, parity
        self._tidy(name)
        return int(segment_bytes + entry["bytes_on_disk"] + parity.size + len(sealed))

    def load(self, rings: Mapping[str, Ring]) -> tuple[Any, list[str]] | None:
        """Read the newest sound checkpoint, and put what it holds into the arrays of ``rings``.

        Returns its state, and a sentence for each file that was damaged; None if there is no
        checkpoint at all.
        """
        damages: list[str] = []
        for path in sorted(self.folder.glob("*.json"), reverse=True):
            try:
                manifest = self._read_manifest(path)
                repaired = self._check_segments(manifest)  # all of them, before anything changes
                state = files.decode(manifest["tree"], self._read(manifest["tensors"]))
                for entry in manifest["segments"]:
                    for name, items in self._read(entry).items():
                        rows, first = rings[name].rows, entry["first"][name]
                        rows[np.arange(first, first + len(items)) % len(rows)] = items.numpy()
            except CheckpointError as error:
                damages.append(str(error))
                continue
            self._segments = manifest["segments"]
            older = [f"{damage} Going on from an earlier checkpoint." for damage in damages]
            return state, older + repaired
        if damages:
            raise CheckpointError(" ".join(damages))
        return None

    def _check_segments(self, manifest: dict[str, Any]) -> list[str]:
        """Read all segments, and restore one of them from the others if need be."""
        total = np.empty(0, np.uint8)
        damaged = []
        for entry in manifest["segments"]:
            try:
                total = _xor(total, self._read_file(entry))
            except CheckpointError as error:
                damaged.append((entry, error))
        for entry, why in damaged:
            if len(damaged) > 1 or "parity" not in manifest:
                raise why
            # What is missing in the parity of the others is the one that is missing.
            data = _xor(total, self._read_file(manifest["parity"])).tobytes()
            data = data[: entry["bytes_on_disk"]]
            if _digest(data) != entry["sha256"]:
                raise why
            write_file(self.folder / Path(entry["file"]).name, data)
            total = _xor(total, data)
        self._parity = total
        return [f"{why} It has been restored from the others." for _, why in damaged]

    def _write_segments(
        self, name: str, rings: Mapping[str, Ring]
    ) -> tuple[list[dict[str, Any]], NDArray[np.uint8], int]:
        """Write what no segment has yet; returns all segments, their parity, and new bytes."""
        kept = [s for s in self._segments if _needed(s, rings)]
        parity = self._parity
        try:
            for entry in self._segments:
                if entry not in kept:
                    parity = _xor(parity, self._read_file(entry))
        except CheckpointError:  # it was damaged, and is not needed any more
            parity = np.empty(0, np.uint8)
            for entry in kept:
                parity = _xor(parity, self._read_file(entry))
        ranges = {}
        for key, ring in rings.items():
            last = max((s["first"][key] + s["items"][key] for s in self._segments), default=0)
            # The newest item is written once more, since its successor may have changed it.
            ranges[key] = (max(last - 1, ring.written - len(ring.rows), 0), ring.written)
        size = sum((b - a) * rings[key].rows[0].nbytes for key, (a, b) in ranges.items())
        parts = -(-size // SEGMENT_BYTES)
        new_bytes = 0
        for part in range(parts):
            tensors, first = {}, {}
            for key, (start, stop) in ranges.items():
                low, high = (start + (stop - start) * p // parts for p in (part, part + 1))
                rows = rings[key].rows
                tensors[key] = th.from_numpy(rows[np.arange(low, high) % len(rows)])
                first[key] = low
            entry = self._write(f"{name}.replay{part}", tensors)
            parity = _xor(parity, self._read_file(entry))
            new_bytes += entry["bytes_on_disk"]
            items = {key: len(tensor) for key, tensor in tensors.items()}
            kept.append({**entry, "first": first, "items": items})
        return kept, parity, new_bytes

    def _write(self, name: str, tensors: Mapping[str, th.Tensor]) -> dict[str, Any]:
        raw = io.BytesIO()
        files.write_tensors(raw, tensors)
        entry = self._write_file(name, zlib.compress(raw.getbuffer(), level=1))
        return {**entry, "bytes": raw.tell()}

    def _write_file(self, name: str, data: bytes) -> dict[str, Any]:
        digest = _digest(data)
        file = f"{name}-{digest[:12]}"  # never the name of another file that is still in use
        write_file(self.folder / file, data)
        return {"file": file, "sha256": digest, "bytes_on_disk": len(data)}

    def _read(self, entry: dict[str, Any]) -> dict[str, th.Tensor]:
        data = self._read_file(entry)
        try:
            raw = zlib.decompressobj().decompress(data, max_length=entry["bytes"])
            return files.read_tensors(io.BytesIO(raw), len(raw))
        except (zlib.error, ValueError) as error:
            raise CheckpointError(f"{self.folder / entry['file']} is damaged: {error}.") from error

    def _read_file(self, entry: dict[str, Any]) -> bytes:
        path = self.folder / Path(entry["file"]).name  # never outside of the folder
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
        if _digest(data) != entry["sha256"]:
            raise CheckpointError(f"{path} is damaged: its checksum is another.")
        return data

    def _read_manifest(self, path: Path) -> dict[str, Any]:
        try:
            sealed = json.loads(path.read_bytes())
            text = sealed["manifest"]
            sound = _digest(text.encode()) == sealed["sha256"]
            manifest: dict[str, Any] = json.loads(text) if sound else {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {error!r}.") from error
        if not sound:
            raise CheckpointError(f"{path} is damaged: its checksum is another.")
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {manifest['format']}; this version reads {FORMAT}."
            )
        return manifest

    def _tidy(self, newest: str) -> None:
        """Remove what no kept checkpoint refers to, and damaged ones from which none went on."""
        manifests = sorted(p for p in self.folder.glob("*.json") if p.stem <= newest)[-KEPT:]
        used = {path.name for path in manifests}
        for path in manifests:
            try:
                manifest = self._read_manifest(path)
            except CheckpointError:
                continue
            entries = (manifest["tensors"], manifest.get("parity"), *manifest["segments"])
            used |= {entry["file"] for entry in entries if entry}
        for path in self.folder.iterdir():
            if path.name not in used:
                path.unlink(missing_ok=True)


def _needed(segment: dict[str, Any], rings: Mapping[str, Ring]) -> bool:
    return any(
        segment["first"][key] + segment["items"][key] > ring.written - len(ring.rows)
        for key, ring in rings.items()
    )


def _xor(total: NDArray[np.uint8], data: bytes) -> NDArray[np.uint8]:
    """Exclusive or, the shorter one being followed by zeros."""
    more = np.frombuffer(data, np.uint8)
    result = np.zeros(max(total.size, more.size), np.uint8)
    result[: total.size] = total
    result[: more.size] ^= more
    return result


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_file(path: Path, data: bytes) -> None:
    """Write a file in one go."""
    with files.whole_file(path) as file:
        file.write(data)


@contextmanager
def only_process(folder: Path) -> Iterator[None]:
    """Refuse to work in a folder in which another process does."""
    import fcntl  # not there on Windows

    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"Another process is at work in {folder}; wait for it, or choose another folder."
            ) from None
        yield
