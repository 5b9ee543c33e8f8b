"""Keeps the last answer of every head: asks all of them at their intervals, few at a time, never in step."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import aiohttp

from dpi_operator.api.types import Runtime
from dpi_operator.observe.heads import ask_head
from dpi_operator.plan.facts import HeadReport, RankReport
from dpi_operator.plan.report import VOLATILE_S

log = logging.getLogger(__name__)

FORMING_S = 2.0
"""Seconds between looks at a group that is not ready."""

CONCURRENCY = 16
JITTER = 0.2

Owner = tuple[str, str]
"""Namespace and name of an object."""


@dataclass(frozen=True, slots=True)
class Target:
    """A head to be asked. `steady` heads are asked every `interval_s`, others more often."""

    owner: Owner
    pod: str
    uid: str
    ip: str
    ports: tuple[int, ...]
    runtime: Runtime
    steady: bool
    interval_s: float
    stale_s: float


@dataclass(slots=True)
class _Head:
    target: Target
    due: float
    report: HeadReport | None = None
    told: tuple[object, ...] = ()
    told_at: float = 0.0
    failures: int = 0


@dataclass(slots=True)
class Reporter:
    """`changed` is called with the owner when what a head says matters for its object's status."""

    changed: Callable[[Owner], None]
    _heads: dict[tuple[Owner, str], _Head] = field(default_factory=dict)
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CONCURRENCY))
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def set_targets(self, owner: Owner, targets: list[Target]) -> None:
        """Heads of one object as the last snapshot showed them."""
        wanted = {t.pod: t for t in targets}
        for key in [k for k in self._heads if k[0] == owner]:
            known = wanted.get(key[1])
            if known is None or known.uid != self._heads[key].target.uid:
                del self._heads[key]
        for pod, target in wanted.items():
            head = self._heads.get((owner, pod))
            if head is None:
                self._heads[(owner, pod)] = _Head(target, due=0.0)
                self._wake.set()
            else:
                if head.target.steady and not target.steady:
                    head.due = min(head.due, time.monotonic() + FORMING_S)
                    self._wake.set()
                head.target = target

    def forget(self, owner: Owner) -> None:
        self.set_targets(owner, [])

    def reports(self, owner: Owner) -> dict[str, HeadReport]:
        """Last answers of an object's heads by pod; numbers that are too old are unknown, the rest is kept."""
        now, found = time.time(), {}
        for (key, pod), head in self._heads.items():
            if key == owner and head.report is not None:
                fresh = now - head.report.at <= head.target.stale_s
                found[pod] = head.report if fresh else _without_numbers(head.report)
        return found

    async def run(self) -> None:
        """Until cancelled."""
        running: set[asyncio.Task[None]] = set()
        async with aiohttp.ClientSession() as session:
            try:
                while True:
                    now = time.monotonic()
                    for head in list(self._heads.values()):
                        if head.due <= now:
                            wait = head.target.interval_s if head.target.steady else FORMING_S
                            head.due = now + wait * random.uniform(1 - JITTER, 1 + JITTER)
                            task = asyncio.create_task(self._ask(session, head))
                            running.add(task)
                            task.add_done_callback(running.discard)
                    soonest = min((h.due for h in self._heads.values()), default=now + 60)
                    self._wake.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(max(0.05, soonest - now)):
                            await self._wake.wait()
            finally:
                for task in running:
                    task.cancel()

    async def _ask(self, session: aiohttp.ClientSession, head: _Head) -> None:
        target = head.target
        async with self._slots:
            report = await ask_head(session, target.runtime, target.uid, target.ip, target.ports, time.time())
        if report.error and head.report is not None and head.report.pod_uid == report.pod_uid:
            # One missed answer says nothing of the ranks: what was known stays, with its time.
            head.failures += 1
            report = replace(head.report, error=report.error)
        else:
            head.failures = 0
        head.report = report
        told = _matters(report)
        now = time.monotonic()
        numbers = tuple((r.waiting, r.running, r.kv_usage) for r in report.ranks)
        if told != head.told[:1] or (numbers != head.told[1:] and now - head.told_at >= VOLATILE_S):
            head.told, head.told_at = (*told, *numbers), now
            self.changed(target.owner)


def _matters(report: HeadReport) -> tuple[object, ...]:
    """What a status shows at once when it changes."""
    ranks = tuple((r.rank, r.state, r.stage, r.fingerprint, r.error) for r in report.ranks)
    return ((report.healthy, ranks, bool(report.error)),)


def _without_numbers(report: HeadReport) -> HeadReport:
    def bare(rank: RankReport) -> RankReport:
        return replace(rank, waiting=None, running=None, kv_usage=None)

    return replace(report, ranks=tuple(bare(r) for r in report.ranks))
