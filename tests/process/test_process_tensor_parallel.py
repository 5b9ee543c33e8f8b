"""Ranks whose layers several processes share: tokens, the end of one worker, refusals, and what is left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from process_group import call
from process_model import CONFIG
from process_pods import Pod, stopped, until
from process_streams import Stream

PROMPT = "every request finds its way"
REFUSED = 78
MEMORY = ("--dtype", "float32", "--kv-cache-memory", "64MiB", "--served-model-name", "tiny")
"""In place of a number of blocks, so that it shows how many the memory is counted to be."""


@pytest.fixture(scope="module")
def pod(make_pod: Callable[..., Pod], token_file: str) -> Iterator[Pod]:
    """Two ranks of two workers each."""
    flags = ("-dp", "2", "-tp", "2", "--cpu-threads", "1", "--management-token-file", token_file)
    with make_pod(*MEMORY, *flags, defaults=False) as pod:
        yield pod


class One(NamedTuple):
    text: str
    blocks: int


@pytest.fixture(scope="module")
def one(make_pod: Callable[..., Pod]) -> One:
    """What a rank of one worker answers and has room for."""
    with make_pod(*MEMORY, "--cpu-threads", "1", defaults=False) as pod:
        return One(pod.text(PROMPT, max_tokens=40), blocks_of(pod))


@pytest.fixture(scope="module")
def text_of_one(one: One) -> str:
    return one.text


def blocks_of(pod: Pod) -> int:
    """Of the KV cache of its first rank."""
    found = re.search(r"KV cache (\d+) blocks", pod.log)
    assert found is not None
    return int(found[1])


def whole(pod: Pod, rank: int, after: int = 0) -> dict[str, Any]:
    """The rank's entry once it is READY under an epoch above `after` and has told of its workers.

    The lease says READY at once; pids come with the next report of the rank.
    """

    def look() -> dict[str, Any] | None:
        entry = pod.rank(rank)
        told = entry["workers"] and entry["workers"][0] == entry["pid"]
        return entry if entry["state"] == "READY" and entry["epoch"] > after and told else None

    return until(look, f"rank {rank} is READY above epoch {after} and shows its workers")


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_two_workers_answer_as_one(pod: Pod, text_of_one: str) -> None:
    for rank in (0, 1):
        assert pod.text(PROMPT, rank=rank, max_tokens=40) == text_of_one
    streams = [Stream(pod, PROMPT, rank=i % 2, max_tokens=40) for i in range(6)]
    assert {s.until_end().text for s in streams} == {text_of_one}
    sampled = [pod.text(PROMPT, rank=rank, temperature=1.0, seed=5, max_tokens=30) for rank in (0, 1)]
    assert sampled[0] == sampled[1]


def test_ranks_show_their_workers(pod: Pod) -> None:
    for rank in (0, 1):
        whole(pod, rank)
    status = pod.manage("/ranks").json
    assert status["tensor_parallel_size"] == 2
    for entry in status["ranks"]:
        assert entry["fields"]["tensor_parallel_size"] == 2
        first, second = entry["workers"]
        assert first == entry["pid"]
        assert psutil.Process(second).ppid() == first


@pytest.mark.parametrize("busy", [False, True])
def test_a_killed_worker_ends_its_rank_which_comes_back_whole_and_alone(pod: Pod, text_of_one: str, busy: bool) -> None:
    other, rank, log = whole(pod, 0), whole(pod, 1), len(pod.log)
    stream = Stream(pod, PROMPT, rank=1, max_tokens=6000).until_tokens(10) if busy else None
    victim = rank["workers"][1]
    os.kill(victim, signal.SIGKILL)
    if stream is not None:
        stream.until_end()
        assert stream.error is not None
        assert stream.error["code"] == "rank_lost"
    back = whole(pod, 1, rank["epoch"])
    assert back["restarts"] == rank["restarts"] + 1
    assert not set(rank["workers"]) & set(back["workers"])
    assert all(gone(pid) for pid in rank["workers"])
    said = pod.log[log:]
    assert f"worker 1 of rank 1 (pid {victim}) ended (killed by SIGKILL)" in said
    # The head knows why; the front end, which only saw the connection end, may have spoken first.
    assert any("rank 1 is LOST" in line and f"(pid {victim})" in line for line in said.splitlines())
    assert [pod.rank(0)[key] for key in ("pid", "epoch", "workers")] == [
        other[key] for key in ("pid", "epoch", "workers")
    ]
    pod.until_serves(1)
    assert pod.text(PROMPT, rank=1, max_tokens=40) == text_of_one


def test_a_killed_rank_takes_its_workers_with_it(pod: Pod, text_of_one: str) -> None:
    rank = whole(pod, 0)
    first, second = rank["workers"]
    os.kill(first, signal.SIGKILL)
    until(lambda: gone(second), "the other worker ends with its rank")
    whole(pod, 0, rank["epoch"])
    pod.until_serves(0)
    assert pod.text(PROMPT, rank=0, max_tokens=40) == text_of_one


def loading_worker(pod: Pod) -> psutil.Process:
    """A worker that was started and is not ready yet."""

    def found() -> psutil.Process | None:
        for process in pod.family():
            try:
                if "tensor_process" in process.cmdline()[-1]:
                    return process
            except (psutil.Error, IndexError):
                continue
        return None

    return until(found, "a worker is started")


def test_a_worker_killed_while_it_loads_is_no_end(make_pod: Callable[..., Pod]) -> None:
    with make_pod("-tp", "2", wait=False) as pod:
        loading_worker(pod).kill()
        pod.until_ready()
        until(lambda: pod.rank(0)["restarts"] == 1, "it was started once more")
        assert "worker 1 of rank 0" in pod.log
        assert pod.complete(PROMPT).status == 200


def test_a_launch_stops_in_order_while_its_workers_load(make_pod: Callable[..., Pod]) -> None:
    with make_pod("-tp", "2", wait=False) as pod:
        loading_worker(pod)
        pod.terminate()
        assert pod.wait_exit() == 0
        assert "Traceback" not in pod.log


def test_a_killed_launcher_leaves_no_worker(make_pod: Callable[..., Pod]) -> None:
    with make_pod("-tp", "2") as pod:
        assert len(whole(pod, 0)["workers"]) == 2
        pod.kill()
        pod.assert_gone()


@pytest.mark.parametrize("busy", [False, True])
def test_a_frozen_worker_ends_its_rank(pod: Pod, text_of_one: str, busy: bool) -> None:
    rank, log = whole(pod, 1), len(pod.log)
    victim = rank["workers"][1]
    stream = Stream(pod, PROMPT, rank=1, max_tokens=6000).until_tokens(10) if busy else None
    os.kill(victim, signal.SIGSTOP)
    if stream is not None:
        assert stream.until_end().error["code"] == "rank_lost"
    whole(pod, 1, rank["epoch"])
    assert f"worker 1 of rank 1 (pid {victim}) is frozen" in pod.log[log:]
    assert gone(victim)
    pod.until_serves(1)
    assert pod.text(PROMPT, rank=1, max_tokens=40) == text_of_one


def test_a_frozen_worker_does_not_keep_a_launch_from_stopping(make_pod: Callable[..., Pod]) -> None:
    with make_pod("-tp", "2") as pod, stopped(whole(pod, 0)["workers"][1]):
        pod.terminate()
        assert pod.wait_exit() == 0


@pytest.mark.parametrize("level", [1, 2])
def test_all_workers_sleep_and_wake(pod: Pod, text_of_one: str, level: int) -> None:
    workers = {n: whole(pod, n)["workers"] for n in (0, 1)}
    answer = call(pod, "sleep", level)
    assert answer.status == 200, answer.text
    answer = call(pod, "wake_up")
    assert answer.status == 200, answer.text
    assert pod.text(PROMPT, rank=1, max_tokens=40) == text_of_one
    assert {n: whole(pod, n)["workers"] for n in (0, 1)} == workers


def test_two_workers_count_what_both_hold_of_the_kv_cache(pod: Pod, one: One) -> None:
    """Each has a key-value head."""
    assert blocks_of(pod) == one.blocks


def test_four_workers_share_two_kv_heads(make_pod: Callable[..., Pod], one: One) -> None:
    """Two of them have the same one, and the bytes are for fewer blocks."""
    with make_pod(*MEMORY, "-tp", "4", "--cpu-threads", "4", defaults=False) as pod:
        assert pod.text(PROMPT, max_tokens=40) == one.text
        maps = [m.path for process in pod.family() for m in process.memory_maps()]
        assert any(path.startswith("/memfd:dpi-tensor-parallel") for path in maps)
        assert not [path for path in maps if path.startswith("/dev/shm/")]
        assert blocks_of(pod) == one.blocks // 2


@pytest.mark.parametrize(
    ("flags", "change", "words"),
    [
        (["-tp", "3"], {}, ["attention heads 4 is no multiple of 3", "Sizes that fit: 1, 2, 4"]),
        (["-tp", "2"], {"vocab_size": 321}, ["vocabulary size 321 is no multiple of 2"]),
        (["-tp", "2"], {"intermediate_size": 97}, ["intermediate size 97 is no multiple of 2"]),
    ],
)
def test_sizes_that_do_not_divide_are_refused_before_anything_is_started(
    make_pod: Callable[..., Pod],
    tiny_model: Path,
    tmp_path: Path,
    flags: list[str],
    change: dict[str, Any],
    words: list[str],
) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(tiny_model, folder)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **change}))
    with make_pod(*flags, model=folder, wait=False) as pod:
        assert pod.wait_exit() == REFUSED
        for word in words:
            assert word in pod.log
        assert "importing torch" not in pod.log
        assert "Traceback" not in pod.log
