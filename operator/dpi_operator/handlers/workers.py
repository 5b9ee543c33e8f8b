"""One worker per object: events only mark it dirty, the worker looks at everything anew, plans and acts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from dpi_operator import telemetry
from dpi_operator.api.reasons import EventReason
from dpi_operator.api.types import Runtime
from dpi_operator.apply.client import Api, ApiError
from dpi_operator.apply.executor import Executor, Outcome, writes
from dpi_operator.apply.optional import OptionalKinds
from dpi_operator.handlers.reporter import Owner, Reporter, Target
from dpi_operator.observe.snapshot import ALL_KINDS, Lists, owned, take_snapshot
from dpi_operator.plan.actions import EmitEvent, Plan
from dpi_operator.plan.facts import Snapshot
from dpi_operator.plan.reconcile import reconcile
from dpi_operator.plan.view import GroupPhase, head_targets, phases

log = logging.getLogger(__name__)

SETTLE_S = 0.05
"""Events that come together are handled together."""

IDLE_S = 600.0
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
REFUSED_RETRY_S = 15.0
LAST_FOREIGN_S = 120.0
"""Names that others hold are asked for after REFUSED_RETRY_S, then twice as long each time, up to this."""

STOP_AGAIN_S = 1.0
"""A worker that runs on after it was told to stop is told again after this."""

UNSETTLED_S = 30.0
"""An object that is on its way somewhere is looked at this often, should a watch be deaf."""


@dataclass(slots=True)
class _Worker:
    dirty: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    stale: set[str] = field(default_factory=lambda: set(ALL_KINDS))
    lists: Lists = field(default_factory=dict)
    outcome: Outcome = field(default_factory=Outcome)
    failures: int = 0
    foreign_wait: float = 0.0  # until names that others hold are asked for, as it was last
    foreign_due: float = 0.0  # monotonic seconds
    seen: dict[str, GroupPhase] = field(default_factory=dict)


def _settled(plan: Plan) -> bool:
    told = {c.type: (c.status, c.reason) for c in plan.status.conditions}
    return told.get("Progressing", ("", ""))[1] == "RolloutComplete" and told.get("Degraded", ("", ""))[0] == "False"


class Workers:
    """`mark` is all that watches call. `resync_s`: every object is looked at this often, whatever was heard."""

    def __init__(
        self,
        api: Api,
        executor: Executor,
        optional: OptionalKinds,
        concurrency: int = 10,
        domain: str = "cluster.local",
        resync_s: float = IDLE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api, self._executor, self._domain, self._clock = api, executor, domain, clock
        self._resync_s, self._optional = resync_s, optional
        self._slots = asyncio.Semaphore(concurrency)
        self._workers: dict[Owner, _Worker] = {}
        self.reporter = Reporter(self.mark)
        self.last_success = time.monotonic()

    def mark(self, owner: Owner, kind: str = "") -> None:
        """Something about this object may have changed: children of `kind`, or else only what is always read."""
        worker = self._workers.get(owner)
        if worker is None:
            worker = self._workers[owner] = _Worker()
        worker.stale.add(kind or "Pod")
        worker.dirty.set()
        if worker.task is None:
            worker.task = asyncio.get_running_loop().create_task(self._work(owner, worker))

    def mark_all(self, kinds: Sequence[str]) -> None:
        """Every object that is known: these kinds have come or gone."""
        for owner in list(self._workers):
            for kind in kinds or ("",):
                self.mark(owner, kind)

    async def stop(self) -> None:
        """Returns when no worker runs. A cancellation that a library swallowed is asked for again."""
        running = {w.task for w in self._workers.values() if w.task and not w.task.done()}
        while running:
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=STOP_AGAIN_S)

    async def _work(self, owner: Owner, worker: _Worker) -> None:
        wait = 0.0
        while True:
            try:
                async with asyncio.timeout(wait if wait > 0 else 0.001):
                    await worker.dirty.wait()
            except TimeoutError:
                if wait >= UNSETTLED_S:  # nothing was heard for long: trust nothing that was read before
                    worker.stale |= ALL_KINDS
            await asyncio.sleep(SETTLE_S)
            worker.dirty.clear()
            try:
                async with self._slots:
                    plan = await self._once(owner, worker)
            except asyncio.CancelledError:
                raise
            except Exception as e:
                worker.stale |= ALL_KINDS
                worker.failures += 1
                telemetry.RECONCILES.labels("error").inc()
                wait = min(FIRST_RETRY_S * 2 ** min(worker.failures - 1, 10), LAST_RETRY_S)
                if isinstance(e, ApiError):
                    log.warning("%s/%s: %s; again in %.0f s", *owner, e, wait)
                else:
                    log.exception("%s/%s: planning failed; again in %.0f s", *owner, wait)
                if isinstance(e, ApiError) and e.status == 404:  # a kind has gone: then watches have to begin anew
                    await self._optional.look()
                await asyncio.sleep(min(wait, 1.0))  # an object that is marked all the time must not spin on an error
                continue
            worker.failures = 0
            self.last_success = time.monotonic()
            if plan is None:
                if worker.dirty.is_set():  # another object of the same name came meanwhile
                    wait = 0.0
                    continue
                self._gone(owner)
                return
            wait = self._resync_s if _settled(plan) else UNSETTLED_S
            if plan.requeue_at is not None:
                wait = max(0.05, min(wait, plan.requeue_at - self._clock() + 0.01))
            if worker.outcome.refusals or worker.outcome.rejected:
                wait = min(wait, REFUSED_RETRY_S)
            if worker.outcome.foreign:
                wait = min(wait, max(0.05, worker.foreign_due - time.monotonic()))

    def _gone(self, owner: Owner) -> None:
        self._workers.pop(owner, None)
        self.reporter.forget(owner)
        telemetry.RANKS.forget(*owner)

    async def _once(self, owner: Owner, worker: _Worker) -> Plan | None:
        with telemetry.RECONCILE_SECONDS.time():
            before = worker.outcome
            stale = frozenset(worker.stale | {"Pod"})
            worker.stale.clear()
            snapshot = await take_snapshot(
                self._api,
                *owner,
                reports=self.reporter.reports(owner),
                lists=worker.lists,
                stale=stale,
                refusals=before.refusals,
                absent=dict(self._optional.absent),
                rejected=before.rejected,
                trials=before.trials,
            )
            if snapshot is None:
                return None
            snapshot = replace(snapshot, foreign=await self._still_foreign(owner, worker, snapshot, stale - {"Pod"}))
            now = self._clock()
            plan = reconcile(snapshot, now, self._domain)
            self._observe(owner, worker, snapshot, plan, now)
            document = dict(snapshot.document)
            worker.outcome = await self._executor.run(plan, document, now)
            worker.stale |= worker.outcome.kinds
            if worker.outcome.foreign - snapshot.foreign:
                worker.foreign_wait = REFUSED_RETRY_S
                worker.foreign_due = time.monotonic() + worker.foreign_wait
            worker.outcome.foreign |= snapshot.foreign  # the plan left them alone, so that nothing new is known of them
            if any(
                getattr(worker.outcome, n) != getattr(before, n) for n in ("refusals", "rejected", "foreign", "trials")
            ):
                worker.dirty.set()  # the status does not tell of it yet
        telemetry.RECONCILES.labels("changed" if writes(plan.actions) else "unchanged").inc()
        return plan

    async def _still_foreign(
        self, owner: Owner, worker: _Worker, snapshot: Snapshot, heard: frozenset[str]
    ) -> frozenset[tuple[str, str]]:
        """Names that others held before and still do. Asked for when it is time, or something was `heard` of a kind."""
        due = time.monotonic() >= worker.foreign_due
        uid, found = snapshot.document["metadata"]["uid"], set()
        for kind, name in sorted(worker.outcome.foreign):
            if kind in snapshot.absent or (kind, name) in snapshot.children:
                continue
            if due or kind in heard:
                live = await self._api.get(kind, owner[0], name)
                if live is None or owned(live, uid):
                    continue
            found.add((kind, name))
        if found and due:
            longest = max(REFUSED_RETRY_S, min(LAST_FOREIGN_S, self._resync_s))
            worker.foreign_wait = min(worker.foreign_wait * 2, longest)
            worker.foreign_due = time.monotonic() + worker.foreign_wait
        return frozenset(found)

    def _observe(self, owner: Owner, worker: _Worker, snapshot: Snapshot, plan: Plan, now: float) -> None:
        """Metrics, and which heads are to be asked."""
        seen = phases(snapshot, plan, self._domain, now)
        telemetry.RANKS.set(*owner, [(p.group, p.phase) for p in seen])
        for phase in seen:
            before = worker.seen.get(phase.group.name)
            if before is not None and before.phase != phase.phase:
                telemetry.STARTUP_SECONDS.labels(before.phase).observe(now - before.since)
                if before.phase == "Handshake" and phase.phase == "Ready":
                    telemetry.HANDSHAKE_SECONDS.observe(now - before.since)
        worker.seen = {
            p.group.name: p if (b := worker.seen.get(p.group.name)) is None or b.phase != p.phase else b for p in seen
        }
        for action in plan.actions:
            if isinstance(action, EmitEvent):
                if action.reason in (EventReason.RANK_REPLACED, EventReason.GROUP_RECREATED):
                    telemetry.RESTARTS.labels(*owner, action.reason.value).inc()
                elif action.reason is EventReason.CONFIG_MISMATCH:
                    telemetry.MISMATCHES.labels(*owner).inc()
        targets = [
            Target(
                owner=owner,
                pod=t.pod.name,
                uid=t.pod.uid,
                ip=t.pod.ip,
                ports=t.ports,
                runtime=Runtime(t.runtime),
                steady=t.steady,
                interval_s=t.interval_s,
                stale_s=t.stale_s,
            )
            for t in head_targets(snapshot, self._domain)
        ]
        self.reporter.set_targets(owner, targets)
