"""Clients that leave, and one long prompt among running streams."""

from __future__ import annotations

import time

from process_group import Group, paused
from process_pods import until
from process_streams import Stream

PROMPT = "tokens come back one by one"


def test_a_client_that_leaves_frees_its_rank(group: Group) -> None:

    def ends(reason: str) -> float:
        return group.head.metric("vllm:request_success_total", finished_reason=reason)

    aborted, complete = ends("abort"), ends("length")
    for rank in range(4):
        streams = [Stream(group.head, PROMPT, rank=rank, max_tokens=7000) for _ in range(3)]
        for stream in streams:
            stream.until_tokens(5)
        until(lambda rank=rank: group.head.rank(rank)["running"] == 3, "three requests run")
        for stream in streams:
            stream.leave()
        until(lambda rank=rank: group.head.rank(rank)["running"] == 0, f"rank {rank} is free")
    # Had they been computed to their end, that would be the reason.
    until(lambda: ends("abort") == aborted + 12, "twelve requests ended by an abort")
    assert ends("length") == complete


def test_a_client_that_leaves_a_waiting_answer_frees_its_rank(group: Group) -> None:
    import http.client
    import json

    connection = http.client.HTTPConnection("127.0.0.1", group.head.port, timeout=30)
    body = {"prompt": PROMPT, "max_tokens": 7000, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "X-data-parallel-rank": "1"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    until(lambda: group.head.rank(1)["running"] == 1, "it runs")
    connection.close()
    until(lambda: group.head.rank(1)["running"] == 0, "rank 1 is free")


def test_streams_go_on_while_a_long_prompt_is_prefilled(group: Group) -> None:
    """A chunk of the prompt is at most what a step has left beside the running requests, so each step gives a token."""
    running = [Stream(group.head, f"{PROMPT} {i}", rank=2, max_tokens=7000, return_token_ids=True) for i in range(8)]
    for stream in running:
        stream.until_tokens(10)
    prompt = [2 + i % 300 for i in range(5000)]
    with paused(group.head):

        def nine() -> bool:
            rank = group.head.rank(2)
            return rank["running"] + rank["waiting"] == 9

        long = Stream(group.head, prompt, rank=2, max_tokens=3, return_token_ids=True)
        until(nine, "the long prompt is at the rank")
        for stream in running:
            stream.at_rest()
        resumed = time.monotonic()
    long.until_tokens(1)
    first = long.times[0]
    for stream in running:
        stream.leave()
    assert long.until_end().finish_reason == "length"
    # 5,000 tokens by 256 a step are at least 20 steps, in each of which every stream gets a token. What was sent
    # shortly before the first token of the long one may be read after it.
    for stream in running:
        assert stream.token_ids(resumed, first) >= 11
