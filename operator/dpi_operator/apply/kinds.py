"""Every kind that the operator touches and what it does with it: the API client refuses anything else."""

from __future__ import annotations

from dataclasses import dataclass

from dpi_operator.api.types import GROUP, KIND, PLURAL, VERSION
from dpi_operator.plan.names import INFERENCE_POOL, KUEUE, PLUGINS_POD_GROUP, POD_MONITOR, VOLCANO_POD_GROUP


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind: its path in the API, and the verbs that the operator uses, subresources as `plural/sub`.

    `name` is the kind, with its API group behind a dot where another group has a kind of that name. `switch`: key of
    the operator's chart that grants the rights to a kind which not every cluster has.
    """

    name: str
    group: str
    version: str
    plural: str
    verbs: tuple[str, ...]
    subresources: tuple[tuple[str, tuple[str, ...]], ...] = ()
    switch: str = ""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str = "", sub: str = "") -> str:
        base = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [base, *(("namespaces", namespace) if namespace else ()), self.plural, name, sub]
        return "/".join(p for p in parts if p)


CHILD = ("get", "list", "watch", "create", "patch", "delete")

KINDS: dict[str, Kind] = {
    k.name: k
    for k in (
        Kind(KIND, GROUP, VERSION, PLURAL, ("get", "list", "watch", "patch"), (("status", ("patch",)),)),
        Kind("Pod", "", "v1", "pods", CHILD, (("status", ("patch",)),)),
        Kind("Service", "", "v1", "services", CHILD),
        Kind("ConfigMap", "", "v1", "configmaps", CHILD),
        Kind("ServiceAccount", "", "v1", "serviceaccounts", CHILD),
        Kind("Event", "", "v1", "events", ("create", "patch")),
        Kind("ControllerRevision", "apps", "v1", "controllerrevisions", CHILD),
        Kind("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets", CHILD),
        Kind("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies", CHILD),
        Kind("Lease", "coordination.k8s.io", "v1", "leases", ("get", "create", "update")),
        Kind(
            INFERENCE_POOL,
            "inference.networking.k8s.io",
            "v1",
            "inferencepools",
            CHILD,
            switch="integrations.inferencePools",
        ),
        Kind(POD_MONITOR, "monitoring.coreos.com", "v1", "podmonitors", CHILD, switch="integrations.podMonitors"),
        Kind(
            VOLCANO_POD_GROUP, "scheduling.volcano.sh", "v1beta1", "podgroups", CHILD, switch="integrations.podGroups"
        ),
        Kind(PLUGINS_POD_GROUP, "scheduling.x-k8s.io", "v1alpha1", "podgroups", CHILD, switch="integrations.podGroups"),
    )
}

CHILD_KINDS = ("Service", "ConfigMap", "ServiceAccount", "ControllerRevision", "PodDisruptionBudget", "NetworkPolicy")
"""Kinds made for an object besides its pods, in every cluster."""

OPTIONAL_KINDS = tuple(k.name for k in KINDS.values() if k.switch)
"""Kinds made for an object where the cluster knows them."""

OPTIONAL_GROUPS = {KUEUE: "kueue.x-k8s.io"}
"""API groups of which nothing is read or written, but which have to be there for what objects ask for."""
