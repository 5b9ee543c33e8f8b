"""Talking to an OpenAI endpoint from the command line: addresses, headers, errors that a person can act on."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from dpi_engine.launch.exit_codes import EXIT_CRASHED, EXIT_USAGE
from dpi_engine.tools.arguments import filled, utf8

DEFAULT_URL = "http://127.0.0.1:8000"


class EndpointError(RuntimeError):
    """The endpoint did not answer as asked; the message says what was sent where and what came back."""

    code = EXIT_CRASHED  # of the tool


class BadUrl(EndpointError):
    """Nothing was asked: this cannot be an endpoint's address."""

    code = EXIT_USAGE


def _model(text: str) -> str:
    return filled(utf8(text))


def add_endpoint_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help=f"endpoint, with or without /v1 ({DEFAULT_URL})")
    parser.add_argument("--model", type=_model, default=None, help="model name (default: the endpoint's first)")
    parser.add_argument(
        "--api-key", type=filled, default=None, help="key sent as bearer token (default: $OPENAI_API_KEY, if set)"
    )


def _why(error: BaseException) -> str:
    """What went wrong in words of the user's world."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect ({error.os_error.strerror or error.os_error}); is the server up, and the port right?"
    if isinstance(error, aiohttp.InvalidURL):
        return "not an address; expected http://HOST:PORT"
    return str(error) or type(error).__name__


def _object(answer: Any) -> dict[str, Any]:
    """`answer` if it is a JSON object. Raises ValueError: something else listens there."""
    if not isinstance(answer, dict):
        raise ValueError(f"expected a JSON object, got {json.dumps(answer)[:100]}; is the port right?")
    return answer


def _event(data: bytes) -> dict[str, Any]:
    """One event of a stream, with `choices` that are objects if it has any. Raises ValueError for anything else."""
    event = _object(json.loads(data))
    choices = event.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices):
        raise ValueError(f"expected 'choices' to be a list of objects, got {json.dumps(choices)[:100]}")
    return {**event, "choices": choices}


class Endpoint:
    """An OpenAI-compatible server. Use as an async context manager."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        connections: int = 0,
        timeout_s: float = 600.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`headers` go with every request."""
        base = url.rstrip("/")
        self.base = base.removesuffix("/v1")
        if not self.base.startswith(("http://", "https://")):
            host = base.partition("://")[2] or base or "127.0.0.1:8000"
            raise BadUrl(f"--url {url!r}: expected an address such as http://{host}")
        key = api_key or os.environ.get("OPENAI_API_KEY")
        self._headers = {**({"Authorization": f"Bearer {key}"} if key else {}), **(headers or {})}
        self._limit, self._timeout = connections, timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Endpoint:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=self._timeout),
            connector=aiohttp.TCPConnector(limit=self._limit),
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session:
            await self._session.close()

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status < 400:
            return
        text = await response.text()
        code = None
        try:
            error = json.loads(text)["error"]
            message, code = error["message"], error.get("code")
        except (ValueError, KeyError, TypeError, AttributeError):
            message = text.strip()[:500]
        hint = ""
        no_route = response.status == 404 and code != "model_not_found"
        if no_route and response.url.path in ("/ranks", "/v1/models", "/tokenize"):
            hint = "; is this the other port? /ranks is on the management port, /v1 on the HTTP port"
        raise EndpointError(f"{response.method} {response.url}: {response.status} {response.reason}: {message}{hint}")

    async def get(self, path: str) -> dict[str, Any]:
        """JSON of a GET. Raises EndpointError."""
        assert self._session
        try:
            async with self._session.get(self.base + path) as response:
                await self._check(response)
                return _object(await response.json(content_type=None))
        except (aiohttp.ClientError, TimeoutError, ValueError) as e:
            raise EndpointError(f"GET {self.base}{path}: {_why(e)}") from e

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """JSON answer of a POST. Raises EndpointError."""
        assert self._session
        try:
            async with self._session.post(self.base + path, json=body) as response:
                await self._check(response)
                return _object(await response.json(content_type=None))
        except (aiohttp.ClientError, TimeoutError, ValueError) as e:
            raise EndpointError(f"POST {self.base}{path}: {_why(e)}") from e

    async def first_model(self) -> str:
        models = (await self.get("/v1/models")).get("data") or []
        if not models:
            raise EndpointError(f"{self.base}/v1/models lists no model")
        try:
            return str(models[0]["id"])
        except (KeyError, TypeError):
            raise EndpointError(f"{self.base}/v1/models is no list of models; is the port right?") from None

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Events of a streamed POST, up to [DONE]. Raises EndpointError, also for an error inside the stream."""
        assert self._session
        try:
            async with self._session.post(self.base + path, json={**body, "stream": True}) as response:
                await self._check(response)
                async for line in response.content:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    event = _event(data)
                    if error := event.get("error"):
                        message = error.get("message", error) if isinstance(error, dict) else error
                        raise EndpointError(f"{self.base}{path}: {message}")
                    yield event
                raise EndpointError(f"{self.base}{path}: the stream ended before [DONE]")
        except (aiohttp.ClientError, TimeoutError, ValueError) as e:
            raise EndpointError(f"POST {self.base}{path}: {_why(e)}") from e
