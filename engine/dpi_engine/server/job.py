"""One request for text being answered, whole or as a stream: what completions and chat have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from dpi_engine.server.answering import answer_stream, answer_whole
from dpi_engine.server.generation import Plan
from dpi_engine.server.sequence import Output, merged
from dpi_engine.server.state import ServerState

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Whole:
    """All outputs of one choice. `logprobs` has what `Job.logprobs` gave for each."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Job(ABC):
    """Makes the bodies of one endpoint. `shows_tokens`: chunks also go out that have tokens and no text."""

    chunk_type: type[Any]

    def __init__(self, state: ServerState, plan: Plan, *, shows_tokens: bool) -> None:
        self.state = state
        self.plan = plan
        self.created = int(time.time())
        self._shows_tokens = shows_tokens or plan.return_token_ids
        self.begun: set[int] = set()

    @abstractmethod
    def logprobs(self, output: Output) -> Sequence[Any]:
        """What to tell of the tokens of one output; empty where nothing was asked for."""

    @abstractmethod
    def response(self, wholes: list[Whole]) -> Any:
        """The body of a whole answer, of all choices in order."""

    @abstractmethod
    def news(self, output: Output) -> Iterator[Any]:
        """The chunks that tell of one output."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Generate and answer as was asked for. Raises ApiError."""
        return await (
            answer_stream(request, self._chunks()) if self.plan.stream else answer_whole(request, self._whole)
        )

    async def _whole(self) -> bytes:
        wholes = [Whole() for _ in self.plan.choices]
        texts: list[list[str]] = [[] for _ in wholes]
        async with aclosing(merged(self.plan.choices, self.state.client)) as outputs:
            async for output in outputs:
                whole = wholes[output.index]
                texts[output.index].append(output.text)
                whole.token_ids.extend(output.token_ids)
                whole.logprobs.extend(self.logprobs(output))
                whole.finish_reason, whole.stop_reason = output.finish_reason, output.stop_reason
        for whole, parts in zip(wholes, texts, strict=True):
            whole.text = "".join(parts)
        return _encode(self.response(wholes))

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        """With include_usage, a last chunk without choices has the counts."""
        async with aclosing(merged(self.plan.choices, self.state.client)) as outputs:
            async for output in outputs:
                for chunk in self.news(output):
                    yield _encode(chunk)
        if self.plan.include_usage:
            yield _encode(self.chunk([], last=True))

    def is_first(self, index: int) -> bool:
        """True once for each choice: the first time that it is asked."""
        first = index not in self.begun
        self.begun.add(index)
        return first

    def is_news(self, text: str | None, finish_reason: str | None) -> bool:
        """Is there anything to tell, or was a chunk per output asked for?"""
        return bool(text) or finish_reason is not None or self._shows_tokens or self.plan.continuous_usage

    def chunk(self, choices: list[Any], *, last: bool = False) -> Any:
        """A chunk of `chunk_type`, with counts where they were asked for."""
        plan = self.plan
        chunk = self.chunk_type(id=plan.request_id, created=self.created, model=plan.model, choices=choices)
        if plan.include_usage:
            chunk.usage = plan.usage() if last or plan.continuous_usage else None
        return chunk
