"""The bytes of a stream: frames of HTTP, and that the short way to an event tells what the long way does."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from server_harness import TOKENIZER, Running, drive, echo_client, running

from dpi_engine.server.tally import BatchHistogram, TokenTally

TRICKY = 'say "no" \\ \t\n\r\x00\x1f\x7f </script> \u2028 \u4f60 \U0001f468\u200d\U0001f469 data: [DONE]\n\n 0\r\n\r\n'


async def exchange(server: Running, requests: list[bytes], ends: int) -> bytes:
    """What one connection answers to requests that are sent when the answer before has ended."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, (server.host, server.port))
        got = bytearray()
        for number, request in enumerate(requests, 1):
            await loop.sock_sendall(sock, request)
            while got.count(b"0\r\n\r\n") < number * ends if ends else True:
                part = await loop.sock_recv(sock, 65536)
                if not part:
                    break
                got += part
        return bytes(got)


def post(body: dict[str, Any], version: str = "1.1") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + data


def chunks(raw: bytes) -> list[bytes]:
    found, at = [], 0
    while True:
        size, _, _ = raw[at:].partition(b"\r\n")
        begin = at + len(size) + 2
        end = begin + int(size, 16)
        assert raw[end : end + 2] == b"\r\n"
        if begin == end:
            assert end + 2 == len(raw)
            return found
        found.append(raw[begin:end])
        at = end + 2


def test_each_chunk_holds_whole_events_and_the_connection_serves_again() -> None:
    async def main() -> None:
        async with running() as server:
            body = {"prompt": "the cat sat", "max_tokens": 9, "temperature": 0, "stream": True, "ignore_eos": True}
            raw = await exchange(server, [post(body), post(body)], 1)
            answers = [part for part in raw.split(b"HTTP/1.1 200 OK\r\n") if part]
            assert len(answers) == 2
            for answer in answers:
                head, _, rest = answer.partition(b"\r\n\r\n")
                assert b"Transfer-Encoding: chunked" in head
                parts = chunks(rest)
                assert all(part.startswith(b"data: ") and part.endswith(b"\n\n") for part in parts)
                events = b"".join(parts).decode().split("\n\n")[:-1]
                assert len(events) == 10 and events[-1] == "data: [DONE]"
                assert all(json.loads(event.removeprefix("data: ")) for event in events[:-1])

    drive(main)


def test_a_client_of_http_1_0_gets_events_without_frames() -> None:
    async def main() -> None:
        async with running() as server:
            body = {"prompt": "the cat sat", "max_tokens": 9, "temperature": 0, "stream": True, "ignore_eos": True}
            raw = await exchange(server, [post(body, "1.0")], 0)
            head, _, rest = raw.partition(b"\r\n\r\n")
            assert b"chunked" not in head.lower()
            events = rest.decode().split("\n\n")[:-1]
            assert len(events) == 10 and events[-1] == "data: [DONE]"
            assert all(event.startswith("data: {") for event in events[:-1])

    drive(main)


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["delta"].get("content") or ""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("stop", [None, "never said"])
def test_events_of_text_alone_are_those_that_the_whole_chunk_encodes_to(
    path: str, include_usage: bool, stop: str | None
) -> None:
    async def main() -> None:
        script = TOKENIZER.encode(TRICKY).ids
        async with running(echo_client(script=script)) as server:
            body = {"max_tokens": len(script), "n": 2, "ignore_eos": True, "stream": True, "stop": stop}
            body |= {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}

            async def told(**options: bool) -> list[dict[str, Any]]:
                events = await server.events(path, body | {"stream_options": options})
                return [chunk for chunk in map(json.loads, events[:-1]) if chunk["choices"]]

            short = await told(include_usage=include_usage)
            assert all(("usage" in chunk) is include_usage for chunk in short)
            # Counts in every chunk lead through the whole encoding, which tells of tokens without text too.
            long = await told(include_usage=True, continuous_usage_stats=True)
            for index in range(2):
                mine, theirs = (
                    [
                        (chunk["object"], chunk["model"], list(choice), choice)
                        for chunk in chunks
                        for choice in chunk["choices"]
                        if choice["index"] == index and text_of(choice)
                    ]
                    for chunks in (short, long)
                )
                assert mine == theirs and len(mine) > 20
                assert "".join(text_of(choice) for *_, choice in mine) == TRICKY

    drive(main)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 9)), max_size=30))
def test_observations_that_were_counted_are_those_that_are_observed_one_by_one(seen: list[tuple[float, int]]) -> None:
    registry, bounds = CollectorRegistry(), (0.01, 1, 7.5, 80)
    one, many = (BatchHistogram(name, "", ["x"], registry=registry, buckets=bounds) for name in ("one", "many"))
    other, tokens = one.labels("a"), BatchHistogram("tokens", "", registry=registry)
    tokens.inc = lambda count: tokens.observe(count)  # type: ignore[attr-defined]
    tally = TokenTally(tokens, many.labels("a"))
    for number, (seconds, count) in enumerate(seen):
        tally.interval(seconds, count)
        tally.tokens += count
        for _ in range(count):
            other.observe(seconds)
        if number % 7 == 0:
            tally.flush()
    tally.flush()
    for bound in ("0.01", "1.0", "7.5", "80.0", "+Inf"):
        labels = {"x": "a", "le": bound}
        assert registry.get_sample_value("many_bucket", labels) == registry.get_sample_value("one_bucket", labels)
    assert registry.get_sample_value("many_sum", {"x": "a"}) == pytest.approx(
        registry.get_sample_value("one_sum", {"x": "a"})
    )
    assert registry.get_sample_value("tokens_sum") == sum(count for _, count in seen)
