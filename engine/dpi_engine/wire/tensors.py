"""Numeric arrays as vLLM puts them on the wire: `[dtype, shape, data]`.

`data` is msgpack extension 3 (raw bytes) below 256 bytes, else the index of an extra frame of the same message (the
frame with the main payload has index 0). Extensions 1 and 2 are pickles in vLLM and are refused here unread.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from dpi_engine.wire.errors import WireError
from dpi_engine.wire.messages import LogprobsLists

Buffer = bytes | bytearray | memoryview

RAW_EXT = 3
INLINE_LIMIT = 256
MAX_ELEMENTS = 1 << 24

# numpy's names (sampled tokens) and torch's (prompt tokens) -> (struct code, bytes per element)
_DTYPES: dict[str, tuple[str, int]] = {
    "<i4": ("i", 4),
    "<i8": ("q", 8),
    "<i2": ("h", 2),
    "<u4": ("I", 4),
    "<f4": ("f", 4),
    "<f8": ("d", 8),
    "<f2": ("e", 2),
    "int16": ("h", 2),
    "int32": ("i", 4),
    "int64": ("q", 8),
    "float16": ("e", 2),
    "float32": ("f", 4),
    "float64": ("d", 8),
}


def ext_hook(code: int, data: memoryview) -> msgspec.msgpack.Ext:
    """Hook for decoders: keep raw bytes, refuse every other extension without looking inside."""
    if code != RAW_EXT:
        raise WireError("malformed", f"msgpack extension {code} is not accepted, only {RAW_EXT} (raw bytes)")
    return msgspec.msgpack.Ext(code, bytes(data))


def encode_array(dtype: str, shape: Sequence[int], values: Sequence[float], aux: list[bytes]) -> list[Any]:
    """`[dtype, shape, data]` for `values` in row-major order; large data goes to `aux` (index 0 is the payload)."""
    code, _ = _DTYPES[dtype]
    data = struct.pack(f"<{len(values)}{code}", *values)
    if shape and len(data) >= INLINE_LIMIT:
        aux.append(data)
        return [dtype, list(shape), len(aux)]
    return [dtype, list(shape), msgspec.msgpack.Ext(RAW_EXT, data)]


def decode_array(raw: Any, frames: Sequence[Buffer], what: str) -> tuple[list[int], list[Any]]:
    """Shape and row-major values of `[dtype, shape, data]`; a plain (nested) list is taken as it is.

    Raises WireError when dtype, shape, size or frame index do not fit together.
    """
    if not isinstance(raw, list | tuple) or len(raw) != 3 or not isinstance(raw[0], str):
        raise WireError("malformed", f"{what}: expected [dtype, shape, data], got {type(raw).__name__}")
    dtype, shape, data = raw
    known = _DTYPES.get(dtype)
    if known is None:
        raise WireError("malformed", f"{what}: dtype {dtype[:32]!r} is not one of {', '.join(_DTYPES)}")
    if not isinstance(shape, list | tuple) or len(shape) > 4:
        raise WireError("malformed", f"{what}: shape must be a list of at most 4 sizes")
    count = 1
    for size in shape:
        if type(size) is not int or not 0 <= size <= MAX_ELEMENTS:
            raise WireError("malformed", f"{what}: a size of the shape is not in 0..{MAX_ELEMENTS}")
        count *= size
    if isinstance(data, msgspec.msgpack.Ext):
        buffer: Buffer = bytes(data.data)
    elif type(data) is int and 0 < data < len(frames):
        buffer = frames[data]
    else:
        raise WireError("malformed", f"{what}: data is neither raw bytes nor an index of one of {len(frames)} frames")
    code, width = known
    if len(buffer) != count * width:
        raise WireError(
            "malformed", f"{what}: {count} elements of {dtype} need {count * width} bytes, got {len(buffer)}"
        )
    return list(shape), list(struct.unpack(f"<{count}{code}", buffer))


def encode_logprobs(lists: LogprobsLists, aux: list[bytes], *, prompt: bool) -> list[Any]:
    """vLLM's tuple: token ids, log probabilities, ranks, then boundaries (nil). `prompt`: torch tensors there."""
    rows = len(lists.token_ids)
    width = len(lists.token_ids[0]) if rows else 0
    i32, f32 = ("int32", "float32") if prompt else ("<i4", "<f4")
    out: list[Any] = [
        encode_array(i32, (rows, width), [t for row in lists.token_ids for t in row], aux),
        encode_array(f32, (rows, width), [p for row in lists.logprobs for p in row], aux),
        encode_array(i32, (rows,), lists.ranks, aux),
        None,
    ]
    if prompt:
        out.append(None)
    return out


def decode_logprobs(raw: Any, frames: Sequence[Buffer], what: str) -> LogprobsLists | None:
    """Either form (vLLM's arrays, or plain lists) to lists."""
    if raw is None:
        return None
    if not isinstance(raw, list | tuple) or len(raw) < 3:
        raise WireError("malformed", f"{what}: expected token ids, log probabilities and ranks")
    first = raw[0]
    if isinstance(first, list | tuple) and len(first) == 3 and isinstance(first[0], str):
        ids_shape, ids = decode_array(raw[0], frames, f"{what}.token_ids")
        lp_shape, values = decode_array(raw[1], frames, f"{what}.logprobs")
        _, ranks = decode_array(raw[2], frames, f"{what}.ranks")
        if len(ids_shape) != 2 or ids_shape != lp_shape or len(ranks) != ids_shape[0]:
            raise WireError("malformed", f"{what}: shapes {ids_shape}, {lp_shape} and {len(ranks)} ranks do not agree")
        rows, width = ids_shape
        return LogprobsLists(
            token_ids=[ids[r * width : (r + 1) * width] for r in range(rows)],
            logprobs=[values[r * width : (r + 1) * width] for r in range(rows)],
            ranks=ranks,
        )
    return msgspec.convert(raw, LogprobsLists)
