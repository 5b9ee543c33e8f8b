"""The header of a GGUF file: metadata and the list of tensors, in tens of milliseconds, without numpy or torch."""

from __future__ import annotations

import functools
import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpi_engine.config.errors import ConfigError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_ITEMS = 1 << 26  # entries of one array; real vocabularies stay below 2**20
_MAX_DIMS = 8


class GgufError(ConfigError):
    """A file that is not GGUF, is cut short or contradicts itself. `path` is the file; the text says what and where."""

    def __init__(self, path: str | os.PathLike[str], what: str) -> None:
        super().__init__(f"{path}: {what}")
        self.path = Path(path)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: `shape` with the row length last (as in torch), ggml type number, byte offset in the file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(slots=True)
class GgufHeader:
    """Everything before the tensor data. `metadata` values are Python numbers, strings, booleans and lists of them."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data_start: int
    file_size: int


class _Reader:
    """A cursor over the mapped bytes; running past the end is a GgufError."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.size = path, data, 0, len(data)

    def fail(self, what: str) -> GgufError:
        return GgufError(self.path, f"{what} (at byte {self.at})")

    def take(self, count: int, what: str) -> int:
        start = self.at
        if count < 0 or start + count > self.size:
            raise self.fail(f"cut short: {what} needs {count} bytes, the file has {self.size - start} left")
        self.at = start + count
        return start

    def scalar(self, fmt: str, what: str) -> Any:
        return struct.unpack_from(fmt, self.data, self.take(struct.calcsize(fmt), what))[0]

    def string(self, what: str) -> str:
        length = self.scalar("<Q", what)
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8: {error}") from error

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string(f"value of '{key}'")
        if kind == _ARRAY:
            return self.array(key)
        fmt = _SCALARS.get(kind)
        if fmt is None:
            raise self.fail(f"'{key}' has value type {kind}, which GGUF does not define")
        return self.scalar(fmt, f"value of '{key}'")

    def array(self, key: str) -> list[Any]:
        kind = self.scalar("<I", f"array type of '{key}'")
        count = self.scalar("<Q", f"array length of '{key}'")
        if count > _MAX_ITEMS:
            raise self.fail(f"'{key}' claims {count} entries; more than {_MAX_ITEMS} are not believed")
        fmt = _SCALARS.get(kind)
        if fmt is not None:
            many = f"<{count}{fmt[1]}"
            return list(struct.unpack_from(many, self.data, self.take(struct.calcsize(many), f"array '{key}'")))
        if kind == _STRING:
            return self.strings(count, key)
        raise self.fail(f"'{key}' is an array of value type {kind}; arrays of numbers and strings are supported")

    def strings(self, count: int, key: str) -> list[str]:
        # Written out, not built on string(): a vocabulary has 10**5 of them and start-up waits for this loop.
        data, at, size, length_of = self.data, self.at, self.size, struct.Struct("<Q").unpack_from
        out = []
        try:
            for _ in range(count):
                (length,) = length_of(data, at)
                at += 8
                if at + length > size:
                    raise self.fail(f"cut short inside array '{key}'")
                out.append(data[at : at + length].decode("utf-8"))
                at += length
        except (struct.error, UnicodeDecodeError) as error:
            raise self.fail(f"array '{key}', entry {len(out)}: {error}") from error
        self.at = at
        return out


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """True when the file begins with the GGUF magic. False for what cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def read_header(path: str | os.PathLike[str]) -> GgufHeader:
    """Read metadata and tensor list. Not to be changed by the caller: the last one is kept for those who ask again.

    Raises GgufError; OSError when the file cannot be opened.
    """
    about = os.stat(path)
    return _read_header(Path(path), (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns))


@functools.lru_cache(maxsize=1)
def _read_header(path: Path, identity: tuple[int, ...]) -> GgufHeader:
    """`identity` changes when the file does."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 24:
            raise GgufError(path, f"is {size} bytes long; a GGUF header has at least 24")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Reader(path, data))


def _parse(reader: _Reader) -> GgufHeader:
    if reader.data[:4] != b"GGUF":
        raise GgufError(reader.path, f"begins with {reader.data[:4]!r}, not with the GGUF magic")
    reader.at = 4
    version = reader.scalar("<I", "version")
    if version not in (2, 3):
        raise GgufError(reader.path, f"is GGUF version {version}; 2 and 3 in little-endian order are supported")
    tensor_count = reader.scalar("<Q", "tensor count")
    pair_count = reader.scalar("<Q", "metadata count")
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = reader.string("metadata key")
        kind = reader.scalar("<I", f"type of '{key}'")
        if key in metadata:
            raise reader.fail(f"metadata key '{key}' stands twice")
        metadata[key] = reader.value(kind, key)
    entries = [_tensor_entry(reader) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise reader.fail(f"general.alignment must be a power of two, got {alignment!r}")
    data_start = (reader.at + alignment - 1) // alignment * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, ggml_type, offset in entries:
        if name in tensors:
            raise GgufError(reader.path, f"tensor '{name}' stands twice")
        start = data_start + offset
        if start > reader.size:
            raise GgufError(
                reader.path, f"cut short: tensor '{name}' begins at byte {start}, the file has {reader.size}"
            )
        tensors[name] = GgufTensor(name, shape, ggml_type, start)
    return GgufHeader(reader.path, version, metadata, tensors, data_start, reader.size)


def _tensor_entry(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.string("tensor name")
    dims = reader.scalar("<I", f"dimensions of '{name}'")
    if dims > _MAX_DIMS:
        raise reader.fail(f"tensor '{name}' claims {dims} dimensions")
    shape = tuple(reader.scalar("<Q", f"shape of '{name}'") for _ in range(dims))
    if math.prod(shape) > 1 << 48:
        raise reader.fail(f"tensor '{name}' claims shape {list(shape)}")
    return name, shape[::-1], reader.scalar("<I", f"type of '{name}'"), reader.scalar("<Q", f"offset of '{name}'")
