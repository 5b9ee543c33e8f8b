"""The header of a GGUF file: metadata, the list of tensors and a digest, in tens of milliseconds and without numpy.

Every process of a launch reads it at its start. A vocabulary and its merges are 10**5 strings, of which most readers
want none: arrays are passed over, and decoded when they are asked for.

Source: the GGUF specification, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import functools
import hashlib
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpi_engine.config.errors import WeightFileError

MAX_HEADER = 512 << 20
_MAX_COUNT = 1 << 20  # tensors, or metadata keys, in one file
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 8
_MAX_ELEMENTS = 1 << 48
_DEFAULT_ALIGNMENT = 32


class GgufError(WeightFileError):
    """A file that is not GGUF, is cut short or contradicts itself. `path` is the file; the text says what and where."""

    def __init__(self, path: str | os.PathLike[str], what: str) -> None:
        super().__init__(f"weight file {path}: {what}")
        self.path = Path(path)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: `shape` with the row length last (as in torch), ggml type number, byte offset in the file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


class Metadata(Mapping[str, Any]):
    """Python numbers, strings, booleans and lists of them by key. A list is decoded when it is first asked for; one
    that cannot be is a GgufError then.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] = {}
        self._arrays: dict[str, bytes] = {}

    def put(self, key: str, value: Any) -> None:
        self._values[key] = value

    def put_array(self, key: str, raw: bytes) -> None:
        """`raw` is a whole array as the file has it: type and number of its elements, then these."""
        self._values[key] = None
        self._arrays[key] = raw

    def __getitem__(self, key: str) -> Any:
        raw = self._arrays.get(key)
        if raw is not None:
            self._values[key] = _array(raw, self._path, key)
            self._arrays.pop(key, None)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass(slots=True)
class GgufHeader:
    """Everything before the tensor data. `digest` is the SHA-256 (hex) of its bytes."""

    path: Path
    version: int
    metadata: Metadata
    tensors: dict[str, GgufTensor]
    data_start: int
    file_size: int
    digest: str


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """True when the file begins with the GGUF magic. False for what cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == _MAGIC
    except OSError:
        return False


def read_header(path: str | os.PathLike[str]) -> GgufHeader:
    """Read metadata and tensor list. Not to be changed by the caller: the last one is kept for those who ask again.

    Raises GgufError, also when the file cannot be opened.
    """
    try:
        about = os.stat(path)
        return _read_header(Path(path), (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns))
    except OSError as error:
        raise GgufError(path, f"cannot be read: {error.strerror or error}") from None


@functools.lru_cache(maxsize=1)
def _read_header(path: Path, identity: tuple[int, ...]) -> GgufHeader:
    """`identity` changes when the file does."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise GgufError(path, "it is empty. Fetch it again.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Reader(path, data))


class _Reader:
    """A cursor over the mapped bytes. Running past the end, or past what a header may take, is a GgufError."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0
        self._end = min(len(data), MAX_HEADER)

    def fail(self, what: str) -> GgufError:
        return GgufError(self.path, f"malformed: {what} (at byte {self.at})")

    def _too_short(self, what: str) -> GgufError:
        if self._end == MAX_HEADER:
            return GgufError(self.path, f"its header is larger than {MAX_HEADER} bytes")
        return GgufError(self.path, f"cut short within its header: {what} (at byte {self.at}). Fetch it again.")

    def take(self, count: int, what: str) -> int:
        """Pass `count` bytes; returns where they begin."""
        start = self.at
        if count > self._end - start:
            raise self._too_short(what)
        self.at = start + count
        return start

    def scalar(self, fmt: str, what: str) -> Any:
        return struct.unpack_from(fmt, self.data, self.take(struct.calcsize(fmt), what))[0]

    def count(self, what: str, limit: int = _MAX_COUNT) -> int:
        value = int(self.scalar("<Q", f"number of {what}"))
        if value > limit:
            raise self.fail(f"expected at most {limit} {what}, got {value}")
        return value

    def string(self, what: str) -> str:
        length = self.count(f"bytes in the {what}", MAX_HEADER)
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8: {error}") from None

    def pass_array(self, key: str) -> bytes:
        start = self.at
        kind, count = self.scalar("<I", f"array '{key}'"), self.count(f"elements of '{key}'", MAX_HEADER)
        if kind == _STRING:
            self._pass_strings(count, f"array '{key}'")
        elif kind in _SCALARS:
            self.take(count * struct.calcsize(_SCALARS[kind]), f"array '{key}'")
        elif kind == _ARRAY:
            raise self.fail(f"'{key}' is an array of arrays, which no key of a model is")
        else:
            raise self.fail(f"'{key}' is an array of unknown type {kind}")
        return self.data[start : self.at]

    def _pass_strings(self, count: int, what: str) -> None:
        # Written out, not built on string(): start-up waits for this loop.
        data, at, last, length_of = self.data, self.at, self._end - 8, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > last:
                raise self._too_short(what)
            at += 8 + length_of(data, at)[0]
        if at > self._end:
            raise self._too_short(what)
        self.at = at


def _array(raw: bytes, path: Path, key: str) -> list[Any]:
    """The elements of an array whose bytes the reader has passed."""
    kind, count = struct.unpack_from("<IQ", raw)
    at = struct.calcsize("<IQ")
    if kind != _STRING:
        return list(struct.unpack_from(f"<{count}{_SCALARS[kind][1]}", raw, at))
    length_of = struct.Struct("<Q").unpack_from
    out: list[Any] = []
    try:
        for _ in range(count):
            (length,) = length_of(raw, at)
            at += 8
            out.append(raw[at : at + length].decode("utf-8"))
            at += length
    except UnicodeDecodeError as error:
        raise GgufError(path, f"malformed: array '{key}', entry {len(out)}: {error}") from None
    return out


def _parse(reader: _Reader) -> GgufHeader:
    path = reader.path
    magic = reader.data[reader.take(4, "magic") : 4]
    if magic != _MAGIC:
        raise GgufError(path, f"not a GGUF file: it starts with {magic!r}")
    version = reader.scalar("<I", "version")
    if version not in _VERSIONS:
        raise GgufError(path, f"GGUF version {version} is not known; known: 2 and 3, in little-endian order")
    tensor_count, key_count = reader.count("tensors"), reader.count("metadata keys")
    metadata = Metadata(path)
    for _ in range(key_count):
        key = reader.string("metadata key")
        if key in metadata:
            raise reader.fail(f"metadata key '{key}' stands twice")
        _read_value(reader, key, metadata)
    entries = [_tensor_entry(reader) for _ in range(tensor_count)]
    end = reader.at
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise reader.fail(f"general.alignment must be a power of two, got {alignment!r}")
    data_start = (end + alignment - 1) // alignment * alignment
    tensors: dict[str, GgufTensor] = {}
    size = len(reader.data)
    for name, shape, ggml_type, offset in entries:
        if name in tensors:
            raise reader.fail(f"tensor '{name}' stands twice")
        if offset % alignment:
            raise reader.fail(f"tensor '{name}' begins at {offset}, which is no multiple of {alignment}")
        start = data_start + offset
        if start > size:
            raise GgufError(path, f"cut short: tensor '{name}' begins at byte {start}, beyond its end at {size}")
        tensors[name] = GgufTensor(name, shape, ggml_type, start)
    digest = hashlib.sha256(memoryview(reader.data[:end])).hexdigest()
    return GgufHeader(path, version, metadata, tensors, data_start, size, digest)


def _read_value(reader: _Reader, key: str, metadata: Metadata) -> None:
    kind = reader.scalar("<I", f"type of '{key}'")
    if kind == _ARRAY:
        metadata.put_array(key, reader.pass_array(key))
    elif kind == _STRING:
        metadata.put(key, reader.string(f"value of '{key}'"))
    elif kind in _SCALARS:
        metadata.put(key, reader.scalar(_SCALARS[kind], f"value of '{key}'"))
    else:
        raise reader.fail(f"'{key}' is of unknown type {kind}")


def _tensor_entry(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.string("tensor name")
    dims = reader.scalar("<I", f"dimensions of '{name}'")
    if not 1 <= dims <= _MAX_DIMS:
        raise reader.fail(f"tensor '{name}' claims {dims} dimensions")
    shape = tuple(reader.scalar("<Q", f"shape of '{name}'") for _ in range(dims))
    if math.prod(shape) > _MAX_ELEMENTS:
        raise reader.fail(f"tensor '{name}' claims shape {list(shape)}")
    return name, shape[::-1], reader.scalar("<I", f"type of '{name}'"), reader.scalar("<Q", f"offset of '{name}'")
