"""Calls of the management API that go through front ends to their ranks, each with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dpi_engine.launch.control import UtilityCall, UtilityResult
from dpi_engine.launch.management import UtilityFailed

ANSWER_MARGIN_S = 5.0
"""Beyond a call's own limit: the front end answers at that one, in words."""

Send = Callable[[str, UtilityCall], Awaitable[None]]


class UtilityCalls:
    """Calls that wait for an answer."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[UtilityResult]] = {}
        self._next = 0

    async def call(self, send: Send, front_ends: Sequence[str], method: str, args: list[Any]) -> dict[int, Any]:
        """Results of all `front_ends`, by rank. Raises UtilityFailed with the first error."""
        answers = await asyncio.gather(*(self._ask(send, name, method, args) for name in front_ends))
        for answer in answers:
            if answer.error:
                raise UtilityFailed(answer.status, answer.error)
        return {rank: value for answer in answers for rank, value in answer.results.items()}

    def take(self, answer: UtilityResult) -> None:
        """An answer has come; one that nobody waits for any more is dropped."""
        waiting = self._waiting.pop(answer.call_id, None)
        if waiting and not waiting.done():
            waiting.set_result(answer)

    async def _ask(self, send: Send, name: str, method: str, args: list[Any]) -> UtilityResult:
        self._next += 1
        call = UtilityCall(call_id=self._next, method=method, args=args)
        answer: asyncio.Future[UtilityResult] = asyncio.get_running_loop().create_future()
        self._waiting[call.call_id] = answer
        limit = call.timeout_s + ANSWER_MARGIN_S
        try:
            await send(name, call)
            async with asyncio.timeout(limit):
                return await answer
        except TimeoutError:
            silent = f"{method}: no answer from {name} within {limit:.0f} s"
            return UtilityResult(call_id=call.call_id, error=silent, status=504)
        finally:
            self._waiting.pop(call.call_id, None)
