"""The sockets of a front end: bound, watched, and sent to."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from typing import Any

import zmq

from dpi_engine.wire.counters import WireCounters
from dpi_engine.wire.reader import Handler, SocketReader
from dpi_engine.wire.sockets import bound_endpoint, make_socket, need_descriptors, rank_descriptors

CLOSE_LINGER_MS = 500
"""How long the last messages may take to leave when the sockets close."""


class Transport:
    """A ROUTER for requests, a PULL for outputs, and XSUB feeds, in the running event loop.

    `on_input`, `on_output` get the frames of each message, `on_disconnect` is called when a connection of the ROUTER
    has gone away. `ranks`: how many will connect. Raises OSError naming the endpoint that cannot be bound, or the limit
    that is too low for so many ranks.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        outputs: Sequence[str],
        counters: WireCounters,
        *,
        ranks: int,
        on_input: Handler,
        on_output: Handler,
        on_disconnect: Handler,
    ) -> None:
        need_descriptors(rank_descriptors(ranks), f"front end of {ranks} ranks")
        self._counters = counters
        self._context = zmq.Context()
        self._sockets: list[Any] = []
        try:
            self._input = make_socket(self._context, zmq.ROUTER, linger_ms=CLOSE_LINGER_MS, peers=ranks)
            # Watched from before the bind, so that no connection goes away unseen.
            self._monitor = self._input.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self.input_endpoints = _bind(self._input, inputs)
            self._output = make_socket(self._context, zmq.PULL, peers=ranks)
            self.output_endpoints = _bind(self._output, outputs)
        except BaseException:
            self._context.destroy(0)
            raise
        self._input_inbox = SocketReader(self._input, "input", on_input, counters)
        self._output_inbox = SocketReader(self._output, "output", on_output, counters)
        self._inboxes = [
            self._input_inbox,
            self._output_inbox,
            SocketReader(self._monitor, "monitor", on_disconnect, counters),
        ]

    def send(self, identity: bytes, frames: Sequence[bytes]) -> bool:
        """Hand a message for a peer to the socket; False if there is no connection under this identity."""
        if self._input.closed:
            return False
        try:
            self._input.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (errno.EHOSTUNREACH, errno.EAGAIN):
                return False
            raise
        finally:
            self._input_inbox.kick()
        return True

    def take_outputs(self) -> None:
        """Handle the outputs that have come in, now rather than at the loop's next turn."""
        self._output_inbox.catch_up()

    def subscribe(self, endpoint: str, name: str, handler: Handler) -> Feed:
        """Connect an XSUB to a publisher and ask for all it publishes; it reconnects and asks again by itself."""
        sock = make_socket(self._context, zmq.XSUB, connect=endpoint)
        self._sockets.append(sock)
        inbox = SocketReader(sock, name, handler, self._counters)
        self._inboxes.append(inbox)
        feed = Feed(sock, inbox)
        feed.send(b"\x01")
        return feed

    def unsubscribe(self, feed: Feed) -> None:
        """Close a feed; nothing more comes from it."""
        feed.inbox.close()
        self._inboxes.remove(feed.inbox)
        self._sockets.remove(feed.socket)
        feed.socket.close(0)

    async def close(self) -> None:
        """Close all; what was sent before still has CLOSE_LINGER_MS to leave."""
        for inbox in self._inboxes:
            inbox.close()
        self._input.disable_monitor()
        for sock in (self._monitor, self._output, *self._sockets):
            sock.close(0)
        self._input.close(CLOSE_LINGER_MS)
        await asyncio.to_thread(self._context.term)


class Feed:
    """An XSUB: messages come to its handler, and `send` goes upstream."""

    def __init__(self, sock: Any, inbox: SocketReader) -> None:
        self.socket = sock
        self.inbox = inbox

    def send(self, message: bytes) -> None:
        """Upstream to the publisher; dropped while it is away."""
        try:
            self.socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return
        finally:
            self.inbox.kick()


def _bind(sock: Any, endpoints: Sequence[str]) -> list[str]:
    """Bind to all endpoints; returns them with the ports that were chosen. Raises OSError."""
    bound = []
    for endpoint in endpoints:
        sock.setsockopt(zmq.IPV6, 1 if endpoint.startswith("tcp://[") else 0)
        try:
            sock.bind(endpoint)
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"cannot bind {endpoint}: {error.strerror}") from None
        bound.append(bound_endpoint(sock))
    return bound
