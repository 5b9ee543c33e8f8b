"""Digest of weight files from their headers and sizes: which tensors, of which shapes, where. Never reads all bytes.

Works without torch and without the format's libraries. Headers are read within bounds, so a broken file is an error
and not an exhausted memory.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from dpi_engine.config.errors import WeightFileError

MAX_SAFETENSORS_HEADER = 100 << 20
MAX_GGUF_HEADER = 512 << 20
_MAX_COUNT = 1 << 20  # tensors, or metadata keys, in one file
_GGUF_MAGIC = b"GGUF"
_GGUF_VERSIONS = (2, 3)
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


def weights_digest(files: Iterable[Path]) -> str:
    """SHA-256 (hex) over name, size and header of every file, in the order of names; folders do not matter.

    Raises WeightFileError for a truncated or malformed file, or one that is neither safetensors nor GGUF.
    """
    total = hashlib.sha256()
    for path in sorted(files, key=lambda p: p.name):
        total.update(f"{path.name}\0{_size(path)}\0{header_digest(path)}\n".encode())
    return total.hexdigest()


def header_digest(path: Path) -> str:
    """SHA-256 (hex) of one file's header. Raises WeightFileError."""
    try:
        with path.open("rb") as file:
            if path.suffix == ".gguf":
                return _gguf(file, path)
            return _safetensors(file, path)
    except OSError as e:
        raise WeightFileError(f"weight file {path}: cannot be read: {e.strerror or e}") from None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as e:
        raise WeightFileError(f"weight file {path}: cannot be read: {e.strerror or e}") from None


def _safetensors(file: BinaryIO, path: Path) -> str:
    start = file.read(8)
    size = _size(path)
    if len(start) < 8:
        raise WeightFileError(f"weight file {path}: truncated: expected at least 8 bytes, got {len(start)}")
    (length,) = struct.unpack("<Q", start)
    if length > MAX_SAFETENSORS_HEADER or length > size - 8:
        raise WeightFileError(
            f"weight file {path}: no complete safetensors file: its header claims {length} bytes, the file has {size}"
        )
    header = file.read(length)
    try:
        entries = json.loads(header)
        ends = [int(e["data_offsets"][1]) for name, e in entries.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise WeightFileError(f"weight file {path}: the safetensors header is not the expected JSON") from None
    if 8 + length + max(ends, default=0) > size:
        raise WeightFileError(
            f"weight file {path}: truncated: its header describes {8 + length + max(ends)} bytes, the file has {size}. "
            "Fetch it again."
        )
    return hashlib.sha256(header).hexdigest()


class _Reader:
    """Walks the mapped file up to a bound. What it passed is hashed as one piece: a vocabulary has 10**5 strings, and
    start-up waits for this."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0
        self._end = min(len(data), MAX_GGUF_HEADER)

    def skip(self, count: int) -> int:
        """Pass `count` bytes; returns where they begin."""
        start = self.at
        if count > self._end - start:
            raise self._too_short()
        self.at = start + count
        return start

    def _too_short(self) -> WeightFileError:
        if self._end == MAX_GGUF_HEADER:
            return WeightFileError(f"weight file {self.path}: the GGUF header is larger than {MAX_GGUF_HEADER} bytes")
        return WeightFileError(f"weight file {self.path}: truncated within its GGUF header. Fetch it again.")

    def number(self, code: str) -> int:
        code = "<" + code
        return int(struct.unpack_from(code, self.data, self.skip(struct.calcsize(code)))[0])

    def count(self, what: str, limit: int = _MAX_COUNT) -> int:
        return self._at_most(limit, what, self.number("Q"))

    def _at_most(self, limit: int, what: str, value: int) -> int:
        if value > limit:
            raise WeightFileError(f"weight file {self.path}: malformed: expected at most {limit} {what}, got {value}")
        return value

    def strings(self, count: int) -> None:
        length_of, data, end, at = struct.Struct("<Q").unpack_from, self.data, self._end, self.at
        for _ in range(count):
            if at + 8 > end:
                raise self._too_short()
            (length,) = length_of(data, at)
            at += 8 + length
            if at > end:
                self._at_most(MAX_GGUF_HEADER, "bytes of text", length)
                raise self._too_short()
        self.at = at

    def value(self, kind: int) -> None:
        if kind in _SCALAR_BYTES:
            self.skip(_SCALAR_BYTES[kind])
        elif kind == _STRING:
            self.strings(1)
        elif kind == _ARRAY:
            item = self.number("I")
            length = self.count("array elements", MAX_GGUF_HEADER)
            if item in _SCALAR_BYTES:
                self.skip(length * _SCALAR_BYTES[item])
            elif item == _STRING:
                self.strings(length)
            else:
                self._bad_type(item)
        else:
            self._bad_type(kind)

    def _bad_type(self, kind: int) -> None:
        raise WeightFileError(f"weight file {self.path}: malformed: metadata value of unknown type {kind}")


def _gguf(file: BinaryIO, path: Path) -> str:
    if _size(path) == 0:
        raise WeightFileError(f"weight file {path}: it is empty. Fetch it again.")
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        end = _header_end(_Reader(data, path))
        return hashlib.sha256(data[:end]).hexdigest()


def _header_end(reader: _Reader) -> int:
    """Bytes of the header. Raises WeightFileError."""
    path = reader.path
    magic = reader.data[: reader.skip(4) + 4]
    if magic != _GGUF_MAGIC:
        raise WeightFileError(f"weight file {path}: not a GGUF file: it starts with {magic!r}")
    version = reader.number("I")
    if version not in _GGUF_VERSIONS:
        raise WeightFileError(f"weight file {path}: GGUF version {version} is not known; known: 2, 3")
    tensors, keys = reader.count("tensors"), reader.count("metadata keys")
    for _ in range(keys):
        reader.strings(1)
        reader.value(reader.number("I"))
    last = 0
    for _ in range(tensors):
        reader.strings(1)
        dims = reader.number("I")
        if dims > 8:
            raise WeightFileError(f"weight file {path}: malformed: a tensor of {dims} dimensions")
        reader.skip(8 * dims + 4)
        last = max(last, reader.number("Q"))
    if reader.at + last > len(reader.data):
        raise WeightFileError(f"weight file {path}: truncated: tensors start beyond its end. Fetch it again.")
    return reader.at
