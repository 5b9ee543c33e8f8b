"""The error body of OpenAI's API."""

from __future__ import annotations

import msgspec


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    error: ErrorBody
