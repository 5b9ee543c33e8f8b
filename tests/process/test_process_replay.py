"""A rank is lost while it runs requests that were not pinned to it: their streams go on as if nothing had happened."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from process_moe import make_moe_model
from process_pods import Pod, stopped, until
from process_streams import Stream

PROMPT = "every request finds its way to a rank"
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 11, "presence_penalty": 0.3}
TOKENS = 1000
OFTEN = ("--max-request-replays", "20")
"""A starved machine loses ranks that nobody has killed; the limit has tests of its own."""


def engines(pod: Pod) -> dict[str, int]:
    return {name: pid for name, pid in pod.children().items() if name.startswith("rank-")}


def running(pod: Pod) -> dict[int, int]:
    """Requests by rank."""
    return {rank: entry["running"] for rank, entry in pod.ranks().items()}


def whole(pod: Pod, **fields: Any) -> str:
    return pod.text(PROMPT, rank=0, max_tokens=TOKENS, timeout=240.0, **fields)


def begun(
    start: Callable[[], list[Any]], ended: Callable[[Any], bool], seen: Callable[[], bool], what: str
) -> list[Any]:
    """Requests that were seen where they should be. Where all had ended before that, others are started."""
    for _ in range(20):
        requests = start()
        until(lambda: seen() or all(map(ended, requests)), what)  # noqa: B023 - called within the loop's turn
        if not all(map(ended, requests)):
            return requests
    pytest.fail(f"did not happen before the requests had ended: {what}")


def streams_at_both(pod: Pod, count: int = 6, tokens: int = TOKENS, **other: Any) -> list[Stream]:
    """All with some tokens, some of them on each rank; `other`: what is different for every second one."""

    def start() -> list[Stream]:
        return [Stream(pod, PROMPT, max_tokens=tokens, **(other if i % 2 else {})) for i in range(count)]

    def seen() -> bool:
        return min(running(pod).values()) > 0

    streams = begun(start, lambda stream: stream.ended.is_set(), seen, "requests at both ranks")
    for stream in streams:
        stream.until_tokens(5)
    return streams


def check(streams: list[Stream], greedy: str, sampled: str) -> None:
    for i, stream in enumerate(streams):
        stream.until_end()
        assert stream.error is None and stream.failure is None and stream.done
        assert stream.finish_reason == "length"
        assert stream.text == (sampled if i % 2 else greedy)


@pytest.fixture(scope="module")
def pod(make_pod: Callable[..., Pod]) -> Any:
    with make_pod("-dp", "2", "--api-server-count", "1", *OFTEN) as pod:
        yield pod


def test_streams_of_a_killed_rank_end_with_the_text_of_an_unbroken_run(pod: Pod) -> None:
    pod.until_serves(0, 1)
    greedy, sampled = whole(pod), whole(pod, **SAMPLED)
    streams = streams_at_both(pod, **SAMPLED)
    os.kill(engines(pod)["rank-1"], signal.SIGKILL)
    check(streams, greedy, sampled)
    until(lambda: pod.metric("dpi_requests_replayed_total", engine="1") > 0, "the replays are counted")
    pod.until_ready()
    until(lambda: pod.metric("vllm:num_requests_running") == 0, "nothing is left")


def test_streams_of_a_frozen_rank_go_on_and_it_forgets_them_when_it_thaws(pod: Pod) -> None:
    pod.until_serves(0, 1)
    greedy, sampled = whole(pod), whole(pod, **SAMPLED)
    streams = streams_at_both(pod, **SAMPLED)
    with stopped(engines(pod)["rank-0"]):
        pod.until_rank(0, "LOST")
        check(streams, greedy, sampled)
    pod.until_serves(0, 1)
    until(lambda: set(running(pod).values()) == {0}, "nothing runs any more")
    assert whole(pod) == greedy


def test_a_whole_answer_is_replayed_too_and_a_pinned_one_is_not(pod: Pod) -> None:
    pod.until_serves(0, 1)
    greedy = whole(pod)
    with ThreadPoolExecutor(4) as pool:

        def start() -> list[Any]:
            return [pool.submit(pod.complete, PROMPT, max_tokens=TOKENS, timeout=240.0) for _ in range(4)]

        pinned = Stream(pod, PROMPT, rank=1, max_tokens=4000).until_tokens(2)
        answers = begun(start, lambda answer: answer.done(), lambda: running(pod)[1] > 1, "requests at rank 1")
        os.kill(engines(pod)["rank-1"], signal.SIGKILL)
        for answer in answers:
            assert answer.result().status == 200
            assert answer.result().json["choices"][0]["text"] == greedy
            assert answer.result().json["usage"]["completion_tokens"] == TOKENS
    assert pinned.until_end().error is not None and pinned.error["code"] == "rank_lost"


def test_with_replays_turned_off_a_lost_rank_ends_its_requests(make_pod: Callable[..., Pod]) -> None:
    with make_pod("-dp", "2", "--api-server-count", "1", "--max-request-replays", "0") as pod:
        streams = streams_at_both(pod, **SAMPLED)
        os.kill(engines(pod)["rank-1"], signal.SIGKILL)
        errors = [s.until_end().error for s in streams]
        assert {e["code"] for e in errors if e} == {"rank_lost"}
        assert any(e is None for e in errors)


def test_where_ranks_share_experts_a_request_waits_until_the_group_is_whole(
    process_cache: Path, tmp_path: Path
) -> None:
    moe = make_moe_model(tmp_path / "tiny-moe")
    flags = ("--dtype", "float32", "--max-model-len", "2048", "--num-gpu-blocks-override", "512", "--cpu-threads", "1")
    with Pod(moe, *flags, "-ep", "-dp", "2", "-asc", "1", *OFTEN, cache=process_cache) as pod:
        greedy = pod.text(PROMPT, rank=0, max_tokens=300, timeout=240.0)
        streams = streams_at_both(pod, count=4, tokens=300)
        os.kill(engines(pod)["rank-1"], signal.SIGKILL)
        for stream in streams:
            assert stream.until_end().error is None and stream.text == greedy
        until(lambda: pod.metric("dpi_requests_replayed_total", engine="1") > 0, "the replays are counted")
