"""Ports of a pod before its children bind them: which are taken, and the HTTP ports held while the model loads."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from dpi_engine.config.network import AddressError, port_is_free
from dpi_engine.launch.exit_codes import EXIT_REFUSED
from dpi_engine.launch.failures import LaunchFailed


def check_free(what: str, host: str, port: int, host_from: str) -> None:
    """Raises LaunchFailed naming the flag (`what`) whose port another process holds, or the setting of a wrong host."""
    try:
        free = port_is_free(host, port)
    except AddressError as e:
        raise LaunchFailed(f"{what}: {e}; {host_from} must be an address of this machine", EXIT_REFUSED) from None
    if not free:
        raise LaunchFailed(f"{what}: port {port} of {host} is in use; free it or give another", EXIT_REFUSED)


class HeldPorts:
    """HTTP ports, bound and not listening, that only this pod's API servers can share."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def hold(self, host: str, port: int) -> None:
        """Raises LaunchFailed when the port cannot be had."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        held = socket.socket(family, socket.SOCK_STREAM)
        self._held.append(held)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            try:
                held.bind((host, port))
            except OSError:
                # Connections of a server that has ended may linger. The port can be had all the same, but is not held
                # as firmly: with this option another process may bind it, too, until an API server listens.
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                held.bind((host, port))
        except OSError as e:
            raise LaunchFailed(f"--port {port}: cannot be had on {host}: {e.strerror or e}", EXIT_REFUSED) from None

    def close(self) -> None:
        for held in self._held:
            held.close()


def check_all(
    wanted: Iterable[tuple[str, int]], http_host: str, control_host: str | None, control_from: str, held: HeldPorts
) -> None:
    """Look at each (flag, port) before a child starts in vain, and hold those of the HTTP servers. Raises LaunchFailed.

    `control_host`: None where nothing but the HTTP servers listens on TCP; `control_from` is the setting that gave it.
    """
    for what, port in wanted:
        for_http = what.startswith("--port")
        host = http_host if for_http else control_host
        if host is not None:
            check_free(what, host, port, "--host" if for_http else control_from)
        if for_http:
            held.hold(http_host, port)
