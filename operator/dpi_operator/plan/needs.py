"""What an object needs of its cluster beyond what every cluster has. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dpi_operator.api.reasons import Reason
from dpi_operator.api.types import DataParallelInference, GangProvider
from dpi_operator.api.validate import Finding
from dpi_operator.plan.names import INFERENCE_POOL, KUEUE, PLUGINS_POD_GROUP, POD_MONITOR, VOLCANO_POD_GROUP

GANG_KINDS = {
    GangProvider.VOLCANO: VOLCANO_POD_GROUP,
    GangProvider.SCHEDULER_PLUGINS: PLUGINS_POD_GROUP,
    GangProvider.KUEUE: KUEUE,
}
"""By which each gang scheduler is known to be there."""


@dataclass(frozen=True, slots=True)
class Need:
    """A kind that `field` asks for; `serving`: without it the object cannot do what it is for."""

    kind: str
    field: str
    serving: bool


def needs(dpi: DataParallelInference) -> list[Need]:
    found = []
    if kind := GANG_KINDS.get(dpi.spec.scheduling.gang.provider):
        found.append(Need(kind, "spec.scheduling.gang.provider", serving=True))
    if dpi.spec.load_balancing.inference_pool.enabled:
        found.append(Need(INFERENCE_POOL, "spec.loadBalancing.inferencePool.enabled", serving=True))
    if dpi.spec.metrics.pod_monitor.enabled:
        found.append(Need(POD_MONITOR, "spec.metrics.podMonitor.enabled", serving=False))
    return found


def missing(dpi: DataParallelInference, absent: Mapping[str, str], serving: bool) -> tuple[Finding, ...]:
    """Needs that the cluster does not meet: those without which the object cannot serve as asked, or the others."""
    return tuple(
        Finding(Reason.MISSING_CRD, need.field, f"{need.kind.partition('.')[0]}: {absent[need.kind]}")
        for need in needs(dpi)
        if need.serving is serving and need.kind in absent
    )
