"""SIGTERM in every situation, and a head that is gone."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
from process_group import call, paused
from process_pods import PATIENCE, Pod, until
from process_streams import Stream

PROMPT = "wait for the head"


def refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), PATIENCE).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_running_stream_finishes_and_new_connections_are_refused(
    make_pod: Callable[..., Pod], token_file: str
) -> None:
    with make_pod("--shutdown-timeout", "600", "--management-token-file", token_file) as pod:
        stream = Stream(pod, PROMPT, max_tokens=2000).until_tokens(10)
        with paused(pod):  # the stream cannot end before the test has looked
            pod.terminate()
            until(lambda: refused(pod.port), "the HTTP port refuses connections")
            assert not stream.ended.is_set()
            answer = pod.manage("/readyz")
            assert (answer.status, answer.text) == (503, "draining\n")
            assert pod.manage("/livez").status == 200
        assert stream.until_end().finish_reason == "length"
        assert stream.done
        assert stream.error is None
        assert pod.wait_exit() == 0
        pod.assert_gone()


def test_a_stream_longer_than_the_time_limit_ends_with_an_error_event(
    make_pod: Callable[..., Pod], token_file: str
) -> None:
    with make_pod("--shutdown-timeout", "1", "--management-token-file", token_file) as pod:
        stream = Stream(pod, PROMPT, max_tokens=5000).until_tokens(10)
        stand_still(pod)
        pod.terminate()
        stream.until_end()
        assert stream.error is not None
        assert stream.error["code"] == "shutting_down"
        assert stream.done
        assert pod.wait_exit() == 0


def stand_still(pod: Pod) -> None:
    """The scheduler is paused for good, so that no stream can end by itself."""
    assert call(pod, "pause_scheduler", "keep", False).status == 200


def test_two_signals_end_a_pod_at_once(make_pod: Callable[..., Pod], token_file: str) -> None:
    with make_pod("--shutdown-timeout", "600", "--management-token-file", token_file) as pod:
        stream = Stream(pod, PROMPT, max_tokens=5000).until_tokens(10)
        stand_still(pod)
        pod.terminate()
        until(lambda: refused(pod.port), "it drains")
        pod.terminate()
        stream.until_end()
        assert stream.error is not None
        assert stream.error["code"] == "shutting_down"
        assert pod.wait_exit() == 0


@pytest.mark.parametrize("stage", ["importing torch", "HELLO"])
def test_sigterm_while_a_rank_loads_ends_promptly(make_pod: Callable[..., Pod], stage: str) -> None:
    with make_pod(wait=False) as pod:
        until(lambda: stage in pod.log or stage in states(pod), f"rank 0 is at {stage}", every=0.01)
        pod.terminate()
        assert pod.wait_exit() == 0
        assert "starting it again" not in pod.log
        if stage == "HELLO":  # torch's libraries are loaded without heeding signals, on a busy machine for seconds
            assert "is killed" not in pod.log


def states(pod: Pod) -> str:
    try:
        return pod.manage("/ranks").text
    except OSError:
        return ""


def test_sigterm_while_ranks_look_for_their_head_ends_promptly(make_pod: Callable[..., Pod]) -> None:
    head = make_pod()
    with make_pod("-dp", "3", "-dpl", "2", "-dpr", "1", head=head, wait=False) as pod:
        until(lambda: "joining the head at" in states(pod), "the ranks look for their head")
        assert pod.manage("/startupz").status == 503
        assert "joining the head at tcp://127.0.0.1" in pod.manage("/startupz").text
        pod.terminate()
        assert pod.wait_exit() == 0
        assert "is killed" not in pod.log


def test_a_headless_pod_finishes_its_requests_while_the_head_routes_elsewhere(make_pod: Callable[..., Pod]) -> None:
    head = make_pod("-dp", "2", "-dpl", "1", wait=False)
    with head, make_pod("-dp", "2", "-dpl", "1", "-dpr", "1", "--shutdown-timeout", "600", head=head) as headless:
        head.until_ready()
        stream = Stream(head, PROMPT, rank=1, max_tokens=3000).until_tokens(10)
        headless.terminate()
        assert head.until_rank(1, "SUSPECT")["stage"] == "draining"
        assert headless.manage("/readyz").text == "draining\n"
        while not stream.ended.wait(0.1):  # nothing fails meanwhile; the stream gets the processor in between
            assert head.complete(PROMPT, max_tokens=1).status == 200
        assert stream.finish_reason == "length"
        assert headless.wait_exit() == 0
        assert "left: stopped" in head.until_rank(1, "LOST")["error"]
        assert head.complete(PROMPT).status == 200

        def pinned() -> str:
            answer = head.complete(PROMPT, rank=1)
            assert answer.status == 503
            return answer.json["error"]["message"]

        until(lambda: "rank is LOST" in pinned(), "the API server says why")


def test_a_killed_head_leaves_nothing_and_its_ranks_join_the_next_one_without_loading(
    make_pod: Callable[..., Pod],
) -> None:
    head = make_pod("-dp", "3", "-dpl", "1", wait=False)
    with head, make_pod("-dp", "3", "-dpl", "2", "-dpr", "1", head=head) as headless:
        head.until_ready()
        stream = Stream(head, PROMPT, rank=2, max_tokens=8000).until_tokens(10)
        text = head.text(PROMPT, rank=2)
        before = headless.ranks()
        head.kill()
        head.assert_gone()
        stream.until_end()
        until(lambda: "joining again" in headless.rank(1)["stage"], "the ranks look for a new head")
        assert headless.manage("/readyz").status == 503
        assert headless.manage("/livez").status == 200
        head.start()
        head.until_ready()
        for rank in (1, 2):
            back = head.until_rank(rank, "READY")
            assert back["epoch"] > before[rank]["epoch"]
            assert back["pid"] == before[rank]["pid"]
            head.until_serves(rank)
            assert head.text(PROMPT, rank=rank) == text
        until(lambda: headless.manage("/readyz").status == 200, "the headless pod is ready again")
        until(lambda: headless.rank(1)["running"] == headless.rank(2)["running"] == 0, "nothing is left running")


def test_ranks_that_find_no_new_head_end_their_pod_with_an_error(make_pod: Callable[..., Pod]) -> None:
    shared = ("-dp", "3", "-dpl", "1", "--handshake-timeout")
    head = make_pod(*shared, "600", wait=False)
    # The time limit holds for the start too, so the impatient one loads alone.
    with head, make_pod(*shared, "600", "-dpr", "2", head=head, name="patient") as patient:
        head.until_rank(0, "READY")
        with make_pod(*shared, "45", "-dpr", "1", head=head, name="impatient") as impatient:
            head.until_ready()
            head.terminate()
            assert head.wait_exit() == 0
            for rank, pod in ((1, impatient), (2, patient)):
                until(lambda rank=rank, pod=pod: "joining again" in pod.rank(rank)["stage"], "it looks for a head")
            assert impatient.wait_exit() == 3
            assert "rank-1 found no head in time" in impatient.log
            assert f"tcp://127.0.0.1:{head.rpc}" in impatient.log
        assert "joining again" in patient.rank(2)["stage"]
        patient.terminate()
        assert patient.wait_exit() == 0
