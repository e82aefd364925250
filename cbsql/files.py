"""Files that hold numbers and no code: zip archives of JSON and safetensors.

Nothing in such a file is unpickled, evaluated or imported. All of it is checked against the bytes
that are really there before memory is taken, and whatever is wrong ends in a :class:`FileError`.
docs/files.md describes the format.
"""

import importlib
import io
import json
import math
import os
import pathlib
import zipfile
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.save_util import open_path
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import TrainFreq, TrainFrequencyUnit
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule
from stable_baselines3.her.goal_selection_strategy import GoalSelectionStrategy
from torch.overrides import TorchFunctionMode

from cbsql.temperature import Counter, Temperature

FORMAT = 1
"""Of the files written here; it grows when a file of today could be misread."""

PathLike = str | pathlib.Path | io.BufferedIOBase

_JSON, _TENSORS = "cbsql.json", "tensors.safetensors"
_MAX_JSON_BYTES = 2**22
_MAX_DEPTH = 32

# Classes that are known by their public names. Whatever else is named is imported with trust only.
_NAMESPACES = (
    "torch.nn",
    "torch.optim",
    "stable_baselines3.common.buffers",
    "stable_baselines3.common.torch_layers",
    "stable_baselines3.dqn.policies",
    "stable_baselines3.her.her_replay_buffer",
    "cbsql.replay",
    "cbsql.deep.networks",
    "cbsql.deep.optim",
    "cbsql.deep.policies",
)
_BASES: dict[str, type] = {
    "policy_class": BasePolicy,
    "replay_buffer_class": ReplayBuffer,
    "optimizer_class": th.optim.Optimizer,
    "features_extractor_class": BaseFeaturesExtractor,
    "activation_fn": th.nn.Module,
}
# Objects that are what they were made from: attributes, which are arguments of what makes them.
_OBJECTS: dict[type, tuple[str, ...]] = {
    ConstantSchedule: ("val",),
    FloatSchedule: ("value_schedule",),
    LinearSchedule: ("start", "end", "end_fraction"),
    TrainFreq: ("frequency", "unit"),
    TrainFrequencyUnit: ("value",),
    GoalSelectionStrategy: ("value",),
    spaces.Box: ("low", "high", "dtype"),
    spaces.Dict: ("spaces",),
    spaces.Discrete: ("n", "start", "dtype"),
    spaces.MultiBinary: ("n",),
    spaces.MultiDiscrete: ("nvec", "start", "dtype"),
    spaces.Tuple: ("spaces",),
}
_KINDS = {kind.__name__: kind for kind in _OBJECTS}
_DTYPES = {
    th.bool: "BOOL",
    th.uint8: "U8",
    th.int8: "I8",
    th.int16: "I16",
    th.int32: "I32",
    th.int64: "I64",
    th.uint16: "U16",
    th.uint32: "U32",
    th.uint64: "U64",
    th.float16: "F16",
    th.bfloat16: "BF16",
    th.float32: "F32",
    th.float64: "F64",
}


class FileError(ValueError):
    """A file that cannot be read or written safely; the message names it and says why."""


@contextmanager
def blame(path: PathLike) -> Iterator[None]:
    """Within, whatever goes wrong is the fault of the content of a file, and says so."""
    try:
        yield
    except FileError:
        raise
    except Exception as error:
        # Refusals of this module are sentences. Others, of Torch for example, may be pages.
        lines = str(error).strip().splitlines() or [""]
        reason = lines[0] if type(error) is ValueError else f"{type(error).__name__}: {lines[0]}"
        raise FileError(f"{_label(path)} cannot be loaded: {printable(reason[:500])}") from error


def printable(text: str) -> str:
    """A text of a stranger without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _label(path: PathLike) -> str:
    return str(path if isinstance(path, str | pathlib.Path) else getattr(path, "name", "The file"))


@contextmanager
def whole_file(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """Write a file so that it is there completely or not at all, also after a power cut."""
    # With an ending of its own: a killed process leaves it, and nobody may take it for the file.
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    if os.name != "posix":
        return  # where folders cannot be opened
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@dataclass
class Document:
    """What a file holds, by name: values go in and out, JSON and tensors are what is stored.

    Setting a value raises :class:`FileError` if it cannot be stored, with nothing changed.
    """

    kind: str
    content: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, th.Tensor] = field(default_factory=dict)
    trust: bool = False

    def __setitem__(self, name: str, value: Any) -> None:
        tensors: dict[str, th.Tensor] = {}
        self.content[name] = encode(value, tensors, name)
        self.tensors.update(tensors)

    def __getitem__(self, name: str) -> Any:
        if name not in self.content:
            raise ValueError(f"it has no {name}.")
        return decode(self.content[name], self.tensors, self.trust, name)

    def write(self, path: PathLike, suffix: str | None = None) -> None:
        """Write the file; the same content is always the same bytes."""
        document = {"format": FORMAT, "kind": self.kind, "content": self.content}
        text = json.dumps(document, allow_nan=False).encode()
        if len(text) > _MAX_JSON_BYTES:
            raise FileError(
                f"{_label(path)} cannot be saved: beside its tensors it would have {len(text)} "
                f"bytes, and {_MAX_JSON_BYTES} are allowed."
            )
        if isinstance(path, str | pathlib.Path):
            path = pathlib.Path(path)
            if not path.suffix and suffix:
                path = path.with_name(f"{path.name}.{suffix}")
            path.parent.mkdir(parents=True, exist_ok=True)
            target: AbstractContextManager[IO[bytes]] = whole_file(path)
        else:
            target = nullcontext(open_path(path, "w"))
        with target as file, zipfile.ZipFile(file, "w") as archive:
            archive.writestr(zipfile.ZipInfo(_JSON), text)
            info = zipfile.ZipInfo(_TENSORS)
            with archive.open(info, "w", force_zip64=True) as stream:
                write_tensors(stream, self.tensors)

    def budget(self) -> "Budget | nullcontext[None]":
        """A limit to what may be built from this file, unless it is trusted."""
        return nullcontext() if self.trust else Budget(self.tensors)


def read(path: PathLike, kind: str, suffix: str | None = None, trust: bool = False) -> Document:
    """Read a file that :meth:`Document.write` wrote.

    :param trust: import the classes it names, even those of strangers
    """
    with _open(path, suffix) as file, blame(path):
        size = file.seek(0, io.SEEK_END)
        with zipfile.ZipFile(file) if zipfile.is_zipfile(file) else nullcontext() as archive:
            members = archive.infolist() if archive else []
            if archive is None or _JSON not in [member.filename for member in members]:
                raise ValueError(
                    "it is not a file of cbsql; one of Stable-Baselines3, or of an early cbsql, "
                    "can run any code when it is loaded, and needs trust=True."
                )
            _check_members(members, size)
            with archive.open(_JSON) as stream:
                document = _parse(stream.read())
            if document.keys() != {"format", "kind", "content"}:
                raise ValueError(f"{_JSON} must have format, kind and content.")
            if document["format"] != FORMAT:
                raise ValueError(
                    f"it has the format {document['format']!r}, and this version of cbsql reads "
                    f"{FORMAT}; install another version."
                )
            if document["kind"] != kind or not isinstance(document["content"], dict):
                raise ValueError(f"it is a file of the kind {document['kind']!r}, not {kind!r}.")
            with archive.open(_TENSORS) as stream:
                tensors = read_tensors(stream, archive.getinfo(_TENSORS).file_size)
    return Document(kind, document["content"], tensors, trust)


def is_document(path: PathLike, suffix: str | None = None) -> bool:
    """Whether a file, valid or not, is one of ours; a stream stays where it is."""
    try:
        with _open(path, suffix) as file:
            position = file.tell()
            try:
                return zipfile.is_zipfile(file) and _JSON in zipfile.ZipFile(file).namelist()
            finally:
                file.seek(position)
    except Exception:  # a stranger's file can be broken in any way
        return False


def save_state(path: PathLike, owner: Counter | Temperature) -> None:
    """Write what a counter or a temperature has learnt to a file of its own."""
    document = Document("state")
    document["class"] = type(owner).__name__
    document["state"] = owner.state_dict()
    document.write(path, "zip")


def load_state(path: PathLike, owner: Counter | Temperature) -> None:
    """Let a counter or a temperature go on from what :func:`save_state` wrote."""
    document = read(path, "state", "zip")
    with blame(path):
        if document["class"] != type(owner).__name__:
            raise ValueError(f"it is the state of {document['class']}, not of {owner!r}.")
        owner.load_state_dict(document["state"])


def check_tensors(given: Mapping[str, Any], expected: Mapping[str, th.Tensor]) -> None:
    """Compare names, shapes and types before anything is copied."""
    for name in sorted(given.keys() ^ expected.keys()):
        raise ValueError(f"the tensor {name} is {'missing' if name in expected else 'unknown'}.")
    for name, tensor in expected.items():
        other = given[name]
        if not isinstance(other, th.Tensor) or _describe(other) != _describe(tensor):
            found = _describe(other) if isinstance(other, th.Tensor) else type(other).__name__
            raise ValueError(f"the tensor {name} is {found}, and must be {_describe(tensor)}.")


def check_optimizer(given: Mapping[str, Any], optimizer: th.optim.Optimizer) -> None:
    """Check that the state of an optimiser is about the parameters it has."""
    parameters = [item for group in optimizer.param_groups for item in group["params"]]
    for group in given["param_groups"]:
        for name, value in group.items():
            check_kind(name, value, optimizer.param_groups[0].get(name))
    for index, moments in given["state"].items():
        shape = parameters[index].shape
        for name, moment in moments.items():
            if isinstance(moment, th.Tensor) and not _fits(moment.shape, shape):
                raise ValueError(f"{name} of parameter {index} is {_describe(moment)}.")
            if not isinstance(moment, th.Tensor | int | float | None):
                raise ValueError(f"{name} of parameter {index} is {moment!r:.60}.")


def _fits(moment: th.Size, parameter: th.Size) -> bool:
    """Whether a state has a number for all of a parameter, or for each of its parts or axes."""
    same_axes = len(moment) == len(parameter)
    pairs = zip(moment, parameter, strict=False)
    return not moment or (same_axes and all(size in (1, most) for size, most in pairs))


def check_kind(name: str, value: Any, like: Any) -> None:
    """Check that a value is of the kind of another; None says nothing."""
    number = isinstance(like, int | float) and not isinstance(like, bool)
    kind = int | float if number else type(like)  # a boolean is a number, as verbose=True is
    if like is not None and not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r:.60}, which is not of the kind of {like!r:.60}.")


class Budget(TorchFunctionMode):
    """Within, networks cannot grow much larger than the tensors that came with their description.

    A few bytes of JSON can ask for any number of layers of any size.
    """

    _factories = frozenset(
        (th.arange, th.empty, th.eye, th.full, th.linspace, th.ones, th.rand, th.randn, th.zeros)
    )

    def __init__(self, tensors: Mapping[str, th.Tensor]) -> None:
        super().__init__()
        self._bytes = 2**24 + sum(4 * tensor.nbytes + 2**14 for tensor in tensors.values())

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._factories:
            planned = {key: value for key, value in kwargs.items() if key != "generator"}
            size = func(*args, **{**planned, "device": "meta"}).nbytes
            self._bytes -= size + 2**12  # an object takes memory even if it is small
            if self._bytes < 0:
                raise ValueError("it describes networks larger than the weights it has.")
        return func(*args, **kwargs)


def encode(value: Any, tensors: dict[str, th.Tensor], name: str) -> Any:
    """A value as JSON, in which objects have the name of their kind under "$"."""

    def inner(part: Any, key: object) -> Any:
        return encode(part, tensors, f"{name}.{key}")

    if type(value) in _OBJECTS:
        fields = {key: inner(getattr(value, key), key) for key in _OBJECTS[type(value)]}
        return {"$": type(value).__name__, **fields}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$": "float", "value": str(value)}
    if isinstance(value, list):
        return [inner(part, i) for i, part in enumerate(value)]
    if type(value) is tuple:
        return {"$": "tuple", "items": [inner(part, i) for i, part in enumerate(value)]}
    if isinstance(value, deque):
        items = [inner(part, i) for i, part in enumerate(value)]
        return {"$": "deque", "items": items, "maxlen": value.maxlen}
    if isinstance(value, dict):
        if all(isinstance(key, str) and key != "$" for key in value):
            return {key: inner(part, key) for key, part in value.items()}
        return {"$": "dict", "items": [[inner(k, "key"), inner(v, k)] for k, v in value.items()]}
    if isinstance(value, th.Tensor) and value.dtype in _DTYPES:
        return {"$": "tensor", "name": _add(value.detach().cpu(), tensors, name)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.isnative:
        view = (
            value if value.flags.writeable and min(value.strides, default=0) >= 0 else value.copy()
        )
        return {"$": "array", "name": _add(th.from_numpy(view), tensors, name)}
    if isinstance(value, np.dtype) and value.kind in "biuf":
        return {"$": "dtype", "name": value.name}
    if isinstance(value, np.random.Generator) and isinstance(value.bit_generator, np.random.PCG64):
        return {"$": "generator", "state": value.bit_generator.state}
    if isinstance(value, type) and "<locals>" not in value.__qualname__:
        return {"$": "class", "name": class_name(value)}
    raise FileError(f"{name} is a {type(value).__name__} ({value!r:.60}), which files do not hold.")


def decode(
    value: Any,
    tensors: Mapping[str, th.Tensor],
    trust: bool = False,
    key: str = "",
    depth: int = 0,
) -> Any:
    """What :func:`encode` was given; ``key`` is the name under which it was found."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"its JSON is nested more than {_MAX_DEPTH} deep.")

    def inner(part: Any, key: str = "") -> Any:
        return decode(part, tensors, trust, key, depth + 1)

    if isinstance(value, list):
        return [inner(part) for part in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: inner(part, key) for key, part in value.items()}
    fields = {key: part for key, part in value.items() if key != "$"}
    match value["$"]:
        case "float":
            return float(fields["value"])
        case "tuple":
            return tuple(inner(fields["items"]))
        case "deque":
            return deque(inner(fields["items"]), fields["maxlen"])
        case "dict":
            return dict(inner(fields["items"]))
        case "tensor":
            return tensors[fields["name"]]
        case "array":
            return tensors[fields["name"]].numpy()
        case "dtype":
            if np.dtype(fields["name"]).kind not in "biuf":
                raise ValueError(f"{fields['name']!r} is not a type of numbers.")
            return np.dtype(fields["name"])
        case "generator":
            generator = np.random.Generator(np.random.PCG64(0))
            generator.bit_generator.state = fields["state"]
            return generator
        case "class":
            return _find_class(fields["name"], _BASES.get(key, tuple(_BASES.values())), trust)
        case str(name) if name in _KINDS and {*fields} == {*_OBJECTS[_KINDS[name]]}:
            arguments = inner(fields)
            if name == "Dict":  # Gymnasium would sort a plain dict
                arguments["spaces"] = OrderedDict(arguments["spaces"])
            if name == "Discrete" and arguments["dtype"] == np.int64:
                del arguments["dtype"]  # the only one there was before Gymnasium 1.2.2
            return _KINDS[name](**arguments)
    raise ValueError(f"it has a value of the unknown kind {value['$']!r}.")


def class_name(kind: type) -> str:
    """The name of a class: its public one if it is known, else where to import it from."""
    for namespace in _NAMESPACES:
        if vars(importlib.import_module(namespace)).get(kind.__name__) is kind:
            return f"{namespace}.{kind.__name__}"
    return f"{kind.__module__}:{kind.__qualname__}"


def _find_class(name: str, base: type | tuple[type, ...], trust: bool) -> type:
    namespace, _, last = name.rpartition(".")
    if namespace in _NAMESPACES:
        found = vars(importlib.import_module(namespace)).get(last)
    elif trust:
        module, _, path = name.partition(":")
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    else:
        raise ValueError(
            f"it uses the class {name}, which is not of Torch, Stable-Baselines3 or cbsql; pass "
            "trust=True if that may be imported, or what to use instead in custom_objects."
        )
    if not isinstance(found, type) or not issubclass(found, base):
        raise ValueError(f"{name} is not a class of the kind that belongs there.")
    return found


def _add(tensor: th.Tensor, tensors: dict[str, th.Tensor], name: str) -> str:
    while name in tensors:
        name += "_"
    tensors[name] = tensor
    return name


@contextmanager
def _open(path: PathLike, suffix: str | None) -> Iterator[IO[bytes]]:
    """Open a file as SB3 does: a path may lack its suffix, and streams are left open."""
    file = open_path(path, "r", suffix=suffix)
    try:
        yield file
    finally:
        if isinstance(path, str | pathlib.Path):
            file.close()


def _check_members(members: list[zipfile.ZipInfo], size: int) -> None:
    names = sorted(member.filename for member in members)
    if names != [_JSON, _TENSORS]:
        raise ValueError(f"it must have the members {_JSON} and {_TENSORS} once, not {names}.")
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            raise ValueError(f"{member.filename} is compressed or encrypted, which is not allowed.")
        if not 0 <= member.file_size == member.compress_size <= size:
            raise ValueError(f"{member.filename} claims to be larger than the file.")
        if member.filename == _JSON and member.file_size > _MAX_JSON_BYTES:
            raise ValueError(
                f"{_JSON} has {member.file_size} bytes, the most is {_MAX_JSON_BYTES}."
            )


def _parse(text: bytes) -> dict[str, Any]:
    """A JSON object, strictly: no name twice, no NaN."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        parsed = dict(pairs)
        if len(parsed) < len(pairs):
            raise ValueError("its JSON has a name twice.")
        return parsed

    def refuse(constant: str) -> None:
        raise ValueError(f"its JSON has the number {constant}.")

    parsed = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    if not isinstance(parsed, dict):
        raise ValueError("its JSON is not an object.")
    return parsed


def write_tensors(stream: IO[bytes], tensors: Mapping[str, th.Tensor]) -> None:
    """The safetensors format, one tensor after the other, so that none is copied as a whole."""
    header, begin = {}, 0
    for name, tensor in tensors.items():
        end = begin + tensor.nbytes
        kind = _DTYPES[tensor.dtype]
        header[name] = {"dtype": kind, "shape": [*tensor.shape], "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        for part in [tensor] if tensor.is_contiguous() else tensor:
            # An axis of one or no element may have any stride, but not if it is seen as bytes.
            flat = part.contiguous().as_strided((part.numel(),), (1,))
            stream.write(flat.view(th.uint8).numpy().data)


def read_tensors(stream: IO[bytes], size: int) -> dict[str, th.Tensor]:
    """Check that the header accounts for every byte there is, then read."""
    length = int.from_bytes(stream.read(8), "little")
    if length > min(size - 8, _MAX_JSON_BYTES):
        raise ValueError(f"{_TENSORS} has a header of {length} bytes, which is too long.")
    header = _parse(stream.read(length))
    kinds = {name: dtype for dtype, name in _DTYPES.items()}
    plan, position = [], 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (begin, end) = kinds[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
            raise ValueError(f"the tensor {name} has the shape {shape} at {begin} to {end}.")
        if begin != position or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"the tensor {name} is not where and as large as its shape says.")
        plan.append((name, dtype, shape, end - begin))
        position = end
    if position != size - 8 - length:
        raise ValueError(f"{_TENSORS} has {size - 8 - length} bytes of tensors, not {position}.")
    return {name: _read_tensor(stream, *how) for name, *how in plan}


def _read_tensor(stream: IO[bytes], dtype: th.dtype, shape: list[int], size: int) -> th.Tensor:
    flat = th.empty(size, dtype=th.uint8)
    rest = flat.numpy().data
    while rest:
        rest = rest[stream.readinto(rest[: 2**24]) or _truncated() :]  # type: ignore[attr-defined]
    if dtype == th.bool:
        flat.clamp_(max=1)  # any other byte is neither true nor false
    return flat.view(dtype).reshape(shape)


def _truncated() -> int:
    raise ValueError(f"{_TENSORS} ends too early.")


def _describe(tensor: th.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
