"""Experts spread over ranks, on real processes: the text of one rank, pauses, and a rank that is killed."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_moe import make_moe_model
from process_pods import Pod, ask, until
from process_streams import Stream, caught

COMMON = ("--dtype", "float32", "--max-model-len", "2048", "--num-gpu-blocks-override", "512", "--cpu-threads", "1")
PROMPTS = ["the quick brown fox", "every request finds its way", "nine ranks wait for the head"]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_moe_model(tmp_path_factory.mktemp("moe") / "tiny-moe")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def expected(moe: Path, cache: Path) -> list[str]:
    """What one rank with all experts says."""
    with Pod(moe, *COMMON, cache=cache, name="alone") as pod:
        pod.until_ready()
        return [pod.text(prompt, max_tokens=48) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def two(moe: Path, cache: Path) -> Iterator[Pod]:
    """A service of two ranks that share the experts, for tests after which both are there with their weights."""
    args = (*COMMON, "--enable-expert-parallel", "-dp", "2", "-asc", "1", "--enable-dev-endpoints")
    with Pod(moe, *args, cache=cache) as pod:
        yield pod


def engines(pod: Pod) -> dict[str, int]:
    return {name: pid for name, pid in pod.children().items() if name.startswith("rank-")}


def test_two_pods_share_the_experts_and_each_rank_says_what_one_alone_says(
    moe: Path, cache: Path, expected: list[str]
) -> None:
    args = (*COMMON, "--enable-expert-parallel", "-dp", "4", "-dpl", "2", "--dp-sync-interval", "4")
    with (
        Pod(moe, *args, "-asc", "1", cache=cache, wait=False) as head,
        Pod(moe, *args, "-dpr", "2", cache=cache, head=head) as rest,
    ):
        head.until_ready()
        rest.until_ready()
        for rank in range(4):
            assert [head.text(p, rank=rank, max_tokens=48) for p in PROMPTS] == expected
        streams = [Stream(head, PROMPTS[i % 3], max_tokens=48) for i in range(12)]
        assert sorted({s.until_end().text for s in streams}) == sorted(expected)
        for pod, rank in ((head, "1"), (rest, "3")):  # each had steps of the others to take part in
            for name in ("waves", "syncs", "dummy_steps", "groups_formed", "exchange_seconds"):
                counter = f"dpi_lockstep_{name}_total"
                until(lambda p=pod, c=counter, r=rank: p.metric(c, engine=r) > 0, f"{counter} of rank {rank}")
            assert pod.metric("dpi_lockstep_group", engine=rank) > 0
        assert not any(labels.get("engine") == "2" for name, labels, _ in head.metrics() if "lockstep" in name)


def test_a_killed_rank_takes_its_own_requests_along_and_the_others_go_on_without_loading(
    moe: Path, cache: Path
) -> None:
    args = (*COMMON, "--enable-expert-parallel", "-dp", "3", "-asc", "1")
    with Pod(moe, *args, cache=cache) as pod:
        pod.until_ready()
        before = engines(pod)
        text = pod.text(PROMPTS[0], rank=0, max_tokens=600, timeout=120.0)
        kept = Stream(pod, PROMPTS[0], rank=0, max_tokens=600).until_tokens(20)
        lost = Stream(pod, PROMPTS[1], rank=2, max_tokens=2000).until_tokens(5)
        os.kill(before["rank-2"], signal.SIGKILL)
        lost.until_end()
        assert lost.error is not None and lost.error["code"] == "rank_lost" and "rank 2" in lost.error["message"]
        refused = pod.complete(PROMPTS[0])
        if refused.status != 200:  # not back yet
            assert refused.status == 503
            assert "rank 2" in pod.manage("/readyz").text or pod.manage("/readyz").status == 200
        assert kept.until_end(120).finish_reason == "length"
        assert kept.text == text
        pod.until_ready()
        assert pod.text(PROMPTS[0], rank=2, max_tokens=40) == pod.text(PROMPTS[0], rank=1, max_tokens=40)
        after = engines(pod)
        assert after.pop("rank-2") != before.pop("rank-2")
        assert after == before
        assert pod.log.count("loaded Qwen3MoeForCausalLM") == 4  # three at the start, one again
        assert "weights are kept, 1 requests here wait" in pod.log
        assert "rank-0: group" in pod.log and "1 requests here go on" in pod.log
        for name, least in (("dpi_lockstep_group_breaks_total", 1), ("dpi_lockstep_groups_formed_total", 2)):
            until(lambda n=name, m=least: pod.metric(n, engine="0") >= m, f"{name} of a rank that stayed")


def test_a_group_that_does_not_come_together_again_ends_by_name(moe: Path, cache: Path) -> None:
    args = (*COMMON, "--enable-expert-parallel", "-dp", "2", "-dpl", "1", "--reform-timeout", "3")
    with Pod(moe, *args, "-asc", "1", cache=cache, wait=False) as head:
        with Pod(moe, *args, "-dpr", "1", cache=cache, head=head, name="other") as other:
            head.until_ready()
            stream = Stream(head, PROMPTS[0], rank=0, max_tokens=1500).until_tokens(5)
            began = time.monotonic()
            other.terminate()
            assert other.wait_exit() == 0
        stream.until_end()
        until(lambda: "rank 0 ends:" in head.log, "rank 0 gives up")
        assert time.monotonic() - began > 3
        line = next(line for line in head.log.splitlines() if "rank 0 ends:" in line)
        assert "did not come together within 3 s (--reform-timeout): rank 1 (LOST" in line


def test_a_port_of_the_exchange_that_is_in_use_is_named_before_a_rank_starts(moe: Path, cache: Path) -> None:
    pod = Pod(moe, *COMMON, "-ep", "-dp", "2", "-asc", "1", cache=cache, wait=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", pod.rpc + 201))
        taken.listen()
        with pod:
            assert pod.wait_exit() == 78
            assert f"expert exchange of rank 1 (--data-parallel-rpc-port {pod.rpc} + 201)" in pod.log
            assert f"port {pod.rpc + 201} of 127.0.0.1 is in use" in pod.log
            assert "Traceback" not in pod.log


def test_a_port_of_the_exchange_that_this_launch_wants_twice_is_told_from_one_in_use(moe: Path, cache: Path) -> None:
    """Outside a pod the port follows from the rank."""
    at = Pod(moe, cache=cache)
    args = (*COMMON, "-ep", "-dp", "4", "-dpl", "1", "-dpr", "2")
    with Pod(moe, *args, cache=cache, head=at, rpc=at.rpc, management=at.rpc + 202, wait=False) as pod:
        assert pod.wait_exit() == 78
        twice = f"port {at.rpc + 202} is wanted twice"
        assert f"{twice}: for --management-port and for expert exchange of rank 2" in pod.log


def test_a_frozen_rank_is_given_up_and_comes_back_with_its_weights(two: Pod) -> None:
    text = two.text(PROMPTS[0], rank=0, max_tokens=400, timeout=120.0)
    before, loads = engines(two), two.log.count("loaded Qwen3MoeForCausalLM")
    kept = Stream(two, PROMPTS[0], rank=0, max_tokens=400).until_tokens(10)
    os.kill(before["rank-1"], signal.SIGSTOP)
    try:
        two.until_rank(1, "LOST")
    finally:
        os.kill(before["rank-1"], signal.SIGCONT)
    assert kept.until_end(120).text == text
    two.until_ready()
    assert engines(two) == before
    assert two.log.count("loaded Qwen3MoeForCausalLM") == loads


def test_all_ranks_are_paused_and_resumed_together(two: Pod, expected: list[str]) -> None:
    def told(path: str) -> None:
        assert ask(f"{two.url}{path}", method="POST").status == 200

    def begin() -> Stream:
        return Stream(two, PROMPTS[0], rank=1, max_tokens=400).until_tokens(10)

    stream = caught(begin, lambda: told("/pause?mode=keep"), lambda: told("/resume"))
    assert stream.at_rest() < 400
    told("/resume")
    assert stream.until_end(120).finish_reason == "length"
    for level in (1, 2):
        told(f"/sleep?level={level}")
        told("/wake_up")
        assert two.text(PROMPTS[1], rank=0, max_tokens=48) == expected[1]
    whole = two.text(PROMPTS[0], rank=1, max_tokens=400)
    stream = caught(begin, lambda: told("/sleep?level=2&mode=keep"), lambda: told("/wake_up"))
    assert stream.at_rest() < 400
    told("/wake_up")
    assert stream.until_end(120).text == whole


def test_without_expert_parallelism_ranks_are_independent(moe: Path, cache: Path, expected: list[str]) -> None:
    args = (*COMMON, "-dp", "2", "-asc", "1")
    with Pod(moe, *args, cache=cache) as pod:
        pod.until_ready()
        other = Stream(pod, PROMPTS[1], rank=1, max_tokens=2000).until_tokens(5)
        os.kill(engines(pod)["rank-0"], signal.SIGKILL)
        pod.until_rank(0, "LOST")
        assert pod.text(PROMPTS[1], rank=1, max_tokens=48) == expected[1]
        other.leave()
        pod.until_rank(0, "READY")
        assert pod.text(PROMPTS[2], rank=0, max_tokens=48) == expected[2]
        assert "group" not in pod.log.replace("process group", "")
        assert "dpi_lockstep" not in pod.manage("/metrics").text


def test_ranks_with_endpoints_of_their_own_share_experts_and_refuse_work_while_one_is_away(
    moe: Path, cache: Path, expected: list[str]
) -> None:
    args = (*COMMON, "--enable-expert-parallel", "-dp", "2")
    with (
        Pod(moe, *args, "-dpn", "0", cache=cache, wait=False) as head,
        Pod(moe, *args, "-dpn", "1", cache=cache, member_of=head) as member,
    ):
        head.until_ready()
        for pod in (head, member):
            until(lambda pod=pod: pod.complete(PROMPTS[0]).status == 200, f"{pod.name} answers")
            assert pod.text(PROMPTS[0], max_tokens=48) == expected[0]
        kept = Stream(member, PROMPTS[1], max_tokens=500).until_tokens(5)
        os.kill(engines(head)["rank-0"], signal.SIGKILL)
        until(lambda: "waits for rank 0" in member.manage("/readyz").text, "the other pod is not ready either")
        refused = member.complete(PROMPTS[2])
        if refused.status != 200:  # not back yet
            assert refused.status == 503
        assert kept.until_end(120).finish_reason == "length"
        member.until_ready()
        assert member.text(PROMPTS[2], max_tokens=48) == expected[2]
