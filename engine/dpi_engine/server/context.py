"""What a request's headers say."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

from aiohttp import web

from dpi_engine.server.errors import bad_request

REQUEST_ID_HEADER = "X-Request-Id"
RANK_HEADER = "X-data-parallel-rank"
SESSION_HEADER = "X-Session-Id"
MAX_LABEL = 128

_LABEL = re.compile(r"[\x21-\x7e]{1,128}")
_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class RequestContext:
    """`rank`: the global rank that the client wants. `session_id`: requests that shall meet on one rank."""

    request_id: str | None
    rank: int | None
    session_id: str | None


def given_request_id(request: web.Request) -> str | None:
    """The id that the client sent in its header, if it is fit to be echoed."""
    value = request.headers.get(REQUEST_ID_HEADER)
    return value if value is not None and _LABEL.fullmatch(value) else None


def read_context(request: web.Request) -> RequestContext:
    """Raises ApiError 400 for a header that cannot be what it says."""
    given = request.headers.get(REQUEST_ID_HEADER)
    if given and not _LABEL.fullmatch(given):
        raise bad_request(
            f"the header {REQUEST_ID_HEADER} must be 1 to {MAX_LABEL} printable ASCII characters without blanks",
            REQUEST_ID_HEADER,
            "invalid_value",
        )
    session = request.headers.get(SESSION_HEADER)
    if session and not _LABEL.fullmatch(session):
        raise bad_request(
            f"the header {SESSION_HEADER} must be 1 to {MAX_LABEL} printable ASCII characters without blanks",
            SESSION_HEADER,
            "invalid_value",
        )
    rank = request.headers.get(RANK_HEADER)
    if rank is not None and not _NUMBER.fullmatch(rank):
        raise bad_request(
            f"the header {RANK_HEADER} must be a rank (0, 1, ...), got {rank[:40]!r}", RANK_HEADER, "invalid_value"
        )
    return RequestContext(given or None, None if rank is None else int(rank), session or None)


def new_request_id() -> str:
    return uuid.uuid4().hex
