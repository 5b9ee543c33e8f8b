"""Head and headless pod of our own in the vllm dialect: the bytes of another engine, the same service."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from process_pods import Pod, stopped, until
from process_streams import Stream

PROMPT = "nine ranks wait for the head"


class Pair(NamedTuple):
    head: Pod
    headless: Pod


@pytest.fixture(scope="module")
def pair(make_pod: Callable[..., Pod]) -> Iterator[Pair]:
    flags = ("-dp", "2", "-dpl", "1", "--data-parallel-protocol", "vllm")
    head = make_pod(*flags, "--api-server-count", "2", wait=False)
    with head, make_pod(*flags, "-dpr", "1", head=head) as headless:
        head.until_ready()
        yield Pair(head, headless)


def test_both_ranks_serve(pair: Pair) -> None:
    assert pair.head.manage("/ranks").json["protocol"] == "vllm"
    until(lambda: [r["state"] for r in pair.head.ranks().values()] == ["READY", "READY"], "both at the head")
    pair.headless.until_rank(1, "READY")
    pair.head.until_serves(0, 1)
    texts = {pair.head.text(PROMPT, rank=rank, max_tokens=40) for rank in (0, 1) for _ in range(4)}
    assert len(texts) == 1
    assert pair.head.complete(PROMPT, rank=2).status == 400


def test_a_stream_a_departure_and_loads_go_over_the_wire(pair: Pair) -> None:
    streams = [Stream(pair.head, PROMPT, rank=1, max_tokens=7000) for _ in range(6)]
    for stream in streams:
        stream.until_tokens(20)
    until(lambda: pair.headless.rank(1)["running"] == 6, "they run")
    until(lambda: pair.head.metric("vllm:num_requests_running", engine="1") == 6, "the head knows it")
    for stream in streams:
        stream.leave()
    until(lambda: pair.headless.rank(1)["running"] == 0, "rank 1 is free")
    whole = Stream(pair.head, PROMPT, rank=1, max_tokens=100).until_end()
    assert whole.finish_reason == "length"
    assert whole.text == pair.head.text(PROMPT, rank=0, max_tokens=100)


def test_a_restarted_api_server_learns_its_ranks(pair: Pair) -> None:
    before = pair.head.children()
    os.kill(before["api-1"], signal.SIGKILL)
    until(lambda: pair.head.children().get("api-1", before["api-1"]) != before["api-1"], "another one")
    until(lambda: [s["listening"] for s in pair.head.manage("/ranks").json["api_servers"]] == [True, True], "both")
    pair.head.until_serves(0, 1)


def test_a_killed_rank_ends_its_requests_and_comes_back(pair: Pair) -> None:
    pid = pair.headless.rank(1)["pid"]
    stream = Stream(pair.head, PROMPT, rank=1, max_tokens=6000).until_tokens(10)
    os.kill(pid, signal.SIGKILL)
    stream.until_end()
    assert stream.error is not None
    assert stream.error["code"] == "rank_lost"
    assert pair.head.complete(PROMPT, rank=0).status == 200
    until(lambda: pair.headless.rank(1)["state"] == "READY" and pair.headless.rank(1)["pid"] != pid, "a new process")
    pair.head.until_serves(1)
    assert pair.head.text(PROMPT, rank=1) == pair.head.text(PROMPT, rank=0)


def test_a_rank_that_was_cut_off_is_taken_back_by_an_api_server_that_was_started_anew(
    make_pod: Callable[..., Pod],
) -> None:
    """The one that noticed its end is gone itself, and so cannot say that it is back."""
    with make_pod("-dp", "2", "--api-server-count", "1", "--data-parallel-protocol", "vllm") as pod:
        before = pod.children()
        with stopped(before["rank-1"]):
            pod.until_rank(1, "LOST")
            os.kill(before["api-0"], signal.SIGKILL)
        until(lambda: pod.log.count("listening on") == 2, "another API server listens")
        pod.until_rank(1, "READY")
        pod.until_serves(0, 1)
        if "rank-1 hangs" not in pod.log:  # a starved machine: it stood still for so long that its launcher replaced it
            assert pod.children()["rank-1"] == before["rank-1"]
