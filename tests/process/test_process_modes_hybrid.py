"""Hybrid balancing: two pods of two ranks, each with front ends over its own; rank 0's pod is the head of the group."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
from process_group import paused
from process_pods import Pod, stopped, until
from process_streams import Stream

PROMPT = "the quick brown fox jumps over"
FLAGS = ("-dp", "4", "-dpl", "2", "--data-parallel-hybrid-lb", "--api-server-count", "2")


class Pair(NamedTuple):
    head: Pod
    member: Pod

    def pids(self) -> dict[str, int]:
        """Of all children, `head/rank-0` and so on."""
        return {f"{pod.name}/{name}": pid for pod in self for name, pid in pod.children().items()}

    def settle(self) -> None:
        """Both pods whole and idle, the member's ranks joined to the head."""
        for pod in self:
            pod.until_ready()
        until(lambda: idle(self.head, 4) and idle(self.member, 2), "four idle ranks and four API servers")
        until(lambda: self.member.manage("/ranks").json["head_lost"] == {}, "the member's ranks have the head")


def idle(pod: Pod, ranks: int) -> bool:
    status = pod.manage("/ranks").json
    servers = status["api_servers"]
    return (
        len(status["ranks"]) == ranks
        and not status["missing"]
        and all(r["running"] == r["waiting"] == 0 for r in status["ranks"])
        and [s["listening"] and s["ready"] and not s["in_flight"] for s in servers] == [True, True]
    )


@pytest.fixture(scope="module")
def running_pair(make_pod: Callable[..., Pod]) -> Iterator[Pair]:
    head = make_pod(*FLAGS, wait=False)
    with head, make_pod(*FLAGS, "-dpr", "2", member_of=head) as member:
        head.until_ready()
        yield Pair(head, member)


@pytest.fixture
def pair(running_pair: Pair) -> Pair:
    running_pair.settle()
    return running_pair


def states(pod: Pod) -> list[tuple[int, str, bool, str]]:
    return [(r["rank"], r["state"], r["local"], r["pod"]) for r in pod.manage("/ranks").json["ranks"]]


def generated(pod: Pod) -> dict[str, float]:
    """Tokens by rank, of the pod's metrics."""
    return {
        labels["engine"]: value
        for name, labels, value in pod.metrics()
        if name == "vllm:generation_tokens_total" and value
    }


def test_the_head_knows_the_group_and_the_member_its_own_ranks(pair: Pair) -> None:
    assert states(pair.head) == [
        (0, "READY", True, "head"),
        (1, "READY", True, "head"),
        (2, "READY", False, "member"),
        (3, "READY", False, "member"),
    ]
    assert states(pair.member) == [(2, "READY", True, "member"), (3, "READY", True, "member")]
    head, member = (pod.manage("/ranks").json for pod in pair)
    assert (head["role"], member["role"], head["mode"], member["mode"]) == ("head", "member", "hybrid", "hybrid")
    assert head["local_ranks"] == [0, 1] and member["local_ranks"] == [2, 3]
    assert head["fingerprint"] == member["fingerprint"]
    by_rank = {r["rank"]: r for r in head["ranks"]}
    for rank in member["ranks"]:
        assert rank["pid"] == by_rank[rank["rank"]]["pid"]
        assert rank["fields"]["weights_digest"] == by_rank[0]["fields"]["weights_digest"]
    assert pair.head.manage("/readyz").text == pair.member.manage("/readyz").text == "ok, 2 of 2 ranks\n"
    assert set(pair.head.children()) == {"coordinator", "api-0", "api-1", "rank-0", "rank-1"}
    assert set(pair.member.children()) == {"api-0", "api-1", "rank-2", "rank-3"}


def test_each_endpoint_spreads_requests_over_its_own_ranks_alone(pair: Pair) -> None:
    before = {**generated(pair.head), **generated(pair.member)}
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda i: pair[i % 2].complete(f"{PROMPT} {i}", max_tokens=60), range(32)))
    assert {a.status for a in answers} == {200}

    def counted() -> bool:
        now = [generated(pod) for pod in pair]
        return [sum(n.values()) - sum(before.get(r, 0) for r in n) for n in now] == [16 * 60, 16 * 60]

    until(counted, "all tokens are counted, half of them in each pod")
    assert set(generated(pair.head)) == {"0", "1"}
    assert set(generated(pair.member)) == {"2", "3"}
    assert all(v > before.get(rank, 0) for pod in pair for rank, v in generated(pod).items())


def test_every_rank_answers_the_same_under_its_global_number(pair: Pair) -> None:
    texts = {pair[rank // 2].text(PROMPT, rank=rank, max_tokens=40) for rank in range(4) for _ in range(2)}
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("pod", "rank", "status", "words"),
    [
        (0, 3, 421, ["this endpoint serves ranks 0 to 1", "rank 3 has its endpoint in pod member"]),
        (1, 0, 421, ["this endpoint serves ranks 2 to 3", "rank 0 has its endpoint in pod head"]),
        (0, 4, 400, ["rank 4 does not exist", "expected 0 to 3", "serves ranks 0 to 1"]),
        (1, 70000, 400, ["rank 70000 does not exist", "serves ranks 2 to 3"]),
        (1, -1, 400, ["X-data-parallel-rank", "-1"]),
    ],
)
def test_a_rank_of_another_pod_or_of_none_is_named(
    pair: Pair, pod: int, rank: int, status: int, words: list[str]
) -> None:
    if pod == 1 and status == 421:
        until(lambda: "in pod head" in pair.member.complete(PROMPT, rank=0).text, "the head has told its places")
    answer = pair[pod].complete(PROMPT, rank=rank)
    assert answer.status == status
    for word in words:
        assert word in answer.json["error"]["message"]
    if status == 421:
        assert answer.json["error"]["code"] == "rank_elsewhere"


def both_servers_know(pod: Pod, rank: int, running: int) -> bool:
    """The API server that did not send the requests hears of them by the coordinator alone."""
    servers = pod.manage("/ranks").json["api_servers"]
    return all(any((r, n) == (rank, running) for r, _, _, _, n, *_ in s["loads"]) for s in servers)


def test_loads_reach_the_head_and_by_its_coordinator_all_front_ends_of_a_pod(pair: Pair) -> None:
    stream = Stream(pair.member, PROMPT, rank=3, max_tokens=7000).until_tokens(5)
    try:
        until(lambda: pair.head.rank(3)["running"] == 1, "the head knows of the request of rank 3")
        until(lambda: both_servers_know(pair.member, 3, 1), "both API servers of the member know")
        assert pair.head.rank(2)["running"] == 0
    finally:
        stream.leave()
    until(lambda: pair.head.rank(3)["running"] == 0, "it has ended")


def test_metrics_of_a_pod_are_those_of_its_ranks(pair: Pair) -> None:
    for pod, own in zip(pair, ({"0", "1"}, {"2", "3"}), strict=True):
        pod.text(PROMPT)
        engines = {labels["engine"] for name, labels, _ in pod.metrics() if name == "vllm:num_requests_running"}
        assert engines == own
        assert pod.metric("dpi_pod_ready") == 1
    assert {
        labels["engine"]: value for name, labels, value in pair.member.metrics() if name == "dpi_rank_head_connected"
    } == {"2": 1, "3": 1}
    assert not [1 for name, _, _ in pair.head.metrics() if name == "dpi_rank_head_connected"]


def test_a_killed_rank_of_a_member_comes_back_to_both_and_nobody_else_notices(pair: Pair) -> None:
    before, epochs = pair.pids(), [pod.rank(2)["epoch"] for pod in pair]
    lost = Stream(pair.member, PROMPT, rank=2, max_tokens=6000)
    others = [Stream(pair.member, PROMPT, rank=3, max_tokens=1500), Stream(pair.head, PROMPT, max_tokens=1500)]
    for stream in [lost, *others]:
        stream.until_tokens(10)
    os.kill(before["member/rank-2"], signal.SIGKILL)
    lost.until_end()
    assert lost.error is not None and lost.error["code"] == "rank_lost"
    assert [s.until_end().finish_reason for s in others] == ["length"] * 2

    def back() -> bool:
        now = [pod.rank(2) for pod in pair]
        return all(r["state"] == "READY" and r["epoch"] > epoch for r, epoch in zip(now, epochs, strict=True))

    until(back, "rank 2 is READY again in its pod and at the head")
    pair.member.until_serves(2)
    assert pair.member.text(PROMPT, rank=2) == pair.head.text(PROMPT)
    stream = Stream(pair.member, PROMPT, rank=2, max_tokens=7000).until_tokens(5)
    try:
        until(lambda: both_servers_know(pair.member, 2, 1), "loads of the new life are taken")
        until(lambda: pair.head.rank(2)["running"] == 1, "by the head too")
    finally:
        stream.leave()
    after = pair.pids()
    assert after.pop("member/rank-2") != before.pop("member/rank-2")
    assert after == before


def test_a_frozen_rank_of_a_member_is_out_of_its_front_ends_routing(pair: Pair) -> None:
    before = pair.pids()
    with stopped(before["member/rank-3"]):
        pair.member.until_rank(3, "LOST")
        told = "every API server refuses what is meant for rank 3"
        until(lambda: {pair.member.complete(PROMPT, rank=3).status for _ in range(12)} == {503}, told)
        assert {pair.member.complete(PROMPT, max_tokens=1).status for _ in range(6)} == {200}
        pair.head.until_rank(3, "LOST")
        assert pair.member.manage("/readyz").text == "ok, 1 of 2 ranks\n"
        assert pair.head.manage("/readyz").text == "ok, 2 of 2 ranks\n"
    for pod in pair:
        pod.until_rank(3, "READY")
    pair.member.until_serves(3)
    assert pair.member.text(PROMPT, rank=3) == pair.member.text(PROMPT, rank=2)
    assert pair.pids() == before


def test_a_lost_head_leaves_the_member_serving_and_its_ranks_join_the_next_one(pair: Pair) -> None:
    head, member = pair
    before, joined = member.ranks(), {rank: head.rank(rank)["epoch"] for rank in (2, 3)}
    text, pids = member.text(PROMPT, max_tokens=40), member.children()
    stream = Stream(member, PROMPT, rank=2, max_tokens=3000).until_tokens(10)
    head.kill()
    head.assert_gone()

    def alone() -> Any:
        return set(member.manage("/ranks").json["head_lost"]) == {"2", "3"}

    until(alone, "the member's ranks miss the head")
    assert member.metric("dpi_rank_head_connected") == 0
    assert member.manage("/readyz").text == "ok, 2 of 2 ranks\n"
    assert {member.text(PROMPT, rank=rank, max_tokens=40) for rank in (2, 3) for _ in range(3)} == {text}
    assert stream.until_end().finish_reason == "length"
    assert stream.error is None
    head.start()
    head.until_ready()
    for rank in (2, 3):
        back = head.until_rank(rank, "READY")
        assert back["epoch"] > joined[rank]
        assert back["pid"] == before[rank]["pid"]
    until(lambda: member.manage("/ranks").json["head_lost"] == {}, "the member's ranks have joined it")
    assert {r: e["epoch"] for r, e in member.ranks().items()} == {r: e["epoch"] for r, e in before.items()}
    assert member.children() == pids
    assert head.text(PROMPT, max_tokens=40) == text
    stream = Stream(member, PROMPT, rank=3, max_tokens=7000).until_tokens(5)
    try:
        until(lambda: both_servers_know(member, 3, 1), "the new coordinator tells loads")
        until(lambda: head.rank(3)["running"] == 1, "the new head knows them")
    finally:
        stream.leave()


def test_a_lost_member_touches_nobody_and_rejoins(pair: Pair) -> None:
    head, member = pair
    pids, epochs = head.children(), {rank: head.rank(rank)["epoch"] for rank in range(4)}
    stream = Stream(head, PROMPT, max_tokens=3000).until_tokens(10)
    member.kill()
    member.assert_gone()
    for rank in (2, 3):
        head.until_rank(rank, "LOST")
    assert head.manage("/readyz").text == "ok, 2 of 2 ranks\n"
    assert {head.complete(PROMPT).status for _ in range(6)} == {200}
    assert stream.until_end().finish_reason == "length"
    assert head.complete(PROMPT, rank=2).status == 421
    member.start()
    member.until_ready()
    for rank in (2, 3):
        assert head.until_rank(rank, "READY")["epoch"] > epochs[rank]
    assert {rank: head.rank(rank)["epoch"] for rank in (0, 1)} == {rank: epochs[rank] for rank in (0, 1)}
    assert member.text(PROMPT) == head.text(PROMPT)
    stream = Stream(member, PROMPT, rank=2, max_tokens=7000).until_tokens(5)
    try:
        until(lambda: both_servers_know(member, 2, 1), "loads of the new pod are taken")
    finally:
        stream.leave()
    assert head.children() == pids


def test_a_frozen_head_is_found_again_when_it_thaws(pair: Pair) -> None:
    head, member = pair
    assert head.process is not None
    pids, epochs = pair.pids(), {rank: member.rank(rank)["epoch"] for rank in (2, 3)}
    with stopped(head.process.pid):
        until(lambda: set(member.manage("/ranks").json["head_lost"]) == {"2", "3"}, "the member misses the head")
        assert {member.complete(PROMPT, rank=rank).status for rank in (2, 3)} == {200}
    until(lambda: member.manage("/ranks").json["head_lost"] == {}, "the member's ranks have joined it again")
    for rank in (2, 3):
        head.until_rank(rank, "READY")
        assert member.rank(rank)["epoch"] == epochs[rank]
    assert pair.pids() == pids


def test_launches_of_different_size_make_one_group_and_stop_without_their_head(make_pod: Callable[..., Pod]) -> None:
    head = make_pod("-dp", "3", "-dpl", "2", "-dph", wait=False)
    with head, make_pod("-dp", "3", "-dpl", "1", "-dpr", "2", member_of=head) as member:
        head.until_ready()
        assert "is external balancing" in member.log
        until(lambda: [r["state"] for r in head.ranks().values()] == ["READY"] * 3, "three ranks")
        assert head.text(PROMPT) == member.text(PROMPT, rank=2)
        head.kill()
        until(lambda: "2" in member.manage("/ranks").json["head_lost"], "the member misses the head")
        member.terminate()
        assert member.wait_exit() == 0
        assert "is killed" not in member.log


def test_sigterm_drains_each_pod_by_itself(make_pod: Callable[..., Pod], token_file: str) -> None:
    flags = ("-dp", "4", "-dpl", "2", "-dph", "--api-server-count", "1", "--shutdown-timeout", "600")
    flags += ("--management-token-file", token_file)
    head = make_pod(*flags, wait=False)
    with head, make_pod(*flags, "-dpr", "2", member_of=head) as member:
        head.until_ready()
        last = Stream(head, PROMPT, max_tokens=1000).until_tokens(10)
        with paused(head):  # the stream cannot end before the test has looked
            head.terminate()
            until(lambda: head.manage("/readyz").text == "draining\n", "the head drains")
        assert last.until_end().finish_reason == "length"
        assert head.wait_exit() == 0
        assert member.complete(PROMPT).status == 200
        assert member.manage("/readyz").status == 200
        last = Stream(member, PROMPT, rank=3, max_tokens=1000).until_tokens(10)
        member.terminate()
        assert last.until_end().finish_reason == "length"
        assert member.wait_exit() == 0
        assert "is killed" not in head.log + member.log
