"""A small HTTP server for what asks one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from aiohttp import web


@contextlib.asynccontextmanager
async def http_server(page: Callable[[str], str | None]) -> AsyncIterator[int]:
    """A server of `page(path)`, of 404 where that is None, whatever the method. Yields its port."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        text = page(request.path)
        return web.Response(status=404) if text is None else web.Response(text=text)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
