"""Multi-port balancing: the health of a pod whose ranks have a port each, on a port of its own.

`/health`, `/ready` and `/readyz` answer 200 while the pod may get traffic, else 503; the body tells of each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from dpi_engine.launch.children import RestartPolicy
from dpi_engine.launch.management import Verdict

PATHS = ("/health", "/ready", "/readyz")

FAIL_TOGETHER = "fail-together"
RESTART_ONE = "restart-one"


def policy_of(name: str) -> RestartPolicy:
    """What the end of a rank or of its front end leads to. Under `fail-together` the first one ends the launch."""
    return RestartPolicy(limit=0) if name == FAIL_TOGETHER else RestartPolicy()


def make_supervisor_app(verdict: Callable[[], Verdict], detail: Callable[[], dict[str, Any]]) -> web.Application:
    """`detail` gives the body besides the verdict."""

    async def health(_: web.Request) -> web.Response:
        ok, reason = verdict()
        body = msgspec.json.encode({"healthy": ok, "reason": reason, **detail()})
        return web.Response(status=200 if ok else 503, body=body, content_type="application/json")

    app = web.Application()
    for path in PATHS:
        app.router.add_get(path, health)
    return app
