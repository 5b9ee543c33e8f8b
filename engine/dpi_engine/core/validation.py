"""What the core refuses to take, each with a code and a sentence. Nothing that passes can break a step."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dpi_engine.wire.messages import EngineCoreRequest, SamplingParams


class RequestRefused(Exception):
    """A request that was not taken; the scheduler is as it was before.

    `code` is one of: duplicate_request, unsupported_request, empty_prompt, token_out_of_range, prompt_too_long,
    does_not_fit, invalid_sampling, nothing_to_generate, queue_full. A duplicate's id belongs to a live request: do not
    end that one by answering under it.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def check(
    request: EngineCoreRequest, *, vocab_size: int, max_model_len: int, capacity: int, max_logprobs: int
) -> SamplingParams:
    """Raise RequestRefused unless the request can be run to its end; returns its sampling parameters.

    `capacity`: tokens that the whole block pool holds.
    """
    _check_kind(request)
    sampling = request.sampling_params
    if sampling is None:
        raise RequestRefused("unsupported_request", "sampling_params: missing; only text generation is served")
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestRefused("empty_prompt", "prompt_token_ids: empty; at least one token is needed")
    _check_tokens("prompt_token_ids", prompt, vocab_size)
    outputs = request.output_token_ids
    if outputs:
        _check_tokens("output_token_ids", outputs, vocab_size)
    if len(prompt) >= max_model_len:
        raise RequestRefused(
            "prompt_too_long",
            f"prompt_token_ids: {len(prompt)} tokens leave no room for an output; the model's limit is {max_model_len} "
            "tokens in all. Shorten the prompt",
        )
    if len(prompt) + 1 > capacity:
        raise RequestRefused(
            "does_not_fit",
            f"prompt_token_ids: {len(prompt)} tokens can never fit; the whole key/value cache holds {capacity} tokens. "
            "Shorten the prompt or give the engine more cache memory",
        )
    _check_sampling(sampling, vocab_size, max_logprobs)
    if outputs:
        _check_replay(sampling, len(prompt), outputs, min(max_model_len, capacity))
    return sampling


def _check_kind(request: EngineCoreRequest) -> None:
    for name in ("pooling_params", "mm_features", "prompt_embeds", "lora_request"):
        if getattr(request, name):
            raise RequestRefused("unsupported_request", f"{name}: not supported by this engine; leave it out")
    if request.resumable:
        raise RequestRefused("unsupported_request", "resumable: streaming input is not supported by this engine")


def _check_tokens(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    low, high = min(tokens), max(tokens)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise RequestRefused(
            "token_out_of_range", f"{name}: token id {wrong} is outside the vocabulary, 0 to {vocab_size - 1}"
        )


def _check_sampling(sampling: SamplingParams, vocab_size: int, max_logprobs: int) -> None:
    def expect(name: str, ok: bool, expected: str) -> None:
        if not ok:
            raise RequestRefused("invalid_sampling", f"{name}: expected {expected}, got {getattr(sampling, name)!r}")

    most = sampling.max_tokens
    expect("max_tokens", most is None or most >= 1, "at least 1")
    expect("min_tokens", sampling.min_tokens >= 0, "at least 0")
    expect("min_tokens", most is None or sampling.min_tokens <= most, f"at most max_tokens ({most})")
    expect("temperature", _finite(sampling.temperature) and sampling.temperature >= 0, "a finite number >= 0")
    expect("top_p", 0 < sampling.top_p <= 1, "a number in (0, 1]")
    expect("top_k", sampling.top_k >= -1, "-1, 0 (no limit) or a positive number")
    expect("min_p", 0 <= sampling.min_p <= 1, "a number in [0, 1]")
    expect("presence_penalty", _finite(sampling.presence_penalty), "a finite number")
    expect("frequency_penalty", _finite(sampling.frequency_penalty), "a finite number")
    expect(
        "repetition_penalty", _finite(sampling.repetition_penalty) and sampling.repetition_penalty > 0, "a number > 0"
    )
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(sampling, name)
        expect(name, count is None or 0 <= count <= max_logprobs, f"0 to {max_logprobs}")
    for name in ("stop_token_ids", "all_stop_token_ids", "allowed_token_ids", "logit_bias"):
        tokens = getattr(sampling, name)
        if tokens:
            _check_tokens(name, tokens, vocab_size)
    expect("allowed_token_ids", sampling.allowed_token_ids != [], "at least one token id, or none given")
    if sampling.logit_bias:
        expect("logit_bias", all(map(_finite, sampling.logit_bias.values())), "finite numbers")
    for words in sampling.bad_words_token_ids or ():
        expect("bad_words_token_ids", bool(words), "sequences of at least one token")
        _check_tokens("bad_words_token_ids", words, vocab_size)


def _check_replay(sampling: SamplingParams, num_prompt: int, outputs: list[int], length_limit: int) -> None:
    """Tokens so far that already end the request: the earlier engine has said so, there is nothing to go on with."""
    most = sampling.max_tokens
    if num_prompt + len(outputs) >= length_limit or (most is not None and len(outputs) >= most):
        raise RequestRefused(
            "nothing_to_generate",
            f"output_token_ids: {len(outputs)} tokens after a prompt of {num_prompt} are all that max_tokens ({most}) "
            f"and the length limit ({length_limit}) allow",
        )


def _finite(value: float) -> bool:
    return math.isfinite(value)
