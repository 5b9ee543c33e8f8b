"""The sequences of one request on their way from the engine client to a client of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from dpi_engine.frontend.detokenizer import Detokenizer
from dpi_engine.frontend.interface import (
    EngineClient,
    EngineError,
    Generation,
    GenerationRequest,
    InvalidRequest,
    TokenDelta,
)
from dpi_engine.server.metrics import RequestTimer
from dpi_engine.wire.messages import LogprobsLists


@dataclass(slots=True)
class Output:
    """News of one choice. `text` may be empty while it could still become a stop string or half a character.

    `finish_reason` is set exactly once per choice, on its last output. `logprobs` has a row for each of `token_ids`.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: LogprobsLists | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class Choice:
    """One sequence to generate for choice `index`, and what is known of it so far.

    `hidden_stops`: stop token ids that the model brought, which are no news to the client. `keep_tokens` false: the
    tokens only had to be computed (scoring a prompt), none is shown.
    """

    index: int
    request: GenerationRequest
    detokenizer: Detokenizer
    timer: RequestTimer
    hidden_stops: frozenset[int] = frozenset()
    keep_tokens: bool = True
    num_tokens: int = 0
    cached_tokens: int = 0
    prompt_logprobs: LogprobsLists | None = None
    finished: bool = field(default=False, init=False)

    def output(self, delta: TokenDelta) -> Output:
        """What a delta means to the client. Raises EngineError for one that says so."""
        reason, stop_reason = delta.finish_reason, delta.stop_reason
        if reason is not None:
            if reason == "error":
                raise EngineError("the engine could not go on with this request")
            self.finished = True
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        if delta.events:
            self.timer.events(delta.events)
        ids, rows = delta.new_token_ids, delta.logprobs
        self.timer.tokens(len(ids), delta.rank, self.cached_tokens)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = joined(self.prompt_logprobs, delta.prompt_logprobs)
        if not self.keep_tokens:
            return Output(self.index, "", [], None, reason and "length")
        piece = self.detokenizer.push(ids, last_is_stop_token=reason == "stop")
        text, stop = piece.text, piece.stop
        if stop is not None:
            ids, rows = ids[: piece.tokens_used], head(rows, piece.tokens_used)
        elif reason is not None:
            rest = self.detokenizer.finish()
            text, stop = text + rest.text, rest.stop
        if stop is not None:
            reason, stop_reason = "stop", stop
            self.finished = True
        elif stop_reason in self.hidden_stops:
            stop_reason = None
        self.num_tokens += len(ids)
        return Output(self.index, text, ids, rows, reason, stop_reason)


def head(rows: LogprobsLists | None, count: int) -> LogprobsLists | None:
    """The first `count` positions."""
    if rows is None:
        return None
    return LogprobsLists(rows.token_ids[:count], rows.logprobs[:count], rows.ranks[:count])


def joined(first: LogprobsLists | None, more: LogprobsLists) -> LogprobsLists:
    """Positions of both, in order."""
    if first is None:
        return more
    return LogprobsLists(
        first.token_ids + more.token_ids, first.logprobs + more.logprobs, list(first.ranks) + list(more.ranks)
    )


class Gate(Protocol):
    """Holds outputs up: while it is `full` none is put, and what comes merges in the engine client."""

    @property
    def full(self) -> bool: ...

    async def room(self) -> None:
        """Return when it is not full any more."""
        ...


class Open:
    """A gate for a reader that takes everything."""

    full = False

    async def room(self) -> None:
        return


async def generate(choices: Sequence[Choice], client: EngineClient, put: Callable[[Output], None], gate: Gate) -> None:
    """Run all choices to their ends; `put` gets each output as it comes, in order within a choice.

    An output is put in the same turn of the event loop in which its message came: no task is woken for a token. Ending
    this early, or an error in one choice, aborts all that have not finished. Raises EngineError as the client does, and
    whatever `put` or the gate raise.
    """
    await _Generating(choices, client, put, gate).run()


class _Generating:
    """The choices of one request while they run. `_turn` calls the task: the gate is full, or all is over."""

    def __init__(
        self, choices: Sequence[Choice], client: EngineClient, put: Callable[[Output], None], gate: Gate
    ) -> None:
        self._choices = choices
        self._client = client
        self._put = put
        self._gate = gate
        self._left = len(choices)
        self._held: dict[int, tuple[Choice, Generation]] = {}
        self._error: Exception | None = None
        self._over = False
        self._turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        begun: list[tuple[Choice, Generation]] = []
        try:
            for choice in self._choices:
                source = self._client.generate(choice.request)
                begun.append((choice, source))
                try:
                    source.listen(partial(self._news, choice, source))
                except Exception as error:
                    self._fail(choice, error)
                    break
            while self._left and self._error is None:
                await self._turn
                self._turn = asyncio.get_running_loop().create_future()
                if self._gate.full and self._left and self._error is None:
                    await self._gate.room()
                held, self._held = self._held, {}
                for choice, source in held.values():
                    self._news(choice, source)
            if self._error is not None:
                raise self._error
        finally:
            self._over = True
            for choice, source in begun:
                choice.timer.finished("abort")  # which those that have ended do not mind
                source.leave()

    def _news(self, choice: Choice, source: Generation) -> None:
        """Something came. An error is for the task that runs all this, not for the one that brings the news."""
        if self._over or choice.finished:
            return
        gate = self._gate
        if gate.full:
            self._held[choice.index] = choice, source
            return
        try:
            delta = source.take()
            if delta is None:
                return
            output = choice.output(delta)
            if output.text or output.token_ids or choice.finished or delta.prompt_logprobs is not None:
                self._put(output)
        except Exception as error:
            self._fail(choice, error)
            return
        if choice.finished:
            self._left -= 1
            choice.timer.finished(output.finish_reason or "abort")
            source.leave()  # a stop string ends it here first
            self._call()
        elif gate.full:
            self._call()

    def _fail(self, choice: Choice, error: Exception) -> None:
        if isinstance(error, InvalidRequest):
            choice.timer.discard()  # the client's fault, answered before any rank had it
        elif isinstance(error, EngineError):
            choice.timer.finished("error")
        self._over, self._error = True, error
        self._call()

    def _call(self) -> None:
        if not self._turn.done():
            self._turn.set_result(None)
