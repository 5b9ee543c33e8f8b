"""Writing safetensors files piece by piece, with tensors where kernels read them best: on cache lines.

Source: the safetensors format; headers may end in spaces, tensors follow one another without gaps.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes. The first tensor lies on such a place in the file; each next one, where all before it fill theirs."""

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8"}


def write_tensor_file(
    target: Path,
    entries: Sequence[tuple[str, Sequence[int], torch.dtype]],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write a file of (name, shape, dtype) in this order, each tensor as `read` gives it. Returns their bytes.

    Beside `target` first, then in its place: readers see all or nothing. One process at a time may do this for a
    target; what one that was killed left is overwritten. Raises OSError, and what `read` raises.
    """
    start, size = _start(entries, metadata)
    temporary = target.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(start)
            for name, _, _ in entries:
                file.write(_bytes_of(read(name)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return size


def _start(
    entries: Sequence[tuple[str, Sequence[int], torch.dtype]], metadata: Mapping[str, str] | None
) -> tuple[bytes, int]:
    """What comes before the first tensor, and the bytes of all tensors."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, shape, dtype in entries:
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, offset


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
