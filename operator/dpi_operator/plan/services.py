"""The Services of an object: for clients, for its pods to find each other, and one per rank where that is wished."""

from __future__ import annotations

from collections.abc import Sequence

from dpi_operator.api.types import DataParallelInference, Runtime
from dpi_operator.plan.actions import Manifest
from dpi_operator.plan.modes import endpoints_per_pod, every_pod_serves, http_ports, port_name
from dpi_operator.plan.names import (
    L_GROUP,
    L_NAME,
    L_POD,
    L_REVISION,
    L_ROLE,
    child_metadata,
    client_service,
    internal_service,
    rank_service,
)
from dpi_operator.plan.pods import Role, layout


def endpoint_selector(dpi: DataParallelInference, revision: str = "") -> dict[str, str]:
    """Labels of the pods that have an endpoint, with `revision` of that revision only."""
    selector = {L_NAME: dpi.metadata.name}
    if not every_pod_serves(dpi):
        selector[L_ROLE] = Role.RANK0.value
    if revision:
        selector[L_REVISION] = revision
    return selector


def build_client_service(
    dpi: DataParallelInference, revision: str = "", served: Sequence[DataParallelInference] = ()
) -> Manifest:
    """Ready pods with an endpoint, with `revision` only that revision's. Never publishes pods that are not ready.

    `served`: the object at the revisions whose pods are to be reached; empty: as it is now. Headless pods among those
    that it then selects have no port of these names and get nothing.
    """
    served = served or [dpi]
    wide = max(served, key=every_pod_serves)
    wanted = dpi.spec.load_balancing.service
    metadata = child_metadata(dpi, client_service(dpi.metadata.name), "client-service")
    if wanted.annotations:
        metadata["annotations"] = dict(wanted.annotations)
    ports = [
        {
            "name": port_name(number),
            "port": wanted.port + number,
            "targetPort": port_name(number),
            "protocol": "TCP",
            "appProtocol": "http",
        }
        for number in range(max(map(endpoints_per_pod, served)))
    ]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "type": wanted.type.value,
            "selector": endpoint_selector(wide, revision),
            "ports": ports,
            "publishNotReadyAddresses": False,
            "ipFamilyPolicy": "PreferDualStack",
        },
    }


def build_internal_service(dpi: DataParallelInference) -> Manifest:
    """Names of all pods, before they are ready: ranks join through it."""
    ports = dpi.spec.engine.ports
    listed = [{"name": "tcp-rpc", "port": ports.rpc, "targetPort": ports.rpc, "protocol": "TCP"}]
    if dpi.spec.engine.runtime is Runtime.DPI:
        listed.append(
            {
                "name": "management",
                "port": ports.management,
                "targetPort": ports.management,
                "protocol": "TCP",
                "appProtocol": "http",
            }
        )
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": child_metadata(dpi, internal_service(dpi.metadata.name), "internal-service"),
        "spec": {
            "clusterIP": "None",
            "selector": {L_NAME: dpi.metadata.name},
            "ports": listed,
            "publishNotReadyAddresses": True,
            "ipFamilyPolicy": "PreferDualStack",
        },
    }


def build_rank_services(dpi: DataParallelInference, group: int, revision: str = "") -> list[Manifest]:
    """A Service for each rank of a group that has an endpoint, named after group and rank, whatever its pod is called.

    In mode Hybrid that is the first rank of each pod, whose endpoint serves all ranks of the pod; in mode Internal
    rank 0, whose endpoint serves the group.
    """
    if not dpi.spec.load_balancing.per_rank_services:
        return []
    shape, name, made = layout(dpi), dpi.metadata.name, []
    for index in range(shape.pods):
        for number in range(len(http_ports(dpi, index, dpi.spec.engine.ports))):
            rank = index * shape.local + number
            metadata = child_metadata(dpi, rank_service(name, group, rank), "rank-service")
            selector = {L_NAME: name, L_GROUP: str(group), L_POD: str(index)}
            if revision:
                selector[L_REVISION] = revision
            port = {
                "name": "http",
                "port": dpi.spec.load_balancing.service.port,
                "targetPort": port_name(number),
                "protocol": "TCP",
                "appProtocol": "http",
            }
            made.append(
                {
                    "apiVersion": "v1",
                    "kind": "Service",
                    "metadata": metadata,
                    "spec": {
                        "type": "ClusterIP",
                        "selector": selector,
                        "ports": [port],
                        "publishNotReadyAddresses": False,
                        "ipFamilyPolicy": "PreferDualStack",
                    },
                }
            )
    return made


def endpoint(dpi: DataParallelInference) -> str:
    name, namespace = client_service(dpi.metadata.name), dpi.metadata.namespace
    return f"http://{name}.{namespace}.svc:{dpi.spec.load_balancing.service.port}"
