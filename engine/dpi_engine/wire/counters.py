"""Counts of what was wrong on the wire, by socket and reason. They end in `/metrics`."""

from __future__ import annotations

import threading


class WireCounters:
    """Thread-safe counters of malformed, refused and dropped messages.

    Sockets and reasons are names from this code, never text from outside, so the number of pairs is bounded.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], int] = {}

    def count(self, socket: str, reason: str, n: int = 1) -> None:
        """Add `n` messages that failed on `socket` for `reason`."""
        key = (socket, reason)
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + n

    def snapshot(self) -> dict[tuple[str, str], int]:
        """A copy: (socket, reason) -> messages since start."""
        with self._lock:
            return dict(self._counts)

    def total(self, socket: str | None = None) -> int:
        """Messages counted on `socket`, or on all."""
        with self._lock:
            return sum(n for (name, _), n in self._counts.items() if socket is None or name == socket)
