"""Frames of the links between ranks: a fixed header of 32 bytes, then the payload. Pure.

    0  4  magic "DPX1"
    4  1  kind
    5  1  zero
    6  2  rank of the sender
    8  8  epoch of the group
   16  8  number of the exchange in this epoch, from 1 (0 in HELLO)
   24  8  bytes of payload

All numbers are little endian. Both ends know what comes next, so a header that says anything else ends the link.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from dpi_engine.wire.errors import WireError
from dpi_engine.wire.group import KEY_BYTES

MAGIC = b"DPX1"
_HEADER = struct.Struct("<4sBBHQQQ")
HEADER_BYTES = _HEADER.size
_HELLO = struct.Struct(f"<HH{KEY_BYTES}s")
HELLO_BYTES = HEADER_BYTES + _HELLO.size


class Kind(enum.IntEnum):
    """What a frame carries."""

    HELLO = 0  # rank meant, size of the group, key: opens a link, in both directions
    SYNC = 1  # int64 values of an all-reduce
    TOKENS = 2  # rows for experts of the receiver
    SUMS = 3  # their results


class Header(NamedTuple):
    kind: Kind
    rank: int
    group: int
    number: int
    length: int


def encode_header(kind: Kind, rank: int, group: int, number: int, length: int) -> bytes:
    return _HEADER.pack(MAGIC, kind, 0, rank, group, number, length)


def decode_header(data: bytes | bytearray | memoryview, max_payload: int) -> Header:
    """Raises WireError for what is not a header, or announces more than `max_payload` bytes."""
    magic, kind, zero, rank, group, number, length = _HEADER.unpack(data)
    if magic != MAGIC or zero or kind > max(Kind):
        raise WireError("malformed", "exchange: not a frame of a rank")
    if length > max_payload:
        raise WireError("too_large", f"exchange: a frame of {length} bytes, at most {max_payload} are accepted")
    return Header(Kind(kind), rank, group, number, length)


class Hello(NamedTuple):
    """`rank` opens a link to rank `to` in a group of `size` ranks."""

    rank: int
    to: int
    group: int
    size: int
    key: bytes


def encode_hello(hello: Hello) -> bytes:
    body = _HELLO.pack(hello.to, hello.size, hello.key)
    return encode_header(Kind.HELLO, hello.rank, hello.group, 0, len(body)) + body


def decode_hello(data: bytes | bytearray) -> Hello:
    """From exactly HELLO_BYTES bytes. Raises WireError."""
    header = decode_header(data[:HEADER_BYTES], _HELLO.size)
    if header.kind is not Kind.HELLO or header.length != _HELLO.size:
        raise WireError("malformed", "exchange: a link begins with HELLO")
    to, size, key = _HELLO.unpack(data[HEADER_BYTES:])
    return Hello(header.rank, to, header.group, size, key)
