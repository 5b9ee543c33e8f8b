"""One request's way through the front end: what came from the engine, merged until its reader takes it. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dpi_engine.frontend.interface import (
    EngineError,
    GenerationRequest,
    InvalidRequest,
    NoReadyRank,
    Overloaded,
    RankLost,
    TokenDelta,
)
from dpi_engine.wire.messages import EngineCoreEvent, EngineCoreOutput, FinishReason, LogprobsLists, SamplingParams

FINISH_WORDS = {reason: reason.name.lower() for reason in FinishReason}

_ERRORS: dict[str, type[EngineError]] = {
    **{error.code: error for error in (EngineError, InvalidRequest, NoReadyRank, Overloaded, RankLost)},
    "queue_full": Overloaded,
    "duplicate_request": EngineError,
    "stale_epoch": RankLost,
    **dict.fromkeys(
        (
            "does_not_fit",
            "empty_prompt",
            "invalid_sampling",
            "nothing_to_generate",
            "prompt_too_long",
            "token_out_of_range",
            "unsupported_field",
            "unsupported_request",
        ),
        InvalidRequest,
    ),
}


def engine_error(message: str | None, stop_reason: int | str | None, rank: int) -> EngineError:
    """The exception for an output that ended in ERROR.

    The kind is a known code in `stop_reason` or before the first colon of the message; EngineError otherwise.
    """
    text = message or "the engine gave no reason"
    head, _, rest = text.partition(":")
    kind = _ERRORS.get(stop_reason) if isinstance(stop_reason, str) else None
    if kind is None and head in _ERRORS:
        kind, text = _ERRORS[head], rest.strip()
    return (kind or EngineError)(f"rank {rank}: {text}")


class RequestStream:
    """All that is known of a request in flight: enough to send it again elsewhere, and what its reader has yet to get.

    Memory is bounded by the request's own tokens: what the reader leaves is merged into one delta.
    """

    __slots__ = (
        "_cached_tokens",
        "_events",
        "_finish_reason",
        "_ids",
        "_logprobs",
        "_prompt_logprobs",
        "_stop_reason",
        "_waiter",
        "epoch",
        "error",
        "finished",
        "listener",
        "output_token_ids",
        "placed_at",
        "rank",
        "replays",
        "request",
        "sampling",
        "taken",
        "wire_id",
    )

    def __init__(self, wire_id: str, request: GenerationRequest, sampling: SamplingParams) -> None:
        self.wire_id = wire_id
        self.request = request
        self.sampling = sampling
        self.rank = 0
        self.epoch = 0
        self.placed_at = 0  # outputs that it had when it was sent to this rank
        self.replays = 0
        self.output_token_ids: list[int] = []  # index k of the output was accepted k-th, once
        self.finished = False  # nothing more will be accepted
        self.taken = False  # the reader has all
        self.error: EngineError | None = None
        self.listener: Callable[[], None] | None = None  # called in place of waking the one who waits
        self._ids: list[int] = []
        self._logprobs: LogprobsLists | None = None
        self._prompt_logprobs: LogprobsLists | None = None
        self._cached_tokens: int | None = None
        self._events: list[EngineCoreEvent] | None = None
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._waiter: asyncio.Future[None] | None = None

    def push(self, output: EngineCoreOutput, indexed: bool) -> bool:
        """Take over an engine's output. `indexed`: `output_index` is meant, so tokens that came before are left out.

        A gap in the indexes, which only a faulty engine makes, ends the request with an error. Returns whether there is
        news: the reader is to be told by `wake`.
        """
        if self.finished:
            return False
        ids = output.new_token_ids
        logprobs = output.new_logprobs
        known = len(self.output_token_ids)
        if indexed and ids and output.output_index != known:
            skip = known - output.output_index
            if skip < 0:
                self.finished = True
                self.error = EngineError(
                    f"rank {self.rank}: output index {output.output_index} came where {known} was expected; "
                    "tokens between them are missing"
                )
                return True
            ids = ids[skip:]
            if logprobs is not None:
                logprobs = LogprobsLists(logprobs.token_ids[skip:], logprobs.logprobs[skip:], logprobs.ranks[skip:])
        news = False
        if ids:
            self.output_token_ids.extend(ids)
            if self._ids:
                self._ids.extend(ids)
            else:
                self._ids = ids
            news = True
            if logprobs is not None:
                self._logprobs = _joined(self._logprobs, logprobs)
        if output.new_prompt_logprobs_tensors is not None:
            self._prompt_logprobs = _joined(self._prompt_logprobs, output.new_prompt_logprobs_tensors)
            news = True
        if output.prefill_stats is not None and self._cached_tokens is None:
            self._cached_tokens = output.prefill_stats.num_cached_tokens
        if output.events:
            self._events = [*(self._events or ()), *output.events]  # they ride on the next delta
        reason = output.finish_reason
        if reason is not None:
            self.finished = True
            if reason == FinishReason.ERROR:
                self.error = self.error_of(output)
                return True
            self._finish_reason = FINISH_WORDS[reason]
            self._stop_reason = output.stop_reason
            news = True
        return news

    def error_of(self, output: EngineCoreOutput) -> EngineError:
        """What an output that ended in ERROR says."""
        return engine_error(output.error, output.stop_reason, self.rank)

    def fail(self, error: EngineError) -> None:
        """End with an error; tokens that are already here reach the reader before it."""
        if not self.finished:
            self.finished = True
            self.error = error
            if self.listener is None:
                self.wake()
            else:  # not within the news of a rank that ends many
                asyncio.get_running_loop().call_soon(self.wake)

    def take(self) -> TokenDelta | None:
        """All that is new since the last call as one delta, or None."""
        if not self._ids and self._finish_reason is None and self._prompt_logprobs is None:
            return None
        delta = TokenDelta(
            new_token_ids=self._ids,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            cached_tokens=self._cached_tokens,
            rank=self.rank,
            events=self._events,
        )
        if self._finish_reason is not None:
            self.taken = True
        self._ids = []
        self._logprobs = self._prompt_logprobs = None
        self._finish_reason = self._events = None
        return delta

    def wake(self) -> None:
        """Tell the reader that `take` or `error` has something."""
        if self.listener is not None:
            self.listener()
            return
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Return when `take` or `error` may have something. One reader at a time."""
        if self._waiter is not None:
            raise RuntimeError(f"request {self.request.request_id!r}: two readers wait for one stream")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


def _joined(first: LogprobsLists | None, more: LogprobsLists) -> LogprobsLists:
    if first is None:
        return more
    first.token_ids.extend(more.token_ids)
    first.logprobs.extend(more.logprobs)
    first.ranks.extend(more.ranks)
    return first
