"""Fields that completions and chat share."""

from __future__ import annotations

from typing import Any

import msgspec


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """How tokens are chosen and where generation ends. `None` means that the client left it out.

    Types only: ranges are checked in `params`, so that each complaint can name its field and limits. `logit_bias` maps
    token ids (JSON object keys, so strings) to a bias in logits.
    """

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """Token counts: each prompt once however large `n` is, completions summed over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


PromptLogprobs = list[dict[str, Any] | None]
"""Per prompt token: None for the first, else token id (as a string) -> {logprob, rank, decoded_token}."""
