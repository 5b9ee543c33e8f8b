"""Hybrid and external balancing with the bytes of another engine between head and ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from process_moe import make_moe_model
from process_pods import Pod, until
from process_streams import Stream

PROMPT = "nine ranks wait for the head"
VLLM = ("--data-parallel-protocol", "vllm")
HYBRID = ("-dp", "4", "-dpl", "2", "-dph", "--api-server-count", "2", *VLLM)


class Pair(NamedTuple):
    head: Pod
    member: Pod


@pytest.fixture(scope="module")
def pair(make_pod: Callable[..., Pod]) -> Iterator[Pair]:
    head = make_pod(*HYBRID, wait=False)
    with head, make_pod(*HYBRID, "-dpr", "2", member_of=head) as member:
        head.until_ready()
        yield Pair(head, member)


def test_each_pod_serves_its_ranks(pair: Pair) -> None:
    until(lambda: [r["state"] for r in pair.head.ranks().values()] == ["READY"] * 4, "the head knows four ranks")
    assert pair.member.manage("/ranks").json["protocol"] == "vllm"
    pair.head.until_serves(0, 1)
    pair.member.until_serves(2, 3)
    texts = {pair[rank // 2].text(PROMPT, rank=rank, max_tokens=30) for rank in range(4) for _ in range(3)}
    assert len(texts) == 1
    assert pair.member.complete(PROMPT, rank=0).status == 421
    assert pair.member.complete(PROMPT, rank=4).status == 400


def test_front_ends_follow_the_heads_coordinator(pair: Pair) -> None:
    assert f"following the coordinator at tcp://127.0.0.1:{pair.head.rpc + 1}" in pair.member.log
    streams = [Stream(pair.member, PROMPT, rank=3, max_tokens=7000).until_tokens(5) for _ in range(4)]
    until(lambda: pair.member.metric("vllm:num_requests_running", engine="3") == 4, "the pod knows its load")
    for stream in streams:
        stream.leave()
    until(lambda: pair.member.rank(3)["running"] == 0, "rank 3 is free")


def test_a_killed_rank_of_a_member_comes_back(pair: Pair) -> None:
    pid = pair.member.rank(2)["pid"]
    stream = Stream(pair.member, PROMPT, rank=2, max_tokens=6000).until_tokens(10)
    os.kill(pid, signal.SIGKILL)
    assert stream.until_end().error is not None
    told = "every API server has heard of the loss"
    until(lambda: {pair.member.complete(PROMPT, rank=2).status for _ in range(12)} <= {200, 503}, told)
    assert {pair.member.complete(PROMPT).status for _ in range(4)} == {200}
    until(lambda: pair.member.rank(2)["state"] == "READY" and pair.member.rank(2)["pid"] != pid, "a new process")
    pair.member.until_serves(2)
    assert pair.member.text(PROMPT, rank=2) == pair.head.text(PROMPT)


def test_external_ranks_serve(make_pod: Callable[..., Pod]) -> None:
    flags = ("-dp", "2", *VLLM)
    head = make_pod(*flags, "-dpn", "0", wait=False)
    with head, make_pod(*flags, "-dpn", "1", member_of=head) as member:
        head.until_ready()
        assert head.text(PROMPT, rank=0) == member.text(PROMPT, rank=1)
        until(lambda: head.rank(1)["state"] == "READY", "the head knows the other rank")


def test_mixtures_are_never_mixed(make_pod: Callable[..., Pod], tmp_path: Path) -> None:
    """With vLLM's protocol the ranks of a mixture are vLLM's: ours are refused before they join anybody."""
    model = make_moe_model(tmp_path / "moe")
    head = make_pod("-dp", "2", "-dpl", "0", *VLLM, model=model, wait=False)
    ranks = make_pod("-dp", "2", *VLLM, head=head, model=model, wait=False)
    beside = make_pod("-dp", "2", "-dpl", "1", *VLLM, model=model, wait=False)
    for launch in (ranks, beside):
        with launch:
            assert launch.wait_exit() == 78
            assert "never mixed" in launch.log and "--data-parallel-size-local 0" in launch.log
    with head:
        until(lambda: "waiting for ranks 0-1 of other pods" in head.log, "a head without ranks waits for vLLM's")
