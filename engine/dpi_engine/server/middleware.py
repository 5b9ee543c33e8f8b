"""Around every handler: request ids, errors in one shape, keys, counts."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web
from aiohttp.typedefs import Middleware

from dpi_engine.frontend.interface import EngineError
from dpi_engine.server.answering import CLIENT_GONE
from dpi_engine.server.context import REQUEST_ID_HEADER, given_request_id
from dpi_engine.server.errors import ApiError, from_engine, shutting_down
from dpi_engine.server.sse import ClientGone
from dpi_engine.server.state import STATE

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})
"""Probes and scrapers come without a key."""


def route_of(request: web.Request) -> str:
    """The route's template, so that what strangers ask for makes no new series."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unmatched"


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost: turns every exception into an answer, echoes the request id, counts."""
    started = time.monotonic()
    status = 500
    try:
        response = await _guarded(request, handler)
        status = 499 if request.get(CLIENT_GONE) else response.status
        return response
    except asyncio.CancelledError:
        status = 499
        raise
    finally:
        state = request.app[STATE]
        seconds = time.monotonic() - started
        state.metrics.on_http(route_of(request), request.method, status, seconds)
        if state.options.log_requests:
            log.info("%s %s %d %.3fs id=%s", request.method, request.path, status, seconds, given_request_id(request))


async def _guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return error.response()
    except EngineError as error:
        return from_engine(error).response()
    except web.HTTPRequestEntityTooLarge:
        limit = request.app[STATE].options.body_limit
        # What is left of the body is not worth reading.
        return ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large", close=True).response()
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        response = ApiError(
            405, f"{request.method} is not allowed here; use {allowed}", code="method_not_allowed"
        ).response()
        response.headers["Allow"] = allowed
        return response
    except web.HTTPException as error:
        if error.status < 400:
            raise
        what = f"no route {request.method} {request.path[:200]}" if error.status == 404 else error.reason
        return ApiError(error.status, what, code="not_found" if error.status == 404 else "http_error").response()
    except ClientGone:
        request[CLIENT_GONE] = True
        return web.Response(status=400)
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return ApiError(500, "internal error; the server's log has the details", code="internal_error").response()


async def echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Signal before the head goes out: the client finds its request id again."""
    given = given_request_id(request)
    if given is not None:
        response.headers[REQUEST_ID_HEADER] = given


def require_key(keys: Sequence[str]) -> Middleware:
    """Middleware that asks for one of `keys` as a bearer token, except on open paths."""
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in OPEN_PATHS:
            return await handler(request)
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        # Every key is compared, each in constant time: the answer's time says nothing about any of them.
        matches = sum(hmac.compare_digest(given, digest) for digest in digests)
        if scheme.lower() != "bearer" or not matches:
            what = "wrong API key" if token else "no API key; send it as 'Authorization: Bearer KEY'"
            raise ApiError(401, what, code="invalid_api_key")
        return await handler(request)

    return check


@web.middleware
async def refuse_while_draining(request: web.Request, handler: Handler) -> web.StreamResponse:
    """New work that comes over an open connection during shutdown is sent elsewhere."""
    if request.app[STATE].draining and request.method == "POST":
        return shutting_down().response()
    return await handler(request)
