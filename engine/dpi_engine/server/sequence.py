"""One sequence on its way from the engine client to a client of ours, and several of them merged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from dpi_engine.frontend.detokenizer import Detokenizer
from dpi_engine.frontend.interface import EngineClient, EngineError, GenerationRequest, InvalidRequest, TokenDelta
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

    async def outputs(self, client: EngineClient) -> AsyncGenerator[Output, None]:
        """Generate. Closing this, or a stop string, closes the client's stream, which aborts the request there.

        Raises EngineError as the client does, also if the stream ends without a finish reason.
        """
        reason: str | None = None
        deltas: AsyncIterator[TokenDelta] | None = None
        try:
            deltas = client.generate(self.request)
            async for delta in deltas:
                output = self._take(delta)
                reason = output.finish_reason
                if reason is not None:
                    self.finished = True
                if output.text or output.token_ids or reason is not None or delta.prompt_logprobs is not None:
                    yield output
                if reason is not None:
                    break
            else:
                raise EngineError("the engine's stream ended without a finish reason")
        except InvalidRequest:
            self.timer.discard()  # the client's fault, answered before any rank had it
            raise
        except EngineError:
            reason = "error"
            raise
        finally:
            self.timer.finished(reason or "abort")
            if deltas is not None:
                await _close(deltas)

    def _take(self, delta: TokenDelta) -> Output:
        if delta.finish_reason == "error":
            raise EngineError("the engine could not go on with this request")
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        if delta.events:
            self.timer.events(delta.events)
        self.timer.tokens(len(delta.new_token_ids), delta.rank, self.cached_tokens)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = joined(self.prompt_logprobs, delta.prompt_logprobs)
        if not self.keep_tokens:
            return Output(self.index, "", [], None, delta.finish_reason and "length")
        ids, rows = delta.new_token_ids, delta.logprobs
        reason, stop_reason = delta.finish_reason, delta.stop_reason
        piece = self.detokenizer.push(ids, last_is_stop_token=reason == "stop")
        text, stop = piece.text, piece.stop
        if stop is not None:
            ids, rows = ids[: piece.tokens_used], head(rows, piece.tokens_used)
        elif reason is not None:
            rest = self.detokenizer.finish()
            text, stop = text + rest.text, rest.stop
        if stop is not None:
            reason, stop_reason = "stop", stop
        elif stop_reason in self.hidden_stops:
            stop_reason = None
        self.num_tokens += len(ids)
        return Output(self.index, text, ids, rows, reason, stop_reason)


async def _close(iterator: AsyncIterator[Any]) -> None:
    close = getattr(iterator, "aclose", None)
    if close is not None:
        await close()


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


async def merged(choices: Sequence[Choice], client: EngineClient) -> AsyncGenerator[Output, None]:
    """Outputs of all choices as they come; order is kept within a choice.

    At most one output per choice waits here: a slow reader holds the choices up, whose news then merge in the client.
    Closing this, or an error in one choice, closes all of them.
    """
    if len(choices) == 1:
        async with aclosing(choices[0].outputs(client)) as outputs:
            async for output in outputs:
                yield output
        return
    queue: asyncio.Queue[Output | BaseException | None] = asyncio.Queue(maxsize=1)

    async def pump(choice: Choice) -> None:
        try:
            async with aclosing(choice.outputs(client)) as outputs:
                async for output in outputs:
                    await queue.put(output)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(choice)) for choice in choices]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
