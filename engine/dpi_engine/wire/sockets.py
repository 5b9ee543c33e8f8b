"""ZMQ sockets with the options every channel needs, endpoints, and receives that end by a deadline."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import resource
import shutil
import socket as pysocket
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import zmq

from dpi_engine.wire.codec import MAX_FRAME_BYTES, MAX_FRAMES
from dpi_engine.wire.errors import WireError

HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 3000
HEARTBEAT_PEERS = 128
"""Of so many connections a socket pings each one every HEARTBEAT_MS, of more ones less often: libzmq looks through the
timers of all connections whenever one answers, so their cost would grow with the square. Leases tell sooner anyway."""
BACKLOG = 4096
"""Connections that may wait to be taken, as far as net.core.somaxconn lets them: all ranks may come at one time."""
IPC_PATH_LIMIT = 107
"""Bytes in sockaddr_un.sun_path on Linux, without the closing zero."""

ROOM_IN_FOLDER = 32
"""Bytes of a socket's path below the parent of its folder: `/dpi-xxxxxxxx/handshake`."""

SPARE_DESCRIPTORS = 256
"""File descriptors that a process needs beside those it counts: files, pipes, libraries, connections that close."""

ROOM_DESCRIPTORS = 8192
"""Where the soft limit is raised, so far beyond the need: HTTP clients are served by the same process."""


class TooFewDescriptors(OSError):
    """The hard limit of file descriptors is below what the ranks of this group need; the text says what to raise."""


def rank_descriptors(ranks: int) -> int:
    """File descriptors that connections of so many ranks take in a head, a front end or a coordinator.

    At most two for each, and one that has not closed yet when its rank comes back.
    """
    return 3 * ranks


def need_descriptors(count: int, what: str) -> None:
    """See that this process may open `count` file descriptors for `what`, and raise its soft limit where it must.

    Connections over the limit would be refused silently, and ranks be missing for no visible reason. Raises
    TooFewDescriptors when the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = count + SPARE_DESCRIPTORS
    endless = resource.RLIM_INFINITY
    if soft == endless or need <= soft:
        return
    if hard != endless and need > hard:
        raise TooFewDescriptors(
            errno.EMFILE,
            f"{what}: {need} file descriptors are needed in this process, its hard limit (RLIMIT_NOFILE) is {hard}; "
            "raise it where the process is started: `ulimit -n`, LimitNOFILE= of a systemd unit, or the default of the "
            "container runtime",
        )
    wanted = need + ROOM_DESCRIPTORS
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == endless else min(hard, wanted), hard))


def make_context(sockets: int) -> zmq.Context[Any]:
    """A context for so many sockets and some more; libzmq's own limit is 1023.

    Connections do not count, sockets and monitors do. Raises OSError when libzmq can hold no so many.
    """
    context: zmq.Context[Any] = zmq.Context()
    need = sockets + 64
    if need > context.get(zmq.MAX_SOCKETS):
        most = context.get(zmq.SOCKET_LIMIT)
        if need > most:
            context.term()
            raise OSError(errno.EMFILE, f"{need} ZMQ sockets in one context, libzmq holds at most {most}")
        context.set(zmq.MAX_SOCKETS, need)
    return context


def make_socket(
    context: zmq.Context[Any],
    kind: int,
    *,
    bind: str | Sequence[str] = (),
    connect: str | None = None,
    identity: bytes | None = None,
    linger_ms: int = 0,
    send_hwm: int = 0,
    receive_hwm: int = 0,
    immediate: bool = False,
    peers: int = 1,
) -> Any:
    """A socket with size limit, ZMTP heartbeats and IPv6 as its endpoints need, bound or connected.

    HWM 0 means no limit. A ROUTER reports unreachable peers (ROUTER_MANDATORY) and an XPUB passes every subscription
    (XPUB_VERBOSE). `immediate` queues nothing for a peer that is not connected.
    `peers`: how many connections its context will have. Raises OSError with the endpoint in its
    text when a bind or connect fails; the socket is closed then.
    """
    sock = context.socket(kind)
    try:
        sock.setsockopt(zmq.LINGER, linger_ms)
        sock.setsockopt(zmq.SNDHWM, send_hwm)
        sock.setsockopt(zmq.RCVHWM, receive_hwm)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        # Both ends ping, so neither asks the other for a time to live, which would be one more timer per connection.
        rarer = max(1, -(-peers // HEARTBEAT_PEERS))
        sock.setsockopt(zmq.HEARTBEAT_IVL, rarer * HEARTBEAT_MS)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, rarer * HEARTBEAT_TIMEOUT_MS)
        sock.setsockopt(zmq.BACKLOG, BACKLOG)
        sock.setsockopt(zmq.RECONNECT_IVL, 50)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if identity is not None:
            sock.setsockopt(zmq.IDENTITY, identity)
        if immediate:
            sock.setsockopt(zmq.IMMEDIATE, 1)
        if kind == zmq.ROUTER:
            sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if kind == zmq.XPUB:
            sock.setsockopt(zmq.XPUB_VERBOSE, 1)
        for endpoint in [bind] if isinstance(bind, str) else bind:
            sock.setsockopt(zmq.IPV6, 1 if endpoint.startswith("tcp://[") else 0)
            _attempt(sock.bind, endpoint, "bind")
        if connect is not None:
            sock.setsockopt(zmq.IPV6, 1 if connect.startswith("tcp://[") else 0)
            _attempt(sock.connect, connect, "connect")
    except BaseException:
        sock.close(0)
        raise
    return sock


def _attempt(action: Any, endpoint: str, verb: str) -> None:
    if endpoint.startswith("ipc://") and len(endpoint.encode()) - 6 > IPC_PATH_LIMIT:
        raise OSError(f"cannot {verb} {endpoint}: a socket path holds at most {IPC_PATH_LIMIT} bytes")
    try:
        action(endpoint)
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"cannot {verb} {endpoint}: {error.strerror}") from None


def receive(sock: Any, *, flags: int = 0) -> list[bytes]:
    """One message. Frames beyond MAX_FRAMES are read and thrown away, so their number cannot fill memory."""
    frames = [sock.recv(flags)]
    extra = False
    while sock.getsockopt(zmq.RCVMORE):
        frame = sock.recv(flags)
        if len(frames) < MAX_FRAMES + 1:
            frames.append(frame)
        else:
            extra = True
    if extra:
        raise WireError("frame_count", f"more than {MAX_FRAMES} frames in a message")
    return frames


def receive_by(sock: Any, deadline: float, what: str) -> list[bytes]:
    """One message, or TimeoutError naming `what` when none came by `deadline` (time.monotonic seconds)."""
    left = deadline - time.monotonic()
    if left <= 0 or not sock.poll(max(1, int(left * 1000))):
        raise TimeoutError(f"no {what} by the deadline")
    return receive(sock, flags=zmq.NOBLOCK)


# --------------------------------------------------------------------------------------------------- endpoints


def tcp_endpoint(host: str, port: int) -> str:
    """`tcp://host:port`, an IPv6 literal in brackets."""
    bare = host.strip("[]")
    return f"tcp://[{bare}]:{port}" if ":" in bare else f"tcp://{bare}:{port}"


def split_tcp(endpoint: str) -> tuple[str, int]:
    """Host and port of a tcp endpoint. Raises ValueError."""
    if not endpoint.startswith("tcp://"):
        raise ValueError(f"{endpoint!r} is not a tcp endpoint")
    host, colon, port = endpoint[6:].rpartition(":")
    if not colon or not port.isdigit() or not host:
        raise ValueError(f"{endpoint!r}: expected tcp://HOST:PORT")
    return host.strip("[]"), int(port)


def resolve(endpoint: str) -> str:
    """The endpoint with its name replaced by an address, looked up now; other transports pass unchanged.

    Raises OSError when the name has no address (yet).
    """
    if not endpoint.startswith("tcp://"):
        return endpoint
    host, port = split_tcp(endpoint)
    with contextlib.suppress(ValueError):
        return tcp_endpoint(str(ipaddress.ip_address(host)), port)
    infos = pysocket.getaddrinfo(host, port, type=pysocket.SOCK_STREAM)
    return tcp_endpoint(str(infos[0][4][0]), port)


def bound_endpoint(sock: Any) -> str:
    """Where a socket was bound last, with the port the system chose."""
    raw: bytes = sock.getsockopt(zmq.LAST_ENDPOINT)
    return raw.rstrip(b"\0").decode()


def _too_long(base: str) -> bool:
    """A socket in a folder of its own below `base` would have a longer path than the system takes."""
    return len(os.fsencode(base)) > IPC_PATH_LIMIT - ROOM_IN_FOLDER


class PathTooLong(OSError):
    """No socket has room in the folder for them."""


class RuntimeDir:
    """A private folder (mode 0700) for ipc sockets, removed by `close` or at the end of the `with` block.

    A process that is killed leaves its folder behind; the next one of the same user removes it.
    """

    def __init__(self, parent: str | None = None) -> None:
        """`parent` defaults to XDG_RUNTIME_DIR where it can be used, else the temporary folder.

        Raises OSError where neither can be written to, or the temporary folder's path is too long for a socket.
        """
        base = parent or os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        if not os.path.isdir(base) or not os.access(base, os.W_OK) or _too_long(base):
            base = tempfile.gettempdir()
        if _too_long(base):
            raise PathTooLong(
                errno.ENAMETOOLONG, f"no folder for sockets: {base} is too long a path; set TMPDIR to another"
            )
        self._sweep(Path(base))
        self.path = Path(tempfile.mkdtemp(prefix=self._PREFIX, dir=base))
        # Locked before it has its name: whoever finds it free knows that its owner is gone.
        self._lock = os.open(self.path / "new", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(self.path / "new", self.path / self._LOCK)

    _PREFIX, _LOCK = "dpi-", "owner"

    @classmethod
    def _sweep(cls, base: Path) -> None:
        for lock in base.glob(f"{cls._PREFIX}*/{cls._LOCK}"):
            with contextlib.suppress(OSError):  # alive, another user's, or removed by a third process just now
                descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.parent, ignore_errors=True)
                finally:
                    os.close(descriptor)

    def ipc(self, name: str) -> str:
        """Endpoint of the socket `name` in this folder."""
        return f"ipc://{self.path / name}"

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RuntimeDir:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Waker:
    """Wakes a thread that polls sockets: `fd` becomes readable after `wake` until `clear`."""

    def __init__(self) -> None:
        self._read, self._write = pysocket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self.fd = self._read.fileno()

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: nobody is left to wake
            self._write.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            while self._read.recv(4096):
                pass

    def close(self) -> None:
        self._read.close()
        self._write.close()


def backoff(first: float = 0.05, most: float = 2.0) -> Iterator[float]:
    """Pauses in seconds: doubling from `first` up to `most`, for ever (the caller has a deadline)."""
    pause = first
    while True:
        yield pause
        pause = min(pause * 2, most)
