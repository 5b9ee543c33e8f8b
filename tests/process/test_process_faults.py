"""Processes of a running service are killed and frozen: what ends, what goes on, who comes back.

States that pass (a rank is LOST for half a second until its process is started again) are read from the log.
"""

from __future__ import annotations

import os
import signal
import time

from process_group import Group, paused
from process_pods import Answer, stopped, until
from process_streams import Stream

PROMPT = "every request finds its way"


def test_a_killed_rank_ends_its_own_requests_only_and_rejoins_alone(group: Group) -> None:
    def restarts() -> float:
        return group.headless.metric("dpi_process_restarts_total", process="rank-3")

    before, restarted = group.pids(), restarts()
    rank = group.head.rank(3)
    lost = Stream(group.head, PROMPT, rank=3, max_tokens=6000)
    others = [Stream(group.head, PROMPT, rank=rank, max_tokens=1200) for rank in range(3)]
    for stream in [lost, *others]:
        stream.until_tokens(20)
    os.kill(before["rank-3"], signal.SIGKILL)
    lost.until_end()
    assert lost.error is not None
    assert lost.error["code"] == "rank_lost"
    assert "rank 3" in lost.error["message"]

    def told() -> list[Answer] | None:
        """Answers once no API server sends anything to the dead process."""
        answers = [group.head.complete(PROMPT, rank=3) for _ in range(12)]
        return answers if all(a.status in (200, 503) for a in answers) else None

    for answer in until(told, "every API server has heard of the loss"):
        if answer.status != 200:  # not back yet
            assert "data_parallel_rank 3" in answer.json["error"]["message"]
    assert {group.head.complete(PROMPT).status for _ in range(8)} == {200}
    assert [s.until_end().finish_reason for s in others] == ["length"] * 3
    assert len({s.text for s in others}) == 1

    def anew() -> dict | None:
        entry = group.head.rank(3)
        return entry if entry["state"] == "READY" and entry["epoch"] > rank["epoch"] else None

    back = until(anew, "rank 3 is READY under a new epoch")
    assert back["restarts"] > rank["restarts"]
    group.head.until_serves(3)
    assert group.head.text(PROMPT, rank=3, max_tokens=50) == group.head.text(PROMPT, rank=0, max_tokens=50)
    after = group.pids()
    assert after.pop("rank-3") != before.pop("rank-3")
    assert after == before
    until(lambda: restarts() == restarted + 1, "its launcher counts one restart")


def test_a_frozen_rank_is_lost_and_comes_back_when_it_thaws(group: Group) -> None:
    rank = group.head.rank(2)
    pid = group.pids()["rank-2"]
    stream = Stream(group.head, PROMPT, rank=2, max_tokens=6000).until_tokens(10)
    log = len(group.head.log)
    with stopped(pid):  # not for long: after ten seconds its launcher replaces it
        lost = group.head.until_rank(2, "LOST")
    assert "silent for" in lost["error"]
    assert "rank 2 is SUSPECT" in group.head.log[log:].partition("rank 2 is LOST")[0]
    stream.until_end()
    assert stream.error is not None
    assert stream.error["code"] == "rank_lost"
    assert "rank 2" in stream.error["message"]
    back = group.head.until_rank(2, "READY")
    assert back["epoch"] > rank["epoch"]
    assert back["pid"] == pid
    assert back["boot_id"] != rank["boot_id"]
    group.head.until_serves(2)
    assert group.head.text(PROMPT, rank=2) == group.head.text(PROMPT, rank=1)
    until(lambda: group.headless.rank(2)["epoch"] == back["epoch"], "the headless pod says so too")


def test_a_rank_that_stays_frozen_gets_no_work_and_is_replaced_by_its_launcher(group: Group) -> None:
    rank = group.head.rank(1)
    before, log = group.pids(), len(group.head.log)

    def silent() -> dict | None:
        entry = group.head.rank(1)
        return entry if entry["state"] in ("SUSPECT", "LOST") else None

    with stopped(before["rank-1"]):
        assert until(silent, "the head notices")["last_seen_s"] >= 1.25
        pinned = "every API server refuses what is meant for rank 1"
        until(lambda: {group.head.complete(PROMPT, rank=1).status for _ in range(12)} == {503}, pinned)
        assert {group.head.complete(PROMPT).status for _ in range(8)} == {200}
        until(lambda: group.head.rank(1)["pid"] != before["rank-1"], "the frozen process is gone")
        back = group.head.until_rank(1, "READY")
    assert back["epoch"] > rank["epoch"]
    assert "rank 1 is LOST: silent for" in group.head.log[log:]
    assert "rank-1 hangs" in group.head.log[log:]
    group.head.until_serves(1)
    assert group.head.text(PROMPT, rank=1) == group.head.text(PROMPT, rank=0)
    after = group.pids()
    del after["rank-1"], before["rank-1"]
    assert after == before


def test_a_frozen_api_server_is_replaced_by_its_launcher(group: Group) -> None:
    before = group.pids()
    with stopped(before["api-1"]):
        until(lambda: group.pids().get("api-1", before["api-1"]) != before["api-1"], "another api-1")
    until(lambda: group.head.complete(PROMPT).status == 200, "the service answers")
    assert "api-1 hangs" in group.head.log
    after = group.pids()
    del after["api-1"], before["api-1"]
    assert after == before


def test_a_launcher_that_stood_still_blames_nobody(group: Group) -> None:
    before = group.pids()
    assert group.head.process is not None
    with stopped(group.head.process.pid):
        time.sleep(12)  # longer than a report may be late
    until(lambda: group.head.manage("/readyz").status == 200, "the head is ready")
    until(lambda: all(r["state"] == "READY" for r in group.head.ranks().values()), "all ranks are READY")
    assert group.pids() == before


def test_the_service_answers_without_its_coordinator_and_gets_it_back(group: Group) -> None:
    before = group.pids()
    os.kill(before["coordinator"], signal.SIGKILL)
    until(lambda: group.pids().get("coordinator") != before["coordinator"], "the coordinator is gone")
    assert {group.head.complete(PROMPT, rank=rank).status for rank in range(4)} == {200}
    until(lambda: group.pids().get("coordinator", before["coordinator"]) != before["coordinator"], "another one")
    stream = Stream(group.head, PROMPT, rank=3, max_tokens=6000).until_tokens(5)
    with paused(group.head):
        # The API server that did not send the request hears of it by the coordinator alone.
        until(lambda: group.servers(lambda s: load(s, 3) == 1), "rank 3's load is known in both API servers")
        stream.leave()
    after = group.pids()
    del after["coordinator"], before["coordinator"]
    assert after == before


def load(server: dict, rank: int) -> int:
    """Requests at a rank, as an API server knows."""
    return sum(waiting + running for at, _, _, waiting, running, *_ in server["loads"] if at == rank)


def test_a_killed_api_server_is_replaced_and_learns_its_ranks(group: Group) -> None:
    before = group.pids()
    streams = group.streams_at_both(PROMPT, 6000)
    for stream in streams:
        stream.until_tokens(3)
    with paused(group.head):  # so that none ends by itself
        in_flight = until(lambda: in_flight_of_both(group, len(streams)), "both API servers tell of all streams")
        os.kill(before["api-0"], signal.SIGKILL)
        until(lambda: sum(s.ended.is_set() for s in streams) == in_flight[0], "its streams end, and no others")
        assert not any(s.done for s in streams)
        survivors = [s for s in streams if not s.ended.is_set()]
        # What the killed one had asked for is dropped: ranks that stand still cannot have computed it to the end.
        until(lambda: at_ranks(group) == len(survivors), "its requests end")
        until(lambda: group.servers(lambda s: s["listening"]), "both API servers listen")
    for stream in survivors:
        stream.until_tokens(stream.tokens + 5)
        stream.leave()
    after = group.pids()
    assert after.pop("api-0") != before.pop("api-0")
    assert after == before
    group.head.until_serves(0, 1, 2, 3)
    texts = {group.head.text(PROMPT, rank=rank, max_tokens=30) for rank in range(4) for _ in range(6)}
    assert len(texts) == 1


def in_flight_of_both(group: Group, total: int) -> list[int] | None:
    """Requests of each API server, once they are `total` and both have some."""
    counts = [s["in_flight"] for s in group.head.manage("/ranks").json["api_servers"]]
    return counts if sum(counts) == total and min(counts) > 0 else None


def at_ranks(group: Group) -> int:
    """Requests at all ranks: the pods' own reports, as a restarted API server may not know yet."""
    own = {**group.head.ranks(), **group.headless.ranks()}
    return sum(r["running"] + r["waiting"] for r in own.values())
