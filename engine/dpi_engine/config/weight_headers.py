"""Digest of weight files from their headers and sizes: which tensors, of which shapes, where. Never reads all bytes.

Works without torch and without the format's libraries. Headers are read within bounds, so a broken file is an error
and not an exhausted memory.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from dpi_engine.config.errors import WeightFileError
from dpi_engine.config.gguf_file import read_header

MAX_SAFETENSORS_HEADER = 100 << 20


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
        if path.suffix == ".gguf":
            return read_header(path).digest
        with path.open("rb") as file:
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
