"""Nonsense at every port of a running service: it is counted and nothing else happens."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections.abc import Iterator

import pytest
import zmq
from process_group import Group
from process_pods import PATIENCE, Pod, until

FRAMES = 2000
PROMPT = "nine ranks wait"


@contextlib.contextmanager
def unharmed(group: Group) -> Iterator[None]:
    """Every process of both pods is the same one afterwards, and every rank answers as before."""
    pids, text = group.pids(), group.head.text(PROMPT, rank=0)
    yield
    group.head.until_serves(0, 1, 2, 3)
    for rank in range(4):
        assert group.head.text(PROMPT, rank=rank) == text
    assert group.pids() == pids
    until(lambda: all(r["state"] == "READY" for r in group.head.ranks().values()), "every rank is READY")


def messages(seed: int, count: int) -> Iterator[list[bytes]]:
    """Random frames, among them some that look like messages: msgpack maps and arrays, type bytes, identities."""
    rng = random.Random(seed)
    starts = [b"", b"\x00", b"\x01", b"\x02", b"\x03", b"\x81\xa6status\xa5HELLO", b"\x9a\x00\x90", b"\xdc\xff\xff"]
    for _ in range(count):
        yield [rng.choice(starts) + rng.randbytes(rng.randrange(40)) for _ in range(rng.choice((1, 1, 2, 3)))]


def counted(pod: Pod, *sockets: str) -> float:
    return sum(pod.metric("dpi_wire_malformed_frames_total", socket=name) for name in sockets)


@pytest.mark.parametrize(
    ("offset", "kind", "sockets"),
    [
        (0, zmq.DEALER, ("handshake",)),
        (3, zmq.PUSH, ("coordinator_pull",)),
        (10, zmq.DEALER, ("input",)),
        (11, zmq.PUSH, ("output",)),
        (12, zmq.DEALER, ("input",)),
        (13, zmq.PUSH, ("output",)),
    ],
)
def test_malformed_messages_at_a_control_port_are_counted(
    group: Group, offset: int, kind: int, sockets: tuple[str, ...]
) -> None:
    head = group.head
    before = counted(head, *sockets)
    context = zmq.Context()
    sock = context.socket(kind)
    try:
        with unharmed(group):
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.SNDTIMEO, int(PATIENCE * 1000))
            sock.setsockopt(zmq.SNDHWM, 0)
            sock.setsockopt(zmq.RCVHWM, 0)
            sock.connect(f"tcp://127.0.0.1:{head.rpc + offset}")
            for frames in messages(offset, FRAMES):
                sock.send_multipart(frames)
            until(lambda: counted(head, *sockets) >= before + FRAMES, f"{FRAMES} messages are counted")
    finally:
        context.destroy(0)


def test_nonsense_subscriptions_to_the_coordinator_are_counted(group: Group) -> None:
    before = counted(group.head, "coordinator_back")
    context = zmq.Context()
    sock = context.socket(zmq.XSUB)
    try:
        with unharmed(group):
            sock.setsockopt(zmq.SNDTIMEO, int(PATIENCE * 1000))
            sock.connect(f"tcp://127.0.0.1:{group.head.rpc + 2}")
            for frames in messages(2, FRAMES):
                sock.send_multipart(frames)
            until(lambda: counted(group.head, "coordinator_back") > before, "some are counted")
    finally:
        context.destroy(0)


def test_random_bytes_at_every_open_port_harm_nobody(group: Group) -> None:
    head = group.head
    rng = random.Random(1)
    ports = [head.rpc + offset for offset in (0, 2, 3, 10, 11, 12, 13)]
    ports += [head.port, head.management, group.headless.management]
    greeting = b"\xff" + struct.pack(">Q", 1) + b"\x7f\x03\x00NULL" + bytes(48)  # the beginning of a ZMTP peer
    with unharmed(group):
        for port in ports:
            for i in range(40):
                with socket.create_connection(("127.0.0.1", port), PATIENCE) as sock, contextlib.suppress(OSError):
                    sock.sendall((greeting if i % 4 == 0 else b"") + rng.randbytes(rng.randrange(1, 3000)))
                    if i % 2:
                        sock.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/nowhere"])
def test_nonsense_bodies_get_a_named_error(group: Group, path: str) -> None:
    rng = random.Random(path)
    with unharmed(group):
        for _ in range(25):
            body = rng.randbytes(rng.randrange(200))
            with socket.create_connection(("127.0.0.1", group.head.port), PATIENCE) as sock:
                head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                sock.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
                answer = b""
                while chunk := sock.recv(65536):
                    answer += chunk
            assert answer.split(b" ", 2)[1] in (b"400", b"404"), answer
            assert b'"error"' in answer
