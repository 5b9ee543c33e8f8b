"""Receiving from ZMQ sockets inside an event loop, many messages per wake-up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import zmq

from dpi_engine.wire.codec import MAX_FRAMES
from dpi_engine.wire.counters import WireCounters

logger = logging.getLogger(__name__)

BURST = 64
"""Messages handled before other tasks of the loop get their turn."""

CATCH_UP = 64 * BURST
"""Messages handled at once before a rank is given up; it may have sent the end of every request among them."""

Handler = Callable[[list[zmq.Frame]], None]


class SocketReader:
    """Calls `handler` with the frames of every message of a socket, in the loop's thread.

    A handler that raises costs its message only (counted as `handler_error` under `name`). Whoever sends on the same
    socket calls `kick` afterwards: sending may swallow the sign that something came in.
    """

    def __init__(self, socket: Any, name: str, handler: Handler, counters: WireCounters) -> None:
        self._socket = socket
        self._name = name
        self._handler = handler
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._fd: int = socket.getsockopt(zmq.FD)
        self._scheduled = False
        self._closed = False
        self._loop.add_reader(self._fd, self._drain)
        self.kick()

    def kick(self) -> None:
        """Look for messages in the next round of the loop."""
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def catch_up(self) -> None:
        """Handle what waits now, at most CATCH_UP messages."""
        for _ in range(CATCH_UP // BURST):
            if not self._burst():
                return
        self.kick()

    def close(self) -> None:
        """Stop receiving; the socket stays open."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)

    def _drain(self) -> None:
        self._scheduled = False
        if self._burst():
            self.kick()

    def _burst(self) -> bool:
        """Handle up to BURST messages; True if there may be more."""
        for _ in range(BURST):
            if self._closed:
                return False
            try:
                frames = self._receive()
            except zmq.Again:
                return False
            except zmq.ZMQError as error:
                logger.error("cannot receive on the %s socket: %s", self._name, error)
                self.close()
                return False
            if frames is None:
                self._counters.count(self._name, "frame_count")
                continue
            try:
                self._handler(frames)
            except Exception:
                self._counters.count(self._name, "handler_error")
                logger.exception("a message on the %s socket could not be handled", self._name)
        return True

    def _receive(self) -> list[zmq.Frame] | None:
        """The next message; None for one of too many frames, which is read to its end and thrown away."""
        frame = self._socket.recv(zmq.NOBLOCK, copy=False)
        frames = [frame]
        count = 1
        while frame.more:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            count += 1
            if count <= MAX_FRAMES:
                frames.append(frame)
        return frames if count <= MAX_FRAMES else None
