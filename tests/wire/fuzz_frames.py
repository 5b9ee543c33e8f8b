"""Malformed messages for any socket: mutations of valid ones, random bytes, deep nesting, huge lengths, wrong counts.

`messages(seed, count, corpus)` is deterministic. A corpus is a list of valid messages (lists of frames).
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import golden_frames as golden
import msgspec

from dpi_engine.wire import handshake as hs
from dpi_engine.wire.codec import StartWave, UtilityCall, encode, encode_outputs, encode_ready_response, encode_request
from dpi_engine.wire.messages import (
    WIRE_VERSION,
    Dialect,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    LoadRecord,
    LogprobsLists,
    ReadyResponse,
    RequestType,
    SamplingParams,
    SchedulerStats,
)

Message = list[bytes]

_request = EngineCoreRequest("fuzz", [1, 2, 3], sampling_params=SamplingParams(seed=1, stop=["x"], logit_bias={1: 2.0}))
_rows = LogprobsLists([[1] * 40] * 2, [[-0.5] * 40] * 2, [1, 1])
_output = EngineCoreOutput("fuzz", [1], new_logprobs=_rows, new_prompt_logprobs_tensors=_rows)

REQUESTS: list[Message] = [
    encode_request(RequestType.ADD, _request),
    encode_request(RequestType.ADD, _request, Dialect.VLLM),
    [b"\x00", golden.ADD],
    encode_request(RequestType.ABORT, ["fuzz", "other"]),
    encode_request(RequestType.UTILITY, UtilityCall(0, 1, "is_sleeping", [1, {"a": None}])),
    encode_request(RequestType.START_DP_WAVE, StartWave(3, 1)),
]

OUTPUTS: list[Message] = [
    encode_outputs(EngineCoreOutputs(0, [_output], SchedulerStats(), finished_requests=["fuzz"])),
    encode_outputs(EngineCoreOutputs(0, [_output], SchedulerStats()), Dialect.VLLM),
    encode_outputs(EngineCoreOutputs(0, load=LoadRecord(0, 1, 2, 3, 4, 0.5))),
    encode_outputs(EngineCoreOutputs(0, wave_complete=3, start_wave=4), Dialect.VLLM),
    [golden.LOGPROBS_PAYLOAD, golden.LOGPROBS_IDS, golden.LOGPROBS_VALUES],
]

RANK_TABLES: list[Message] = [[encode(["RANKS", 1, 1, [[0, "READY", 1, b"12345678"]]])]]

READY_RESPONSES: list[Message] = [
    [golden.READY_RESPONSE],
    [golden.READY_RESPONSE_25_KEYS],
    [encode_ready_response(ReadyResponse(max_model_len=1, num_gpu_blocks=2, block_size=3))],
]

WAKE_UPS: list[Message] = [[encode([1, 2])], [encode([b"\x00\x00", 0])], [encode(["SCALE_ELASTIC_EP", 4])]]

HANDSHAKES: list[Message] = [
    [hs.encode_engine_message(hs.EngineMessage(status=status, local=True, headless=False, **extra))]
    for status, extra in [
        (hs.HELLO, {"version": WIRE_VERSION, "pod": "p", "fields": {"model": "m", "seed": 0}}),
        (hs.READY, {"epoch": 1, "fingerprint": "x" * 64, "fields": {"dtype": "bfloat16"}}),
        (hs.BEAT, {"epoch": 1, "step_age": 0.5, "steps": 10}),
        (hs.PROGRESS, {"epoch": 1, "stage": "loading", "fraction": 0.5}),
        (hs.GOODBYE, {"epoch": 1, "reason": "drained"}),
    ]
] + [[hs.encode_engine_message(hs.EngineMessage(status=hs.HELLO, local=True, headless=False), Dialect.VLLM)]]

HEAD_MESSAGES: list[Message] = [
    [golden.INIT_DENSE],
    [hs.encode_head_message(hs.HeadMessage(status=hs.BEAT, epoch=1, head_id=b"12345678"))],
    [hs.encode_head_message(hs.HeadMessage(status=hs.ERROR, error=hs.ErrorBody(code="fenced", message="no")))],
]

_HEADERS = [
    b"\xdc",
    b"\xdd",
    b"\xde",
    b"\xdf",
    b"\xc4",
    b"\xc5",
    b"\xc6",
    b"\xc7",
    b"\xc8",
    b"\xc9",
    b"\xd9",
    b"\xda",
    b"\xdb",
]


def _blob(rng: random.Random) -> bytes:
    """One frame that is garbage from the ground up."""
    kind = rng.randrange(7)
    if kind == 0:
        return rng.randbytes(rng.randrange(64))
    if kind == 1:
        return bytes([rng.choice([0x91, 0x92, 0x81, 0x9F])]) * rng.choice([10, 600, 5000])
    if kind == 2:
        return rng.choice(_HEADERS) + rng.choice([b"\xff" * 4, b"\x7f" + b"\xff" * 3]) + rng.randbytes(rng.randrange(8))
    if kind == 3:
        return msgspec.msgpack.encode(
            msgspec.msgpack.Ext(rng.choice([0, 1, 2, 3, 127]), rng.randbytes(rng.randrange(40)))
        )
    if kind == 4:
        return msgspec.msgpack.encode(_value(rng, 3))
    if kind == 5:
        return b""
    return rng.choice([b"GET / HTTP/1.1\r\n\r\n", b"ENGINE_CORE_DEAE", b"\x80\x04\x95.", b"\xc1" * 9, b"{}" * 50])


def _value(rng: random.Random, depth: int) -> object:
    kind = rng.randrange(9 if depth else 6)
    if kind < 6:
        return [None, True, rng.randrange(-(1 << 63), 1 << 63), rng.random(), "text", b"bytes"][kind]
    if kind == 6:
        return {f"k{i}": _value(rng, depth - 1) for i in range(rng.randrange(4))}
    return [_value(rng, depth - 1) for _ in range(rng.randrange(12))]


def _mutate(rng: random.Random, message: Message) -> Message:
    """A valid message with one to three things wrong."""
    frames = list(message)
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(6)
        at = rng.randrange(len(frames)) if frames else 0
        if kind == 0 and frames:
            del frames[at]
        elif kind == 1:
            frames.insert(at, _blob(rng))
        elif not frames or not frames[at]:
            continue
        else:
            frame = bytearray(frames[at])
            position = rng.randrange(len(frame))
            if kind == 2:
                frame[position] ^= 1 << rng.randrange(8)
            elif kind == 3:
                del frame[position:]
            elif kind == 4:
                frame[position:position] = _blob(rng)[:200]
            else:
                frame[position] = rng.randrange(256)
            frames[at] = bytes(frame)
    return frames


def messages(seed: int, count: int, corpus: list[Message]) -> Iterator[Message]:
    """`count` messages, two in three mutations of `corpus`; never one without a frame (a socket cannot send that)."""
    rng = random.Random(seed)
    for _ in range(count):
        choice = rng.randrange(6)
        if choice < 4:
            frames = _mutate(rng, rng.choice(corpus))
        else:
            frames = [_blob(rng) for _ in range(rng.choice([1, 1, 2, 2, 3, 9]))]
        yield frames or [b""]


def no_subscriptions(stream: Iterator[Message]) -> Iterator[Message]:
    """For an XPUB: frames that begin with 0 or 1 are (un)subscriptions, which ZMQ takes in itself."""
    for frames in stream:
        yield [b"\x02" + f if not f or f[0] in (0, 1) else f for f in frames]
