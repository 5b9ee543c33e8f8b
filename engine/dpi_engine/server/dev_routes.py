"""Routes that change the state of the engines. They exist only where the server was started to have them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from dpi_engine.server.errors import ApiError, bad_request
from dpi_engine.server.routes import json_response
from dpi_engine.server.state import STATE

PAUSE_MODES = ("abort", "wait", "keep")
SLEEP_MODES = ("abort", "keep")  # of core/utility.py, which a front end does not load


async def _call(request: web.Request, method: str, *args: Any) -> dict[int, Any]:
    """Call every ready rank. Raises EngineError as the client does."""
    return await request.app[STATE].client.utility(method, *args)


def _choice(request: web.Request, name: str, allowed: tuple[str, ...], default: str) -> str:
    value = request.query.get(name, default)
    if value not in allowed:
        raise bad_request(f"'{name}' must be one of {', '.join(allowed)}, got {value[:40]!r}", name, "invalid_value")
    return value


def _flag(request: web.Request, name: str, default: bool) -> bool:
    return _choice(request, name, ("true", "false"), str(default).lower()) == "true"


def _by_rank(results: dict[int, Any]) -> web.Response:
    return json_response({"ranks": {str(rank): result for rank, result in sorted(results.items())}})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Forget cached prefixes on every rank; a rank with requests under way says false."""
    return _by_rank(await _call(request, "reset_prefix_cache"))


async def sleep(request: web.Request) -> web.Response:
    """`level` 1 gives up the KV cache, 2 the weights too; `mode` abort ends requests under way, keep computes them
    anew after `/wake_up`."""
    level = int(_choice(request, "level", ("1", "2"), "1"))
    mode = _choice(request, "mode", SLEEP_MODES, "abort")
    return _by_rank(await _call(request, "sleep", level, mode))


async def wake_up(request: web.Request) -> web.Response:
    """`tags` (repeated: weights, kv_cache) are checked; everything is brought back, whichever are given."""
    tags = request.query.getall("tags", [])
    unknown = [tag for tag in tags if tag not in ("weights", "kv_cache")]
    if unknown:
        raise bad_request(f"'tags' must be weights or kv_cache, got {unknown[0][:40]!r}", "tags", "invalid_value")
    return _by_rank(await _call(request, "wake_up", tags or None))


async def is_sleeping(request: web.Request) -> web.Response:
    results = await _call(request, "is_sleeping")
    return json_response({"is_sleeping": any(results.values()), "ranks": {str(r): v for r, v in results.items()}})


async def pause(request: web.Request) -> web.Response:
    """Stop taking up requests; `mode` abort ends those under way, wait lets them end, keep holds them."""
    mode = _choice(request, "mode", PAUSE_MODES, "abort")
    return _by_rank(await _call(request, "pause_scheduler", mode, _flag(request, "clear_cache", True)))


async def resume(request: web.Request) -> web.Response:
    """409 while a rank sleeps, whose memory only `/wake_up` brings back."""
    if asleep := [str(rank) for rank, sleeps in (await _call(request, "is_sleeping")).items() if sleeps]:
        ranks = f"rank {asleep[0]} sleeps" if len(asleep) == 1 else f"ranks {', '.join(asleep)} sleep"
        raise ApiError(409, f"{ranks}: POST /wake_up first, after which they go on", code="asleep")
    return _by_rank(await _call(request, "resume_scheduler"))


async def is_paused(request: web.Request) -> web.Response:
    results = await _call(request, "is_scheduler_paused")
    return json_response({"is_paused": any(results.values()), "ranks": {str(r): v for r, v in results.items()}})


DEV_ROUTES: tuple[tuple[str, str, Callable[[web.Request], Awaitable[web.Response]]], ...] = (
    ("POST", "/reset_prefix_cache", reset_prefix_cache),
    ("POST", "/sleep", sleep),
    ("POST", "/wake_up", wake_up),
    ("GET", "/is_sleeping", is_sleeping),
    ("POST", "/pause", pause),
    ("POST", "/resume", resume),
    ("GET", "/is_paused", is_paused),
)
