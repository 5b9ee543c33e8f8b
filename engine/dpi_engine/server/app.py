"""The application: routes, middleware, life cycle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from dpi_engine.frontend.interface import EngineClient
from dpi_engine.server import routes
from dpi_engine.server.answering import keep_metrics_fresh, watch_streams
from dpi_engine.server.bundle import TokenizerBundle
from dpi_engine.server.chat import handle_chat
from dpi_engine.server.completions import handle_completions
from dpi_engine.server.dev_routes import DEV_ROUTES
from dpi_engine.server.metrics import Metrics
from dpi_engine.server.middleware import echo_request_id, observe, refuse_while_draining, require_key
from dpi_engine.server.options import ServerOptions
from dpi_engine.server.state import STATE, ServerState


def make_app(
    client: EngineClient, bundle: TokenizerBundle, settings: Any, metrics: Metrics | None = None
) -> web.Application:
    """The OpenAI-compatible API over an engine client.

    `settings` is a `Settings` or has its attributes (`options` lists those read). Raises TemplateError for a chat
    template that cannot be read. Serve it with `serving.serve`, or an AppRunner with handler_cancellation.
    """
    options = settings if isinstance(settings, ServerOptions) else ServerOptions.from_settings(settings)
    if metrics is None:
        metrics = Metrics(options.model_names[0], client.max_model_len)
    state = ServerState.build(client, bundle, options, metrics)
    for info in client.ranks():
        metrics.add_rank(info.rank)
        metrics.on_rank(info)
    middlewares: list[Middleware] = [observe, refuse_while_draining]
    if options.api_keys:
        middlewares.append(require_key(options.api_keys))
    app = web.Application(middlewares=middlewares, client_max_size=options.body_limit)
    app[STATE] = state
    app.on_response_prepare.append(echo_request_id)
    app.cleanup_ctx.append(_housekeeping)
    add_get, add_post = app.router.add_get, app.router.add_post
    add_post("/v1/completions", handle_completions)
    add_post("/v1/chat/completions", handle_chat)
    add_get("/v1/models", routes.handle_models)
    add_get("/v1/models/{model:.+}", routes.handle_model)
    add_post("/tokenize", routes.handle_tokenize)
    add_post("/detokenize", routes.handle_detokenize)
    add_get("/health", routes.handle_health)
    add_get("/ping", routes.handle_health)
    add_post("/ping", routes.handle_health)
    add_get("/load", routes.handle_load)
    add_get("/version", routes.handle_version)
    add_get("/metrics", routes.handle_metrics)
    if options.dev_endpoints:
        for method, path, handler in DEV_ROUTES:
            app.router.add_route(method, path, handler)
    return app


async def _housekeeping(app: web.Application) -> AsyncIterator[None]:
    state = app[STATE]
    tasks = [asyncio.create_task(watch_streams(state)), asyncio.create_task(keep_metrics_fresh(state))]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    state.metrics.flush()
