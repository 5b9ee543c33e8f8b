"""One request for text being answered, whole or as a stream: what completions and chat have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from dpi_engine.server.answering import answer_stream, answer_whole
from dpi_engine.server.generation import Plan
from dpi_engine.server.sequence import Open, Output, generate
from dpi_engine.server.sse import EventStream, event
from dpi_engine.server.state import ServerState

_encode = msgspec.json.Encoder().encode

_GAP = b"\0"
"""Stands in an encoded chunk where the text goes: no JSON text has this byte."""


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
        self._plain = not (self._shows_tokens or plan.continuous_usage)
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self.begun: set[int] = set()

    @abstractmethod
    def logprobs(self, output: Output) -> Sequence[Any]:
        """What to tell of the tokens of one output; empty where nothing was asked for."""

    @abstractmethod
    def response(self, wholes: list[Whole]) -> Any:
        """The body of a whole answer, of all choices in order."""

    @abstractmethod
    def text_chunk(self, index: int, text: Any) -> Any:
        """The chunk that tells of text in the middle of a choice, and of nothing else."""

    @abstractmethod
    def news(self, output: Output) -> Iterator[Any]:
        """The chunks that tell of one output."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Generate and answer as was asked for. Raises ApiError."""
        return await (answer_stream(request, self._stream) if self.plan.stream else answer_whole(request, self._whole))

    async def _whole(self) -> bytes:
        collector = _Collector(self)
        await generate(self.plan.choices, self.state.client, collector.put, Open())
        return _encode(self.response(collector.wholes()))

    async def _stream(self, stream: EventStream) -> bytes:
        """With include_usage, a last chunk without choices has the counts."""

        def put(output: Output) -> None:
            if events := self.events(output):
                stream.put(events)

        await generate(self.plan.choices, self.state.client, put, stream)
        return event(_encode(self.chunk([], last=True))) if self.plan.include_usage else b""

    def events(self, output: Output) -> bytes:
        """The events that tell of one output; empty if there is nothing to tell yet."""
        frame = self._frames.get(output.index)
        if frame is None or output.finish_reason is not None:
            if self._plain and output.index in self.begun:
                self._frames[output.index] = self._frame(output.index)
            return b"".join([event(_encode(chunk)) for chunk in self.news(output)])
        if not output.text:
            return b""
        return b"%b%b%b" % (frame[0], _encode(output.text), frame[1])

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text in every event of a choice that has text and nothing else."""
        before, _, after = event(_encode(self.text_chunk(index, msgspec.Raw(_GAP)))).partition(_GAP)
        return before, after

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


class _Collector:
    """Takes all outputs of a job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._wholes = [Whole() for _ in job.plan.choices]
        self._texts: list[list[str]] = [[] for _ in self._wholes]

    def put(self, output: Output) -> None:
        whole = self._wholes[output.index]
        self._texts[output.index].append(output.text)
        whole.token_ids.extend(output.token_ids)
        whole.logprobs.extend(self._job.logprobs(output))
        whole.finish_reason, whole.stop_reason = output.finish_reason, output.stop_reason

    def wholes(self) -> list[Whole]:
        for whole, parts in zip(self._wholes, self._texts, strict=True):
            whole.text = "".join(parts)
        return self._wholes
