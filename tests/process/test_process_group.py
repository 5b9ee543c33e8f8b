"""A head and a headless pod of two ranks each make one service."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from process_group import Group
from process_pods import ask, parse_metrics, until

PROMPT = "the quick brown fox jumps over"


def test_the_head_knows_four_ready_ranks_and_the_headless_pod_its_own(group: Group) -> None:
    head, headless = group.head.manage("/ranks").json, group.headless.manage("/ranks").json
    assert [(r["rank"], r["state"], r["local"], r["pod"]) for r in head["ranks"]] == [
        (0, "READY", True, "head"),
        (1, "READY", True, "head"),
        (2, "READY", False, "headless"),
        (3, "READY", False, "headless"),
    ]
    assert head["missing"] == []
    assert [(r["rank"], r["state"]) for r in headless["ranks"]] == [(2, "READY"), (3, "READY")]
    by_rank = {r["rank"]: r for r in head["ranks"]}
    told = {r["rank"]: (r["pod"], r["fingerprint"]) for r in head["ranks"] if not r["local"]}
    assert {r["rank"]: (r["pod"], r["fingerprint"]) for r in headless["ranks"]} == told
    for rank in headless["ranks"]:
        assert rank["epoch"] == by_rank[rank["rank"]]["epoch"] > 0
        assert rank["pid"] == by_rank[rank["rank"]]["pid"]
        assert rank["boot_id"] == by_rank[rank["rank"]]["boot_id"]
    assert head["fingerprint"] == headless["fingerprint"]
    assert by_rank[0]["fields"]["weights_digest"] == by_rank[3]["fields"]["weights_digest"]


def test_every_rank_answers_the_same_when_asked_for_by_number(group: Group) -> None:
    texts = {group.head.text(PROMPT, rank=rank, max_tokens=40) for rank in range(4) for _ in range(2)}
    assert len(texts) == 1
    assert len(texts.pop()) > 20


@pytest.mark.parametrize("rank", [4, -1, 70000])
def test_a_rank_out_of_range_is_a_bad_request(group: Group, rank: int) -> None:
    answer = group.head.complete(PROMPT, rank=rank)
    assert answer.status == 400
    assert str(rank) in answer.json["error"]["message"]


def test_a_load_without_ranks_reaches_every_rank_through_both_api_servers(group: Group) -> None:
    before = {r: group.head.metric("vllm:generation_tokens_total", engine=str(r)) for r in range(4)}
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: group.head.complete(f"{PROMPT} {i}", max_tokens=60), range(40)))
    assert {a.status for a in answers} == {200}

    def counted() -> bool:
        now = {r: group.head.metric("vllm:generation_tokens_total", engine=str(r)) for r in range(4)}
        return all(now[r] > before[r] for r in now) and sum(now.values()) - sum(before.values()) == 40 * 60

    until(counted, "2400 tokens counted, some of every rank")


def test_both_api_servers_take_connections(group: Group) -> None:
    for stream in group.streams_at_both(PROMPT, 6000):
        stream.leave()


def test_metrics_of_the_head_cover_the_group_and_those_of_a_headless_pod_its_ranks(group: Group) -> None:
    group.head.text(PROMPT, rank=3)
    # A report comes four times a second; what API servers write they write at once.
    until(lambda: group.headless.metric("dpi_engine_steps_total", engine="3") > 0, "steps of rank 3")
    for pod in (group.head, group.headless):
        until(lambda pod=pod: pod.metric("dpi_rank_state", engine="2", state="READY") == 1, f"rank 2 at {pod.name}")
    engines = {labels["engine"] for name, labels, _ in group.head.metrics() if name == "vllm:num_requests_running"}
    assert engines == {"0", "1", "2", "3"}
    own = {labels["engine"] for name, labels, _ in group.headless.metrics() if name == "vllm:num_requests_running"}
    assert own == {"2", "3"}
    assert group.headless.metric("dpi_pod_ready") == group.head.metric("dpi_pod_ready") == 1
    public = parse_metrics(ask(f"{group.head.url}/metrics").text)
    assert {labels["engine"] for name, labels, _ in public if name == "vllm:num_requests_running"} == engines
