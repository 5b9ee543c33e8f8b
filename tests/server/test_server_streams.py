"""Streams when clients leave, are slow, or wait long; and shutdown. On raw sockets where that is the point."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from echo_client import EchoClient
from server_harness import DEADLINE_S, Bundle, Running, drive, echo_client, options, running, until

from dpi_engine.frontend.interface import EngineError, RankLost
from dpi_engine.server.app import make_app
from dpi_engine.server.serving import serve
from dpi_engine.server.state import STATE
from free_ports import PORTS


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "echo", "prompt": "the cat", "max_tokens": 200, "temperature": 0, "ignore_eos": True} | fields


def http_request(path: str, content: dict[str, Any]) -> bytes:
    data = json.dumps(content).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def connect(server: Running, receive_buffer: int | None = None) -> socket.socket:
    """A plain non-blocking connection."""
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (server.host, server.port))
    return sock


async def read_until(sock: socket.socket, mark: bytes) -> bytes:
    """What comes until `mark` was seen or the server closed."""
    data = bytearray()
    while mark not in data[-65536 - len(mark) :]:
        part = await asyncio.get_running_loop().sock_recv(sock, 65536)
        if not part:
            break
        data += part
    return bytes(data)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_client_that_leaves_before_the_first_byte_aborts_all_choices(
    chat: bool, n: int, stream: bool, how: str
) -> None:
    async def main() -> None:
        gate = asyncio.Event()
        async with running(echo_client(gate=gate)) as server:
            content = body(n=n, stream=stream)
            if chat:
                del content["prompt"]
                content["messages"] = [{"role": "user", "content": "the cat"}]
            sock = await connect(server)
            path = "/v1/chat/completions" if chat else "/v1/completions"
            await asyncio.get_running_loop().sock_sendall(sock, http_request(path, content))
            await until(lambda: len(server.client.active) == n, "the requests never reached the engine")
            if how == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            if how == "half":
                sock.shutdown(socket.SHUT_WR)
            else:
                sock.close()
            await until(lambda: len(server.client.aborted) == n, "the engine was not told")
            await until(lambda: not server.state.active, "the handler is still there")
            assert not server.client.active and server.client.generated == 0
            sock.close()
            gate.set()
            status, _ = await server.post("/v1/completions", body(max_tokens=2))
            assert status == 200

    drive(main)


@pytest.mark.parametrize("n", [1, 3])
def test_client_that_leaves_in_the_middle_aborts_within_a_few_tokens(n: int) -> None:
    async def main() -> None:
        async with running(echo_client(max_model_len=10**7)) as server:
            sock = await connect(server)
            request = http_request("/v1/completions", body(n=n, stream=True, max_tokens=10**6))
            await asyncio.get_running_loop().sock_sendall(sock, request)
            await read_until(sock, b"data: ")
            sock.close()
            await until(lambda: len(server.client.aborted) == n, "the engine was not told")
            assert not server.client.active and server.client.generated < 10**6

    drive(main)


def test_leaving_clients_do_not_disturb_the_others() -> None:
    async def main() -> None:
        gate = asyncio.Event()
        async with running(echo_client(gate=gate)) as server:
            leaving = []
            staying = [asyncio.create_task(server.post("/v1/completions", body(max_tokens=10))) for _ in range(20)]
            for _ in range(10):
                sock = await connect(server)
                await asyncio.get_running_loop().sock_sendall(
                    sock, http_request("/v1/completions", body(n=3, stream=True, request_id="again"))
                )
                leaving.append(sock)
            await until(lambda: len(server.client.requests) == 50, "the requests never reached the engine")
            for sock in leaving:
                sock.close()
            await until(lambda: len(server.client.aborted) == 30, "the engine was not told")
            gate.set()
            for status, answer in await asyncio.gather(*staying):
                assert status == 200 and answer["usage"]["completion_tokens"] == 10
            status, answer = await server.post("/v1/completions", body(request_id="again", max_tokens=3))
            assert status == 200 and answer["id"] == "cmpl-again"

    drive(main)


@pytest.mark.parametrize("n", [1, 2])
def test_slow_reader_stops_the_generator_and_then_gets_everything(n: int) -> None:
    async def main() -> None:
        total = 4_000
        async with running(echo_client(max_model_len=10**6), send_buffer=16384) as server:
            sock = await connect(server, receive_buffer=4096)
            request = http_request("/v1/completions", body(n=n, stream=True, max_tokens=total))
            await asyncio.get_running_loop().sock_sendall(sock, request)

            def blocked() -> bool:
                return any(stream.writing for stream in server.state.streams)

            held = -1
            while held != server.client.generated:  # the kernel may take a little more now and then
                await until(blocked, "the stream never waited for its reader")
                held = server.client.generated
                await asyncio.sleep(0.3)
            assert held < n * total
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**22)
            data = await read_until(sock, b"data: [DONE]")
            assert data.count(b'"finish_reason":"length"') == n
            assert server.client.generated == n * total
            sock.close()

    drive(main)


def test_reader_that_takes_nothing_is_given_up() -> None:
    async def main() -> None:
        async with running(echo_client(max_model_len=10**8), send_buffer=16384, write_timeout_s=0.2) as server:
            sock = await connect(server, receive_buffer=4096)
            request = http_request("/v1/completions", body(stream=True, max_tokens=10**7))
            await asyncio.get_running_loop().sock_sendall(sock, request)
            await until(lambda: len(server.client.aborted) == 1, "the stream was never given up")
            await until(lambda: not server.state.active and not server.state.streams, "the handler is still there")
            sock.close()

    drive(main)


def test_waiting_stream_gets_comments_that_clients_skip() -> None:
    async def main() -> None:
        gate = asyncio.Event()
        async with running(echo_client(gate=gate), keepalive_s=0.05) as server:
            sock = await connect(server)
            request = http_request("/v1/completions", body(stream=True, max_tokens=2))
            await asyncio.get_running_loop().sock_sendall(sock, request)
            early = await read_until(sock, b": waiting\n\n")
            assert b"200 OK" in early and b"text/event-stream" in early and b"data:" not in early
            gate.set()
            assert b'"finish_reason":"length"' in await read_until(sock, b"[DONE]")
            sock.close()

    drive(main)


@pytest.mark.parametrize("error", [RankLost("rank 1 was lost: no beat"), EngineError("logits are not numbers")])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_error_in_a_running_stream_is_an_event_and_the_end(error: EngineError, path: str) -> None:
    async def main() -> None:
        async with running(echo_client(fail_after=(3, error))) as server:
            content = body(stream=True, messages=[{"role": "user", "content": "hello there"}])
            events = await server.events(path, content)
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2]) == {
                "error": {"message": str(error), "type": "server_error", "param": None, "code": error.code}
            }
            assert all("error" not in json.loads(event) for event in events[:-2])
            assert not any(c["finish_reason"] for event in events[:-2] for c in json.loads(event)["choices"])
            status, answer = await server.post(path, content | {"stream": False})
            assert status == 500 and answer["error"]["message"] == str(error)

    drive(main)


def test_error_in_one_of_three_choices_ends_all() -> None:
    async def main() -> None:
        async with running(echo_client(fail_after=(5, RankLost("rank 0 was lost")))) as server:
            events = await server.events("/v1/completions", body(stream=True, n=3))
            assert events[-1] == "[DONE]" and json.loads(events[-2])["error"]["code"] == "rank_lost"
            assert not server.client.active and len(server.client.aborted) == 3

    drive(main)


def test_error_before_the_first_token_keeps_its_status() -> None:
    async def main() -> None:
        async with running(echo_client(fail_after=(0, RankLost("rank 0 was lost")))) as server:
            status, answer = await server.post("/v1/completions", body(stream=True))
            assert status == 500 and answer["error"]["code"] == "rank_lost"

    drive(main)


def test_half_closed_idle_connection_is_closed() -> None:
    async def main() -> None:
        async with running() as server:
            sock = await connect(server)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, http_request("/v1/completions", body(max_tokens=1)))
            assert b"200 OK" in await read_until(sock, b'"usage"')
            sock.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(sock, 4096):
                pass
            sock.close()

    drive(main)


def test_shutdown_lets_streams_finish() -> None:
    async def main() -> None:
        gate, stop = asyncio.Event(), asyncio.Event()
        client = echo_client(gate=gate)
        app = make_app(client, Bundle(), options(shutdown_timeout_s=DEADLINE_S))
        listener = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        served = asyncio.create_task(serve(app, "", 0, sock=listener, stop=stop))
        async with aiohttp.ClientSession() as http:
            async with http.get(url + "/version") as response:
                assert response.status == 200
            asked = asyncio.create_task(_read_stream(http, url, body(stream=True, max_tokens=5)))
            await until(lambda: len(client.active) == 1, "the request never reached the engine")
            async with aiohttp.ClientSession() as second:
                async with second.get(url + "/health") as response:
                    assert response.status == 200
                stop.set()
                await until(lambda: app[STATE].draining, "the drain never began")
                # The connection from before is still served: health says that no more work is taken.
                async with second.get(url + "/health") as response:
                    assert response.status == 503 and "draining" in (await response.json())["reason"]
                async with second.post(url + "/v1/completions", json=body()) as response:
                    assert response.status == 503 and response.headers["Retry-After"]
            with pytest.raises(aiohttp.ClientConnectorError):
                async with aiohttp.ClientSession() as third, third.get(url + "/version"):
                    pass
            gate.set()
            events = await asked
            assert events[-1] == "[DONE]" and '"finish_reason":"length"' in events[-2]
            await served
        assert client.finished and not client.aborted

    drive(main)


def test_a_server_says_that_it_listens_once_a_connection_is_taken() -> None:
    async def main() -> None:
        port, stop, said = PORTS.take(1), asyncio.Event(), []

        def takes_connections() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        def on_listening(listens: bool) -> None:
            said.append((listens, takes_connections()))

        app = make_app(echo_client(), Bundle(), options())
        served = asyncio.create_task(serve(app, "127.0.0.1", port, stop=stop, on_listening=on_listening))
        await until(lambda: len(said) == 1, "it never listened")
        stop.set()
        await served
        assert said == [(True, True), (False, True)]
        assert not takes_connections()

    drive(main)


@asynccontextmanager
async def serving_until_sigterm(client: EchoClient) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    """A server that SIGTERM ends after a drain of 50 ms; waits for its end."""
    app = make_app(client, Bundle(), options(shutdown_timeout_s=0.05))
    listener = socket.create_server(("127.0.0.1", 0))
    served = asyncio.create_task(serve(app, "", 0, sock=listener))
    async with aiohttp.ClientSession() as http:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", http
        await served


def test_sigterm_ends_a_stream_that_does_not_finish_with_an_error_event() -> None:
    async def main() -> None:
        gate = asyncio.Event()
        gate.set()
        client = echo_client(gate=gate, max_model_len=10**8)
        async with serving_until_sigterm(client) as (url, http):
            content = body(stream=True, max_tokens=10**7)
            async with http.post(url + "/v1/completions", json=content) as response:
                await response.content.readuntil(b"\n\n")
                gate.clear()
                os.kill(os.getpid(), signal.SIGTERM)
                text = (await response.text()).strip().split("\n\n")
            assert text[-1] == "data: [DONE]"
            assert json.loads(text[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert not client.active and len(client.aborted) == 1

    drive(main)


def test_sigterm_answers_503_where_nothing_was_sent_yet() -> None:
    async def main() -> None:
        client = echo_client(gate=asyncio.Event())
        async with serving_until_sigterm(client) as (url, http):
            whole = asyncio.create_task(http.post(url + "/v1/completions", json=body(n=2)))
            stream = asyncio.create_task(http.post(url + "/v1/completions", json=body(stream=True)))
            await until(lambda: len(client.active) == 3, "the requests never reached the engine")
            os.kill(os.getpid(), signal.SIGTERM)
            for answer in await asyncio.gather(whole, stream):
                assert answer.status == 503 and (await answer.json())["error"]["code"] == "shutting_down"
        assert not client.active and len(client.aborted) == 3

    drive(main)


async def _read_stream(http: aiohttp.ClientSession, url: str, content: dict[str, Any]) -> list[str]:
    async with http.post(url + "/v1/completions", json=content) as response:
        text = await response.text()
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
