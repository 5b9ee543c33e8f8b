"""The management API: one listener per pod, headless ones too. GET only, but for what the token file opens.

/livez     200 while the launcher works and no local engine hangs in a step
/readyz    200 while this pod may get traffic
/startupz  200 once the first start is complete
/metrics   Prometheus text
/ranks     JSON: what every rank does, and which are missing
POST /utility/METHOD  (bearer token of `--management-token-file`)  JSON list of arguments
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
from aiohttp import web

from dpi_engine.config.errors import ConfigError

log = logging.getLogger(__name__)


class Verdict(NamedTuple):
    """A probe's answer and the reason, which is sent as text."""

    ok: bool
    reason: str


class UtilityFailed(RuntimeError):
    """A call could not be done; `status` is what HTTP says about it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class PodView(Protocol):
    """What the launcher lets the management API see."""

    def live(self) -> Verdict: ...
    def ready(self) -> Verdict: ...
    def started(self) -> Verdict: ...
    def ranks(self) -> dict[str, Any]: ...
    def metrics_text(self) -> tuple[bytes, str]:
        """Body and content type."""
        ...

    async def utility(self, method: str, args: list[Any]) -> dict[int, Any]:
        """Results by rank. Raises UtilityFailed."""
        ...


def read_token(path: str | None) -> str | None:
    """Management token from its file. Raises ConfigError when the file is unreadable or empty."""
    if path is None:
        return None
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--management-token-file {path}: cannot be read: {e}") from None
    if not token:
        raise ConfigError(f"--management-token-file {path}: the file is empty")
    return token


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def make_management_app(view: PodView, token: str | None) -> web.Application:
    """The aiohttp application. `token` None closes every call that changes state."""

    def probe(ask: Callable[[], Verdict]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(_: web.Request) -> web.Response:
            ok, reason = ask()
            return web.Response(status=200 if ok else 503, text=reason + "\n")

        return handler

    async def ranks(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(view.ranks()), content_type="application/json")

    async def metrics(_: web.Request) -> web.Response:
        body, content_type = view.metrics_text()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def utility(request: web.Request) -> web.Response:
        if token is None:
            return _error(403, "calls that change state are closed: start with --management-token-file FILE")
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, token.encode()):
            return _error(401, "expected the header `Authorization: Bearer TOKEN` with the management token")
        body = await request.read()
        try:
            args = msgspec.json.decode(body, type=list[Any]) if body else []
        except msgspec.MsgspecError as e:
            return _error(400, f"expected a JSON list of arguments: {e}")
        method = request.match_info["method"]
        try:
            results = await view.utility(method, args)
        except UtilityFailed as e:
            return _error(e.status, str(e))
        return web.json_response({"method": method, "results": {str(k): v for k, v in results.items()}})

    @web.middleware
    async def errors(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
        try:
            return await handler(request)
        except web.HTTPException as e:
            return _error(e.status, f"{request.method} {request.path}: {e.reason}")
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return _error(500, "internal error, see the launcher's log")

    app = web.Application(middlewares=[errors], client_max_size=1 << 20)
    app.router.add_get("/livez", probe(view.live))
    app.router.add_get("/readyz", probe(view.ready))
    app.router.add_get("/startupz", probe(view.started))
    app.router.add_get("/ranks", ranks)
    app.router.add_get("/metrics", metrics)
    app.router.add_post("/utility/{method}", utility)
    return app
