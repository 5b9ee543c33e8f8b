"""Pods put together to groups, and what is true of a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from dpi_operator.api.types import (
    Architecture,
    Coupling,
    DataParallelInference,
    FailureAction,
    GangProvider,
    Mode,
    Runtime,
)
from dpi_operator.plan.facts import HeadReport, PodFacts, RankReport
from dpi_operator.plan.modes import every_pod_serves, independent_servers
from dpi_operator.plan.names import group_name
from dpi_operator.plan.network import Network
from dpi_operator.plan.pods import PodPlan, plan_group
from dpi_operator.plan.revisions import Revision


@dataclass(frozen=True, slots=True)
class Group:
    """One group of one revision. `plans` is empty when its revision is no longer known."""

    revision: str
    index: int
    name: str
    dpi: DataParallelInference
    plans: tuple[PodPlan, ...] = ()
    pods: Mapping[int, PodFacts] = field(default_factory=dict)
    reports: Mapping[int, HeadReport] = field(default_factory=dict)  # by index of the pod that gave it

    @property
    def head(self) -> PodFacts | None:
        return self.pods.get(0)

    @property
    def live(self) -> bool:
        """Some pod of it is not on its way out."""
        return any(p.deleting is None for p in self.pods.values())

    @property
    def report(self) -> HeadReport | None:
        """What its head said last."""
        return self.reports.get(0)

    def endpoints(self) -> list[PodFacts]:
        """Pods that have, or will have, an endpoint: the head's, or all of them."""
        if every_pod_serves(self.dpi):
            return list(self.pods.values())
        return [self.head] if self.head else []

    @property
    def serving(self) -> bool:
        """One of its endpoints takes requests."""
        return any(p.ready and p.deleting is None for p in self.endpoints())

    def ready_since(self) -> float | None:
        """Since when all its endpoints take requests; None while one does not."""
        found = self.endpoints()
        if not found or not all(p.ready and p.deleting is None and p.ready_since is not None for p in found):
            return None
        if every_pod_serves(self.dpi) and len(found) < len(self.plans):
            return None
        return max(p.ready_since or 0.0 for p in found)

    def available(self, now: float, min_ready_s: int) -> bool:
        """All its endpoints have taken requests for `min_ready_s` seconds."""
        since = self.ready_since()
        return since is not None and now - since >= min_ready_s

    def sampled(self) -> dict[int, tuple[RankReport, float]]:
        """What the pods that run now said of each rank, and when. A pod knows its own ranks best, then the head."""
        found: dict[int, tuple[RankReport, float]] = {}
        for index in sorted(self.reports):
            pod, report = self.pods.get(index), self.reports[index]
            if pod is None or pod.uid != report.pod_uid:
                continue
            shift = pod.rank_start if independent_servers(self.dpi) else 0
            for rank in report.ranks:
                number = rank.rank + shift
                if number not in found or number in pod.ranks:
                    found[number] = (replace(rank, rank=number) if shift else rank, report.at)
        return found

    def rank_reports(self) -> dict[int, RankReport]:
        """What the pods that run now said of each rank."""
        return {rank: report for rank, (report, _) in self.sampled().items()}

    @property
    def size(self) -> int:
        return sum(p.rank_count for p in self.plans) or sum(p.rank_count for p in self.pods.values())

    def ready_ranks(self) -> int:
        """Ranks in ready pods, less those of which the head says that they are not ready."""
        reports, n = self.rank_reports(), 0
        for pod in self.pods.values():
            if pod.ready and pod.deleting is None:
                n += sum(1 for r in pod.ranks if r not in reports or reports[r].state in ("READY", "Unknown"))
        return n

    @property
    def ready(self) -> bool:
        return bool(self.pods) and self.serving and self.ready_ranks() == self.size

    def missing(self) -> list[int]:
        """Ranks that do not serve."""
        reports = self.rank_reports()
        up = {
            r
            for pod in self.pods.values()
            if pod.ready and pod.deleting is None
            for r in pod.ranks
            if r not in reports or reports[r].state in ("READY", "Unknown")
        }
        return [r for r in range(self.size) if r not in up]

    def pod_of(self, rank: int) -> str:
        """Name of the pod that holds, or would hold, a rank."""
        for plan in self.plans:
            if plan.rank_start <= rank < plan.rank_start + plan.rank_count:
                return plan.name
        return next((p.name for p in self.pods.values() if rank in p.ranks), "")


def ranks_alone(dpi: DataParallelInference) -> bool:
    """Whether a lost pod is replaced alone, or takes its group with it.

    Ranks of ours that share experts keep their weights and form their group again when the lost one is back; those
    that wait for it in vain end by themselves (`--reform-timeout`), and so the whole group is replaced.
    """
    action, p = dpi.spec.failure_policy.action, dpi.spec.parallelism
    if action is FailureAction.RECREATE_GROUP or p.coupling is Coupling.COUPLED:
        return False
    if dpi.spec.scheduling.gang.provider is GangProvider.KUEUE:
        return False  # Kueue lets a pod of a group go only with the others, and ours keep their names
    if dpi.spec.engine.runtime is Runtime.VLLM:
        return dpi.spec.model.architecture is Architecture.DENSE and dpi.spec.load_balancing.mode is Mode.EXTERNAL
    return True


def assemble(
    pods: Iterable[PodFacts],
    revisions: Mapping[str, Revision],
    dpi: DataParallelInference,
    network: Network,
    reports: Mapping[str, HeadReport],
) -> dict[tuple[str, int], Group]:
    """All groups that have pods, by (revision, index)."""
    by_group: dict[tuple[str, int], dict[int, PodFacts]] = {}
    for pod in pods:
        by_group.setdefault((pod.revision, pod.group), {})[pod.index] = pod
    return {key: make_group(key[0], key[1], found, revisions, dpi, network, reports) for key, found in by_group.items()}


def _as_planned(pod: PodFacts, plans: tuple[PodPlan, ...]) -> PodFacts:
    """With the ranks that it was made for, whatever its labels say by now."""
    plan = plans[pod.index] if pod.index < len(plans) and plans[pod.index].name == pod.name else None
    if plan is None or (plan.rank_start, plan.rank_count) == (pod.rank_start, pod.rank_count):
        return pod
    return replace(pod, rank_start=plan.rank_start, rank_count=plan.rank_count)


def make_group(
    revision: str,
    index: int,
    pods: Mapping[int, PodFacts],
    revisions: Mapping[str, Revision],
    dpi: DataParallelInference,
    network: Network,
    reports: Mapping[str, HeadReport],
) -> Group:
    known = revisions.get(revision)
    plans = tuple(plan_group(known.dpi, index, network, revision)) if known else ()
    return Group(
        revision=revision,
        index=index,
        name=group_name(dpi.metadata.name, revision, index),
        dpi=known.dpi if known else dpi,
        plans=plans,
        pods={i: _as_planned(pod, plans) for i, pod in pods.items()},
        reports={i: reports[pod.name] for i, pod in sorted(pods.items()) if pod.name in reports},
    )
