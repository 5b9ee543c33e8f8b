"""Server-sent events with back-pressure, keep-alive comments and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from dpi_engine.server.errors import ApiError

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientGone(Exception):
    """The client closed the connection."""


class EventStream:
    """One SSE answer. The head goes out with the first event, so that an error before it can still have its status.

    Every write waits while the client is slow; whoever watches over streams calls `give_up` when it takes too long.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(headers=_HEADERS)
        self._lock = asyncio.Lock()
        self._writers = 0
        self._closed = False
        self.started = False
        self.last_change = time.monotonic()  # when the last write began or ended

    @property
    def writing(self) -> bool:
        """A write waits for the client."""
        return self._writers > 0

    def give_up(self) -> None:
        """Break the connection; the handler is cancelled by that."""
        if self._request.transport is not None:
            self._request.transport.abort()

    async def _start(self) -> None:
        async with self._lock:
            if not self.started:
                await self.response.prepare(self._request)
                self.started = True

    async def _write(self, data: bytes) -> None:
        self._writers += 1
        self.last_change = time.monotonic()
        try:
            if not self.started:
                await self._start()
            await self.response.write(data)
        except ConnectionError as error:
            raise ClientGone("the client closed the connection") from error
        finally:
            self._writers -= 1
            self.last_change = time.monotonic()

    async def send(self, data: bytes) -> None:
        """One event. Raises ClientGone."""
        await self._write(b"data: " + data + b"\n\n")

    async def comment(self) -> None:
        """A line that clients skip, so that nobody on the way takes a waiting stream for a dead one."""
        if not self.writing and not self._closed:
            await self._write(b": waiting\n\n")

    async def done(self) -> web.StreamResponse:
        """The end mark."""
        self._closed = True
        await self._write(b"data: [DONE]\n\n")
        await self.response.write_eof()
        return self.response

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """End with an error: as a plain response if nothing has gone out yet, else as the last event."""
        self._closed = True
        async with self._lock:
            started = self.started
        if not started:
            return error.response()
        await self._write(b"data: " + error.body() + b"\n\ndata: [DONE]\n\n")
        await self.response.write_eof()
        return self.response
