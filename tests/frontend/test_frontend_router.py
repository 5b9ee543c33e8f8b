"""Placement of requests: always on a rank of lowest score, counts exact, whatever happens in between."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpi_engine.frontend.affinity import AffinityTable, affinity_keys
from dpi_engine.frontend.interface import InvalidRequest, NoReadyRank, RankElsewhere
from dpi_engine.frontend.router import KV_PRESSURE_START, KV_PRESSURE_WEIGHT, Router
from dpi_engine.wire.messages import RankState

READY, SUSPECT, LOST = RankState.READY, RankState.SUSPECT, RankState.LOST


def ready_router(num_ranks: int, **options: Any) -> Router:
    router = Router(num_ranks, **options)
    for rank in range(router.first_rank, router.first_rank + num_ranks):
        router.set_state(rank, READY, 1)
    return router


class Model:
    """The same by brute force: everything counted anew from a plain list of requests."""

    def __init__(self, num_ranks: int, clients: int, unit: int) -> None:
        self.clients, self.unit = clients, unit
        self.states = [RankState.NEW] * num_ranks
        self.epochs = [0] * num_ranks
        self.seqs = [-1] * num_ranks
        self.reports: list[tuple[int, float] | None] = [None] * num_ranks
        self.others = [(0, 0)] * num_ranks
        self.requests: dict[str, list[int]] = {}  # id -> [rank, tokens, prefilled]
        self.since = [0] * num_ranks  # sent there after its last report

    def own(self, rank: int) -> tuple[int, int]:
        mine = [(tokens, done) for r, tokens, done in self.requests.values() if r == rank]
        return len(mine), sum(tokens for tokens, done in mine if not done)

    def score(self, rank: int) -> int:
        requests, tokens = self.own(rank)
        other_requests, other_tokens = self.others[rank]
        unseen = (self.clients - 1) * min(self.since[rank], requests)
        score = max(self.clients * requests, requests + other_requests + unseen)
        score += max(self.clients * tokens, tokens + other_tokens) // self.unit
        report = self.reports[rank]
        if report is not None and report[1] > KV_PRESSURE_START:
            score += int((report[0] + 1) * KV_PRESSURE_WEIGHT * (report[1] - KV_PRESSURE_START))
        return score

    def mean(self) -> tuple[int, int]:
        heard = [r for r, s in enumerate(self.states) if s == READY and self.reports[r] is not None]
        if not heard:
            return 0, 0
        requests = sum(self.own(r)[0] + self.others[r][0] for r in heard)
        tokens = sum(self.own(r)[1] + self.others[r][1] for r in heard)
        return -(-requests // len(heard)), tokens // len(heard)

    def assume(self, rank: int, mean: tuple[int, int]) -> None:
        own = self.own(rank)
        self.others[rank] = (max(0, mean[0] - own[0]), max(0, mean[1] - own[1]))


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("pick"), st.integers(0, 3000)),
        st.tuples(st.just("pinned"), st.integers(-1, 6)),
        st.tuples(st.just("prefilled"), st.integers(0, 60)),
        st.tuples(st.just("finish"), st.integers(0, 60)),
        st.tuples(
            st.just("report"),
            st.integers(0, 4),
            st.integers(-2, 2),
            st.one_of(st.none(), st.integers(0, 9)),
            st.integers(0, 40),
            st.integers(0, 40),
            st.floats(0, 1),
            st.integers(0, 5000),
        ),
        st.tuples(st.just("state"), st.integers(0, 4), st.sampled_from([READY, SUSPECT, LOST]), st.integers(-1, 1)),
        st.tuples(st.just("refresh")),
    ),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(OPERATIONS, st.integers(1, 5), st.integers(1, 4))
def test_every_pick_has_the_lowest_score_and_counts_stay_exact(
    operations: list[tuple], num_ranks: int, clients: int
) -> None:
    router = Router(num_ranks, client_count=clients, prefill_unit=256)
    model = Model(num_ranks, clients, 256)
    number = 0
    for name, *args in operations:
        live = list(model.requests)
        if name in ("pick", "pinned"):
            number += 1
            pinned = args[0] if name == "pinned" else None
            tokens = args[0] if name == "pick" else 100
            ready = [r for r in range(num_ranks) if model.states[r] == READY]
            if pinned is not None and not 0 <= pinned < num_ranks:
                with pytest.raises(InvalidRequest):
                    router.pick(f"r{number}", tokens, pinned)
                continue
            if (pinned is not None and pinned not in ready) or not ready:
                with pytest.raises(NoReadyRank):
                    router.pick(f"r{number}", tokens, pinned)
                continue
            place = router.pick(f"r{number}", tokens, pinned, affinity=(number % 3,))
            if pinned is None:
                assert place.rank in ready
                assert model.score(place.rank) == min(model.score(r) for r in ready)
            else:
                assert place.rank == pinned
            assert place.epoch == model.epochs[place.rank]
            model.requests[f"r{number}"] = [place.rank, tokens, 0]
            model.since[place.rank] += 1
        elif name in ("prefilled", "finish") and live:
            wire_id = live[args[0] % len(live)]
            if name == "finish":
                router.finish(wire_id)
                del model.requests[wire_id]
                assert router.finish(wire_id) is None
            else:
                router.prefilled(wire_id)
                model.requests[wire_id][2] = 1
        elif name == "report" and args[0] < num_ranks:
            rank, shift, seq, waiting, running, kv_usage, tokens = args
            epoch = model.epochs[rank] + shift
            taken = router.report(rank, epoch, seq, waiting, running, kv_usage, tokens)
            fresh = shift == 0 and model.states[rank] != LOST and (seq is None or seq > model.seqs[rank])
            assert taken == fresh
            if fresh:
                own = model.own(rank)
                model.seqs[rank] = model.seqs[rank] if seq is None else seq
                model.reports[rank] = (waiting, kv_usage)
                model.since[rank] = 0
                model.others[rank] = (max(0, waiting + running - own[0]), max(0, tokens - own[1]))
        elif name == "state" and args[0] < num_ranks:
            rank, state, shift = args
            epoch = model.epochs[rank] + shift
            gone = router.set_state(rank, state, epoch)
            if shift < 0:
                assert gone == []
                continue
            if state == LOST or shift > 0:
                assert sorted(gone) == sorted(i for i, r in model.requests.items() if r[0] == rank)
                model.requests = {i: r for i, r in model.requests.items() if r[0] != rank}
                model.reports[rank], model.seqs[rank], model.others[rank] = None, -1, (0, 0)
                model.since[rank] = 0
            else:
                assert gone == []
            was, model.states[rank], model.epochs[rank] = model.states[rank], state, epoch
            if state == READY and was != READY and model.reports[rank] is None:
                model.assume(rank, model.mean())
        elif name == "refresh":
            router.refresh_unknown()
            mean = model.mean()
            for rank in range(num_ranks):
                if model.states[rank] == READY and model.reports[rank] is None:
                    model.assume(rank, mean)
        for rank in range(num_ranks):
            assert router.own(rank) == model.own(rank) >= (0, 0)
            assert router.score(rank) == model.score(rank)
        assert router.in_flight == len(model.requests)
        assert router.queued == sum(1 for r in model.requests.values() if not r[2])
    for rank in range(num_ranks):
        router.set_state(rank, LOST, model.epochs[rank])
        assert router.own(rank) == (0, 0)
    assert (router.in_flight, router.queued, router.num_ready) == (0, 0, 0)


def test_equal_load_rotates_over_all_ranks() -> None:
    router = ready_router(4)
    picks = []
    for i in range(40):  # one after another: every score is 0 again before the next
        picks.append(router.pick(f"r{i}", 10).rank)
        router.finish(f"r{i}")
    assert picks == [0, 1, 2, 3] * 10


def test_a_burst_before_any_report_is_spread_evenly() -> None:
    router = ready_router(4)
    for i in range(16):
        router.pick(f"r{i}", 10)
    assert [router.own(rank)[0] for rank in range(4)] == [4, 4, 4, 4]


def test_front_ends_begin_at_ranks_of_their_own() -> None:
    firsts = [ready_router(4, client_index=i, client_count=4).pick("r", 1).rank for i in range(4)]
    assert firsts == [0, 1, 2, 3]


def test_bursts_of_several_front_ends_at_one_instant_differ_by_two_at_most() -> None:
    routers = [ready_router(4, client_index=i, client_count=4) for i in range(4)]
    totals = [0] * 4
    for client, router in enumerate(routers):
        for i in range(15 + client % 2):
            totals[router.pick(f"r{i}", 10).rank] += 1
    assert max(totals) - min(totals) <= 2


def test_a_report_older_than_a_dispatch_does_not_erase_it() -> None:
    router = ready_router(2)
    for i in range(10):
        router.pick(f"r{i}", 10)
        router.report(0, 1, i, 0, 0, 0.0)  # both engines have yet to see what was sent
        router.report(1, 1, i, 0, 0, 0.0)
    assert [router.own(rank)[0] for rank in range(2)] == [5, 5]


def test_work_of_others_counts_and_our_own_end_is_seen_at_once() -> None:
    router = ready_router(2)
    for i in range(4):
        router.pick(f"r{i}", 0, pinned=0)
    router.report(0, 1, 1, 2, 5, 0.0)  # 7 there, 4 of them ours
    assert router.score(0) == 7
    for i in range(4):
        router.finish(f"r{i}")
    assert router.score(0) == 3  # no newer report needed
    assert router.pick("next", 0).rank == 1


def test_a_long_prompt_that_waits_for_prefill_weighs_like_requests() -> None:
    router = ready_router(2, prefill_unit=512)
    long = router.pick("long", 4096).rank
    assert [router.pick(f"r{i}", 16).rank for i in range(5)] == [1 - long] * 5
    router.prefilled("long")
    assert router.score(long) == 1


def test_kv_pressure_turns_requests_away_before_the_cache_is_full() -> None:
    router = ready_router(2)
    router.report(0, 1, 1, 0, 2, 0.95)
    router.report(1, 1, 1, 0, 3, 0.10)
    assert router.pick("r", 10).rank == 1


def test_a_rank_that_has_not_reported_is_not_taken_for_idle() -> None:
    router = Router(3)
    for rank in (0, 1):
        router.set_state(rank, READY, 1)
        router.report(rank, 1, 1, 4, 6, 0.2)
    router.set_state(2, READY, 1)
    assert router.score(2) == 10
    for rank in (0, 1):
        router.report(rank, 1, 2, 0, 0, 0.0)
    router.refresh_unknown()
    assert router.score(2) == 0


@pytest.mark.parametrize("rank", [-1, 12, 10**9])
def test_a_pinned_rank_that_does_not_exist_is_refused_with_the_range(rank: int) -> None:
    router = ready_router(4, first_rank=4, group_size=12)
    with pytest.raises(InvalidRequest, match=f"rank {rank} does not exist; expected 0 to 11 .*serves ranks 4 to 7"):
        router.pick("r", 1, pinned=rank)
    assert router.in_flight == 0


@pytest.mark.parametrize("rank", [0, 3, 8, 11])
def test_a_pinned_rank_of_another_front_end_is_refused_with_its_place(rank: int) -> None:
    router = ready_router(4, first_rank=4, group_size=12, elsewhere=lambda rank: f"ask pod {rank // 4}")
    with pytest.raises(RankElsewhere, match=f"rank {rank}: this endpoint serves ranks 4 to 7; ask pod {rank // 4}"):
        router.pick("r", 1, pinned=rank)
    assert router.in_flight == 0


def test_a_front_end_of_one_rank_says_so() -> None:
    router = ready_router(1, first_rank=2, group_size=4)
    with pytest.raises(RankElsewhere, match="this endpoint serves rank 2; it is served by another launch"):
        router.pick("r", 1, pinned=3)


def test_a_pinned_rank_is_a_global_number_and_must_be_ready() -> None:
    router = ready_router(4, first_rank=4)
    assert router.pick("a", 1, pinned=6).rank == 6
    router.set_state(6, SUSPECT, 1)
    with pytest.raises(NoReadyRank, match="SUSPECT"):
        router.pick("b", 1, pinned=6)


def test_no_ready_rank_says_how_the_ranks_stand() -> None:
    router = ready_router(2)
    router.set_state(0, LOST, 1)
    router.set_state(1, SUSPECT, 1)
    with pytest.raises(NoReadyRank, match="1 LOST, 1 SUSPECT"):
        router.pick("r", 1)


def test_affinity_decides_between_equals_only() -> None:
    router = ready_router(4)
    assert router.pick("turn1", 10, affinity=("s",)).rank == 0
    router.finish("turn1")
    assert router.pick("turn2", 10, affinity=("s",)).rank == 0  # rotation would have taken rank 1
    assert router.pick("turn3", 10, affinity=("s",)).rank != 0  # one request more there: a real difference


def test_affinity_to_a_restarted_rank_is_forgotten() -> None:
    router = ready_router(4)
    assert router.pick("turn1", 10, affinity=("s",)).rank == 0
    router.set_state(0, READY, 2)
    assert router.pick("turn2", 10, affinity=("s",)).rank == 1


def test_sessions_keep_their_ranks_at_low_load() -> None:
    router = ready_router(4)
    homes: dict[int, set[int]] = {}
    for turn in range(6):
        for session in range(20):
            place = router.pick(f"{session}-{turn}", 50, affinity=affinity_keys([], f"s{session}"))
            homes.setdefault(session, set()).add(place.rank)
            router.finish(f"{session}-{turn}")
    assert all(len(ranks) == 1 for ranks in homes.values())
    assert [sum(ranks == {rank} for ranks in homes.values()) for rank in range(4)] == [5, 5, 5, 5]


def test_affinity_keys_name_session_and_prefixes_and_part_salts() -> None:
    prompt = list(range(300))
    keys = affinity_keys(prompt, "s", None)
    assert len(keys) == 3
    assert set(affinity_keys(prompt[:256] + [9] * 50, "t")) & set(keys) == set(keys[1:])
    assert not set(affinity_keys(prompt, "s", "salt")) & set(keys)
    assert affinity_keys(prompt[:63]) == ()


def test_the_affinity_table_is_bounded() -> None:
    table = AffinityTable(capacity=3)
    for key in range(5):
        table.record((key,), key, 1)
    assert len(table) == 3
    assert table.candidates((0, 4, 2)) == [(4, 1), (2, 1)]


def steps_of(action: Callable[[], object]) -> int:
    """Lines and calls of Python, and calls of C, that an action takes."""
    count = 0

    def trace(frame: object, event: str, arg: object) -> object:
        nonlocal count
        count += event in ("line", "call")
        return trace

    def profile(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event == "c_call"

    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
        sys.settrace(None)
    return count


@pytest.mark.parametrize("clients", [1, 4])
def test_no_step_of_a_route_looks_at_all_ranks(clients: int) -> None:
    costs: dict[int, dict[str, int]] = {}
    for size in (16, 1024, 4096):
        router = ready_router(size, client_count=clients)
        for i in range(4 * size):  # loads that differ, so that many buckets are in use
            router.pick(f"w{i}", 1)
        for rank in range(size):
            router.report(rank, 1, 1, rank % 7, 4 + rank % 5, (rank % 10) / 20)
        router.pick("before", 700)
        costs[size] = {
            "pick": steps_of(lambda router=router: router.pick("new", 700, affinity=("s",))),
            "first token": steps_of(lambda router=router: router.prefilled("new")),
            "report": steps_of(lambda router=router: router.report(5, 1, 2, 3, 4, 0.2)),
            "end": steps_of(lambda router=router: router.finish("new")),
            "rank lost": steps_of(lambda router=router: router.set_state(7, SUSPECT, 1)),
            "rank back": steps_of(lambda router=router: router.set_state(7, READY, 1)),
        }
    for what, least in costs[16].items():
        for size in (1024, 4096):
            assert costs[size][what] <= least + 40, f"{what}: {costs}"


def test_front_ends_that_see_the_same_numbers_choose_different_ranks() -> None:
    routers = [ready_router(64, client_index=i, client_count=4) for i in range(4)]
    for seq in range(1, 4):
        for router in routers:
            for rank in range(64):
                router.report(rank, 1, seq, 0, seq % 2, 0.0)
        picked = {router.pick(f"r{seq}", 1).rank for router in routers}
        assert len(picked) == 4


def test_what_was_sent_after_a_report_counts_for_the_other_front_ends_too() -> None:
    router = ready_router(2, client_count=4)
    for rank in range(2):
        router.report(rank, 1, 1, 0, 8, 0.0)
    first = router.pick("a", 0).rank
    assert router.score(first) == 8 + 4
    router.report(first, 1, 2, 0, 9, 0.0)
    assert router.score(first) == 9


def test_scores_that_come_and_go_leave_nothing_behind() -> None:
    router = ready_router(2)
    for seq in range(5000):
        router.report(0, 1, seq, seq * 7, 0, 0.0)
    assert len(router._buckets) <= 70
    assert len(router._scores) <= 70
    assert router.pick("r", 1).rank == 1


def test_bad_construction_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="client_index=2"):
        Router(4, client_index=2, client_count=2)
