"""The API through the real `openai` client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from server_harness import TOKENIZER, Running, drive, echo_client, running

PATIENCE = 300.0
"""For an answer and for a connection, for which the client by itself waits 5 s: less than a busy machine may take."""

PROMPT = "the cat sat on the mat; \U0001f642 \u00e4\u00f6\u00fc \u4f60\u597d"


@asynccontextmanager
async def connected(**changes: Any) -> AsyncIterator[tuple[Running, openai.AsyncOpenAI]]:
    client = changes.pop("client", None)
    async with (
        running(client, **changes) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0) as api,
    ):
        yield server, api


def test_completion_repeats_the_prompt_and_counts_tokens() -> None:
    async def main() -> None:
        async with connected() as (_, api):
            ids = TOKENIZER.encode(PROMPT).ids
            answer = await api.completions.create(model="echo", prompt=PROMPT, max_tokens=len(ids), temperature=0)
            assert answer.choices[0].text == PROMPT
            assert answer.choices[0].finish_reason == "length"
            assert answer.object == "text_completion" and answer.model == "echo" and answer.id.startswith("cmpl-")
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == answer.usage.completion_tokens == len(ids)
            assert answer.usage.total_tokens == 2 * len(ids)
            details = answer.usage.prompt_tokens_details
            assert details is not None and details.cached_tokens == len(ids) // 16 * 16

    drive(main)


@pytest.mark.parametrize("per_delta", [1, 3, 50])
def test_streamed_completion_equals_whole_one_and_finishes_once(per_delta: int) -> None:
    async def main() -> None:
        async with connected(client=echo_client(per_delta=per_delta)) as (_, api):
            asked: dict[str, Any] = {"model": "echo", "prompt": PROMPT, "max_tokens": 77, "temperature": 0}
            whole = await api.completions.create(**asked)
            chunks = [chunk async for chunk in await api.completions.create(**asked, stream=True)]
            assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
            reasons = [chunk.choices[0].finish_reason for chunk in chunks]
            assert reasons == [None] * (len(chunks) - 1) + ["length"]
            assert {chunk.id for chunk in chunks} == {chunks[0].id}
            assert all(chunk.usage is None for chunk in chunks)

    drive(main)


@pytest.mark.parametrize("stream_only_asked", [True, False])
def test_streamed_chat_equals_whole_one_with_role_first(stream_only_asked: bool) -> None:
    async def main() -> None:
        async with connected() as (_, api):
            asked: dict[str, Any] = {
                "model": "echo",
                "messages": [{"role": "system", "content": "be"}, {"role": "user", "content": PROMPT}],
                "temperature": 0,
                "max_completion_tokens": 60,
            }
            if not stream_only_asked:
                asked["extra_body"] = {"skip_special_tokens": False, "ignore_eos": True}
            whole = await api.chat.completions.create(**asked)
            chunks = [chunk async for chunk in await api.chat.completions.create(**asked, stream=True)]
            assert chunks[0].choices[0].delta.role == "assistant"
            assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert text == whole.choices[0].message.content and whole.choices[0].message.role == "assistant"
            assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
                whole.choices[0].finish_reason
            ]
            assert whole.id.startswith("chatcmpl-") and whole.object == "chat.completion"
            assert chunks[0].object == "chat.completion.chunk"

    drive(main)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_three_choices_have_own_seeds_texts_and_endings(stream: bool, chat: bool) -> None:
    async def main() -> None:
        async with connected() as (server, api):
            asked: dict[str, Any] = {"model": "echo", "n": 3, "seed": 5, "max_tokens": 9, "stream": stream}
            if stream:
                asked["stream_options"] = {"include_usage": True}
            if chat:
                answer = await api.chat.completions.create(messages=[{"role": "user", "content": "hi"}], **asked)
            else:
                answer = await api.completions.create(prompt="hi there", **asked)
            texts, reasons = {0: "", 1: "", 2: ""}, dict.fromkeys(range(3), ())
            usage = None
            for part in [chunk async for chunk in answer] if stream else [answer]:
                usage = part.usage or usage
                for choice in part.choices:
                    shown = choice if not chat else choice.delta if stream else choice.message
                    texts[choice.index] += (shown.content if chat else shown.text) or ""
                    if choice.finish_reason:
                        reasons[choice.index] += (choice.finish_reason,)
            assert len(set(texts.values())) == 3 and all(texts.values())
            assert reasons == dict.fromkeys(range(3), ("length",))
            assert usage.completion_tokens == 27
            assert usage.prompt_tokens == len(server.client.requests[0].prompt_token_ids)
            assert [request.sampling.seed for request in server.client.requests] == [5, 6, 7]
            assert len({request.request_id for request in server.client.requests}) == 3

    drive(main)


def test_same_seed_gives_same_text_and_no_seed_is_random() -> None:
    async def main() -> None:
        async with connected() as (server, api):
            asked: dict[str, Any] = {"model": "echo", "prompt": "x", "max_tokens": 8}
            first = await api.completions.create(**asked, seed=11)
            second = await api.completions.create(**asked, seed=11)
            assert first.choices[0].text == second.choices[0].text
            await api.completions.create(**asked)
            await api.completions.create(**asked)
            seeds = [request.sampling.seed for request in server.client.requests[2:]]
            assert None not in seeds and seeds[0] != seeds[1]

    drive(main)


def test_usage_chunk_comes_last_and_only_when_asked_for() -> None:
    async def main() -> None:
        async with connected() as (_, api):
            asked: dict[str, Any] = {"model": "echo", "prompt": "the mat", "max_tokens": 4, "temperature": 0}
            for options in ({}, {"include_usage": False}):
                chunks = [c async for c in await api.completions.create(**asked, stream=True, stream_options=options)]
                assert all(chunk.choices and chunk.usage is None for chunk in chunks)
            chunks = [
                chunk
                async for chunk in await api.completions.create(
                    **asked, stream=True, stream_options={"include_usage": True}
                )
            ]
            assert chunks[-1].choices == [] and chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == 4
            assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])
            continuous = {"include_usage": True, "continuous_usage_stats": True}
            chunks = [
                chunk async for chunk in await api.completions.create(**asked, stream=True, stream_options=continuous)
            ]
            counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
            assert counts == [1, 2, 3, 4, 4]

    drive(main)


def test_chat_logprobs_have_bytes_sorted_alternatives_and_a_finite_floor() -> None:
    async def main() -> None:
        async with connected() as (_, api):
            asked: dict[str, Any] = {
                "model": "echo",
                "messages": [{"role": "user", "content": "\U0001f642"}],
                "temperature": 0,
                "max_tokens": 30,
                "extra_body": {"ignore_eos": True},
            }
            for more, count in (({}, 0), ({"top_logprobs": 4}, 4)):
                answer = await api.chat.completions.create(**asked, logprobs=True, **more)
                assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
                content = answer.choices[0].logprobs.content
                assert answer.usage is not None and len(content) == answer.usage.completion_tokens == 30
                smile = [entry for entry in content if entry.token.startswith("bytes:")]
                assert bytes([x for entry in smile[:4] for x in entry.bytes or []]) == "\U0001f642".encode()
                for entry in content:
                    assert entry.logprob == -0.5 and len(entry.top_logprobs) == count
                    values = [top.logprob for top in entry.top_logprobs]
                    assert values == sorted(values, reverse=True) and all(value >= -9999.0 for value in values)
                    assert not count or values[-1] == -9999.0
            chunks = [chunk async for chunk in await api.chat.completions.create(**asked, logprobs=True, stream=True)]
            streamed = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content or []]
            assert [entry.token for entry in streamed] == [entry.token for entry in content]

    drive(main)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_echo_with_logprobs_covers_prompt_and_answer(stream: bool, apart: bool) -> None:
    async def main() -> None:
        async with connected(client=echo_client(prompt_logprobs_apart=apart)) as (_, api):
            prompt = "the \u00e4 cat"
            ids = TOKENIZER.encode(prompt).ids
            asked: dict[str, Any] = {
                "model": "echo", "prompt": prompt, "max_tokens": len(ids), "temperature": 0, "echo": True,
                "logprobs": 2, "n": 2,
            }  # fmt: skip
            parts = [await api.completions.create(**asked)]
            if stream:
                parts = [chunk async for chunk in await api.completions.create(**asked, stream=True)]
            for index in (0, 1):
                choices = [choice for part in parts for choice in part.choices if choice.index == index]
                text = "".join(choice.text for choice in choices)
                assert text == prompt * 2
                shown = [choice.logprobs for choice in choices if choice.logprobs is not None]
                values = [x for part in shown for x in part.token_logprobs or []]
                assert values == [None] + [-0.5] * (2 * len(ids) - 1)
                tops = [x for part in shown for x in part.top_logprobs or []]
                assert tops[0] is None and all(len(top) == 2 for top in tops[1:])
                tokens = [x for part in shown for x in part.tokens or []]
                offsets = [x for part in shown for x in part.text_offset or []]
                assert len(tokens) == len(offsets) == 2 * len(ids)
                for token, offset in zip(tokens, offsets, strict=True):
                    assert token.startswith("bytes:") or text[offset:].startswith(token)

    drive(main)


def test_scoring_a_prompt_without_generating() -> None:
    async def main() -> None:
        async with connected() as (server, api):
            answer = await api.completions.create(model="echo", prompt="the cat", max_tokens=0, echo=True, logprobs=1)
            assert answer.choices[0].text == "the cat" and answer.choices[0].finish_reason == "length"
            assert answer.usage is not None and answer.usage.completion_tokens == 0
            logprobs = answer.choices[0].logprobs
            assert logprobs is not None and logprobs.tokens is not None
            assert "".join(logprobs.tokens) == "the cat"
            assert server.client.requests[0].sampling.max_tokens == 1

    drive(main)


def test_stop_string_ends_generation_in_the_engine_too() -> None:
    async def main() -> None:
        for per_delta in (1, 4, 100):
            async with connected(client=echo_client(per_delta=per_delta)) as (server, api):
                prompt = "abcdefghij" * 3
                asked: dict[str, Any] = {
                    "model": "echo", "prompt": prompt, "max_tokens": 200, "temperature": 0, "stop": ["zzz", "fgh"],
                }  # fmt: skip
                answer = await api.completions.create(**asked)
                assert answer.choices[0].text == "abcde" and answer.choices[0].finish_reason == "stop"
                assert answer.choices[0].model_extra == {"stop_reason": "fgh"}
                assert answer.usage is not None and answer.usage.completion_tokens == 8
                included = await api.completions.create(**asked, extra_body={"include_stop_str_in_output": True})
                assert included.choices[0].text == "abcdefgh"
                chunks = [chunk async for chunk in await api.completions.create(**asked, stream=True)]
                assert "".join(chunk.choices[0].text for chunk in chunks) == "abcde"
                assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
                assert len(server.client.aborted) == (0 if per_delta == 200 else 3) and not server.client.active
                assert server.client.generated <= 3 * max(8, per_delta)

    drive(main)


def test_errors_reach_the_client_as_its_own_exceptions() -> None:
    async def main() -> None:
        async with connected() as (server, api):
            with pytest.raises(openai.NotFoundError) as missing:
                await api.completions.create(model="nobody", prompt="x")
            assert missing.value.code == "model_not_found" and missing.value.param == "model"
            with pytest.raises(openai.BadRequestError):
                await api.completions.create(model="echo", prompt="x", temperature=-1)
            server.client.is_ready = False
            with pytest.raises(openai.InternalServerError) as busy:
                await api.completions.create(model="echo", prompt="x", stream=True)
            assert busy.value.status_code == 503 and busy.value.response.headers["retry-after"] == "1"

    drive(main)


def test_a_hundred_concurrent_requests_get_exact_counts() -> None:
    async def main() -> None:
        async with connected() as (server, api):

            async def one(number: int) -> None:
                prompt = f"request number {number}"
                asked: dict[str, Any] = {"model": "echo", "prompt": prompt, "max_tokens": 10, "temperature": 0}
                ids = TOKENIZER.encode(prompt).ids
                expected = TOKENIZER.decode([ids[k % len(ids)] for k in range(10)])
                if number % 2:
                    answer = await api.completions.create(**asked)
                    assert answer.choices[0].text == expected
                    assert answer.usage is not None and answer.usage.completion_tokens == 10
                else:
                    options = {"include_usage": True}
                    stream = await api.completions.create(**asked, stream=True, stream_options=options)
                    chunks = [chunk async for chunk in stream]
                    assert "".join(c.choices[0].text for c in chunks if c.choices) == expected
                    assert chunks[-1].usage.completion_tokens == 10

            await asyncio.gather(*(one(number) for number in range(100)))
            assert not server.client.active and not server.client.aborted and len(server.client.finished) == 100
            assert not server.state.active and not server.state.streams

    drive(main)


def test_models_and_aliases() -> None:
    async def main() -> None:
        async with connected() as (_, api):
            models = [model async for model in api.models.list()]
            assert [model.id for model in models] == ["echo", "echo-alias"]
            assert models[0].model_extra is not None and models[0].model_extra["max_model_len"] == 256
            assert (await api.models.retrieve("echo-alias")).id == "echo-alias"
            with pytest.raises(openai.NotFoundError):
                await api.models.retrieve("other/model")
            answer = await api.completions.create(model="echo-alias", prompt="x", max_tokens=1)
            assert answer.model == "echo-alias"

    drive(main)
