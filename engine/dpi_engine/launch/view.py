"""What the launcher knows of its children and ranks, and the verdicts drawn from it. No I/O; time is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from dpi_engine.config import fingerprint
from dpi_engine.launch.control import ApiReport, CoordinatorReport, EngineReport
from dpi_engine.launch.management import Verdict
from dpi_engine.wire.messages import LoadRecord, RankInfo, RankState

REPORT_STALE_S = 10.0
"""A ready rank, an API server or a coordinator that has not reported for this long is frozen."""

LOADING_STALE_S = 120.0
"""The same while it loads: imports and reading weights hold the interpreter."""

STEP_STUCK_S = 300.0
"""A step that has not ended for this long will not end."""


@dataclass(slots=True)
class PodState:
    """Reports by child, each with the time it came, and the leases that this pod keeps.

    `serves`: ranks that the pod's front ends send requests to; a head knows the others of its group too. A pod whose
    front ends have their own ranks only is ready with those, whatever the rest of the group does.
    """

    headless: bool
    size: int
    local: tuple[int, ...]
    serves: tuple[int, ...]
    api_servers: int
    pod: str = ""  # its name, or its host's
    member: bool = False  # the group's head is another pod, and this one has front ends of its own
    engines: dict[int, tuple[float, EngineReport]] = field(default_factory=dict)
    apis: dict[int, tuple[float, ApiReport]] = field(default_factory=dict)
    coordinator: tuple[float, CoordinatorReport] | None = None
    leases: list[RankInfo] = field(default_factory=list)
    pids: dict[int, int | None] = field(default_factory=dict)
    restarts: dict[int, int] = field(default_factory=dict)
    complete: bool = False
    draining: bool = False
    stage: str = "starting"

    # -- reports -----------------------------------------------------------------------------------------------------

    def engine_gone(self, rank: int) -> None:
        """The process ended: what it reported is void."""
        self.engines.pop(rank, None)

    def api_gone(self, index: int) -> None:
        self.apis.pop(index, None)

    def loads(self) -> dict[int, LoadRecord]:
        """The newest load of each rank: front ends hear of all, engine reports of the local ones."""
        found: dict[int, LoadRecord] = {}
        for _, api in self.apis.values():
            for load in api.loads:
                if load.rank not in found or (load.epoch, load.seq) > (found[load.rank].epoch, found[load.rank].seq):
                    found[load.rank] = load
        for rank, (_, engine) in self.engines.items():
            if engine.load is not None:
                found[rank] = engine.load
        return found

    def frozen(self, now: float) -> list[tuple[str, str]]:
        """Processes that neither report nor, for a rank, finish a step: their names and why that is certain."""
        found = []
        for rank, (at, report) in self.engines.items():
            limit = REPORT_STALE_S if report.ready else LOADING_STALE_S
            if now - at > limit:
                found.append((f"rank-{rank}", f"no report for {now - at:.0f} s"))
            elif report.step_age_s is not None and report.step_age_s > STEP_STUCK_S:
                found.append((f"rank-{rank}", f"one step has not ended for {report.step_age_s:.0f} s"))
        others = [(f"api-{index}", at) for index, (at, _) in self.apis.items()]
        if self.coordinator is not None:
            others.append(("coordinator", self.coordinator[0]))
        found += [(name, f"no report for {now - at:.0f} s") for name, at in others if now - at > REPORT_STALE_S]
        return found

    def forget(self, name: str) -> None:
        """What the process `name` reported is void."""
        kind, _, index = name.partition("-")
        if kind == "rank":
            self.engine_gone(int(index))
        elif kind == "api":
            self.api_gone(int(index))
        else:
            self.coordinator = None

    def forgive(self, gap: float) -> None:
        """This process stood still for `gap` seconds: nobody is older for it."""
        for reports in (self.engines, self.apis):
            for key, (at, report) in list(reports.items()):
                reports[key] = (at + gap, report)  # type: ignore[assignment]
        if self.coordinator is not None:
            self.coordinator = (self.coordinator[0] + gap, self.coordinator[1])

    # -- verdicts ----------------------------------------------------------------------------------------------------

    def live(self, now: float) -> Verdict:
        if stuck := self.frozen(now):
            return Verdict(False, "; ".join(f"{name}: {why}" for name, why in stuck))
        return Verdict(True, "ok")

    def started(self) -> Verdict:
        return Verdict(True, "ok") if self.complete else Verdict(False, f"starting: {self.waiting_for()}")

    def ready(self) -> Verdict:
        """With front ends: one of their ranks is READY and one of them listens, at least. Headless: all ranks are."""
        if self.draining:
            return Verdict(False, "draining")
        if not self.complete:
            return Verdict(False, f"starting: {self.waiting_for()}")
        waiting = self.waiting_for()
        if self.headless:
            return Verdict(not waiting, waiting or "ok")
        ready = [r for r in self._served() if r.state is RankState.READY]
        if not ready:
            return Verdict(False, f"no rank is ready: {waiting}")
        if not any(report.listening for _, report in self.apis.values()):
            return Verdict(False, "no API server is listening")
        return Verdict(True, f"ok, {len(ready)} of {len(self.serves)} ranks")

    def _served(self) -> list[RankInfo]:
        served = frozenset(self.serves)
        return [r for r in self.leases if r.rank in served]

    def waiting_for(self) -> str:
        """What is still missing, in words; empty when nothing is."""
        if not self.engines and not self.leases and not self.complete and self.stage:
            return self.stage
        missing = []
        if self.headless:
            for rank in self.local:
                report = self.engines.get(rank, (0.0, None))[1]
                if report is None or not report.ready:
                    missing.append(f"rank {rank} ({report.stage or 'starting' if report else 'starting'})")
        else:
            for r in self._served():
                if r.state is not RankState.READY:
                    stage = self._stage(r)
                    missing.append(f"rank {r.rank} ({r.state}{', ' + stage if stage else ''})")
            for index in range(self.api_servers):
                if index not in self.apis or not self.apis[index][1].listening:
                    missing.append(f"API server {index}")
        return ", ".join(missing)

    def _stage(self, info: RankInfo) -> str:
        """Of a rank that has not said HELLO yet: what its process tells, as while it looks for the group's head."""
        own = self.engines.get(info.rank)
        if info.state is RankState.NEW and own is not None and own[1].stage:
            return own[1].stage
        return info.stage

    def all_up(self) -> bool:
        """Every rank and every front end is there."""
        known = self.headless or len(self._served()) == len(self.serves)
        return known and not self.waiting_for()

    # -- documents ---------------------------------------------------------------------------------------------------

    def rank_infos(self) -> list[RankInfo]:
        """All ranks this pod knows: a head all of the group, a headless pod its own."""
        loads = self.loads()
        if self.headless:
            infos = [self._own_info(rank) for rank in self.local]
        else:
            infos = [msgspec.structs.replace(info, stage=self._stage(info)) for info in self.leases]
        for info in infos:
            if info.rank in self.pids:
                info.pid = self.pids[info.rank]
                info.restarts = max(info.restarts, self.restarts.get(info.rank, 0))
            if info.rank in self.engines:
                info.workers = self.engines[info.rank][1].workers
            load = loads.get(info.rank)
            if load is not None and (load.epoch == info.epoch or not info.epoch):
                info.waiting, info.running, info.kv_usage = load.waiting, load.running, load.kv_usage
        return infos

    def _own_info(self, rank: int) -> RankInfo:
        report = self.engines.get(rank, (0.0, None))[1]
        if report is None:
            return RankInfo(rank=rank, pod=self.pod, stage="starting")
        return RankInfo(
            rank=rank,
            pod=self.pod,
            fingerprint=fingerprint.digest(report.fields) if report.fields else "",
            state=RankState.READY if report.ready else RankState.LOADING,
            stage=report.stage,
            epoch=report.epoch,
            boot_id=report.boot_id,
            fields=report.fields,
            steps=report.steps,
            step_age_s=report.step_age_s,
            error=report.error,
        )

    def heads_lost(self) -> dict[int, str]:
        """Ranks here that serve although the group's head is away, and why it is called so."""
        return {rank: report.head_lost for rank, (_, report) in sorted(self.engines.items()) if report.head_lost}

    def missing(self) -> list[dict[str, Any]]:
        return [
            {"rank": r.rank, "state": r.state.value, "stage": r.stage}
            for r in self.rank_infos()
            if r.state is not RankState.READY
        ]

    def malformed(self) -> dict[str, int]:
        """Frames that made no sense, "socket:reason" -> number, over all children."""
        total: dict[str, int] = {}
        reports = [r for _, r in self.engines.values()] + [r for _, r in self.apis.values()]
        for report in [*reports, *([self.coordinator[1]] if self.coordinator else [])]:
            for key, n in report.malformed.items():
                total[key] = total.get(key, 0) + n
        return total
