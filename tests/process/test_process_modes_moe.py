"""Ranks that share experts behind endpoints of their own: hybrid and multi-port balancing, two pods of two ranks."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from process_moe import make_moe_model
from process_pods import Pod, ask, until
from process_streams import Stream, caught

COMMON = (
    "--dtype", "float32", "--max-model-len", "2048", "--num-gpu-blocks-override", "512", "--cpu-threads", "1",
    "--enable-expert-parallel", "--enable-dev-endpoints", "-dp", "4", "-dpl", "2",
)  # fmt: skip
MODES = {
    "hybrid": ("--data-parallel-hybrid-lb", "--api-server-count", "1"),
    "multi-port": ("--data-parallel-multi-port-external-lb", "--data-parallel-supervisor-policy", "restart-one"),
}
PROMPTS = ["the quick brown fox", "every request finds its way"]
TOKENS = 32


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_moe_model(tmp_path_factory.mktemp("moe") / "tiny-moe")


@pytest.fixture(scope="module")
def expected(moe: Path, process_cache: Path) -> list[str]:
    """What one rank with all experts says."""
    with Pod(moe, *COMMON[:8], cache=process_cache, name="alone") as pod:
        return [pod.text(prompt, max_tokens=TOKENS) for prompt in PROMPTS]


class Pair(NamedTuple):
    mode: str
    head: Pod
    member: Pod

    def pod_of(self, rank: int) -> Pod:
        return self.head if rank < 2 else self.member

    def endpoint(self, rank: int) -> dict[str, int]:
        """How a request reaches the rank through its own pod."""
        return {"index": rank % 2} if self.mode == "multi-port" else {"rank": rank}

    def text(self, rank: int, prompt: str, max_tokens: int = TOKENS) -> str:
        """Asked again while the group is not whole."""

        def answered() -> str | None:
            answer = self.pod_of(rank).complete(prompt, max_tokens=max_tokens, **self.endpoint(rank))
            assert answer.status in (200, 503), answer.text
            return answer.json["choices"][0]["text"] if answer.status == 200 else None

        return until(answered, f"rank {rank} answers")

    def call(self, path: str) -> None:
        """At every endpoint of both pods at one time, since each has ranks of its own."""
        urls = [
            f"http://127.0.0.1:{pod.port + index}{path}"
            for pod in (self.head, self.member)
            for index in range(2 if self.mode == "multi-port" else 1)
        ]
        with ThreadPoolExecutor(len(urls)) as pool:
            assert [a.status for a in pool.map(lambda url: ask(url, method="POST"), urls)] == [200] * len(urls)


@pytest.fixture(scope="module", params=MODES)
def running_pair(request: pytest.FixtureRequest, moe: Path, process_cache: Path) -> Iterator[Pair]:
    flags = (*COMMON, *MODES[request.param])
    https = 2 if request.param == "multi-port" else 1
    head = Pod(moe, *flags, cache=process_cache, https=https, wait=False)
    with head, Pod(moe, *flags, "-dpr", "2", cache=process_cache, member_of=head, https=https) as member:
        head.until_ready()
        yield Pair(request.param, head, member)


@pytest.fixture
def pair(running_pair: Pair) -> Pair:
    for pod in (running_pair.head, running_pair.member):
        pod.until_ready()
    return running_pair


def test_every_endpoint_gives_the_text_of_one_rank_with_all_experts(pair: Pair, expected: list[str]) -> None:
    """The first request of an idle group comes to each rank in turn: whichever it is wakes all others."""
    for rank in (3, 0, 2, 1):
        assert [pair.text(rank, prompt) for prompt in PROMPTS] == expected
    assert "coordinator" in pair.head.children() and "coordinator" not in pair.member.children()
    for rank in range(4):
        pod, engine = pair.pod_of(rank), str(rank)
        until(
            lambda p=pod, e=engine: p.metric("dpi_lockstep_dummy_steps_total", engine=e) > 0,
            f"rank {rank} took part in steps of the others",
        )


def test_requests_at_all_endpoints_at_one_time_give_the_same_texts(pair: Pair, expected: list[str]) -> None:
    asked = [(rank, i) for i in (0, 1) for rank in range(4)]
    with ThreadPoolExecutor(len(asked)) as pool:
        texts = list(pool.map(lambda case: pair.text(case[0], PROMPTS[case[1]]), asked))
    assert texts == [expected[i] for _, i in asked]


def test_a_pause_holds_when_every_endpoint_was_told_and_ends_the_same_way(pair: Pair, expected: list[str]) -> None:
    stream = caught(
        lambda: Stream(pair.head, PROMPTS[0], max_tokens=900).until_tokens(5),
        lambda: pair.call("/pause?mode=keep"),
        lambda: pair.call("/resume"),
    )
    at = stream.at_rest()
    pair.call("/resume")
    until(lambda: stream.tokens > at or stream.ended.is_set(), "the stream goes on")
    assert stream.until_end().finish_reason == "length", (stream.events[-1:], stream.failure)
    assert pair.text(2, PROMPTS[1]) == expected[1]


@pytest.mark.parametrize("lost", [3, 0])
def test_a_killed_rank_comes_back_and_requests_of_the_other_pod_go_on(
    pair: Pair, expected: list[str], lost: int
) -> None:
    other = pair.member if lost < 2 else pair.head
    pair.text(2 if lost < 2 else 0, PROMPTS[0])  # the group is whole
    kept = Stream(other, PROMPTS[0], max_tokens=600).until_tokens(5)
    before = {name: pid for pod in pair[1:] for name, pid in pod.children().items() if name.startswith("rank-")}
    os.kill(before[f"rank-{lost}"], signal.SIGKILL)
    assert kept.until_end().finish_reason == "length", (kept.events[-1:], kept.failure)
    for rank in range(4):
        assert pair.text(rank, PROMPTS[1]) == expected[1]

    def ranks() -> dict[str, int]:
        return {name: pid for pod in pair[1:] for name, pid in pod.children().items() if name.startswith("rank-")}

    until(lambda: len(ranks()) == 4, "all ranks are named")
    after = ranks()
    assert after.pop(f"rank-{lost}") != before.pop(f"rank-{lost}")
    assert after == before


def test_the_head_comes_back_and_the_group_with_it(pair: Pair, expected: list[str]) -> None:
    """The member's ranks keep their weights and requests, and wait for the group as long as it takes."""
    kept = Stream(pair.member, PROMPTS[0], max_tokens=900).until_tokens(5)
    ranks = {name: pid for name, pid in pair.member.children().items() if name.startswith("rank-")}
    family = pair.head.family()
    pair.head.kill()
    until(lambda: not any(p.is_running() and p.status() != "zombie" for p in family), "the head's processes end")
    until(lambda: pair.member.manage("/readyz").status == 503, "the member takes no work alone")
    pair.head.start()
    for pod in pair[1:]:
        pod.until_ready()
    assert kept.until_end().finish_reason == "length", (kept.events[-1:], kept.failure)
    for rank in range(4):
        assert pair.text(rank, PROMPTS[0]) == expected[0]
    assert {n: p for n, p in pair.member.children().items() if n.startswith("rank-")} == ranks


@pytest.mark.parametrize("rank", [0, 1])
def test_pods_that_stop_together_finish_what_one_of_them_has(moe: Path, process_cache: Path, rank: int) -> None:
    """A pod without requests stays until the others need its experts no more."""
    flags = (*COMMON[:-4], "-dp", "2", "--shutdown-timeout", "600")
    head = Pod(moe, *flags, "-dpn", "0", cache=process_cache, wait=False)
    with head, Pod(moe, *flags, "-dpn", "1", cache=process_cache, member_of=head) as member:
        head.until_ready()
        pods = (head, member)
        stream = Stream(pods[rank], PROMPTS[0], max_tokens=1000).until_tokens(5)
        for pod in pods:
            pod.terminate()
        assert stream.until_end().finish_reason == "length", (stream.events[-1:], stream.failure)
        assert [pod.wait_exit() for pod in pods] == [0, 0]
        assert "is killed" not in head.log + member.log


def test_a_port_of_the_coordinator_that_is_in_use_is_named(moe: Path, process_cache: Path) -> None:
    """Dense multi-port groups have no coordinator; with experts they have."""
    pod = Pod(moe, *COMMON, *MODES["multi-port"], cache=process_cache, https=2, wait=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", pod.rpc + 1))
        taken.listen()
        with pod:
            assert pod.wait_exit() == 78
            taken.close()
            assert "coordinator to front ends (--data-parallel-rpc-port" in pod.log


def lost_in_names(moe: Path, cache: Path, *args: str) -> Pod:
    """A launch that joins a head whose name has no address; not started."""
    name = ("--data-parallel-address", "no-such-head.invalid")
    return Pod(moe, *COMMON, *name, *args, cache=cache, head=Pod(moe, cache=cache), wait=False)


def says_what_it_looks_for(pod: Pod) -> bool:
    try:
        answer = pod.manage("/startupz")
    except OSError:
        return False
    return answer.status == 503 and "looking for the head: host 'no-such-head.invalid': no such name" in answer.text


def test_a_heads_name_may_get_its_address_later(moe: Path, process_cache: Path) -> None:
    """As that of a pod which is not there yet: it is looked up anew, and named at the time limit."""
    with lost_in_names(moe, process_cache, "-dpr", "2", "--handshake-timeout", "20") as pod:
        until(lambda: says_what_it_looks_for(pod), "/startupz says what it looks for")
        assert pod.wait_exit() == 3
        assert "not complete after --handshake-timeout 20 s; looking for the head: host 'no-such" in pod.log


def test_a_launch_that_looks_for_a_name_stops_when_it_is_told_to(moe: Path, process_cache: Path) -> None:
    with lost_in_names(moe, process_cache, "-dpr", "2", "--handshake-timeout", "3600") as pod:
        until(lambda: says_what_it_looks_for(pod), "/startupz says what it looks for")
        pod.terminate()
        assert pod.wait_exit() == 0
