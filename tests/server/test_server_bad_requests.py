"""Every kind of bad request gets its status, names its field, and leaves the server serving."""

from __future__ import annotations

import asyncio
import logging
import urllib.parse
from typing import Any

import pytest
from server_harness import TOKENIZER, Bundle, Running, drive, echo_client, running

from dpi_engine.config.logs import well_formed

VOCAB = TOKENIZER.get_vocab_size()
USER = [{"role": "user", "content": "hi"}]


def c(**fields: Any) -> dict[str, Any]:
    return {"model": "echo", "prompt": "hi", **fields}


def m(**fields: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": USER, **fields}


COMPLETIONS: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": "echo"}, 400, "prompt"),
    (c(model="other"), 404, "model"),
    (c(model=7), 400, "model"),
    (c(prompt=""), 400, "prompt"),
    (c(prompt=[]), 400, "prompt"),
    (c(prompt=[""]), 400, "prompt"),
    (c(prompt=[[]]), 400, "prompt"),
    (c(prompt=["a", 1]), 400, "prompt"),
    (c(prompt=[1, "a"]), 400, "prompt"),
    (c(prompt=[[1], "a"]), 400, "prompt"),
    (c(prompt=[True]), 400, "prompt"),
    (c(prompt={"text": "a"}), 400, "prompt"),
    (c(prompt=5), 400, "prompt"),
    (c(prompt=[-1]), 400, "prompt"),
    (c(prompt=[[-1]]), 400, "prompt[0]"),
    (c(prompt=[VOCAB]), 400, "prompt"),
    (c(prompt=[[1], [2**70]]), 400, "prompt[1]"),
    (c(prompt=[1] * 256), 400, "prompt"),
    (c(prompt=[1] * 10_000), 400, "prompt"),
    (c(prompt="cat " * 3000), 400, "prompt"),
    (c(prompt=["a"] * 1025), 400, "prompt"),
    (c(prompt=["a"] * 1000, n=2), 400, "n"),
    (c(max_tokens=0), 400, "max_tokens"),
    (c(max_tokens=-1), 400, "max_tokens"),
    (c(max_tokens=10**9), 400, "max_tokens"),
    (c(max_tokens=10**30), 400, "max_tokens"),
    (c(max_tokens="5"), 400, "max_tokens"),
    (c(max_tokens=2.5), 400, "max_tokens"),
    (c(max_tokens=True), 400, "max_tokens"),
    (c(min_tokens=-1), 400, "min_tokens"),
    (c(min_tokens=9, max_tokens=8), 400, "min_tokens"),
    (c(temperature=-0.1), 400, "temperature"),
    (c(temperature=2.1), 400, "temperature"),
    (c(temperature=1e-30), 400, "temperature"),
    (c(temperature="warm"), 400, "temperature"),
    (c(top_p=0), 400, "top_p"),
    (c(top_p=1.5), 400, "top_p"),
    (c(top_k=-5), 400, "top_k"),
    (c(min_p=-0.5), 400, "min_p"),
    (c(min_p=1.5), 400, "min_p"),
    (c(presence_penalty=3), 400, "presence_penalty"),
    (c(frequency_penalty=-3), 400, "frequency_penalty"),
    (c(repetition_penalty=0), 400, "repetition_penalty"),
    (c(repetition_penalty=1e300), 400, "repetition_penalty"),
    (c(n=0), 400, "n"),
    (c(n=129), 400, "n"),
    (c(best_of=2), 400, "best_of"),
    (c(n=2, best_of=1), 400, "best_of"),
    (c(seed=-1), 400, "seed"),
    (c(seed=2**64), 400, "seed"),
    (c(seed="a"), 400, "seed"),
    (c(logprobs=21), 400, "logprobs"),
    (c(logprobs=-1), 400, "logprobs"),
    (c(logprobs=True), 400, "logprobs"),
    (c(prompt_logprobs=21), 400, "prompt_logprobs"),
    (c(prompt_logprobs=1, stream=True), 400, "prompt_logprobs"),
    (c(stop=["s"] * 17), 400, "stop"),
    (c(stop=""), 400, "stop"),
    (c(stop=["a", ""]), 400, "stop"),
    (c(stop=["a", 5]), 400, "stop[1]"),
    (c(stop="x" * 2000), 400, "stop"),
    (c(stop_token_ids=[VOCAB]), 400, "stop_token_ids"),
    (c(stop_token_ids=[1] * 10_000), 400, "stop_token_ids"),
    (c(logit_bias={"999999": 1}), 400, "logit_bias"),
    (c(logit_bias={"-1": 1}), 400, "logit_bias"),
    (c(logit_bias={"one": 1}), 400, "logit_bias"),
    (c(logit_bias={"\u0661": 1}), 400, "logit_bias"),
    (c(logit_bias={"1": 101}), 400, "logit_bias"),
    (c(logit_bias={"1": "x"}), 400, "logit_bias[...]"),
    (c(allowed_token_ids=[]), 400, "allowed_token_ids"),
    (c(allowed_token_ids=[-3]), 400, "allowed_token_ids"),
    (c(bad_words=[""]), 400, "bad_words"),
    (c(truncate_prompt_tokens=0), 400, "truncate_prompt_tokens"),
    (c(truncate_prompt_tokens=257), 400, "truncate_prompt_tokens"),
    (c(priority=1), 400, "priority"),
    (c(priority=2**40), 400, "priority"),
    (c(cache_salt=""), 400, "cache_salt"),
    (c(request_id="a\nb"), 400, "request_id"),
    (c(stream_options={"include_usage": True}), 400, "stream_options"),
    (c(stream="yes"), 400, "stream"),
    (c(stream=True, stream_options=[]), 400, "stream_options"),
    (c(suffix="end"), 400, "suffix"),
    (c(response_format={"type": "json_object"}), 400, "response_format"),
    (c(guided_json={"type": "object"}), 400, "guided_json"),
    (c(use_beam_search=True), 400, "use_beam_search"),
    (c(prompt_embeds="AAAA"), 400, "prompt_embeds"),
]

CHATS: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": "echo"}, 400, "messages"),
    (m(messages=[]), 400, "messages"),
    (m(messages="hi"), 400, "messages"),
    (m(messages=["hi"]), 400, "messages[0]"),
    (m(messages=[{"content": "hi"}]), 400, "messages[0].role"),
    (m(messages=[{"role": "user"}]), 400, "messages[0].content"),
    (m(messages=[{"role": "user", "content": None}]), 400, "messages[0].content"),
    (m(messages=[{"role": "user", "content": 3}]), 400, "messages[0].content"),
    (m(messages=[{"role": "user", "content": []}]), 400, "messages[0].content"),
    (
        m(messages=[*USER, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        400,
        "messages[1].content[0].type",
    ),
    (m(messages=[{"role": "user", "content": [{"type": "text"}]}]), 400, "messages[0].content[0].text"),
    (m(tools=[{"type": "function", "function": {"name": "f"}}]), 400, "tools"),
    (m(tool_choice="required"), 400, "tool_choice"),
    (m(functions=[{"name": "f"}]), 400, "functions"),
    (m(response_format={"type": "json_schema", "json_schema": {}}), 400, "response_format"),
    (m(audio={"voice": "a"}), 400, "audio"),
    (m(modalities=["text", "audio"]), 400, "modalities"),
    (m(prediction={"type": "content"}), 400, "prediction"),
    (m(top_logprobs=3), 400, "top_logprobs"),
    (m(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    (m(logprobs=1), 400, "logprobs"),
    (m(max_completion_tokens=0), 400, "max_completion_tokens"),
    (m(max_completion_tokens=10_000), 400, "max_completion_tokens"),
    (m(messages=[{"role": "user", "content": "cat " * 5000}]), 400, "messages"),
    (m(chat_template="{{ 1 }}"), 400, "chat_template"),
    (m(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs"),
    (m(chat_template_kwargs=[1]), 400, "chat_template_kwargs"),
    (m(continue_final_message=True, add_generation_prompt=True), 400, "continue_final_message"),
]

RAW: list[tuple[bytes, dict[str, str], int]] = [
    (b"", {}, 400),
    (b"   ", {}, 400),
    (b"{", {}, 400),
    (b"[]", {}, 400),
    (b'"x"', {}, 400),
    (b"null", {}, 400),
    (b'{"prompt": NaN}', {}, 400),
    (b'{"prompt": "x", "temperature": 1e999}', {}, 400),
    (b'{"prompt": "\xff\xfe"}', {}, 400),
    (b'{"prompt": "\\ud800"}', {}, 400),
    (b'{"prompt": "\\ud800 tail"}', {}, 400),
    (b"[" * 100_000, {}, 400),
    (b'{"prompt": ' + b"[" * 100_000, {}, 400),
    (b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}", {}, 400),
    (b" " * 5_000_000, {}, 413),
    (b'{"prompt": "x"}', {"Content-Type": "text/plain"}, 415),
    (b"prompt=x", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
    (b"not gzip", {"Content-Encoding": "gzip"}, 400),
]

POST_PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


def check_error(body: Any, param: str | None = None) -> None:
    """The body is an error in OpenAI's shape."""
    assert set(body) == {"error"}, body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    assert isinstance(body["error"]["type"], str)
    assert body["error"]["param"] == param, body


async def check_alive(server: Running) -> None:
    status, body = await server.post("/v1/completions", c(max_tokens=1))
    assert status == 200 and len(body["choices"]) == 1, body


@pytest.mark.parametrize(("path", "table"), [("/v1/completions", COMPLETIONS), ("/v1/chat/completions", CHATS)])
def test_bad_bodies(path: str, table: list[tuple[dict[str, Any], int, str | None]]) -> None:
    async def main() -> None:
        async with running() as server:
            for body, status, param in table:
                got, answer = await server.post(path, body)
                assert got == status, (str(body)[:200], got, answer)
                check_error(answer, param)
            assert server.client.requests == []
            await check_alive(server)

    drive(main)


@pytest.mark.parametrize("path", POST_PATHS)
def test_bodies_that_are_no_request(path: str) -> None:
    async def main() -> None:
        async with running(body_limit=4_000_000) as server:
            for raw, headers, status in RAW:
                sent = {"Content-Type": "application/json"} | headers
                async with server.http.post(server.url + path, data=raw, headers=sent) as response:
                    assert response.status == status, (raw[:60], response.status, await response.text())
                    check_error(await response.json())
            for body in ({}, {"model": 1}):
                got, answer = await server.post(path, body)
                assert got == 400 and answer["error"]["param"]
            await check_alive(server)

    drive(main)


def test_refusals_say_that_this_version_cannot() -> None:
    async def main() -> None:
        async with running() as server:
            for path, body in (
                ("/v1/completions", c(suffix="x")),
                ("/v1/completions", c(n=1, best_of=3)),
                ("/v1/chat/completions", m(tools=[{}])),
                ("/v1/chat/completions", m(messages=[{"role": "user", "content": [{"type": "input_audio"}]}])),
            ):
                status, answer = await server.post(path, body)
                assert status == 400 and "not supported by this server version" in answer["error"]["message"]
                assert answer["error"]["code"] == "unsupported_parameter"

    drive(main)


def test_fields_that_ask_for_nothing_and_unknown_fields_pass() -> None:
    async def main() -> None:
        async with running() as server:
            quiet: dict[str, Any] = {
                "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "tools": None,
                "functions": [], "tool_choice": "none", "response_format": {"type": "text"}, "suffix": None,
                "max_tokens": None, "logit_bias": None, "stop": None, "n": None, "stream": False, "best_of": None,
                "stream_options": None, "temperature": None, "parallel_tool_calls": True, "something_new": [1],
            }  # fmt: skip
            status, _ = await server.post("/v1/completions", c(**quiet))
            assert status == 200
            status, _ = await server.post("/v1/chat/completions", m(**quiet, modalities=["text"]))
            assert status == 200

    drive(main)


def test_too_long_prompts_state_lengths_and_limit() -> None:
    async def main() -> None:
        async with running() as server:
            _, answer = await server.post("/v1/completions", c(prompt=[1] * 300))
            assert "300 tokens" in answer["error"]["message"] and "256 tokens" in answer["error"]["message"]
            assert answer["error"]["code"] == "context_length_exceeded"
            _, answer = await server.post("/v1/completions", c(prompt=[1] * 200, max_tokens=57))
            assert "at most 56" in answer["error"]["message"]
            status, answer = await server.post("/v1/completions", c(prompt=[1] * 200, max_tokens=56, ignore_eos=True))
            assert status == 200 and answer["usage"]["completion_tokens"] == 56
            status, answer = await server.post("/v1/completions", c(prompt=[1] * 255))
            assert status == 200 and answer["usage"]["completion_tokens"] == 1
            status, answer = await server.post("/v1/completions", c(prompt=[1] * 300, truncate_prompt_tokens=-1))
            assert status == 200 and answer["usage"]["prompt_tokens"] == 255
            status, answer = await server.post("/v1/completions", c(prompt=[3, 1, 2], truncate_prompt_tokens=2))
            assert status == 200 and server.client.requests[-1].prompt_token_ids == [1, 2]

    drive(main)


def test_a_huge_text_is_refused_by_its_length_alone() -> None:
    async def main() -> None:
        async with running() as server:
            text = "x" * 20_000_000
            for path, sent in (
                ("/v1/completions", c(prompt=text)),
                ("/v1/chat/completions", m(messages=[{"role": "user", "content": text}])),
            ):
                status, answer = await server.post(path, sent)
                assert status == 400 and "at least" in answer["error"]["message"]
                assert answer["error"]["code"] == "context_length_exceeded"
            await check_alive(server)

    drive(main)


def test_before_any_rank_joined_requests_get_503() -> None:
    async def main() -> None:
        async with running(echo_client(is_ready=False, max_model_len=0)) as server:
            for path, sent in (("/v1/completions", c()), ("/v1/chat/completions", m())):
                status, answer = await server.post(path, sent)
                assert status == 503 and "LOADING" in answer["error"]["message"]

    drive(main)


def test_wrong_paths_methods_and_headers() -> None:
    async def main() -> None:
        async with running() as server:
            status, answer = await server.post("/v1/nothing", {})
            assert status == 404
            check_error(answer)
            status, answer = await server.get("/v1/completions")
            assert status == 405 and "POST" in answer["error"]["message"]
            check_error(answer)
            for name, value in (
                ("X-data-parallel-rank", "one"),
                ("X-data-parallel-rank", "-1"),
                ("X-Session-Id", "s" * 200),
                ("X-Request-Id", "r" * 200),
            ):
                status, answer = await server.post("/v1/completions", c(), headers={name: value})
                assert status == 400, (name, value, answer)
                check_error(answer, name)
            status, answer = await server.post("/v1/completions", c(), headers={"X-data-parallel-rank": "2"})
            assert status == 400
            status, answer = await server.post("/v1/completions", c(stream=True), headers={"X-data-parallel-rank": "2"})
            assert status == 400
            check_error(answer)
            await check_alive(server)

    drive(main)


def test_api_keys_guard_all_but_probes_and_metrics() -> None:
    async def main() -> None:
        async with running(api_keys=("first-key", "second-k\u00e9y")) as server:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first-key"},
                            {"Authorization": "Bearer"}, {"Authorization": "first-key"}):  # fmt: skip
                for path in ("/v1/completions", "/tokenize"):
                    status, answer = await server.post(path, c(), headers=headers)
                    assert status == 401, headers
                    check_error(answer)
                assert (await server.get("/v1/models", headers=headers))[0] == 401
                assert (await server.get("/no/such/path", headers=headers))[0] == 401
            for key in ("first-key", "second-k\u00e9y"):
                headers = {"Authorization": f"Bearer {key}"}
                assert (await server.post("/v1/completions", c(), headers=headers))[0] == 200
            for path in ("/health", "/ping", "/metrics"):
                assert (await server.get(path))[0] == 200

    drive(main)


def test_a_model_without_chat_template_says_what_to_do() -> None:
    async def main() -> None:
        async with running(bundle=Bundle(chat_template=None)) as server:
            status, answer = await server.post("/v1/chat/completions", m())
            assert status == 400 and "--chat-template" in answer["error"]["message"]
            check_error(answer, "messages")
            await check_alive(server)

    drive(main)


def test_unready_engines_give_503_with_reason() -> None:
    async def main() -> None:
        async with running(echo_client(is_ready=False)) as server:
            status, answer = await server.get("/health")
            assert status == 503 and "rank 0 LOADING (weights)" in answer["reason"]
            for stream in (False, True):
                async with server.http.post(server.url + "/v1/completions", json=c(stream=stream)) as response:
                    assert response.status == 503 and response.headers["Retry-After"] == "1"
                    check_error(await response.json())
            server.client.is_ready = True
            assert (await server.get("/health"))[0] == 200

    drive(main)


def test_what_is_no_http_and_bodies_that_cannot_be_unpacked_leave_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with running() as server:
            headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
            async with server.http.post(server.url + "/v1/completions", data=b"not gzip", headers=headers) as response:
                assert response.status == 400
            address = urllib.parse.urlsplit(server.url)
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(b"\x16\x03\x01 no http\r\n\r\n")
            assert await reader.readline() == b"HTTP/1.0 400 Bad Request\r\n"
            writer.close()
            await check_alive(server)

    logger = logging.getLogger("aiohttp.server")
    logger.addFilter(well_formed)
    try:
        drive(main)
    finally:
        logger.removeFilter(well_formed)
    assert not [record for record in caplog.records if record.exc_info]
