"""What a client tells besides tokens: rank changes and load numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from dpi_engine.frontend.interface import EngineError
from dpi_engine.wire.messages import LoadRecord, RankState, SchedulerStats

logger = logging.getLogger(__name__)


class ClientClosed(EngineError):
    """The front end is shutting down (or was never started)."""

    status = 503
    code = "shutting_down"


class RankEvent(msgspec.Struct, kw_only=True):
    """A rank moved to `state` for `reason`; `requests_lost` of this front end ended with it."""

    rank: int
    state: RankState
    epoch: int
    reason: str = ""
    requests_lost: int = 0


StepHook = Callable[[int, int], None]
ReplayHook = Callable[[int], None]
StatsHook = Callable[[int, LoadRecord | SchedulerStats], None]
EventHook = Callable[[RankEvent], None]


class Hooks:
    """Callbacks that may be absent, and may raise without harm to what called them."""

    def __init__(
        self,
        on_stats: StatsHook | None = None,
        on_event: EventHook | None = None,
        on_step: StepHook | None = None,
        on_replay: ReplayHook | None = None,
    ) -> None:
        self._on_stats = on_stats
        self._on_event = on_event
        self._on_step = on_step
        self._on_replay = on_replay

    def replay(self, rank: int) -> None:
        """A request of that rank, which was lost, goes on at another one."""
        if self._on_replay is not None:
            try:
                self._on_replay(rank)
            except Exception:
                logger.exception("the replay hook failed")

    def step(self, rank: int, num_tokens: int) -> None:
        """A rank's step computed `num_tokens`."""
        if self._on_step is not None:
            try:
                self._on_step(rank, num_tokens)
            except Exception:
                logger.exception("the step hook failed")

    def stats(self, rank: int, stats: LoadRecord | SchedulerStats) -> None:
        if self._on_stats is not None:
            try:
                self._on_stats(rank, stats)
            except Exception:
                logger.exception("the stats hook failed")

    def event(self, event: RankEvent) -> None:
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                logger.exception("the event hook failed")
