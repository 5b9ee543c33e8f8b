"""Objects around the pods: account, network policy, disruption budget, and the ConfigMap of the planner's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpi_operator.api.types import DataParallelInference, Mode, Runtime
from dpi_operator.plan.actions import Manifest
from dpi_operator.plan.modes import http_ports
from dpi_operator.plan.names import L_NAME, child_metadata, engine_account, state_config_map
from dpi_operator.plan.state import STATE_KEY, State, write_state


def build_service_account(
    dpi: DataParallelInference, users: Sequence[DataParallelInference] = (), made: bool = False
) -> Manifest | None:
    """An account without rights and without a token; none where the user names one.

    `users`: the object at other revisions that have pods, or are to have some. `made`: it is there, and stays where it
    is what the user names.
    """
    names = {d.spec.security.service_account_name for d in (dpi, *users)}
    if "" not in names and not (made and engine_account(dpi.metadata.name) in names):
        return None
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": child_metadata(dpi, engine_account(dpi.metadata.name), "engine"),
        "automountServiceAccountToken": False,
    }


def _public_ports(dpi: DataParallelInference) -> list[int]:
    ports = dpi.spec.engine.ports
    public = list(http_ports(dpi, 0, ports))
    if dpi.spec.load_balancing.mode is Mode.MULTI_PORT:
        public.append(ports.supervisor)
    if dpi.spec.engine.runtime is Runtime.DPI:
        public.append(ports.management)
    return public


def build_network_policy(dpi: DataParallelInference, others: Sequence[DataParallelInference] = ()) -> Manifest | None:
    """Pods of the object reach each other on every TCP port; everybody reaches HTTP and management, nothing else.

    `others`: the object at other revisions that have pods.
    """
    if not dpi.spec.security.network_policy.enabled:
        return None
    own = {"matchLabels": {L_NAME: dpi.metadata.name}}
    numbers = dict.fromkeys(port for d in (dpi, *others) for port in _public_ports(d))
    public: list[dict[str, Any]] = [{"port": port, "protocol": "TCP"} for port in numbers]
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


def build_disruption_budget(dpi: DataParallelInference, sizes: Sequence[int]) -> Manifest | None:
    """Whole groups are counted, in pods; one group alone has none, since that would only block drains.

    `sizes`: pods of each group. While they differ, evictions take no more than the smallest ones have.
    """
    disruption = dpi.spec.disruption
    if not disruption.enabled or len(sizes) < 2:
        return None
    keep = max(0, sum(sizes) - disruption.max_unavailable_groups * min(sizes))
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
