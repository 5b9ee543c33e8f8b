"""Serves an application until told to stop, then lets it finish what it began."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from dpi_engine.server.errors import shutting_down
from dpi_engine.server.state import STATE, ServerState

log = logging.getLogger(__name__)

FAREWELL_S = 2.0
"""For the error events of streams that did not end in time."""

KEEPALIVE_S = 75.0
BACKLOG = 2048


@contextlib.asynccontextmanager
async def listening(
    app: web.Application, host: str, port: int, *, reuse_port: bool = True, sock: socket.socket | None = None
) -> AsyncIterator[tuple[str, int]]:
    """Serve inside the block; gives the address (port 0 lets the system choose). Ends as `drain` does.

    Raises OSError when the address cannot be had.
    """
    # Cancelling handlers of clients that left is what stops their generation.
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, keepalive_timeout=KEEPALIVE_S, shutdown_timeout=FAREWELL_S
    )
    await runner.setup()
    try:
        site: web.BaseSite
        if sock is not None:
            site = web.SockSite(runner, sock, backlog=BACKLOG)
        else:
            site = web.TCPSite(runner, host, port, reuse_port=reuse_port or None, backlog=BACKLOG)
        await site.start()
        address = runner.addresses[0]
        try:
            yield str(address[0]), int(address[1])
        finally:
            state = app[STATE]
            state.draining = True
            await site.stop()
            await drain(state, state.options.shutdown_timeout_s)
    finally:
        await runner.cleanup()


async def drain(state: ServerState, timeout_s: float) -> None:
    """Wait until no request is being answered, at most `timeout_s`; then end what is left with an error."""
    state.draining = True
    if await _idle(state, timeout_s):
        return
    log.warning("shutdown: %d requests did not end within %g s and are ended now", len(state.active), timeout_s)
    for active in list(state.active):
        active.end_with = shutting_down()
        active.task.cancel()
    await _idle(state, FAREWELL_S)


async def _idle(state: ServerState, timeout_s: float) -> bool:
    if not state.active:
        return True
    try:
        async with asyncio.timeout(timeout_s):
            await state.idle.wait()
    except TimeoutError:
        return False
    return True


async def serve(
    app: web.Application,
    host: str,
    port: int,
    reuse_port: bool = True,
    *,
    sock: socket.socket | None = None,
    stop: asyncio.Event | None = None,
    on_listening: Callable[[bool], None] = lambda listens: None,
) -> None:
    """Serve until `stop` is set or SIGTERM or SIGINT comes, then drain; a second signal cuts the drain short.

    `on_listening` is called with True once connections are taken, with False before that ends.

    During the drain the listening socket is closed, /health answers 503 on connections that are still open, and streams
    have the settings' `shutdown_timeout` to finish; those that do not get an error event.
    """
    stop = stop or asyncio.Event()
    state = app[STATE]
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            for active in list(state.active):
                active.end_with = shutting_down()
                active.task.cancel()
        stop.set()

    handled = []
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):  # only the main thread may
            loop.add_signal_handler(number, on_signal)
            handled.append(number)
    try:
        async with listening(app, host, port, reuse_port=reuse_port, sock=sock) as (where, at):
            log.info("listening on %s port %d", where, at)
            on_listening(True)
            await stop.wait()
            on_listening(False)
            log.info("shutting down: %d requests are being answered", len(state.active))
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
