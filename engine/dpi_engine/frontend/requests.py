"""A request of the HTTP server as the message that engines get. Pure but for the random seed and id."""

from __future__ import annotations

import secrets

import msgspec

from dpi_engine.frontend.interface import GenerationRequest, InvalidRequest
from dpi_engine.frontend.streams import RequestStream
from dpi_engine.wire.messages import EngineCoreRequest


def check_request(request: GenerationRequest, max_model_len: int) -> None:
    """Raise InvalidRequest for a prompt that no engine can run. `max_model_len` 0: not known yet."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise InvalidRequest("prompt: got no tokens; expected at least one")
    if min(prompt) < 0:
        raise InvalidRequest(f"prompt: got token id {min(prompt)}; expected ids of the vocabulary, from 0")
    if max_model_len and len(prompt) >= max_model_len:
        raise InvalidRequest(
            f"prompt: got {len(prompt)} tokens; this model takes at most {max_model_len - 1} and one to generate"
        )


def open_stream(request: GenerationRequest, seeded: bool) -> RequestStream:
    """A stream under an id of its own: two clients may well use the same one.

    `seeded`: give the request a seed if it has none. Then its random numbers depend on nothing else, wherever it runs.
    """
    sampling = request.sampling
    if seeded and sampling.seed is None:
        sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(62))
    return RequestStream(f"{request.request_id}-{secrets.token_hex(4)}", request, sampling)


def rename(stream: RequestStream) -> None:
    """Another id for the wire: what still comes for the one before belongs to a rank that was given up."""
    stream.wire_id = f"{stream.request.request_id}-{secrets.token_hex(4)}"


def to_message(
    stream: RequestStream, client_index: int, wave: int, arrival_time: float, extended: bool
) -> EngineCoreRequest:
    """ADD for a stream, with the tokens it has so far. `extended`: the receiver knows epochs and earlier outputs."""
    request = stream.request
    return EngineCoreRequest(
        request_id=stream.wire_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling_params=stream.sampling,
        arrival_time=request.arrival_time or arrival_time,
        cache_salt=request.cache_salt,
        data_parallel_rank=request.data_parallel_rank,
        client_index=client_index,
        current_wave=wave,
        priority=request.priority,
        external_req_id=request.request_id,
        session_id=request.session_id,
        output_token_ids=stream.output_token_ids if extended else [],
        epoch=stream.epoch if extended else 0,
    )
