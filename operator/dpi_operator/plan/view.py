"""What metrics and the asking of heads need of a snapshot. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dpi_operator.api.read import ManifestError, read_document
from dpi_operator.api.types import DataParallelInference, Runtime
from dpi_operator.plan.actions import Plan
from dpi_operator.plan.facts import PodFacts, Snapshot
from dpi_operator.plan.groups import Group, assemble
from dpi_operator.plan.modes import http_ports
from dpi_operator.plan.network import Cluster
from dpi_operator.plan.pods import NotPlannable
from dpi_operator.plan.revisions import stored_revisions


@dataclass(frozen=True, slots=True)
class GroupPhase:
    group: Group
    phase: str
    since: float


@dataclass(frozen=True, slots=True)
class HeadTarget:
    """A pod with an endpoint that can be asked, on which ports, and how often."""

    pod: PodFacts
    ports: tuple[int, ...]
    runtime: str
    steady: bool
    interval_s: float
    stale_s: float


def _groups(snapshot: Snapshot, domain: str) -> tuple[DataParallelInference, dict[tuple[str, int], Group]] | None:
    try:
        dpi = read_document(snapshot.document, "the object")
        network = Cluster(dpi.metadata.name, dpi.metadata.namespace, domain)
        revisions = stored_revisions(dpi, snapshot.children)
        return dpi, assemble(snapshot.pods, revisions, dpi, network, snapshot.reports)
    except (ManifestError, NotPlannable):
        return None


def phases(snapshot: Snapshot, plan: Plan, domain: str, now: float) -> list[GroupPhase]:
    """Groups that have pods, with the phases that the new status gives them."""
    read = _groups(snapshot, domain)
    if read is None:
        return []
    told = {g.name: g.phase for g in plan.status.groups}
    return [GroupPhase(g, told.get(g.name, "Draining"), now) for g in read[1].values()]


def head_targets(snapshot: Snapshot, domain: str) -> list[HeadTarget]:
    """Pods with an endpoint whose engine runs.

    Groups that are not ready are asked more often; those that are, only where the user wants their queues.
    """
    read = _groups(snapshot, domain)
    if read is None:
        return []
    dpi, groups = read
    stats, found = dpi.spec.metrics.queue_stats, []
    for group in groups.values():
        if group.ready and not stats.enabled:
            continue
        engine = group.dpi.spec.engine
        own = engine.runtime is Runtime.DPI
        for pod in group.endpoints():
            if not pod.ip or not pod.running or pod.deleting is not None:
                continue
            found.append(
                HeadTarget(
                    pod=pod,
                    ports=(engine.ports.management,) if own else http_ports(group.dpi, pod.index, engine.ports),
                    runtime=engine.runtime.value,
                    steady=group.ready,
                    interval_s=float(stats.interval_seconds),
                    stale_s=float(max(stats.stale_after_seconds, stats.interval_seconds + 5)),
                )
            )
    return found
