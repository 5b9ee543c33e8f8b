"""Our engine as a headless rank under the head of a real vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from peer_vllm import START_S, Vllm
from process_pods import PORTS, Pod, until
from process_streams import Stream
from same_answers import PROMPT, check_texts, check_what_is_asked_for

GROUP = ("--data-parallel-size", "2", "--data-parallel-size-local", "1")


class Pair(NamedTuple):
    head: Vllm
    pod: Pod


@pytest.fixture(scope="module")
def pair(ours: Callable[..., Pod], theirs: Callable[..., Vllm]) -> Iterator[Pair]:
    head = theirs(*GROUP, "--api-server-count", "1", rpc=PORTS.take(1), name="vllm-head")
    with head, ours(*GROUP, "--data-parallel-start-rank", "1", head=head, wait=False) as pod:
        head.until_ready()
        yield Pair(head, pod)


def test_tokens_come_through_both_ranks(pair: Pair) -> None:
    pair.pod.until_rank(1, "READY")
    check_texts(pair.head)
    served = pair.pod.rank(1)["steps"]
    assert served > 0
    assert {pair.head.complete(PROMPT).status for _ in range(8)} == {200}
    assert pair.pod.rank(1)["steps"] > served, "the head spreads requests over both"


def test_what_a_request_asks_for_reaches_our_rank(pair: Pair) -> None:
    check_what_is_asked_for(pair.head)


def test_the_head_sees_our_load(pair: Pair) -> None:
    streams = [Stream(pair.head, PROMPT, rank=1, max_tokens=7000) for _ in range(4)]
    for stream in streams:
        stream.until_tokens(20)
    until(lambda: pair.head.metric("vllm:num_requests_running", engine="1") == 4, "the head's metrics show our load")
    assert pair.head.metric("vllm:kv_cache_usage_perc", engine="1") > 0
    for stream in streams:
        stream.leave()
    until(lambda: pair.pod.rank(1)["running"] == 0, "our rank is free")


def test_an_abort_reaches_our_rank(pair: Pair) -> None:
    stream = Stream(pair.head, PROMPT, rank=1, max_tokens=7500).until_tokens(5)
    until(lambda: pair.pod.rank(1)["running"] == 1, "it runs")
    stream.leave()
    until(lambda: pair.pod.rank(1)["running"] == 0, "it was aborted long before its end")
    whole = Stream(pair.head, PROMPT, rank=1, max_tokens=50).until_end()
    assert whole.finish_reason == "length"


def test_what_the_peer_lacks_is_said(pair: Pair) -> None:
    assert "it has no fingerprints, epochs and beats" in pair.pod.log
    assert "ERROR" not in pair.pod.log


def test_our_rank_outlives_its_head(pair: Pair) -> None:
    """Last: the head is stopped. Our rank keeps its weights and joins the next one."""
    pid = pair.pod.rank(1)["pid"]
    pair.head.stop()
    until(lambda: pair.pod.rank(1)["state"] != "READY", "our rank notices")
    assert pair.pod.manage("/readyz").status == 503
    pair.head.start()
    pair.head.until_ready()
    entry = pair.pod.until_rank(1, "READY", START_S)
    assert entry["pid"] == pid
    assert pair.head.text(PROMPT, rank=1) == pair.head.text(PROMPT, rank=0)
