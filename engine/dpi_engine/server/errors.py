"""Errors as OpenAI clients expect them: `{"error": {"message", "type", "param", "code"}}` and the right status."""

from __future__ import annotations

import msgspec
from aiohttp import web

from dpi_engine.frontend.interface import EngineError
from dpi_engine.server.schemas.errors import ErrorBody, ErrorResponse

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}

RETRY_AFTER_S = 1
"""What clients are told to wait after 429 and 503."""


class ApiError(Exception):
    """A request that gets an error answer.

    `param` names the field at fault, `code` is a stable word for programs. `close`: nothing more can be read from the
    connection.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, close: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.close = close

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> bytes:
        """The JSON body."""
        error = ErrorBody(message=self.message, type=self.type, param=self.param, code=self.code)
        return msgspec.json.encode(ErrorResponse(error=error))

    def response(self) -> web.Response:
        headers = {}
        if self.status in (429, 503):
            headers["Retry-After"] = str(RETRY_AFTER_S)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        response = web.Response(status=self.status, body=self.body(), content_type="application/json", headers=headers)
        if self.close:
            response.force_close()
        return response


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that names the field at fault."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, detail: str = "") -> ApiError:
    """A field whose meaning this server cannot honour: refused, never ignored."""
    message = f"'{param}' is not supported by this server version"
    return ApiError(400, f"{message}: {detail}" if detail else message, param=param, code="unsupported_parameter")


def from_engine(error: EngineError) -> ApiError:
    """The HTTP face of what an engine client raised."""
    return ApiError(error.status, str(error) or error.code.replace("_", " "), code=error.code)


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down; send the request again", code="shutting_down", close=True)
