"""The InferencePool of an object: the endpoints among which a gateway's endpoint picker chooses.

Gateway API inference extension, inference.networking.k8s.io/v1: pods by labels, up to eight ports of each.
"""

from __future__ import annotations

from dpi_operator.api.types import DataParallelInference
from dpi_operator.plan.actions import Manifest
from dpi_operator.plan.modes import http_ports
from dpi_operator.plan.names import child_metadata
from dpi_operator.plan.services import endpoint_selector


def build_inference_pool(dpi: DataParallelInference, revision: str = "") -> Manifest | None:
    """One pool per object, never one per rank: ranks are its endpoints. With `revision` only that revision's pods."""
    wanted = dpi.spec.load_balancing.inference_pool
    picker = wanted.endpoint_picker_ref
    if not wanted.enabled or picker is None:
        return None
    ports = http_ports(dpi, 0, dpi.spec.engine.ports)
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": child_metadata(dpi, dpi.metadata.name, "inference-pool"),
        "spec": {
            "selector": {"matchLabels": endpoint_selector(dpi, revision)},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"kind": "Service", "name": picker.name, "port": {"number": picker.port}},
        },
    }
