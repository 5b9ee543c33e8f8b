"""Server-sent events with back-pressure, keep-alive comments and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from dpi_engine.server.errors import ApiError

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """One event; `data` has no line breaks."""
    return b"data: %b\n\n" % data


class ClientGone(Exception):
    """The client closed the connection."""


class EventStream:
    """One SSE answer. The head goes out with the first event, so that an error before it can still have its status.

    `put` writes at once and never waits, so whoever puts must hold back while the stream is `full`: until `room`
    returns. Whoever watches over streams calls `give_up` when a client takes too long.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._protocol = request.protocol
        self.response = web.StreamResponse(headers=_HEADERS)
        self._lock = asyncio.Lock()
        self._early: list[bytes] = []
        self._writers = 0
        self._closed = False
        self._chunked = False
        self.started = False
        self.full = False
        self.last_change = time.monotonic()  # when the last write began or ended

    @property
    def writing(self) -> bool:
        """A write waits for the client."""
        return self._writers > 0

    def give_up(self) -> None:
        """Break the connection; the handler is cancelled by that."""
        if self._request.transport is not None:
            self._request.transport.abort()

    def put(self, events: bytes) -> None:
        """Events as they go over the wire, none cut. Raises ClientGone.

        This goes past the response's own `write`: for a token's event that costs more than everything else does.
        """
        if not self.started:
            self._early.append(events)
            self.full = True
            return
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise ClientGone("the client closed the connection")
        transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)
        self.last_change = time.monotonic()
        if self._protocol.writing_paused:
            self.full = True

    async def room(self) -> None:
        """Wait until it is not `full`. Raises ClientGone."""
        if not self.started or self._protocol.writing_paused:
            await self._write(b"")
        self.full = False

    async def _start(self) -> None:
        """The head, and the events that came before it."""
        async with self._lock:
            if self.started:
                return
            await self.response.prepare(self._request)
            self._chunked = self._request.writer.chunked  # type: ignore[attr-defined]
            self.started = True
            early, self._early = b"".join(self._early), []
            if early:
                await self.response.write(early)

    async def _write(self, data: bytes, end: bool = False) -> None:
        self._writers += 1
        self.last_change = time.monotonic()
        try:
            if not self.started:
                await self._start()
            if end:
                await self.response.write_eof(data)
            else:
                if data:
                    await self.response.write(data)
                await self._request.writer.drain()
        except ConnectionError as error:
            raise ClientGone("the client closed the connection") from error
        finally:
            self._writers -= 1
            self.last_change = time.monotonic()

    async def comment(self) -> None:
        """A line that clients skip, so that nobody on the way takes a waiting stream for a dead one."""
        if not self.writing and not self._closed:
            await self._write(b": waiting\n\n")

    async def done(self, last: bytes = b"") -> web.StreamResponse:
        """`last` events, and the end mark."""
        self._closed = True
        await self._write(last + DONE, end=True)
        return self.response

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """End with an error: as a plain response if nothing has gone out yet, else as the last event."""
        self._closed = True
        async with self._lock:
            started = self.started or bool(self._early)
        if not started:
            return error.response()
        await self._write(event(error.body()) + DONE, end=True)
        return self.response
