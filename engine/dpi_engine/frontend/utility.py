"""Calls of named methods on engines: who was asked, and what they answered. No I/O."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from dpi_engine.frontend.interface import EngineError, InvalidRequest
from dpi_engine.wire.codec import utility_value
from dpi_engine.wire.errors import WireError
from dpi_engine.wire.messages import UtilityOutput

ALLOWED_METHODS = frozenset(
    {
        "get_supported_tasks",
        "is_scheduler_paused",
        "is_sleeping",
        "pause_scheduler",
        "profile",
        "reset_encoder_cache",
        "reset_mm_cache",
        "reset_prefix_cache",
        "resume_scheduler",
        "sleep",
        "wake_up",
    }
)


class UtilityTimeout(EngineError):
    """A rank did not answer a utility call in time."""

    status = 504
    code = "utility_timeout"


class UtilityCalls:
    """Calls that wait for answers. Each call to one rank has an id of its own, so answers need no other address."""

    def __init__(self) -> None:
        # Answers to an earlier front end of the same index must not match: start anywhere in 62 bits.
        self._next_id = secrets.randbits(62)
        self._waiting: dict[int, tuple[int, asyncio.Future[Any]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @staticmethod
    def check(method: str) -> None:
        """Raise InvalidRequest unless the method may be called."""
        if method not in ALLOWED_METHODS:
            raise InvalidRequest(
                f"utility method {method!r} is not one that may be called; expected one of "
                + ", ".join(sorted(ALLOWED_METHODS))
            )

    def open(self, rank: int) -> tuple[int, asyncio.Future[Any]]:
        """A new call id for a call to `rank`, and the future of its answer."""
        self._next_id = (self._next_id + 1) & (2**63 - 1)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[self._next_id] = (rank, future)
        return self._next_id, future

    def close(self, call_id: int) -> None:
        """Nobody waits for this call any more."""
        self._waiting.pop(call_id, None)

    def answer(self, output: UtilityOutput) -> bool:
        """Take an answer; False if no such call waits (it timed out, or never was). Raises WireError on a bad form."""
        entry = self._waiting.pop(output.call_id, None)
        if entry is None:
            return False
        rank, future = entry
        if future.done():
            return False
        if output.failure_message is not None:
            future.set_exception(EngineError(f"rank {rank}: {output.failure_message}"))
            return True
        try:
            future.set_result(utility_value(output))
        except WireError as error:
            future.set_exception(EngineError(f"rank {rank}: {error.detail}"))
            raise
        return True

    def fail_rank(self, rank: int, error: EngineError) -> None:
        """All calls to a rank end with an error."""
        for call_id, (asked, future) in list(self._waiting.items()):
            if asked == rank:
                del self._waiting[call_id]
                if not future.done():
                    future.set_exception(error)
