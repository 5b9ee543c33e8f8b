"""From the bytes of a request body to a checked struct; every fault is a 4xx that says where it is."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from dpi_engine.server.errors import ApiError, bad_request
from dpi_engine.server.refusals import refuse_unsupported

T = TypeVar("T", bound=msgspec.Struct)

BODY_TIMEOUT_S = 60.0

_PATH = re.compile(r" - at `\$\.?(.*)`$")
_JSON_TYPES = re.compile(r"^application/(json|[\w.+-]+\+json)$", re.IGNORECASE)


async def read_json(request: web.Request, kind: type[T]) -> T:
    """Read, decode and type-check a body.

    Unknown fields are ignored (clients send more than any server knows); fields that mean something this server cannot
    do are refused. Raises ApiError 400 (JSON, types, refusals), 408 (too slow) or 415 (not JSON), and
    HTTPRequestEntityTooLarge.
    """
    if "Content-Type" in request.headers and not _JSON_TYPES.match(request.content_type):
        raise ApiError(
            415, f"the body must be application/json, got {request.content_type}", code="unsupported_media_type"
        )
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            raw = await request.read()
    except TimeoutError as error:
        message = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
        raise ApiError(408, message, code="body_timeout", close=True) from error
    except web.HTTPRequestEntityTooLarge:
        raise
    except (web.RequestPayloadError, ValueError, LookupError) as error:
        raise ApiError(400, f"the body could not be read: {error}", code="invalid_body", close=True) from error
    return parse(raw, kind)


def parse(raw: bytes, kind: type[T]) -> T:
    """Decode and type-check the bytes of a body. Raises ApiError 400."""
    if not raw.strip():
        raise bad_request("the body is empty; expected a JSON object", code="invalid_json")
    try:
        value: Any = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise bad_request(f"the body must be a JSON object, got {type(value).__name__}", code="invalid_type")
    refuse_unsupported(value, kind)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _type_error(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body could not be read: {error}", code="invalid_type") from error


def _type_error(text: str) -> ApiError:
    """`Expected `int`, got `str` - at `$.max_tokens`` -> message and param."""
    where = _PATH.search(text)
    path = where.group(1) if where else ""
    what = _PATH.sub("", text).replace("`", "").replace(" | null", "")
    missing = re.match(r"Object missing required field (\w+)", what)
    if missing:
        path = f"{path}.{missing.group(1)}" if path else missing.group(1)
        return bad_request(f"'{path}' is required", path, "missing_field")
    message = what[:1].lower() + what[1:]
    return bad_request(f"'{path}': {message}" if path else message, path or None, "invalid_type")
