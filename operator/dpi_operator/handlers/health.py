"""/healthz, /readyz and /metrics of the operator: there from the start, for a standby too."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from dpi_operator import telemetry

Check = Callable[[], str]
"""An empty string when all is well, else what is wrong."""


def make_health_app(live: Check, ready: Check) -> web.Application:
    def probe(check: Check) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(_: web.Request) -> web.Response:
            wrong = check()
            return web.Response(status=503 if wrong else 200, text=(wrong or "ok") + "\n")

        return handler

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=telemetry.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/healthz", probe(live))
    app.router.add_get("/readyz", probe(ready))
    app.router.add_get("/metrics", metrics)
    return app


async def serve_health(app: web.Application, port: int) -> web.AppRunner:
    """Listens on all addresses, as the kubelet needs it. Raises OSError when the port is taken."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, None, port).start()
    return runner


def age_check(what: str, last: Callable[[], float], limit_s: float) -> Check:
    """Wrong when `last` (monotonic seconds) is longer ago than `limit_s`."""

    def check() -> str:
        age = time.monotonic() - last()
        return f"{what} {age:.0f} s ago, expected within {limit_s:.0f} s" if age > limit_s else ""

    return check
