"""Requests and outputs to frames and back, in both dialects.

A message to an engine is `[type, payload, extra frames...]`, one from an engine `[payload, extra frames...]`; payloads
are msgpack. In the `vllm` dialect exactly vLLM 0.32's fields are written; decoders take both dialects, shorter arrays
(defaults) and longer ones (extras ignored). Whatever is wrong with a message, WireError is what is raised.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from dpi_engine.wire.errors import WireError
from dpi_engine.wire.messages import (
    DEAD_SENTINEL,
    Dialect,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    ReadyResponse,
    RequestType,
    UtilityOutput,
)
from dpi_engine.wire.tensors import Buffer, decode_logprobs, encode_logprobs, ext_hook

MAX_FRAME_BYTES = 64 << 20
MAX_FRAMES = 4096
"""Frames per message: a step with log probabilities of many requests takes up to six per request."""

T = TypeVar("T")


class UtilityCall(msgspec.Struct, array_like=True):
    """UTILITY: call `method` (an allow-listed word, never an attribute) and answer `client_index` under `call_id`."""

    client_index: int
    call_id: int
    method: str
    args: list[Any] = []


class StartWave(msgspec.Struct, array_like=True):
    """START_DP_WAVE: run wave `wave`; `exclude` is the rank that need not be told (vLLM front ends put bytes there).

    `group`: epoch of the group of ranks that is meant, 0 for any. Only the `dpi` dialect has it.
    """

    wave: int
    exclude: int | bytes | None = None
    group: int = 0


class Dead:
    """What `decode_outputs` returns for the sentinel of a dying engine."""

    def __repr__(self) -> str:
        return "DEAD"


DEAD = Dead()

RequestPayload = EngineCoreRequest | list[str] | StartWave | UtilityCall


class _RawOutput(EngineCoreOutput, array_like=True):
    """An output whose log probabilities are still arrays."""

    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None


class _RawOutputs(EngineCoreOutputs, array_like=True):
    """Outputs whose log probabilities are still arrays."""

    outputs: list[_RawOutput] = msgspec.field(default_factory=list)  # type: ignore[assignment]


class _RequestHead(msgspec.Struct, array_like=True):
    request_id: str


class _Coders(threading.local):
    """Encoders keep a buffer of their own, so each thread has one."""

    def __init__(self) -> None:
        self.encoder = msgspec.msgpack.Encoder()
        self.outputs = msgspec.msgpack.Decoder(EngineCoreOutputs, ext_hook=ext_hook)
        self.raw_outputs = msgspec.msgpack.Decoder(_RawOutputs, ext_hook=ext_hook)
        self.add = msgspec.msgpack.Decoder(EngineCoreRequest, ext_hook=ext_hook)
        self.request_head = msgspec.msgpack.Decoder(_RequestHead, ext_hook=ext_hook)
        self.abort = msgspec.msgpack.Decoder(list[str], ext_hook=ext_hook)
        self.wave = msgspec.msgpack.Decoder(StartWave, ext_hook=ext_hook)
        self.utility = msgspec.msgpack.Decoder(UtilityCall, ext_hook=ext_hook)
        self.ready = msgspec.msgpack.Decoder(ReadyResponse, ext_hook=ext_hook)


_coders = _Coders()


def encode(message: Any) -> bytes:
    """Msgpack of a plain value or struct."""
    return _coders.encoder.encode(message)


def decode_as(decoder: msgspec.msgpack.Decoder[T], frame: Buffer, what: str) -> T:
    """`frame` by `decoder`; every way it can fail becomes a WireError."""
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError("too_large", f"{what}: {len(frame)} bytes, at most {MAX_FRAME_BYTES} are accepted")
    try:
        return decoder.decode(frame)
    except WireError:
        raise
    except Exception as error:  # ValidationError, DecodeError, RecursionError, UnicodeDecodeError, TypeError, ...
        raise WireError("malformed", f"{what}: {type(error).__name__}: {str(error)[:200]}") from None


def check_frames(frames: Sequence[Buffer], least: int, most: int, what: str) -> None:
    """WireError unless least <= number of frames <= most and none is too large."""
    if not least <= len(frames) <= most:
        expected = str(least) if least == most else f"{least}..{most}"
        raise WireError("frame_count", f"{what}: expected {expected} frames, got {len(frames)}")
    for frame in frames:
        if len(frame) > MAX_FRAME_BYTES:
            raise WireError("too_large", f"{what}: {len(frame)} bytes, at most {MAX_FRAME_BYTES} are accepted")


# ---------------------------------------------------------------------------------------------------- requests


def encode_request(kind: RequestType, payload: RequestPayload, dialect: Dialect = Dialect.DPI) -> list[bytes]:
    """Frames of a message to an engine, without the identity that a ROUTER puts before them.

    payload by kind: ADD EngineCoreRequest, ABORT list of internal request ids, START_DP_WAVE StartWave, UTILITY
    UtilityCall.
    """
    if dialect is Dialect.VLLM and isinstance(payload, EngineCoreRequest):
        r = payload
        fields = (
            r.request_id,
            r.prompt_token_ids,
            r.mm_features,
            r.sampling_params,
            r.pooling_params,
            r.arrival_time,
            r.lora_request,
            r.cache_salt,
            r.data_parallel_rank,
            r.prompt_embeds,
            r.prompt_is_token_ids,
            r.client_index,
            r.current_wave,
            r.priority,
            r.trace_headers,
            r.resumable,
            r.external_req_id,
            r.reasoning_ended,
            r.reasoning_parser_kwargs,
            r.abort_immediately,
            r.session_id,
            r.kv_hints,
        )
        return [kind.value, _coders.encoder.encode(fields)]
    if dialect is Dialect.VLLM and isinstance(payload, StartWave):
        return [kind.value, _coders.encoder.encode((payload.wave, payload.exclude))]
    return [kind.value, _coders.encoder.encode(payload)]


# Features a rank does not serve: asking for one is refused by name, never ignored.
_UNSERVED = ("mm_features", "pooling_params", "lora_request", "prompt_embeds")


def decode_request(frames: Sequence[Buffer]) -> tuple[RequestType, RequestPayload]:
    """Kind and payload of `[type, payload, extra...]`.

    Raises WireError; its `request_id` is set where the id of a bad ADD could be read.
    """
    check_frames(frames, 2, MAX_FRAMES, "request")
    kind_byte = bytes(frames[0])
    body = frames[1]
    if kind_byte == b"\x00":
        return RequestType.ADD, _decode_add(body)
    if kind_byte == b"\x01":
        return RequestType.ABORT, decode_as(_coders.abort, body, "ABORT")
    if kind_byte == b"\x02":
        return RequestType.START_DP_WAVE, decode_as(_coders.wave, body, "START_DP_WAVE")
    if kind_byte == b"\x03":
        return RequestType.UTILITY, decode_as(_coders.utility, body, "UTILITY")
    raise WireError("unknown_type", f"request type {kind_byte[:8].hex()!r} is not one of 00, 01, 02, 03")


def _decode_add(body: Buffer) -> EngineCoreRequest:
    try:
        request = decode_as(_coders.add, body, "ADD")
    except WireError as error:
        try:
            error.request_id = decode_as(_coders.request_head, body, "ADD").request_id
        except WireError:
            error.request_id = None
        raise error from None
    for name in _UNSERVED:
        value = getattr(request, name)
        if value is not None and value != []:
            raise WireError(
                "unsupported_field",
                f"ADD: {name} is set, but this engine serves text generation of the base model only",
                request.request_id,
            )
    if request.prompt_token_ids is None:
        raise WireError("unsupported_field", "ADD: prompt_token_ids is missing", request.request_id)
    if request.sampling_params is None:
        raise WireError("unsupported_field", "ADD: sampling_params is missing", request.request_id)
    return request


# ----------------------------------------------------------------------------------------------------- outputs


def encode_outputs(outputs: EngineCoreOutputs, dialect: Dialect = Dialect.DPI) -> list[bytes]:
    """Frames of one message from an engine to one front end (or to the coordinator)."""
    if dialect is Dialect.DPI:
        return [_coders.encoder.encode(outputs)]
    aux: list[bytes] = []
    rows = []
    for o in outputs.outputs:
        logprobs: Any = o.new_logprobs
        if logprobs is not None:
            logprobs = encode_logprobs(logprobs, aux, prompt=False)
        prompt_logprobs: Any = o.new_prompt_logprobs_tensors
        if prompt_logprobs is not None:
            prompt_logprobs = encode_logprobs(prompt_logprobs, aux, prompt=True)
        rows.append(
            (
                o.request_id,
                o.new_token_ids,
                logprobs,
                prompt_logprobs,
                o.pooling_output,
                o.finish_reason,
                o.stop_reason,
                o.events,
                o.kv_transfer_params,
                o.ec_transfer_params,
                o.trace_headers,
                o.prefill_stats,
                o.routed_experts,
                o.num_nans_in_logits,
                o.mm_cache_miss_hashes,
                o.new_sampling_mask,
                o.spec_decode_metrics,
                o.prompt_token_id_logprobs,
            )
        )
    fields = (
        outputs.engine_index,
        rows,
        outputs.scheduler_stats,
        outputs.timestamp,
        outputs.utility_output,
        outputs.finished_requests,
        outputs.wave_complete,
        outputs.start_wave,
        outputs.weight_version,
    )
    return [_coders.encoder.encode(fields), *aux]


def decode_outputs(frames: Sequence[Buffer]) -> EngineCoreOutputs | Dead:
    """One message of an engine, or DEAD for its last word. Raises WireError."""
    check_frames(frames, 1, MAX_FRAMES, "outputs")
    body = frames[0]
    if len(body) == len(DEAD_SENTINEL) and bytes(body) == DEAD_SENTINEL:
        return DEAD
    try:
        return _coders.outputs.decode(body)  # arrays of log probabilities do not fit this type: the slow way below
    except Exception:
        raw = decode_as(_coders.raw_outputs, body, "outputs")
    outputs = []
    for o in raw.outputs:
        try:
            logprobs = decode_logprobs(o.new_logprobs, frames, "new_logprobs")
            prompt = decode_logprobs(o.new_prompt_logprobs_tensors, frames, "new_prompt_logprobs")
        except WireError:
            raise
        except Exception as error:
            raise WireError("malformed", f"outputs: {type(error).__name__}: {str(error)[:200]}") from None
        values = {name: getattr(o, name) for name in EngineCoreOutput.__struct_fields__}
        values["new_logprobs"] = logprobs
        values["new_prompt_logprobs_tensors"] = prompt
        outputs.append(EngineCoreOutput(**values))
    fields = {name: getattr(raw, name) for name in EngineCoreOutputs.__struct_fields__}
    fields["outputs"] = outputs
    return EngineCoreOutputs(**fields)


def utility_reply(call_id: int, result: Any = None, failure: str | None = None) -> UtilityOutput:
    """Answer to a UtilityCall: `result` as [type info (nil), value], or a failure message."""
    if failure is not None:
        return UtilityOutput(call_id=call_id, failure_message=failure, result=None)
    return UtilityOutput(call_id=call_id, result=[None, result])


def utility_value(output: UtilityOutput) -> Any:
    """Value inside a utility answer. Raises WireError when its form is wrong or it names types to be imported."""
    if output.result is None:
        return None
    if not isinstance(output.result, list) or len(output.result) != 2:
        raise WireError("malformed", "utility result: expected [type info, value]")
    if output.result[0] is not None:
        raise WireError("malformed", "utility result: type names are not accepted, only plain values")
    return output.result[1]


# ---------------------------------------------------------------------------------------------- ready response

_VLLM_READY_FIELDS = tuple(name for name in ReadyResponse.__struct_fields__ if name != "epoch")


def encode_ready_response(response: ReadyResponse, dialect: Dialect = Dialect.DPI) -> bytes:
    """First message of an engine on each input socket."""
    if dialect is Dialect.DPI:
        return _coders.encoder.encode(response)
    return _coders.encoder.encode({name: getattr(response, name) for name in _VLLM_READY_FIELDS})


def decode_ready_response(frame: Buffer) -> ReadyResponse | None:
    """The response, or None for an empty frame (which some engines send: it still makes the route)."""
    if not len(frame):
        return None
    return decode_as(_coders.ready, frame, "ready response")
