"""Writing safetensors files piece by piece, with tensors where kernels read them best: on cache lines.

Source: the safetensors format; headers may end in spaces, tensors follow one another without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes. The first tensor lies on such a place in the file; each next one, where all before it fill theirs."""

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8"}


def tensor_file_start(
    entries: Iterable[tuple[str, Sequence[int], torch.dtype]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, int]:
    """What comes before the first tensor of a file of (name, shape, dtype) in this order, and the bytes of them all."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, shape, dtype in entries:
        size = dtype.itemsize
        for n in shape:
            size *= n
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, offset


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a tensor on the CPU, to be written."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
