"""Where the pods of a plan live: it decides which addresses they bind, how they find rank 0, and their ports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dpi_operator.api.types import Ports

POD_IP = "$(DPI_POD_IP)"
"""Expanded by the kubelet from the downward API."""

LOCAL_PORT_STEP = 1000
"""Distance between the ports of two pods on one loopback."""


@dataclass(frozen=True, slots=True)
class PodPlace:
    """One pod among all of its object: group, index in the group, and number over all groups."""

    group: int
    index: int
    number: int
    hostname: str


class Network(Protocol):
    def http_host(self) -> str:
        """Address that the HTTP and management listeners bind."""
        ...

    def head_address(self, pod: PodPlace, head: PodPlace) -> str:
        """Address of the group's rank 0 as `pod` names it (rank 0 binds it)."""
        ...

    def ports(self, pod: PodPlace, base: Ports) -> Ports: ...


@dataclass(frozen=True, slots=True)
class Local:
    """All pods on this machine's loopback, as `dpi up` runs them."""

    def http_host(self) -> str:
        return "127.0.0.1"

    def head_address(self, pod: PodPlace, head: PodPlace) -> str:
        return "127.0.0.1"

    def ports(self, pod: PodPlace, base: Ports) -> Ports:
        step = pod.number * LOCAL_PORT_STEP
        return Ports(
            http=base.http + step,
            management=base.management + step,
            rpc=base.rpc + step,
            supervisor=base.supervisor + step,
        )


@dataclass(frozen=True, slots=True)
class Cluster:
    """Pods of a Kubernetes cluster: rank 0 binds its own IP, the others know it by its name in the headless Service."""

    name: str
    namespace: str
    domain: str = "cluster.local"

    def http_host(self) -> str:
        return "0.0.0.0"

    def head_address(self, pod: PodPlace, head: PodPlace) -> str:
        if pod.index == 0:
            return POD_IP
        return f"{head.hostname}.{self.name}-internal.{self.namespace}.svc.{self.domain}"

    def ports(self, pod: PodPlace, base: Ports) -> Ports:
        return base
