"""What the HTTP server asks of an engine client, and what it gets. The server knows no sockets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import msgspec

from dpi_engine.wire.messages import EngineCoreEvent, LogprobsLists, RankInfo, SamplingParams


class GenerationRequest(msgspec.Struct, kw_only=True):
    """One sequence to generate (the server makes n of them for n > 1)."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    session_id: str | None = None
    arrival_time: float = 0.0


class TokenDelta(msgspec.Struct, kw_only=True):
    """New tokens of one sequence. `finish_reason` is set exactly once, on the last one."""

    new_token_ids: list[int]
    logprobs: LogprobsLists | None = None
    prompt_logprobs: LogprobsLists | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int | None = None
    rank: int = 0
    events: list[EngineCoreEvent] | None = None  # queued, scheduled, preempted; the engine's own clock


class EngineError(Exception):
    """Base of what `generate` raises; `status` is the HTTP status that says it best."""

    status = 500
    code = "engine_error"


class NoReadyRank(EngineError):
    status = 503
    code = "no_ready_rank"


class RankLost(EngineError):
    status = 500
    code = "rank_lost"


class Overloaded(EngineError):
    status = 503
    code = "overloaded"


class InvalidRequest(EngineError):
    status = 400
    code = "invalid_request"


class RankElsewhere(EngineError):
    """The rank exists, behind another front end."""

    status = 421
    code = "rank_elsewhere"


class Generation(AsyncIterator[TokenDelta]):
    """One request's deltas until it is finished, for one reader: either called (`listen`) or waiting (`async for`).

    What the reader leaves is merged into one delta.
    """

    @abstractmethod
    def listen(self, listener: Callable[[], None]) -> None:
        """Send the request; `listener` is called in the event loop when `take` has something, until `leave`.

        Raises InvalidRequest, NoReadyRank, Overloaded, or another EngineError.
        """

    @abstractmethod
    def take(self) -> TokenDelta | None:
        """All that is new since the last call, or None. Raises the EngineError that the request ended in, once."""

    @abstractmethod
    def leave(self) -> None:
        """Want no more: a request that has not finished is aborted in the engine. Idempotent."""


class EngineClient(Protocol):
    """The front end's view of all ranks."""

    max_model_len: int

    def generate(self, request: GenerationRequest) -> Generation:
        """Leaving the iterator early (or cancelling) aborts the request in the core."""
        ...

    async def utility(self, method: str, *args: Any, timeout: float = 30.0) -> dict[int, Any]:
        """Call an allow-listed method on every ready rank; results by rank."""
        ...

    def ranks(self) -> list[RankInfo]: ...

    def ready(self) -> bool:
        """True while at least one rank may get work."""
        ...
