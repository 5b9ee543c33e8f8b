"""How a handler answers: whole or streamed, with errors, departures and shutdown handled in one place."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from dpi_engine.frontend.interface import EngineError
from dpi_engine.server.errors import ApiError, from_engine
from dpi_engine.server.sse import ClientGone, EventStream
from dpi_engine.server.state import STATE, ServerState

log = logging.getLogger(__name__)

CLIENT_GONE = web.RequestKey("client_gone", bool)


async def answer_whole(request: web.Request, make_body: Callable[[], Awaitable[bytes]]) -> web.StreamResponse:
    """A JSON answer. `make_body` may raise ApiError or EngineError."""
    state = request.app[STATE]
    active = state.enter()
    try:
        return web.Response(body=await make_body(), content_type="application/json")
    except EngineError as error:
        raise from_engine(error) from error
    except asyncio.CancelledError:
        if active.end_with is None:
            raise
        active.task.uncancel()
        return active.end_with.response()
    finally:
        state.leave(active)


async def answer_stream(request: web.Request, produce: Callable[[EventStream], Awaitable[bytes]]) -> web.StreamResponse:
    """A stream of events. `produce` puts them, and returns those that go out with the end mark."""
    state = request.app[STATE]
    stream = EventStream(request)
    active = state.enter()
    state.streams.add(stream)
    try:
        try:
            return await stream.done(await produce(stream))
        except EngineError as error:
            return await stream.fail(from_engine(error))
        except ApiError as error:
            return await stream.fail(error)
        except asyncio.CancelledError:
            if active.end_with is None:
                raise
            active.task.uncancel()
            return await stream.fail(active.end_with)
        except ClientGone:
            raise
        except Exception:
            log.exception("request %s failed while streaming", request.path)
            return await stream.fail(ApiError(500, "internal error; the server's log has the details", code="internal"))
    except ClientGone as gone:
        log.debug("%s: %s", request.path, gone)
        request[CLIENT_GONE] = True
        return stream.response
    finally:
        state.streams.discard(stream)
        state.leave(active)


async def watch_streams(state: ServerState) -> None:
    """Until cancelled: a comment to every stream that was silent for the configured time, and an end to those whose
    client has taken nothing for the configured time."""
    silence, patience = state.options.keepalive_s, state.options.write_timeout_s
    comments: set[asyncio.Task[None]] = set()
    try:
        while True:
            await asyncio.sleep(min(silence, patience) / 4)
            now = time.monotonic()
            for stream in list(state.streams):
                if stream.writing:
                    if stream.last_change < now - patience:
                        log.info("a stream's client took no byte for %g s and is given up", patience)
                        stream.give_up()
                elif stream.last_change < now - silence:
                    task = asyncio.create_task(_comment(stream))
                    comments.add(task)
                    task.add_done_callback(comments.discard)
    finally:
        for task in comments:
            task.cancel()


async def _comment(stream: EventStream) -> None:
    try:
        await stream.comment()
    except ClientGone:
        return  # its handler learns the same by being cancelled


REFRESH_S = 1.0


async def keep_metrics_fresh(state: ServerState) -> None:
    """Until cancelled: take over rank states and wire counts, which another process of ours may be scraped for."""
    while True:
        try:
            state.metrics.refresh(state.client.ranks())
        except Exception:
            log.exception("metrics could not be refreshed; trying again in %g s", REFRESH_S)
        await asyncio.sleep(REFRESH_S)
