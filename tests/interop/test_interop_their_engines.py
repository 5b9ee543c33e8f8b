"""A real vLLM's headless rank under our head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from peer_vllm import START_S, Vllm
from process_pods import Pod, stopped, until
from process_streams import Stream
from same_answers import PROMPT, check_texts, check_what_is_asked_for

TOKEN = "beside-the-peer"
GROUP = ("--data-parallel-size", "2", "--data-parallel-size-local", "1")


class Pair(NamedTuple):
    head: Pod
    peer: Vllm


@pytest.fixture(scope="module")
def pair(
    ours: Callable[..., Pod], theirs: Callable[..., Vllm], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text(TOKEN + "\n")
    head = ours(*GROUP, "--api-server-count", "2", "--management-token-file", str(token), wait=False)
    peer = theirs(*GROUP, "--data-parallel-start-rank", "1", rpc=head.rpc, name="vllm-ranks", headless=True)
    with head, peer:
        head.until_ready(START_S)
        head.until_serves(0, 1)
        yield Pair(head, peer)


def test_tokens_come_through_both_ranks(pair: Pair) -> None:
    until(lambda: [r["state"] for r in pair.head.ranks().values()] == ["READY", "READY"], "both at the head")
    check_texts(pair.head)


def test_what_a_request_asks_for_reaches_their_rank(pair: Pair) -> None:
    check_what_is_asked_for(pair.head)


def test_a_request_that_their_rank_refuses_ends_by_name(pair: Pair) -> None:
    answer = pair.head.complete([1] * 9000, rank=1)
    assert answer.status == 400
    assert "8192" in answer.text
    assert pair.peer.running


def test_the_head_sees_their_load_and_their_requests_end_by_abort(pair: Pair) -> None:
    streams = [Stream(pair.head, PROMPT, rank=1, max_tokens=7000) for _ in range(4)]
    for stream in streams:
        stream.until_tokens(10)
    until(lambda: pair.head.metric("vllm:num_requests_running", engine="1") == 4, "the head knows their load")
    assert pair.head.metric("vllm:kv_cache_usage_perc", engine="1") > 0
    for stream in streams:
        stream.leave()
    until(lambda: pair.head.metric("vllm:num_requests_running", engine="1") == 0, "they were aborted")
    whole = Stream(pair.head, PROMPT, rank=1, max_tokens=50).until_end()
    assert whole.finish_reason == "length"


def test_calls_reach_both(pair: Pair) -> None:
    def call(method: str, *args: object) -> dict[str, object]:
        answer = pair.head.manage(f"/utility/{method}", list(args), {"Authorization": f"Bearer {TOKEN}"})
        assert answer.status == 200, answer.text
        return answer.json["results"]

    assert call("reset_prefix_cache") == {"0": True, "1": True}
    call("pause_scheduler", "keep")
    assert call("is_scheduler_paused") == {"0": True, "1": True}
    call("resume_scheduler")
    assert call("is_scheduler_paused") == {"0": False, "1": False}
    pair.head.until_serves(0, 1)


def test_a_rank_that_stood_still_is_taken_back(pair: Pair) -> None:
    (engine,) = pair.peer.engines()
    stream = Stream(pair.head, PROMPT, rank=1, max_tokens=7500).until_tokens(5)
    with stopped(engine.pid):
        pair.head.until_rank(1, "LOST")
        assert stream.until_end().error is not None
        assert pair.head.complete(PROMPT, rank=0).status == 200
    pair.head.until_rank(1, "READY")
    pair.head.until_serves(0, 1)
    assert pair.head.text(PROMPT, rank=1) == pair.head.text(PROMPT, rank=0)
    until(lambda: pair.head.metric("vllm:num_requests_running", engine="1") == 0, "what it had before was aborted")


def test_a_killed_rank_is_lost_and_rejoins(pair: Pair) -> None:
    (engine,) = pair.peer.engines()
    stream = Stream(pair.head, PROMPT, rank=1, max_tokens=7500).until_tokens(5)
    engine.kill()
    pair.head.until_rank(1, "LOST")
    assert stream.until_end().error["code"] == "rank_lost"
    assert {pair.head.complete(PROMPT).status for _ in range(6)} == {200}
    pair.peer.stop()  # its launcher ends with its rank; what runs it starts it again
    pair.peer.start()
    pair.head.until_rank(1, "READY", START_S)
    pair.head.until_serves(0, 1)
    assert pair.head.text(PROMPT, rank=1) == pair.head.text(PROMPT, rank=0)


def test_what_the_peer_lacks_is_said(pair: Pair) -> None:
    assert "it has no fingerprints, epochs and beats" in pair.head.log
    assert pair.head.rank(1)["fields"] == {}
    assert "ERROR" not in pair.head.log


def test_a_head_of_our_protocol_refuses_their_rank_by_name(
    ours: Callable[..., Pod], theirs: Callable[..., Vllm], pair: Pair
) -> None:
    head = ours(*GROUP, protocol="dpi", wait=False)
    with head, theirs(*GROUP, "--data-parallel-start-rank", "1", rpc=head.rpc, name="stranger", headless=True) as peer:
        until(lambda: "rank 1 is a vLLM engine" in head.log, "it says who came, and what to do", START_S)
        assert "--data-parallel-protocol vllm" in head.log
        until(lambda: not peer.running, "the stranger ends", START_S)
        assert head.running and head.complete(PROMPT, rank=0).status == 200
