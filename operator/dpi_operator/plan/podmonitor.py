"""The PodMonitor of an object: how the Prometheus operator finds and scrapes its pods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpi_operator.api.types import DataParallelInference, Runtime
from dpi_operator.plan.actions import Manifest
from dpi_operator.plan.modes import endpoints_per_pod, port_name
from dpi_operator.plan.names import L_NAME, child_metadata

GROUP_OF_POD = "(.+)-[0-9]+"
"""A pod is named after its group, as the operator names groups in its own metrics."""


def meta_label(label: str) -> str:
    """Name by which Prometheus's discovery gives a label of a pod: all but letters and digits become underscores."""
    return "__meta_kubernetes_pod_label_" + "".join(c if c.isalnum() else "_" for c in label)


def relabelings() -> list[dict[str, Any]]:
    """Labels that dashboards and alerts group by."""
    return [
        {"sourceLabels": [meta_label(L_NAME)], "targetLabel": "dpi"},
        {"sourceLabels": ["__meta_kubernetes_pod_name"], "regex": GROUP_OF_POD, "targetLabel": "group"},
    ]


def _scraped_ports(dpi: DataParallelInference) -> list[str]:
    if dpi.spec.engine.runtime is Runtime.DPI:
        return ["management"]
    return [port_name(n) for n in range(endpoints_per_pod(dpi))]


def build_pod_monitor(dpi: DataParallelInference, others: Sequence[DataParallelInference] = ()) -> Manifest | None:
    """Scrapes /metrics of every pod that has one: of ours the management port, of the other runtime HTTP.

    `others`: the object at other revisions that have pods.
    """
    wanted = dpi.spec.metrics.pod_monitor
    if not wanted.enabled:
        return None
    metadata = child_metadata(dpi, dpi.metadata.name, "pod-monitor")
    metadata["labels"] = {**wanted.labels, **metadata["labels"]}
    ports = dict.fromkeys(port for d in (dpi, *others) for port in _scraped_ports(d))
    interval = f"{wanted.interval_seconds}s"
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata,
        "spec": {
            "selector": {"matchLabels": {L_NAME: dpi.metadata.name}},
            "podMetricsEndpoints": [
                {"port": port, "path": "/metrics", "interval": interval, "relabelings": relabelings()} for port in ports
            ],
        },
    }
