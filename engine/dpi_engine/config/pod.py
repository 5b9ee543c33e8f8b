"""Who this pod is: the three variables that come from Kubernetes rather than from the user, read in one place."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

import msgspec

from dpi_engine.config.errors import SettingsError
from dpi_engine.config.network import bare_host


class PodIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """`ip` is None outside a pod; `name` is then the empty string."""

    ip: str | None = None
    name: str = ""
    namespace: str = ""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> PodIdentity:
        """Read DPI_POD_IP, DPI_POD_NAME and DPI_POD_NAMESPACE. Raises SettingsError if the IP is not one."""
        ip = env.get("DPI_POD_IP") or None
        if ip is not None:
            try:
                ipaddress.ip_address(ip)
            except ValueError:
                raise SettingsError(
                    f"environment variable DPI_POD_IP: expected an IP address (the pod's status.podIP), got {ip!r}"
                ) from None
        return cls(ip=ip, name=env.get("DPI_POD_NAME", ""), namespace=env.get("DPI_POD_NAMESPACE", ""))

    @property
    def in_pod(self) -> bool:
        return self.ip is not None

    def http_host(self, host: str | None) -> str:
        """Address that HTTP and management ports bind for `--host` given or not: all in a pod, else loopback.

        In a pod port-forwards come in over loopback, so the pod's own address alone would not do.
        """
        if host is not None:
            return bare_host(host)
        if self.ip is None:
            return "127.0.0.1"
        return "::" if ipaddress.ip_address(self.ip).version == 6 else "0.0.0.0"

    def control_host(self, address: str) -> str:
        """Address that control ports of a head bind: the pod's own, else that of --data-parallel-address."""
        return self.ip or address

    @property
    def control_setting(self) -> str:
        """What says which address control ports bind."""
        return "--data-parallel-address" if self.ip is None else "DPI_POD_IP"
