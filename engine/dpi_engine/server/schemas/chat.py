"""/v1/chat/completions."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from dpi_engine.server.schemas.sampling import PromptLogprobs, SamplingFields, Usage


class Conversation(Protocol):
    """What shapes the prompt that a conversation becomes, here and in /tokenize."""

    messages: list[dict[str, Any]] | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    documents: list[dict[str, Any]] | None
    reasoning_effort: str | None


class ChatRequest(SamplingFields, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob] | None


class ChatMessage(msgspec.Struct):
    role: str
    content: str | None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET


class ChatResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One chunk of a stream (`usage` left out unless asked for)."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
