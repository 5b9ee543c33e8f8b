"""Multi-port balancing: pods of two ranks, a port for each; a supervisor ends them together or starts one again."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from process_group import TOKEN, paused
from process_pods import Pod, ask, parse_metrics, until
from process_streams import Stream

PROMPT = "every request finds its way"
FLAGS = ("-dp", "4", "-dpl", "2", "--data-parallel-multi-port-external-lb")
ENDED_BY_A_CHILD = 4
REFUSED = 78


class Pair(NamedTuple):
    head: Pod
    member: Pod


def supervised(pod: Pod, path: str = "/health") -> tuple[int, dict[str, Any]]:
    answer = ask(f"http://127.0.0.1:{pod.supervisor}{path}")
    return answer.status, answer.json


def text(pod: Pod, index: int, **fields: Any) -> str:
    answer = pod.complete(PROMPT, index=index, **fields)
    assert answer.status == 200, answer.text
    return answer.json["choices"][0]["text"]


@pytest.fixture(scope="module")
def pair(make_pod: Callable[..., Pod]) -> Iterator[Pair]:
    flags = (*FLAGS, "--data-parallel-supervisor-policy", "restart-one")
    head = make_pod(*flags, https=2, wait=False)
    with head, make_pod(*flags, "-dpr", "2", member_of=head, https=2) as member:
        head.until_ready()
        yield Pair(head, member)


def test_every_rank_has_a_port_and_the_supervisor_tells_of_them(pair: Pair) -> None:
    assert [(r["rank"], r["state"], r["pod"]) for r in pair.head.manage("/ranks").json["ranks"]] == [
        (0, "READY", "head"),
        (1, "READY", "head"),
        (2, "READY", "member"),
        (3, "READY", "member"),
    ]
    assert set(pair.head.children()) == {"api-0", "api-1", "rank-0", "rank-1"}
    assert set(pair.member.children()) == {"api-0", "api-1", "rank-2", "rank-3"}
    assert len({text(pod, index, max_tokens=30) for pod in pair for index in (0, 1)}) == 1
    for path in ("/health", "/ready", "/readyz"):
        status, body = supervised(pair.member, path)
        assert status == 200
        assert body["healthy"] is True and body["policy"] == "restart-one"
        assert [(r["rank"], r["port"], r["state"], r["listening"]) for r in body["ranks"]] == [
            (2, pair.member.port, "READY", True),
            (3, pair.member.port + 1, "READY", True),
        ]


def test_a_port_has_its_rank_alone_and_names_where_the_others_are(pair: Pair) -> None:
    assert pair.head.complete(PROMPT, rank=1, index=1).status == 200
    beside = pair.head.complete(PROMPT, rank=1)
    assert beside.status == 421
    assert f"rank 1 has its endpoint on port {pair.head.port + 1} of this pod" in beside.json["error"]["message"]
    far = pair.head.complete(PROMPT, rank=3)
    assert far.status == 421
    assert "rank 3 has its endpoint in pod member" in far.json["error"]["message"]
    assert pair.member.complete(PROMPT, rank=4).status == 400


def test_metrics_of_a_port_are_of_its_rank_and_those_of_the_pod_of_all(pair: Pair) -> None:
    def served(page: str) -> dict[str, float]:
        name = "vllm:generation_tokens_total"
        return {labels["engine"]: v for n, labels, v in parse_metrics(page) if n == name}

    for index in (0, 1):
        text(pair.member, index)
    for index in (0, 1):
        url = f"http://127.0.0.1:{pair.member.port + index}/metrics"
        until(lambda index=index, url=url: served(ask(url).text).keys() == {str(2 + index)}, "its own rank alone")
    until(lambda: served(pair.member.manage("/metrics").text).keys() == {"2", "3"}, "both ranks of the pod")


def test_calls_of_the_management_port_reach_every_rank_of_the_pod(
    make_pod: Callable[..., Pod], token_file: str
) -> None:
    with make_pod("-dp", "2", "-dpl", "2", "-dpm", "--management-token-file", token_file, https=2) as pod:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        for method, args, value in (("pause_scheduler", ["keep", False], True), ("resume_scheduler", [], False)):
            assert pod.manage(f"/utility/{method}", args, headers).status == 200
            answer = pod.manage("/utility/is_scheduler_paused", [], headers)
            assert answer.json["results"] == {"0": value, "1": value}
        assert pod.manage("/utility/sleep", [7], headers).status == 400


def test_restart_one_starts_the_lost_rank_again_while_the_other_serves(pair: Pair) -> None:
    pod = pair.member
    before, epoch = pod.children(), pod.rank(2)["epoch"]
    stream, lost = (Stream(p, PROMPT, max_tokens=n) for p, n in ((pod_at(pod, 1), 2500), (pod, 6000)))
    for s in (stream, lost):
        s.until_tokens(10)
    os.kill(before["rank-2"], signal.SIGKILL)
    assert lost.until_end().error is not None
    status, body = supervised(pod)
    assert status == 200
    assert body["ranks"][1]["state"] == "READY"
    assert pod.manage("/readyz").status == 200
    assert stream.until_end().finish_reason == "length"
    until(lambda: pod.rank(2)["state"] == "READY" and pod.rank(2)["epoch"] > epoch, "rank 2 is back")
    pair.head.until_rank(2, "READY")
    until(lambda: pod.complete(PROMPT).status == 200, "its port serves again")
    after = pod.children()
    assert after.pop("rank-2") != before.pop("rank-2")
    assert after == before


def pod_at(pod: Pod, index: int) -> Any:
    """What a Stream needs of a pod, for another of its ports."""

    class At:
        port = pod.port + index

    return At


def test_restart_one_starts_a_lost_front_end_again(pair: Pair) -> None:
    pod = pair.head
    before = pod.children()
    os.kill(before["api-1"], signal.SIGKILL)
    until(lambda: pod.children().get("api-1", before["api-1"]) != before["api-1"], "another api-1")

    def serves() -> bool:
        try:
            return pod.complete(PROMPT, index=1).status == 200
        except OSError:
            return False

    until(serves, "its port serves again")
    assert text(pod, 0) == text(pod, 1)
    after = pod.children()
    del after["api-1"], before["api-1"]
    assert after == before


def test_fail_together_ends_the_pod_with_its_first_rank_and_no_other_pod(make_pod: Callable[..., Pod]) -> None:
    head = make_pod(*FLAGS, https=2, wait=False)
    long = ("-dpr", "2", "--shutdown-timeout", "600")
    with head, make_pod(*FLAGS, *long, member_of=head, https=2) as member:
        head.until_ready()
        assert supervised(member)[1]["policy"] == "fail-together"
        pids = head.children()
        stream = Stream(member, PROMPT, max_tokens=2000).until_tokens(5)
        os.kill(member.children()["rank-3"], signal.SIGKILL)
        assert stream.until_end().finish_reason == "length"  # within --shutdown-timeout
        assert member.wait_exit() == ENDED_BY_A_CHILD
        assert "rank-3 ended (killed by SIGKILL); the others end with it" in member.log
        assert "--data-parallel-supervisor-policy fail-together" in member.log
        assert "starting it again" not in member.log
        member.assert_gone()
        for rank in (2, 3):
            head.until_rank(rank, "LOST")
        assert {text(head, index) for index in (0, 1)}
        assert head.children() == pids
        member.start()
        member.until_ready()
        assert text(member, 1) == text(head, 1)
        head.terminate()
        assert head.wait_exit() == 0
        assert supervised(member)[0] == 200
        assert member.manage("/readyz").status == 200


@pytest.mark.parametrize("which", ["second port", "supervisor"])
def test_a_port_in_use_is_named_with_its_flag(make_pod: Callable[..., Pod], which: str) -> None:
    pod = make_pod("-dp", "2", "-dpl", "2", "-dpm", https=2, wait=False)
    port = pod.port + 1 if which == "second port" else pod.supervisor
    flag = f"--port {pod.port} + 1 (rank 1)" if which == "second port" else "--data-parallel-supervisor-port"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        pod.start()
        try:
            assert pod.wait_exit() == REFUSED
            assert flag in pod.log and str(port) in pod.log
            assert "Traceback" not in pod.log
        finally:
            taken.close()
            pod.__exit__(None, None, None)


def test_sigterm_finishes_what_every_port_runs(make_pod: Callable[..., Pod], token_file: str) -> None:
    flags = ("-dp", "2", "-dpl", "2", "-dpm", "--shutdown-timeout", "600", "--management-token-file", token_file)
    with make_pod(*flags, https=2) as pod:
        streams = [Stream(pod_at(pod, index), PROMPT, max_tokens=2000).until_tokens(10) for index in (0, 1)]
        with paused(pod):  # the streams cannot end before the test has looked
            pod.terminate()
            until(lambda: supervised(pod)[0] == 503, "the supervisor says so")
            assert not any(s.ended.is_set() for s in streams)
        assert [s.until_end().finish_reason for s in streams] == ["length"] * 2
        assert pod.wait_exit() == 0
