"""Hybrid groups of both engines; external ones, which vLLM has for mixtures only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from peer_vllm import START_S, Vllm
from process_pods import PORTS, Pod, until
from process_streams import Stream

PROMPT = "nine ranks wait for the head"
HYBRID = ("--data-parallel-size", "4", "--data-parallel-size-local", "2", "--data-parallel-hybrid-lb")
HYBRID += ("--api-server-count", "1")


def test_hybrid_launches_of_theirs_join_our_head(ours: Callable[..., Pod], theirs: Callable[..., Vllm]) -> None:
    with (
        ours(*HYBRID) as head,
        theirs(*HYBRID, "--data-parallel-start-rank", "2", rpc=head.rpc, name="vllm-member") as member,
    ):
        member.until_ready()
        until(lambda: [r["state"] for r in head.ranks().values()] == ["READY"] * 4, "the head knows four ranks")
        expected = head.text(PROMPT, rank=0, max_tokens=40)
        # vLLM counts the ranks of a launch from 0.
        assert [member.text(PROMPT, rank=rank, max_tokens=40) for rank in (0, 1)] == [expected] * 2
        assert head.complete(PROMPT, rank=2).status == 421
        stream = Stream(member, PROMPT, rank=1, max_tokens=7000).until_tokens(10)
        until(lambda: member.metric("vllm:num_requests_running", engine="3") == 1, "it knows its own load")
        stream.leave()
        until(lambda: member.metric("vllm:num_requests_running", engine="3") == 0, "it was aborted")


def test_hybrid_launches_of_ours_join_their_head(ours: Callable[..., Pod], theirs: Callable[..., Vllm]) -> None:
    head = theirs(*HYBRID, rpc=PORTS.take(1), name="vllm-head")
    with head, ours(*HYBRID, "--data-parallel-start-rank", "2", member_of=head, wait=False) as member:
        head.until_ready()
        member.until_ready(START_S)
        expected = head.text(PROMPT, rank=0, max_tokens=40)
        assert [member.text(PROMPT, rank=rank, max_tokens=40) for rank in (2, 3)] == [expected] * 2
        stream = Stream(member, PROMPT, rank=3, max_tokens=7000).until_tokens(10)
        until(lambda: member.metric("vllm:num_requests_running", engine="3") == 1, "the load comes")
        stream.leave()
        until(lambda: member.rank(3)["running"] == 0, "it was aborted")
        head.stop()
        assert member.text(PROMPT, rank=2, max_tokens=40) == expected, "it serves on without the head"


@pytest.mark.parametrize("flags", [("--data-parallel-rank", "1"), ("--data-parallel-rank", "0")])
def test_dense_external_launches_are_refused_by_them(theirs: Callable[..., Vllm], flags: tuple[str, ...]) -> None:
    with theirs("--data-parallel-size", "2", *flags, rpc=PORTS.take(1), name="vllm-external") as launch:
        until(lambda: not launch.running, "it ends", START_S)
        assert launch.process is not None and launch.process.returncode != 0
        assert "external" in launch.log.lower()
