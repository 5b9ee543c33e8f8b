"""Addresses: endpoints with IPv6 brackets, names resolved within a deadline, ports that are free."""

from __future__ import annotations

import errno
import ipaddress
import queue
import socket
import threading

from dpi_engine.config.errors import ConfigError


class AddressError(ConfigError):
    """An endpoint is malformed, or a name cannot be resolved."""


def bare_host(host: str) -> str:
    """`host` without the brackets of an IPv6 literal."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_ip(host: str) -> bool:
    """Whether `host` (brackets allowed) is an IPv4 or IPv6 literal, with a zone or without."""
    try:
        ipaddress.ip_address(bare_host(host))
    except ValueError:
        return False
    return True


def host_port(host: str, port: int) -> str:
    """`host:port`, an IPv6 literal in brackets. Raises AddressError if the port is out of range or the host empty."""
    host = bare_host(host)
    if not host or "/" in host or any(c.isspace() for c in host):
        raise AddressError(f"host {host!r}: expected a name or an IP address")
    if not 0 <= port <= 65535:
        raise AddressError(f"port of {host}: expected 0..65535, got {port}")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def tcp_endpoint(host: str, port: int) -> str:
    """`tcp://host:port`, an IPv6 literal in brackets. Raises AddressError as `host_port`."""
    return "tcp://" + host_port(host, port)


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """(host without brackets, port) of `tcp://host:port` or `host:port`. Raises AddressError."""
    rest = endpoint.removeprefix("tcp://")
    host, colon, port = rest.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if (
        not colon
        or not host
        or "/" in rest
        or not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535)
        or (":" in host and not bracketed)
        or (bracketed and not is_ip(host))
    ):
        raise AddressError(
            f"endpoint {endpoint!r}: expected tcp://HOST:PORT with a port 0..65535 and an IPv6 address in brackets"
        )
    return bare_host(host), int(port)


def resolve(host: str, deadline_s: float) -> str:
    """IP of `host`, which may be an IP already; IPv4 before IPv6. Asks anew at each call.

    The system's look-up cannot be cut short, so it runs in a thread that is left behind at the deadline.
    Raises AddressError when the name has no address or there is no answer after `deadline_s` seconds.
    """
    host = bare_host(host)
    if is_ip(host):
        return host
    answers: queue.SimpleQueue[list[str] | OSError | UnicodeError] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as e:
            answers.put(e)
        else:
            found.sort(key=lambda info: info[0] != socket.AF_INET)
            answers.put([str(info[4][0]) for info in found])

    threading.Thread(target=look_up, name=f"resolve {host}", daemon=True).start()
    try:
        answer = answers.get(timeout=deadline_s)
    except queue.Empty:
        raise AddressError(f"host {host!r}: the name service gave no answer within {deadline_s:g} s") from None
    if isinstance(answer, OSError | UnicodeError) or not answer:
        raise AddressError(f"host {host!r}: no such name: {answer}")
    return answer[0]


def source_address(host: str, port: int) -> str:
    """The address of this machine from which it reaches `host` (an IP). Nothing is sent. AddressError without a way."""
    host = bare_host(host)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError as e:
            raise AddressError(f"host {host}: this machine has no way to it: {e.strerror or e}") from None
        return str(probe.getsockname()[0])


def port_is_free(host: str, port: int) -> bool:
    """Whether `port` of `host` (an IP; brackets allowed) can be bound now. AddressError if the host is not ours."""
    host = bare_host(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections of an earlier server that linger in TIME_WAIT do not hold a port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as e:
            if e.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise AddressError(f"{host_port(host, port)} cannot be bound here: {e.strerror or e}") from None
        return True
