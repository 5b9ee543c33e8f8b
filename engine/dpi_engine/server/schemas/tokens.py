"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import msgspec


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None


class TokenizeResponse(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


class DetokenizeResponse(msgspec.Struct):
    prompt: str
