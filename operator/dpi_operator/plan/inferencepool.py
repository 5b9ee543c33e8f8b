"""The InferencePool of an object: the endpoints among which a gateway's endpoint picker chooses.

Gateway API inference extension, inference.networking.k8s.io/v1: pods by labels, up to eight ports of each.
"""

from __future__ import annotations

from collections.abc import Sequence

from dpi_operator.api.types import DataParallelInference
from dpi_operator.plan.actions import Manifest
from dpi_operator.plan.modes import every_pod_serves, http_ports
from dpi_operator.plan.names import child_metadata
from dpi_operator.plan.services import endpoint_selector


def build_inference_pool(
    dpi: DataParallelInference, revision: str = "", served: Sequence[DataParallelInference] = ()
) -> Manifest | None:
    """One pool per object, never one per rank: ranks are its endpoints. With `revision` only that revision's pods.

    `served`: the object at the revisions whose pods are to be reached, first the one that serves now; empty: as it is
    now. A pool has one list of ports for all its pods, and takes each of them for an endpoint.
    """
    served = served or [dpi]
    wanted = dpi.spec.load_balancing.inference_pool
    picker = wanted.endpoint_picker_ref
    if not wanted.enabled or picker is None:
        return None
    ports = http_ports(served[0], 0, served[0].spec.engine.ports)
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": child_metadata(dpi, dpi.metadata.name, "inference-pool"),
        "spec": {
            "selector": {"matchLabels": endpoint_selector(min(served, key=every_pod_serves), revision)},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"kind": "Service", "name": picker.name, "port": {"number": picker.port}},
        },
    }
