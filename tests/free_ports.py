"""Ports for what the tests start. Every test process has a part of its own, so that several can run side by side."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

FIRST, PARTS = 10000, 20
"""All lie below the range that the system gives to outgoing connections, and below Kubernetes' node ports."""

PART, SECOND_PODS = 500, 1000
"""A part is PART ports, and as many SECOND_PODS higher, where `dpi up` puts a second pod."""

GIVEN_OUT = 200
"""Of each part. As far above each of these a rank of a mixture of experts listens, which is in the same part then."""


def is_free(port: int) -> bool:
    """Can a server be bound there, on loopback?"""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Ports:
    """Runs of free ports. The part is this process's until it ends: a lock holds it."""

    def __init__(self) -> None:
        self._lock: IO[str] | None = None
        self._first = self._next = 0
        self._held: set[int] = set()

    def take(self, count: int) -> int:
        """First of `count` consecutive ports that are free, and were not given out for as long as there were others."""
        if self._lock is None:
            self._take_part()
        end = self._first + GIVEN_OUT
        for _ in range(2 * GIVEN_OUT):
            if self._next + count > end:
                self._next = self._first
            first = self._next
            self._next += count
            run = range(first, first + count)
            if self._held.isdisjoint(run) and all(map(is_free, run)):
                return first
        raise AssertionError(f"no {count} free ports in {self._first} to {end - 1}")

    def hold(self, ports: Iterable[int]) -> None:
        """Their owner may bind them at any time, and not all of them now: they are not given out until `release`."""
        self._held.update(ports)

    def release(self, ports: Iterable[int]) -> None:
        self._held.difference_update(ports)

    def _take_part(self) -> None:
        folder = Path(tempfile.gettempdir()) / f"dpi-test-ports-{os.getuid()}"
        folder.mkdir(exist_ok=True)
        for part in range(PARTS):
            lock = (folder / str(part)).open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                continue
            block, half = divmod(part, SECOND_PODS // PART)
            self._lock = lock
            self._first = self._next = FIRST + 2 * SECOND_PODS * block + PART * half
            return
        raise AssertionError(f"{PARTS} test processes run on this machine, and each has ports; see {folder}")


PORTS = Ports()
