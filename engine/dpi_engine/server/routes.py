"""Everything beside generation: health, models, version, load, metrics, tokenize, detokenize."""

from __future__ import annotations

from importlib import metadata

import msgspec
from aiohttp import web

from dpi_engine.server.chat import render_messages
from dpi_engine.server.errors import bad_request
from dpi_engine.server.json_body import read_json
from dpi_engine.server.metrics import CONTENT_TYPE
from dpi_engine.server.params import token_ids
from dpi_engine.server.prompts import encode
from dpi_engine.server.schemas.models import ModelCard, ModelList
from dpi_engine.server.schemas.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from dpi_engine.server.state import STATE, ServerState


def package_version() -> str:
    """Version of the installed distribution; a source tree that was never installed says so."""
    try:
        return metadata.version("dpinference")
    except metadata.PackageNotFoundError:
        return "0+not-installed"


def json_response(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")


async def handle_health(request: web.Request) -> web.Response:
    """200 while work can be taken, else 503 with the reason."""
    reason = request.app[STATE].unready_reason()
    if reason is None:
        return json_response({"status": "ok"})
    return json_response({"status": "unready", "reason": reason}, 503)


async def handle_version(request: web.Request) -> web.Response:
    return json_response({"version": package_version()})


async def handle_load(request: web.Request) -> web.Response:
    """Requests in this process, and what is known of each rank's queue."""
    state = request.app[STATE]
    ranks = [
        {"rank": r.rank, "state": r.state, "waiting": r.waiting, "running": r.running, "kv_usage": r.kv_usage}
        for r in state.client.ranks()
    ]
    return json_response({"server_load": len(state.active), "ranks": ranks})


async def handle_metrics(request: web.Request) -> web.Response:
    state = request.app[STATE]
    state.metrics.refresh(state.client.ranks())
    return web.Response(body=state.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})


def _card(state: ServerState, name: str) -> ModelCard:
    return ModelCard(
        id=name, created=state.created, root=state.options.model_root, max_model_len=state.client.max_model_len
    )


async def handle_models(request: web.Request) -> web.Response:
    """All served names."""
    state = request.app[STATE]
    return json_response(ModelList(data=[_card(state, name) for name in state.options.model_names]))


async def handle_model(request: web.Request) -> web.Response:
    """One served name. Raises ApiError 404."""
    state = request.app[STATE]
    return json_response(_card(state, state.check_model(request.match_info["model"])))


async def handle_tokenize(request: web.Request) -> web.Response:
    """Token ids of a prompt or of a conversation. Raises ApiError."""
    state = request.app[STATE]
    body = await read_json(request, TokenizeRequest)
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either 'prompt' or 'messages'", "prompt", "missing_field")
    if body.prompt is not None:
        text, special = body.prompt, body.add_special_tokens is not False
    else:
        text, special = render_messages(state, body), bool(body.add_special_tokens)
    ids = await encode(state.bundle.tokenizer, text, add_special_tokens=special)
    strings = [state.texts.text(i) for i in ids] if body.return_token_strs else None
    return json_response(
        TokenizeResponse(count=len(ids), max_model_len=state.client.max_model_len, tokens=ids, token_strs=strings)
    )


async def handle_detokenize(request: web.Request) -> web.Response:
    """Text of token ids. Raises ApiError."""
    state = request.app[STATE]
    body = await read_json(request, DetokenizeRequest)
    state.check_model(body.model)
    ids = token_ids("tokens", body.tokens, state.texts.vocab_size, len(body.tokens))
    text = state.bundle.tokenizer.decode(ids, skip_special_tokens=bool(body.skip_special_tokens))
    return json_response(DetokenizeResponse(text))
