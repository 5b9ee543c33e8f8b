"""Random requests: whatever is sent, the server answers below 500 and goes on."""

from __future__ import annotations

import asyncio
import collections
import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_harness import Running, echo_client, running

from dpi_engine.server.schemas.chat import ChatRequest
from dpi_engine.server.schemas.completions import CompletionRequest
from dpi_engine.server.schemas.tokens import DetokenizeRequest, TokenizeRequest


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server in a thread of its own."""
    ready: list[Running] = []
    began, end = threading.Event(), threading.Event()

    async def main() -> None:
        async with running(echo_client(max_model_len=64)) as found:
            ready.append(found)
            began.set()
            while not end.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert began.wait(60)
    yield ready[0]
    end.set()
    thread.join(60)
    assert not thread.is_alive()


def post(server: Running, path: str, raw: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    try:
        connection.request("POST", path, body=raw, headers={"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


LIKELY: dict[str, Any] = {
    "prompt": st.one_of(
        st.text(max_size=20), st.lists(st.integers(-2, 400), max_size=5), st.lists(st.text(max_size=3))
    ),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "system", "tool", ""]), "content": st.text(max_size=9)}
        ),
        max_size=3,
    ),
    "model": st.sampled_from(["echo", "echo-alias"]),
    "max_tokens": st.integers(-1, 20),
    "max_completion_tokens": st.integers(-1, 20),
    "n": st.integers(0, 4),
    "stream": st.booleans(),
    "logprobs": st.one_of(st.booleans(), st.integers(-1, 21)),
    "top_logprobs": st.integers(-1, 21),
    "echo": st.booleans(),
    "temperature": st.floats(),
    "stop": st.one_of(st.text(max_size=3), st.lists(st.text(max_size=3), max_size=18)),
    "seed": st.integers(),
    "tokens": st.lists(st.integers(-5, 400)),
}

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)

PATHS: dict[str, Any] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A path, and a body of its fields with likely, odd and nonsensical values."""
    path = draw(st.sampled_from(sorted(PATHS)))
    names = PATHS[path].__struct_fields__
    body: dict[str, Any] = {}
    for name in ("prompt", "messages", "tokens"):
        if name in names and draw(st.integers(0, 5)):
            body[name] = draw(LIKELY[name])
    for name in draw(st.lists(st.sampled_from(names), max_size=6)):
        body[name] = draw(LIKELY.get(name, ANYTHING) if draw(st.booleans()) else ANYTHING)
    return path, body


SEEN: collections.Counter[int] = collections.Counter()


def check(status: int, answer: bytes) -> None:
    SEEN[status] += 1
    assert status < 500, answer
    if status >= 400:
        assert json.loads(answer)["error"]["message"]
    elif answer.startswith(b"data: "):
        assert answer.endswith(b"data: [DONE]\n\n")
    else:
        assert isinstance(json.loads(answer), dict)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(request=requests())
def test_bodies_made_of_known_fields(server: Running, request: tuple[str, dict[str, Any]]) -> None:
    path, body = request
    check(*post(server, path, json.dumps(body).encode()))
    assert not server.client.active


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(path=st.sampled_from(sorted(PATHS)), raw=st.binary(max_size=60))
def test_bodies_of_any_bytes(server: Running, path: str, raw: bytes) -> None:
    check(*post(server, path, raw))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(path=st.sampled_from(sorted(PATHS)), value=ANYTHING)
def test_bodies_of_any_json(server: Running, path: str, value: Any) -> None:
    check(*post(server, path, json.dumps(value).encode()))


def test_the_server_still_answers_and_saw_good_and_bad(server: Running) -> None:
    if SEEN.total() < 200:  # run alone
        test_bodies_made_of_known_fields(server=server)
    assert SEEN[200] > 0 and SEEN[400] > 20, SEEN
    status, answer = post(server, "/v1/completions", b'{"prompt": "the cat", "max_tokens": 3, "temperature": 0}')
    assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 3
