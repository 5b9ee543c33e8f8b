"""/v1/completions."""

from __future__ import annotations

from typing import Any

import msgspec

from dpi_engine.server.schemas.sampling import PromptLogprobs, SamplingFields, Usage


class CompletionRequest(SamplingFields, kw_only=True):
    """`prompt`: str | list[str] | list[int] | list[list[int]]; its form is read in `prompts`."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry per token. `text_offset` counts characters from the start of the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """A whole answer, or one chunk of a stream (`usage` left out there unless asked for)."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
