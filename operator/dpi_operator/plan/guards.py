"""Objects around the pods: account, network policy, disruption budget, and the ConfigMap of the planner's state."""

from __future__ import annotations

from typing import Any

from dpi_operator.api.types import DataParallelInference, Mode, Runtime
from dpi_operator.plan.actions import Manifest
from dpi_operator.plan.modes import http_ports
from dpi_operator.plan.names import L_NAME, child_metadata, engine_account, state_config_map
from dpi_operator.plan.pods import layout
from dpi_operator.plan.state import STATE_KEY, State, write_state


def build_service_account(dpi: DataParallelInference) -> Manifest | None:
    """An account without rights and without a token; none where the user names one."""
    if dpi.spec.security.service_account_name:
        return None
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": child_metadata(dpi, engine_account(dpi.metadata.name), "engine"),
        "automountServiceAccountToken": False,
    }


def build_network_policy(dpi: DataParallelInference) -> Manifest | None:
    """Pods of the object reach each other on every TCP port; everybody reaches HTTP and management, nothing else."""
    if not dpi.spec.security.network_policy.enabled:
        return None
    ports, own = dpi.spec.engine.ports, {"matchLabels": {L_NAME: dpi.metadata.name}}
    public: list[dict[str, Any]] = [{"port": port, "protocol": "TCP"} for port in http_ports(dpi, 0, ports)]
    if dpi.spec.load_balancing.mode is Mode.MULTI_PORT:
        public.append({"port": ports.supervisor, "protocol": "TCP"})
    if dpi.spec.engine.runtime is Runtime.DPI:
        public.append({"port": ports.management, "protocol": "TCP"})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": child_metadata(dpi, dpi.metadata.name, "network-policy"),
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": own}]}, {"ports": public}],
        },
    }


def build_disruption_budget(dpi: DataParallelInference, groups: int) -> Manifest | None:
    """Whole groups are counted, in pods; one group alone has none, since that would only block drains."""
    disruption, pods = dpi.spec.disruption, layout(dpi).pods
    if not disruption.enabled or groups < 2:
        return None
    keep = max(0, groups - disruption.max_unavailable_groups) * pods
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": child_metadata(dpi, dpi.metadata.name, "disruption-budget"),
        "spec": {
            "minAvailable": keep,
            "selector": {"matchLabels": {L_NAME: dpi.metadata.name}},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def build_state(dpi: DataParallelInference, state: State) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": child_metadata(dpi, state_config_map(dpi.metadata.name), "state"),
        "data": {STATE_KEY: write_state(state)},
    }
