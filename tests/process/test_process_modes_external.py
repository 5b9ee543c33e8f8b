"""External balancing: a pod and an endpoint per rank, dense ranks without a coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from process_group import paused
from process_pods import Pod, until
from process_streams import Stream

PROMPT = "nine ranks wait for the head"
REFUSED = 78
NO_HEAD = 3


class Pair(NamedTuple):
    head: Pod
    member: Pod


@pytest.fixture(scope="module")
def running_pair(make_pod: Callable[..., Pod]) -> Iterator[Pair]:
    head = make_pod("-dp", "2", "-dpn", "0", wait=False)
    with head, make_pod("-dp", "2", "--data-parallel-external-lb", "-dpn", "1", member_of=head) as member:
        head.until_ready()
        yield Pair(head, member)


@pytest.fixture
def pair(running_pair: Pair) -> Pair:
    for pod in running_pair:
        pod.until_ready()
    until(lambda: joined(running_pair), "both ranks are READY at the head")
    return running_pair


def joined(pair: Pair) -> bool:
    ready = all(r["state"] == "READY" for r in pair.head.ranks().values())
    return ready and pair.member.manage("/ranks").json["head_lost"] == {}


def test_each_rank_has_its_endpoint_and_no_coordinator_runs(pair: Pair) -> None:
    head, member = (pod.manage("/ranks").json for pod in pair)
    assert (head["mode"], head["role"], head["local_ranks"]) == ("external", "head", [0])
    assert (member["mode"], member["role"], member["local_ranks"]) == ("external", "member", [1])
    assert [(r["rank"], r["state"], r["pod"]) for r in head["ranks"]] == [(0, "READY", "head"), (1, "READY", "member")]
    assert set(pair.head.children()) == {"api-0", "rank-0"}
    assert set(pair.member.children()) == {"api-0", "rank-1"}
    assert len({pod.text(PROMPT, max_tokens=40) for pod in pair for _ in range(3)}) == 1
    for pod, own in zip(pair, ("0", "1"), strict=True):
        assert {v["engine"] for n, v, _ in pod.metrics() if n == "vllm:num_requests_running"} == {own}


def test_a_rank_is_asked_for_at_its_own_endpoint(pair: Pair) -> None:
    assert pair.head.text(PROMPT, rank=0) == pair.member.text(PROMPT, rank=1)
    answer = pair.head.complete(PROMPT, rank=1)
    assert answer.status == 421
    assert "this endpoint serves rank 0; rank 1 has its endpoint in pod member" in answer.json["error"]["message"]
    assert pair.member.complete(PROMPT, rank=2).status == 400


def test_the_head_sees_the_load_of_every_rank(pair: Pair) -> None:
    stream = Stream(pair.member, PROMPT, max_tokens=7000).until_tokens(5)
    try:
        until(lambda: pair.head.rank(1)["running"] == 1, "the head's /ranks shows the request")
    finally:
        stream.leave()


def test_a_lost_head_is_lost_alone_and_found_again(pair: Pair) -> None:
    head, member = pair
    pids, epoch = member.children(), head.rank(1)["epoch"]
    stream = Stream(member, PROMPT, max_tokens=3000).until_tokens(10)
    head.kill()
    until(lambda: "1" in member.manage("/ranks").json["head_lost"], "the member misses the head")
    assert member.manage("/readyz").status == 200
    assert member.complete(PROMPT).status == 200
    assert stream.until_end().finish_reason == "length"
    head.start()
    head.until_ready()
    assert head.until_rank(1, "READY")["epoch"] > epoch
    until(lambda: joined(pair), "the member has joined it")
    assert member.children() == pids


def test_a_lost_member_is_lost_alone_and_rejoins(pair: Pair) -> None:
    head, member = pair
    pids, epoch = head.children(), head.rank(1)["epoch"]
    member.kill()
    head.until_rank(1, "LOST")
    assert head.manage("/readyz").text == "ok, 1 of 1 ranks\n"
    assert head.complete(PROMPT).status == 200
    member.start()
    member.until_ready()
    assert head.until_rank(1, "READY")["epoch"] > epoch
    assert member.text(PROMPT) == head.text(PROMPT)
    assert head.children() == pids


def test_a_member_that_a_new_head_refuses_finishes_what_it_has(make_pod: Callable[..., Pod], token_file: str) -> None:
    """It must not serve beside another configuration; its clients must not suffer for what the head's flags say."""
    head = make_pod("-dp", "2", "-dpn", "0", wait=False)
    flags = ("-dp", "2", "-dpn", "1", "--management-token-file", token_file, "--shutdown-timeout", "600")
    with head, make_pod(*flags, member_of=head) as member:
        head.until_ready()
        with paused(member):
            stream = Stream(member, PROMPT, max_tokens=40)
            until(lambda: member.rank(1)["waiting"] + member.rank(1)["running"] == 1, "the request is at the rank")
            head.kill()
            head.command += ["--seed", "5"]
            head.start()
            until(lambda: "seed: expected 5, got 0" in member.log, "the member is refused")
            until(lambda: member.manage("/readyz").status == 503, "it takes no new requests")
            assert not stream.ended.wait(1.0), (stream.events[-1:], stream.failure)
        assert stream.until_end().finish_reason == "length", (stream.events[-1:], stream.failure)
        assert member.wait_exit() == REFUSED


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-dp", "3", "-dpn", "1"], ["data_parallel_size", "expected 2", "got 3"]),
        (["-dp", "2", "-dpn", "1", "--seed", "5"], ["seed", "expected 0", "got 5"]),
        (["-dp", "2", "-dpl", "1", "-dpr", "1", "--headless"], ["headless=True", "drop --headless there"]),
        (["-dp", "2", "-dpn", "1"], ["rank 1 is taken", "held by [pod member"]),
    ],
)
def test_a_pod_that_does_not_fit_is_refused_by_the_head_and_serves_nothing(
    make_pod: Callable[..., Pod], pair: Pair, flags: list[str], words: list[str]
) -> None:
    headless = "--headless" in flags
    joining = {"head": pair.head} if headless else {"member_of": pair.head}
    given = [f for f in flags if f != "--headless"]
    with make_pod(*given, **joining, name="stranger", wait=False) as pod:
        assert pod.wait_exit() == REFUSED
        for word in words:
            assert word in pod.log
        assert "listening on" not in pod.log
        assert "Traceback" not in pod.log
    until(lambda: joined(pair), "the group is as before")


def test_a_pod_waits_for_its_head_by_name_and_ends_at_the_time_limit(make_pod: Callable[..., Pod]) -> None:
    head = make_pod()
    place = f"tcp://127.0.0.1:{head.rpc}"
    with make_pod("-dp", "2", "-dpn", "1", "--handshake-timeout", "40", member_of=head, wait=False) as member:

        def named() -> bool:
            try:
                answer = member.manage("/startupz")
            except OSError:
                return False
            return answer.status == 503 and f"joining the head at {place}: no connection" in answer.text

        until(named, "/startupz says what it waits for, and what is in the way", every=0.01)
        assert member.wait_exit() == NO_HEAD
        assert f"has looked for the head at {place} for " in member.log
        assert f"missing: rank 1 (NEW, joining the head at {place}: no connection)" in member.log


def test_sigterm_ends_each_pod_by_itself(make_pod: Callable[..., Pod]) -> None:
    head = make_pod("-dp", "2", "-dpn", "0", "--shutdown-timeout", "600", wait=False)
    with head, make_pod("-dp", "2", "-dpn", "1", "--shutdown-timeout", "600", member_of=head) as member:
        head.until_ready()
        stream = Stream(member, PROMPT, max_tokens=2000).until_tokens(10)
        member.terminate()
        assert stream.until_end().finish_reason == "length"
        assert member.wait_exit() == 0
        assert "left: stopped" in head.until_rank(1, "LOST")["error"]
        head.terminate()
        assert head.wait_exit() == 0
