"""Messages of the handshake socket: HELLO, init, READY, and what the `dpi` dialect adds (beats, progress, errors).

An engine is known by its identity on the ROUTER: rank as 2 bytes little endian (vLLM), followed in the `dpi` dialect by
8 bytes of boot id, drawn anew whenever the engine registers. The boot id is what lets a restarted rank come back while
the connection of its predecessor is still half open.
"""

from __future__ import annotations

import ipaddress
import os
import struct
from typing import Any

import msgspec

from dpi_engine.wire.codec import Buffer, decode_as, encode
from dpi_engine.wire.errors import WireError
from dpi_engine.wire.group import GroupTable
from dpi_engine.wire.messages import Dialect
from dpi_engine.wire.places import Place

BOOT_ID_BYTES = 8
MAX_EPOCH = 1 << 48
MAX_MESSAGE_BYTES = 1 << 20

HELLO = "HELLO"
READY = "READY"
BEAT = "BEAT"
PROGRESS = "PROGRESS"
GOODBYE = "GOODBYE"
INIT = "INIT"
ERROR = "ERROR"
PLACES = "PLACES"

GREETING = [b""]
"""Frames that a head of ours sends by itself to everyone who connects. A vLLM head sends nothing, and dies of the HELLO
of a rank that it does not know: so a rank of ours says it to those only that have greeted."""

ENGINE_STATUSES = (HELLO, READY, BEAT, PROGRESS, GOODBYE)


def new_boot_id() -> bytes:
    """8 random bytes."""
    return os.urandom(BOOT_ID_BYTES)


def identity(rank: int, boot_id: bytes = b"") -> bytes:
    """Identity of a rank on a ROUTER; without boot id it is vLLM's."""
    return struct.pack("<H", rank) + boot_id


def parse_identity(raw: bytes) -> tuple[int, bytes]:
    """Rank and boot id (empty for a vLLM engine). Raises WireError for another length."""
    if len(raw) not in (2, 2 + BOOT_ID_BYTES):
        raise WireError("bad_identity", f"identity of {len(raw)} bytes; expected 2 (rank) or 10 (rank and boot id)")
    return int(struct.unpack("<H", raw[:2])[0]), raw[2:]


class EngineMessage(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Engine -> head. The first three keys in this order are vLLM's HELLO and READY; the rest is left out there.

    `fields` are the declared fingerprint fields in HELLO and the resolved ones in READY. `epoch` is the one the head
    gave (in HELLO: the highest this rank ever had, so that a new head goes on from there). `replaces` is the boot id
    that this engine had before it registered anew. `step_age` is seconds since the step in progress began, None when
    idle.
    `draining` in a beat: what runs will be finished, new work should go elsewhere. `load` in a beat: (waiting, running,
    kv_usage) for a head whose front ends do not hear of this rank.
    `waits` in a beat: why the rank can take no new work just now.
    Ranks that step together say in READY where they take links of the others (`exchange`), and in every beat which
    epoch of the group they know (`group_seen`) and which they have given up (`group_left`; wire/group.py).
    """

    status: str
    local: bool | msgspec.UnsetType = msgspec.UNSET
    headless: bool | msgspec.UnsetType = msgspec.UNSET
    parallel_config_hash: str | None = None
    version: int = 0
    epoch: int = 0
    pod: str = ""
    pid: int = 0
    replaces: bytes = b""
    fingerprint: str = ""
    fields: dict[str, Any] = {}
    stage: str = ""
    fraction: float | None = None
    step_age: float | None = None
    steps: int = 0
    reason: str = ""
    draining: bool = False
    load: tuple[int, int, float] | None = None
    waits: str = ""
    exchange: str = ""
    group_seen: int = 0
    group_left: int = 0


class Addresses(msgspec.Struct, kw_only=True):
    """Where an engine connects to; key order is vLLM's. Index i of inputs and outputs is front end i."""

    inputs: list[str]
    outputs: list[str]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish_address: str | None = None


class LeaseTimes(msgspec.Struct, kw_only=True, frozen=True):
    """Lease durations in seconds as the head tells them to its ranks."""

    beat: float
    suspect: float
    lost: float


class _VllmMessage(msgspec.Struct, omit_defaults=True):
    # Of its own: for a struct of 16 fields msgspec writes the long map header, however many it leaves out.
    status: str
    local: bool
    headless: bool
    parallel_config_hash: str | None = None


class _VllmInit(msgspec.Struct, kw_only=True):
    addresses: Addresses
    parallel_config: dict[str, Any]


class InitMessage(msgspec.Struct, kw_only=True):
    """Head -> engine, the answer to HELLO. vLLM's message ends with `parallel_config`."""

    addresses: Addresses
    parallel_config: dict[str, Any] = {}
    status: str = INIT
    version: int = 0
    epoch: int = 0
    boot_id: bytes = b""
    head_id: bytes = b""
    lease: LeaseTimes | None = None
    dtype: str = "auto"
    fingerprint: str = ""
    fields: dict[str, Any] = {}


class ErrorBody(msgspec.Struct, kw_only=True):
    code: str
    message: str
    details: dict[str, Any] = {}


class HeadMessage(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Head -> engine after init: beat, acknowledged READY, or a refusal. Only the `dpi` dialect has these.

    `group`: the epoch of the ranks that step together, in beats to a rank that does not know it yet.
    """

    status: str = INIT
    epoch: int = 0
    head_id: bytes = b""
    error: ErrorBody | None = None
    group: GroupTable | None = None


class PlacesMessage(msgspec.Struct, kw_only=True):
    """Head -> one rank of each pod that has front ends of its own: where all ranks are."""

    status: str = PLACES
    head_id: bytes = b""
    places: list[Place] = []


_places_decoder = msgspec.msgpack.Decoder(PlacesMessage)
_engine_decoder = msgspec.msgpack.Decoder(EngineMessage)
_init_decoder = msgspec.msgpack.Decoder(InitMessage)
_head_decoder = msgspec.msgpack.Decoder(HeadMessage)


def encode_engine_message(message: EngineMessage, dialect: Dialect = Dialect.DPI) -> bytes:
    """HELLO, READY, BEAT, PROGRESS or GOODBYE; in the vllm dialect status, local, headless (and the hash) alone."""
    if dialect is Dialect.VLLM:
        vllm = _VllmMessage(
            message.status, message.local is True, message.headless is True, message.parallel_config_hash
        )
        return encode(vllm)
    return encode(message)


def decode_engine_message(frame: Buffer) -> EngineMessage:
    """Raises WireError for what is not a message of an engine."""
    if len(frame) > MAX_MESSAGE_BYTES:
        raise WireError("too_large", f"handshake: {len(frame)} bytes, at most {MAX_MESSAGE_BYTES} are accepted")
    message = decode_as(_engine_decoder, frame, "handshake")
    if message.status not in ENGINE_STATUSES:
        raise WireError(
            "malformed", f"handshake: status {message.status[:32]!r} is none of {', '.join(ENGINE_STATUSES)}"
        )
    if message.status in (HELLO, READY) and (message.local is msgspec.UNSET or message.headless is msgspec.UNSET):
        raise WireError("malformed", f"handshake: {message.status} without `local` or `headless`")
    epochs = (message.epoch, message.group_seen, message.group_left)
    if len(message.replaces) not in (0, BOOT_ID_BYTES) or not all(0 <= epoch < MAX_EPOCH for epoch in epochs):
        raise WireError("malformed", "handshake: `replaces` or an epoch out of range")
    if message.exchange and not _is_address(message.exchange):
        raise WireError("malformed", "handshake: `exchange` is not tcp://IP:PORT")
    return message


def encode_init(init: InitMessage, dialect: Dialect = Dialect.DPI) -> bytes:
    if dialect is Dialect.VLLM:
        return encode(_VllmInit(addresses=init.addresses, parallel_config=init.parallel_config))
    return encode(init)


def encode_head_message(message: HeadMessage) -> bytes:
    return encode(message)


def encode_places(message: PlacesMessage) -> bytes:
    return encode(message)


def decode_head_message(frame: Buffer) -> InitMessage | HeadMessage | PlacesMessage:
    """Init, or a later message of the head. Raises WireError."""
    message = decode_as(_head_decoder, frame, "handshake")
    if message.status == INIT:
        return decode_as(_init_decoder, frame, "init")
    if message.status == PLACES:
        return decode_as(_places_decoder, frame, "places")
    if message.status not in (BEAT, READY, ERROR) or (message.status == ERROR and message.error is None):
        raise WireError("malformed", f"handshake: unexpected status {message.status[:32]!r} from the head")
    return message


def _is_address(endpoint: str) -> bool:
    """`tcp://IP:PORT`; names are not looked up for a stranger."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return endpoint.startswith("tcp://") and port.isascii() and port.isdigit() and 0 < int(port[:6]) <= 65535
