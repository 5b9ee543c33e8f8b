"""Routes beside generation, headers, and what requests become for the engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from server_harness import CHATML, TOKENIZER, Bundle, drive, echo_client, running

from dpi_engine.core import utility
from dpi_engine.core.limits import PauseMode
from dpi_engine.server import dev_routes

USER = [{"role": "user", "content": "hi"}]


def test_version_load_ping_and_health() -> None:
    async def main() -> None:
        gate = asyncio.Event()
        async with running(echo_client(gate=gate)) as server:
            assert (await server.get("/health"))[0] == (await server.get("/ping"))[0] == 200
            assert (await server.post("/ping"))[0] == 200
            assert (await server.get("/version"))[1]["version"]
            asked = asyncio.create_task(server.post("/v1/completions", {"prompt": "x", "n": 2}))
            while len(server.client.active) < 2:
                await asyncio.sleep(0)
            _, load = await server.get("/load")
            assert load["server_load"] == 1 and [rank["rank"] for rank in load["ranks"]] == [0, 1]
            gate.set()
            await asked
            assert (await server.get("/load"))[1]["server_load"] == 0

    drive(main)


def test_tokenize_and_detokenize_are_inverse() -> None:
    async def main() -> None:
        async with running() as server:
            text = "the \u00e4 \U0001f642 cat"
            _, tokens = await server.post("/tokenize", {"prompt": text, "return_token_strs": True})
            assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
            assert tokens["max_model_len"] == 256
            _, back = await server.post("/detokenize", {"tokens": tokens["tokens"]})
            assert back == {"prompt": text}
            _, chat = await server.post("/tokenize", {"messages": USER})
            assert TOKENIZER.decode(chat["tokens"], skip_special_tokens=False) == (
                "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
            )
            for path, body in (
                ("/tokenize", {"prompt": "a", "messages": USER}),
                ("/detokenize", {"tokens": [-1]}),
                ("/detokenize", {"tokens": [10**9]}),
                ("/detokenize", {"tokens": "x"}),
            ):
                status, answer = await server.post(path, body)
                assert status == 400 and answer["error"]["message"], (path, body)
            status, answer = await server.post("/tokenize", {"prompt": "a", "model": "other"})
            assert status == 404
            assert (await server.post("/tokenize", {"prompt": ""}))[1]["tokens"] == []

    drive(main)


def test_long_texts_are_encoded_as_short_ones_are() -> None:
    async def main() -> None:
        async with running() as server:
            text = "the cat sat on the mat. " * 2000
            _, tokens = await server.post("/tokenize", {"prompt": text})
            assert tokens["tokens"] == TOKENIZER.encode(text).ids

    drive(main)


def test_request_ids_ranks_and_sessions_reach_the_engine_and_the_id_comes_back() -> None:
    async def main() -> None:
        async with running() as server:
            headers = {"X-Request-Id": "abc-1", "X-data-parallel-rank": "1", "X-Session-Id": "s1"}
            for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}):
                async with server.http.post(server.url + "/v1/completions", json=body, headers=headers) as response:
                    assert response.headers["X-Request-Id"] == "abc-1"
                    assert '"cmpl-abc-1"' in await response.text()
            sent = server.client.requests[-1]
            assert (sent.request_id, sent.data_parallel_rank, sent.session_id) == ("cmpl-abc-1", 1, "s1")
            assert sent.arrival_time > 0
            async with server.http.post(server.url + "/nothing", headers=headers) as response:
                assert response.status == 404 and response.headers["X-Request-Id"] == "abc-1"
            _, answer = await server.post("/v1/chat/completions", {"messages": USER, "request_id": "mine", "n": 2})
            assert answer["id"] == "chatcmpl-mine"
            assert {r.request_id for r in server.client.requests[-2:]} == {"chatcmpl-mine-0", "chatcmpl-mine-1"}

    drive(main)


def test_sampling_parameters_reach_the_engine() -> None:
    async def main() -> None:
        async with running(priority_scheduling=True) as server:
            end, other = TOKENIZER.token_to_id("<|im_end|>"), TOKENIZER.token_to_id("<|endoftext|>")
            body: dict[str, Any] = {
                "prompt": "hello", "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": -1,
                "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2,
                "logit_bias": {"5": -100, "6": 2}, "stop_token_ids": [9], "bad_words": ["cat"], "seed": 2**63 - 1,
                "allowed_token_ids": [40, 41], "logprobs": 3, "prompt_logprobs": 2, "priority": -4,
                "cache_salt": "salt", "skip_special_tokens": False, "n": 2,
            }  # fmt: skip
            status, answer = await server.post("/v1/completions", body)
            assert status == 200, answer
            first, second = server.client.requests
            sampling = first.sampling
            assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature) == (7, 2, 0.5)
            assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.9, 0, 0.1)
            assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
            assert sampling.repetition_penalty == 1.2 and sampling.logit_bias == {5: -100.0, 6: 2.0}
            assert sampling.stop_token_ids == sorted([9, other]) and sampling.eos_token_id == end
            assert sampling.all_stop_token_ids == sorted([9, end, other])
            assert sampling.allowed_token_ids == [40, 41] and sampling.logprobs == 3
            assert sampling.skip_special_tokens is False and sampling.output_kind == 1
            assert sampling.bad_words_token_ids == [TOKENIZER.encode("cat").ids, TOKENIZER.encode(" cat").ids]
            assert (first.priority, first.cache_salt) == (-4, "salt")
            assert (sampling.seed, second.sampling.seed) == (2**63 - 1, 0)
            assert (sampling.prompt_logprobs, second.sampling.prompt_logprobs) == (2, None)
            for choice in answer["choices"]:
                assert len(choice["prompt_logprobs"]) == len(first.prompt_token_ids)
                assert choice["prompt_logprobs"][0] is None
                entry = choice["prompt_logprobs"][1][str(first.prompt_token_ids[1])]
                assert entry["logprob"] == -0.5 and entry["rank"] == 1 and entry["decoded_token"]

    drive(main)


def test_ends_of_sequence_are_left_to_the_stop_ids_when_eos_is_ignored() -> None:
    async def main() -> None:
        end, other = TOKENIZER.token_to_id("<|im_end|>"), TOKENIZER.token_to_id("<|endoftext|>")
        async with running(echo_client(script=[40, end, 41, other, 42])) as server:
            _, answer = await server.post("/v1/completions", {"prompt": "x"})
            choice = answer["choices"][0]
            assert choice["finish_reason"] == "stop" and choice["stop_reason"] is None
            assert answer["usage"]["completion_tokens"] == 2
            body = {"prompt": "x", "ignore_eos": True, "max_tokens": 5}
            _, answer = await server.post("/v1/completions", body)
            assert answer["choices"][0]["finish_reason"] == "length"
            assert server.client.requests[-1].sampling.eos_token_id is None
            _, answer = await server.post("/v1/completions", body | {"stop_token_ids": [other]})
            choice = answer["choices"][0]
            assert choice["finish_reason"] == "stop" and choice["stop_reason"] == other
            assert answer["usage"]["completion_tokens"] == 4
            server.client.script = [40, other]
            _, answer = await server.post("/v1/completions", {"prompt": "x"})
            assert answer["choices"][0]["finish_reason"] == "stop" and answer["choices"][0]["stop_reason"] is None

    drive(main)


@pytest.mark.parametrize("prompt", [["a cat", "the dog"], [[40, 41, 42], [43]]])
def test_lists_of_prompts_answer_in_order(prompt: list[Any]) -> None:
    async def main() -> None:
        async with running() as server:
            ids = [TOKENIZER.encode(p).ids if isinstance(p, str) else p for p in prompt]
            body = {
                "prompt": prompt, "n": 2, "temperature": 0, "max_tokens": 3, "echo": True, "logprobs": 0,
                "return_token_ids": True,
            }  # fmt: skip
            _, answer = await server.post("/v1/completions", body)
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
            for choice in answer["choices"]:
                own = ids[choice["index"] // 2]
                out = [own[k % len(own)] for k in range(3)]
                assert choice["prompt_token_ids"] == own and choice["token_ids"] == out
                assert choice["text"] == TOKENIZER.decode(own) + TOKENIZER.decode(out)
                assert choice["logprobs"]["token_logprobs"] == [None] + [-0.5] * (len(own) + 2)
            assert answer["usage"]["prompt_tokens"] == len(ids[0]) + len(ids[1])
            assert answer["usage"]["completion_tokens"] == 12
            events = await server.events("/v1/completions", body | {"stream": True})
            assert events[-1] == "[DONE]"

    drive(main)


def test_token_ids_in_chat_and_in_streams() -> None:
    async def main() -> None:
        async with running() as server:
            body = {"messages": USER, "temperature": 0, "max_tokens": 4, "return_token_ids": True, "logprobs": True,
                    "return_tokens_as_token_ids": True}  # fmt: skip
            _, answer = await server.post("/v1/chat/completions", body)
            sent = server.client.requests[0].prompt_token_ids
            assert answer["prompt_token_ids"] == sent and answer["choices"][0]["token_ids"] == sent[:4]
            tokens = [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]]
            assert tokens == [f"token_id:{token}" for token in sent[:4]]
            chunks = [
                json.loads(e) for e in (await server.events("/v1/chat/completions", body | {"stream": True}))[:-1]
            ]
            assert chunks[0]["prompt_token_ids"] == sent
            assert [t for chunk in chunks for t in chunk["choices"][0].get("token_ids", [])] == sent[:4]

    drive(main)


def test_incomplete_characters_and_emoji_are_the_same_streamed_and_whole() -> None:
    async def main() -> None:
        family = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
        ids = TOKENIZER.encode(f"a{family}\u4f60").ids
        async with running(echo_client(script=ids)) as server:
            for length in range(1, len(ids) + 1):
                body = {"prompt": "x", "max_tokens": length}
                _, answer = await server.post("/v1/completions", body)
                events = await server.events("/v1/completions", body | {"stream": True})
                pieces = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
                assert "".join(pieces) == answer["choices"][0]["text"]
                assert not any("\ufffd" in piece for piece in pieces[:-1])
                assert answer["choices"][0]["text"].rstrip("\ufffd") in f"a{family}\u4f60"

    drive(main)


def test_modes_of_calls_are_those_of_the_ranks() -> None:
    assert set(dev_routes.PAUSE_MODES) == set(PauseMode)
    assert dev_routes.SLEEP_MODES == utility.SLEEP_MODES


def test_development_routes_exist_only_when_switched_on() -> None:
    async def main() -> None:
        async with running() as server:
            for path in ("/sleep", "/wake_up", "/pause", "/resume", "/reset_prefix_cache"):
                assert (await server.post(path))[0] == 404
            assert (await server.get("/is_sleeping"))[0] == 404
        async with running(dev_endpoints=True) as server:
            assert (await server.post("/reset_prefix_cache"))[1] == {"ranks": {"0": True, "1": True}}
            assert (await server.post("/sleep?level=2&mode=keep"))[0] == 200
            assert (await server.get("/is_sleeping"))[1]["is_sleeping"] is False
            assert (await server.post("/wake_up?tags=weights&tags=kv_cache"))[0] == 200
            assert (await server.post("/pause?mode=keep&clear_cache=false"))[0] == 200
            assert (await server.get("/is_paused"))[1]["is_paused"] is False
            assert (await server.post("/resume"))[0] == 200
            assert server.client.calls == [
                ("reset_prefix_cache", ()),
                ("sleep", (2, "keep")),
                ("is_sleeping", ()),
                ("wake_up", (["weights", "kv_cache"],)),
                ("pause_scheduler", ("keep", False)),
                ("is_scheduler_paused", ()),
                ("is_sleeping", ()),
                ("resume_scheduler", ()),
            ]
            wrong = ("/sleep?level=9", "/sleep?mode=wait", "/pause?mode=x", "/pause?clear_cache=1", "/wake_up?tags=x")
            for path in wrong:
                status, answer = await server.post(path)
                assert status == 400 and answer["error"]["param"], path

    drive(main)


def test_ranks_that_sleep_are_not_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def utility(method: str, *args: Any) -> dict[int, Any]:
        assert method == "is_sleeping"
        return {0: False, 1: True}

    async def main() -> None:
        async with running(dev_endpoints=True) as server:
            monkeypatch.setattr(server.client, "utility", utility)
            status, answer = await server.post("/resume")
            assert status == 409
            assert answer["error"]["code"] == "asleep"
            assert answer["error"]["message"].startswith("rank 1 sleeps: POST /wake_up first")

    drive(main)


def test_text_parts_past_tool_calls_and_continuing_the_final_message() -> None:
    async def main() -> None:
        async with running(bundle=Bundle(chat_template=CHATML)) as server:

            async def prompt_of(**body: Any) -> str:
                status, answer = await server.post("/v1/chat/completions", body | {"max_tokens": 1})
                assert status == 200, answer
                ids = server.client.requests[-1].prompt_token_ids
                return TOKENIZER.decode(ids, skip_special_tokens=False)

            parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
            assert "user\none\ntwo<|im_end|>" in await prompt_of(messages=[{"role": "user", "content": parts}])
            called = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
            turns = [*USER, {"role": "assistant", "content": None, "tool_calls": called}]
            turns.append({"role": "tool", "content": "done", "tool_call_id": "1"})
            assert "tool\ndone<|im_end|>" in await prompt_of(messages=turns)
            begun = [*USER, {"role": "assistant", "content": "The answer is"}]
            text = await prompt_of(messages=begun, continue_final_message=True)
            assert text.endswith("<|im_start|>assistant\nThe answer is")
            text = await prompt_of(messages=USER, add_generation_prompt=False)
            assert text.endswith("hi<|im_end|>\n")
            text = await prompt_of(messages=[{"role": "developer", "content": "d"}, *USER])
            assert text.startswith("<|im_start|>system\nd")

    drive(main)
