"""Gang scheduling: the PodGroup of a group, and what makes a pod a member of it.

Volcano's and the scheduler plugins' PodGroups are objects beside the pods; Kueue forms a group of pods that say so.
"""

from __future__ import annotations

from dpi_operator.api.types import DataParallelInference, GangProvider
from dpi_operator.plan.actions import Manifest
from dpi_operator.plan.names import child_metadata

VOLCANO_SCHEDULER = "volcano"


def build_pod_group(dpi: DataParallelInference, name: str, pods: int) -> Manifest | None:
    """For the group `name` of `pods` pods: none of them starts before all have a place."""
    gang = dpi.spec.scheduling.gang
    metadata = child_metadata(dpi, name, "pod-group")
    if gang.provider is GangProvider.VOLCANO:
        spec: dict[str, object] = {"minMember": pods}
        if gang.queue:
            spec["queue"] = gang.queue
        if gang.priority_class_name:
            spec["priorityClassName"] = gang.priority_class_name
        return {
            "apiVersion": "scheduling.volcano.sh/v1beta1",
            "kind": "PodGroup",
            "metadata": metadata,
            "spec": spec,
        }
    if gang.provider is GangProvider.SCHEDULER_PLUGINS:
        return {
            "apiVersion": "scheduling.x-k8s.io/v1alpha1",
            "kind": "PodGroup",
            "metadata": metadata,
            "spec": {"minMember": pods, "scheduleTimeoutSeconds": gang.timeout_seconds},
        }
    return None


def membership(dpi: DataParallelInference, name: str, pods: int) -> tuple[dict[str, str], dict[str, str]]:
    """Labels and annotations of a pod of that group."""
    gang = dpi.spec.scheduling.gang
    if gang.provider is GangProvider.VOLCANO:
        return {}, {"scheduling.k8s.io/group-name": name}
    if gang.provider is GangProvider.SCHEDULER_PLUGINS:
        return {"scheduling.x-k8s.io/pod-group": name}, {}
    if gang.provider is GangProvider.KUEUE:
        labels = {"kueue.x-k8s.io/queue-name": gang.queue, "kueue.x-k8s.io/pod-group-name": name}
        return labels, {"kueue.x-k8s.io/pod-group-total-count": str(pods)}
    return {}, {}


def scheduler_of(dpi: DataParallelInference) -> str:
    """Name of the scheduler, empty for the cluster's default."""
    scheduling = dpi.spec.scheduling
    if not scheduling.scheduler_name and scheduling.gang.provider is GangProvider.VOLCANO:
        return VOLCANO_SCHEDULER
    return scheduling.scheduler_name
