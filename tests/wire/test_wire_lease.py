"""The lease table: tables of events, and random walks that must keep its invariants."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpi_engine.wire.errors import Refusal
from dpi_engine.wire.lease import Accept, Group, LeaseTable, LeaseTimings, Peer, Refuse
from dpi_engine.wire.messages import WIRE_VERSION, RankState

T = LeaseTimings()
A, B = "aa" * 8, "bb" * 8
VLLM = ""


@dataclass
class Difference:
    field: str
    expected: Any
    got: Any


def diff(expected: dict[str, Any], got: dict[str, Any]) -> list[Difference]:
    keys = sorted(expected.keys() | got.keys())
    return [Difference(k, expected.get(k), got.get(k)) for k in keys if expected.get(k) != got.get(k)]


def table(size: int = 2, **options: Any) -> LeaseTable:
    return LeaseTable(Group(size, frozenset(range(size)), **options), T, 0.0)


def hello(t: LeaseTable, now: float = 0.0, rank: int = 0, boot: str = A, **options: Any) -> Any:
    options = {"local": True, "headless": False, "version": WIRE_VERSION, **options}
    return t.hello(Peer(rank, boot), now, **options)


def up(t: LeaseTable, now: float = 0.0, rank: int = 0, boot: str = A) -> int:
    epoch = hello(t, now, rank, boot).epoch
    assert isinstance(t.ready(Peer(rank, boot), epoch, now), Accept)
    return epoch


def test_the_way_up() -> None:
    t = table()
    assert hello(t, 1.0) == Accept(1, True)
    assert t.state(0) is RankState.HELLO
    assert t.progress(Peer(0, A), 1, "loading weights", 0.1, 2.0) == Accept(1, True)
    assert t.progress(Peer(0, A), 1, "loading weights", 0.1, 2.0) == Accept(1, False)
    assert (t.state(0), t.infos(2.0)[0].stage) == (RankState.LOADING, "loading weights 10%")
    assert t.ready(Peer(0, A), 1, 3.0, "digest", {"dtype": "x"}) == Accept(1, True)
    info = t.infos(3.5)[0]
    assert (info.state, info.fingerprint, info.fields, info.last_seen_s) == (
        RankState.READY,
        "digest",
        {"dtype": "x"},
        0.5,
    )
    assert [m.rank for m in t.missing(3.0)] == [1]


def test_a_ready_rank_becomes_suspect_then_lost_by_silence_and_recovers_before_that() -> None:
    t = table()
    epoch = up(t)
    assert t.tick(T.suspect) == []
    assert t.tick(T.suspect + 0.01) == [0] and t.state(0) is RankState.SUSPECT
    assert t.beat(Peer(0, A), epoch, None, 0, 2.0) == Accept(epoch, True) and t.state(0) is RankState.READY
    assert t.tick(2.0 + T.lost) == [0] and t.state(0) is RankState.SUSPECT
    assert t.tick(2.0 + T.lost + 0.01) == [0] and t.state(0) is RankState.LOST
    assert t.tick(100.0) == []


def test_a_loading_rank_has_longer_and_every_message_extends_it() -> None:
    t = table()
    hello(t)
    assert t.tick(T.loading) == []
    t.progress(Peer(0, A), 1, "x", None, T.loading)
    assert t.tick(2 * T.loading) == []
    assert t.tick(2 * T.loading + 0.1) == [0]
    assert "while x" in t.infos(0)[0].stage


def test_a_step_that_does_not_end_makes_suspect_then_lost_although_beats_come() -> None:
    t = table()
    epoch, now, seen = up(t), 0.0, []
    while t.state(0) is not RankState.LOST and now < 2 * T.step_lost:
        now += T.beat
        t.beat(Peer(0, A), epoch, now, 5, now)
        t.tick(now)
        if not seen or seen[-1][0] is not t.state(0):
            seen.append((t.state(0), now))
    assert [s for s, _ in seen] == [RankState.READY, RankState.SUSPECT, RankState.LOST]
    assert seen[1][1] == pytest.approx(T.step_suspect, abs=2 * T.beat)
    assert seen[2][1] == pytest.approx(T.step_lost, abs=2 * T.beat)


def test_a_vllm_rank_is_not_lost_by_silence_but_by_news() -> None:
    t = table(vllm=True)
    assert hello(t, boot=VLLM, version=0) == Accept(1, True)
    assert t.ready(Peer(0), 0, 1.0) == Accept(1, True)
    assert t.tick(1e6) == [] and t.state(0) is RankState.READY
    assert t.lost(0, "closed", 1e6) and t.state(0) is RankState.LOST
    assert isinstance(t.ready(Peer(0), 0, 1e6), Refuse)
    assert hello(t, 1e6, boot=VLLM, version=0) == Accept(2, True)


def test_a_vllm_rank_that_restarts_while_loading_gets_a_new_epoch_a_ready_one_is_defended() -> None:
    t = table(vllm=True)
    hello(t, boot=VLLM, version=0)
    assert hello(t, boot=VLLM, version=0) == Accept(2, True)
    t.ready(Peer(0), 0, 1.0)
    assert hello(t, boot=VLLM, version=0).code is Refusal.DUPLICATE_RANK
    assert t.ready(Peer(0), 0, 1.0).code is Refusal.READY_BEFORE_HELLO


def test_a_vllm_rank_that_was_cut_off_is_back_with_its_connection() -> None:
    t = table(vllm=True)
    hello(t, boot=VLLM, version=0)
    assert not t.reached(0, 1.0), "it was not away"
    t.ready(Peer(0), 0, 1.0)
    assert t.cut_off(0, "not connected", 2.0) and t.infos(2.0)[0].error == "not connected"
    assert t.reached(0, 3.0) and not t.reached(0, 3.0)
    info = t.infos(3.0)[0]
    assert (info.state, info.epoch, info.error, info.stage) == (RankState.READY, 1, "", "")


def test_what_ended_for_another_reason_is_not_back_with_a_connection() -> None:
    t = table(vllm=True)
    hello(t, boot=VLLM, version=0)
    t.ready(Peer(0), 0, 1.0)
    t.cut_off(0, "not connected", 2.0)
    hello(t, 3.0, boot=VLLM, version=0)  # started anew: the connection is of another life
    assert not t.reached(0, 3.0) and t.state(0) is RankState.HELLO
    t.ready(Peer(0), 0, 4.0)
    t.lost(0, "its process ended", 5.0)
    assert not t.reached(0, 6.0) and t.state(0) is RankState.LOST
    up(t, 7.0, rank=1)
    t.cut_off(1, "not connected", 8.0)
    assert not t.reached(1, 9.0), "a rank of ours registers anew"
    assert not t.reached(7, 9.0) and not t.cut_off(7, "?", 9.0)


def test_a_vllm_rank_with_another_configuration_is_lost_by_it() -> None:
    """It would not hear of a refusal, so it must not be routed to."""
    t = table(vllm=True, diff=diff)
    for rank in (0, 1):
        hello(t, rank=rank, boot=VLLM, version=0)
    assert isinstance(t.ready(Peer(0), 0, 1.0, fields={"parallel_config_hash": "a"}), Accept)
    refused = t.ready(Peer(1), 0, 1.0, fields={"parallel_config_hash": "b"})
    assert refused.code is Refusal.FINGERPRINT and "parallel_config_hash: expected 'a', got 'b'" in refused.message
    assert (t.state(0), t.state(1)) == (RankState.READY, RankState.LOST)
    assert not t.reached(1, 2.0)
    assert "parallel_config_hash" in t.infos(2.0)[1].error


def test_a_group_of_our_protocol_takes_no_vllm_rank() -> None:
    t = table(vllm=False)
    refused = hello(t, boot=VLLM, version=0)
    assert refused.code is Refusal.PROTOCOL_VERSION and "--data-parallel-protocol vllm" in refused.message
    assert t.state(0) is RankState.NEW
    assert isinstance(hello(t), Accept)


REFUSED = {
    "rank too high": ({"rank": 2}, Refusal.RANK_OUT_OF_RANGE),
    "rank far too high": ({"rank": 65535}, Refusal.RANK_OUT_OF_RANGE),
    "not local": ({"local": False, "headless": True}, Refusal.LOCALITY),
    "headless beside the head": ({"headless": True}, Refusal.HEADLESS),
    "other version": ({"version": WIRE_VERSION + 1}, Refusal.PROTOCOL_VERSION),
    "no version": ({"version": 0}, Refusal.PROTOCOL_VERSION),
    "other fields": ({"fields": {"seed": 1}}, Refusal.FINGERPRINT),
    "no fields": ({"fields": {}}, Refusal.FINGERPRINT),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_change_nothing(case: str) -> None:
    options, code = REFUSED[case]
    t = table(declared={"seed": 0}, diff=diff)
    decision = hello(t, **{"fields": {"seed": 0}, **options})
    assert isinstance(decision, Refuse) and decision.code is code and decision.message
    assert [i.state for i in t.infos(0)] == [RankState.NEW] * 2
    assert isinstance(hello(t, fields={"seed": 0}), Accept)


@pytest.mark.parametrize(("remote_headless", "headless"), list(itertools.product([True, False], repeat=2)))
def test_remote_ranks_are_headless_exactly_in_internal_mode(remote_headless: bool, headless: bool) -> None:
    t = LeaseTable(Group(2, frozenset({0}), remote_headless), T, 0.0)
    decision = hello(t, rank=1, local=False, headless=headless)
    assert isinstance(decision, Accept) == (remote_headless == headless)


def test_a_mismatch_lists_every_field_with_expected_and_got() -> None:
    t = table(declared={"seed": 0, "model": "m", "same": 1}, diff=diff)
    decision = hello(t, fields={"seed": 1, "model": "n", "same": 1})
    assert decision.details["differences"] == [
        {"field": "model", "expected": "m", "got": "n"},
        {"field": "seed", "expected": 0, "got": 1},
    ]
    assert "rank 0" in decision.message and "model: expected 'm', got 'n'" in decision.message


def test_resolved_fields_follow_the_first_rank_and_are_forgotten_with_the_last() -> None:
    t = table(diff=diff)
    for rank in (0, 1):
        hello(t, rank=rank)
    assert isinstance(t.ready(Peer(0, A), 1, 0.0, fields={"weights": "x", "only_here": 1}), Accept)
    assert t.ready(Peer(1, A), 1, 0.0, fields={"weights": "y"}).code is Refusal.FINGERPRINT
    assert isinstance(t.ready(Peer(1, A), 1, 0.0, fields={"weights": "x", "only_there": 2}), Accept)
    for rank in (0, 1):
        t.lost(rank, "gone", 1.0)
        hello(t, 2.0, rank, B)
    assert isinstance(t.ready(Peer(1, B), 2, 2.0, fields={"weights": "y"}), Accept)


def test_a_duplicate_is_refused_until_the_lease_ends_and_both_are_named() -> None:
    t = table()
    t.hello(Peer(0, A, "pod-a", "10.0.0.1"), 0.0, local=True, headless=False, version=WIRE_VERSION)
    decision = t.hello(Peer(0, B, "pod-b", "10.0.0.2"), 0.0, local=True, headless=False, version=WIRE_VERSION)
    assert decision.code is Refusal.DUPLICATE_RANK
    for word in ("pod-a", "pod-b", A, B, "10.0.0.1", "10.0.0.2", "HELLO"):
        assert word in decision.message
    t.tick(T.loading + 1)
    assert hello(t, T.loading + 1, boot=B) == Accept(2, True)


def test_a_process_that_replaces_itself_need_not_wait_for_its_old_lease() -> None:
    t = table()
    up(t)
    assert hello(t, boot=B, replaces="cc" * 8).code is Refusal.DUPLICATE_RANK
    assert hello(t, boot=B, replaces=A) == Accept(2, True)
    assert t.beat(Peer(0, A), 1, None, 0, 0.0).code is Refusal.FENCED


def test_repeats_of_hello_and_ready_are_harmless() -> None:
    t = table()
    assert hello(t) == Accept(1, True)
    assert hello(t) == Accept(1, False)
    assert t.ready(Peer(0, A), 1, 0.0) == Accept(1, True)
    assert t.ready(Peer(0, A), 1, 0.0) == Accept(1, False)
    assert hello(t).code is Refusal.DUPLICATE_RANK


def test_what_comes_before_hello_is_refused() -> None:
    t = table()
    peer = Peer(0, A)
    for decision in (
        t.ready(peer, 0, 0.0),
        t.beat(peer, 0, None, 0, 0.0),
        t.progress(peer, 0, "x", None, 0.0),
        t.goodbye(peer, 0, "", 0.0),
    ):
        assert isinstance(decision, Refuse) and decision.code is Refusal.READY_BEFORE_HELLO
    assert t.ready(Peer(7, A), 0, 0.0).code is Refusal.RANK_OUT_OF_RANGE


def test_a_new_head_goes_on_from_the_epoch_that_the_rank_remembers() -> None:
    t = table()
    assert hello(t, known_epoch=41) == Accept(42, True)


def test_news_of_an_old_epoch_and_of_strange_ranks_changes_nothing() -> None:
    t = table()
    up(t)
    assert not t.lost(0, "late", 1.0, epoch=7) and not t.lost(5, "x", 1.0) and not t.lost(-1, "x", 1.0)
    assert t.state(0) is RankState.READY
    assert t.goodbye(Peer(0, A), 1, "drained", 1.0) == Accept(1, True)
    assert t.infos(1.0)[0].error == "left: drained"


def test_a_process_that_ends_before_hello_is_shown_among_the_missing() -> None:
    t = table()
    assert not t.lost(1, "exit code 1", 5.0)
    assert [str(m) for m in t.missing(8.0)] == [
        "rank 0 (NEW, no HELLO yet, since 8 s)",
        "rank 1 (NEW, exit code 1, since 8 s)",
    ]


# ---------------------------------------------------------------------------------------------- random walks


class Walk:
    """Applies events to a table of one rank and checks what must always hold."""

    def __init__(self) -> None:
        self.t = table(1)
        self.now = 0.0
        self.ready_at: set[int] = set()
        self.over: set[int] = set()
        self.state, self.epoch = RankState.NEW, 0

    def step(self, event: tuple[Any, ...]) -> None:
        kind, *rest = event
        t, now = self.t, self.now
        if kind == "hello":
            decision = hello(t, now, boot=rest[0], version=WIRE_VERSION if rest[0] else 0)
        elif kind == "ready":
            decision = t.ready(Peer(0, rest[0]), rest[1], now)
        elif kind == "beat":
            decision = t.beat(Peer(0, rest[0]), rest[1], rest[2], 0, now)
        elif kind == "progress":
            decision = t.progress(Peer(0, rest[0]), rest[1], "x", None, now)
        elif kind == "goodbye":
            decision = t.goodbye(Peer(0, rest[0]), rest[1], "", now)
        elif kind == "lost":
            t.lost(0, "news", now)
            decision = None
        else:
            self.now += rest[0]
            t.tick(self.now)
            decision = None
        self.check(kind, decision)

    def check(self, kind: str, decision: Any) -> None:
        state, epoch = self.t.state(0), self.t.epoch(0)
        if isinstance(decision, Refuse):
            assert (state, epoch) == (self.state, self.epoch), "a refusal changed something"
        if isinstance(decision, Accept):
            assert decision.epoch == epoch
        assert epoch >= self.epoch, "an epoch went back"
        if epoch > self.epoch:
            assert kind == "hello" and state is RankState.HELLO
            self.over.update(range(self.epoch + 1))
        if state is RankState.LOST:
            self.over.add(epoch)
        if state in (RankState.READY, RankState.SUSPECT):
            assert epoch not in self.over, "an old epoch is READY again"
        if state is RankState.READY and self.state not in (RankState.READY, RankState.SUSPECT):
            assert kind == "ready" and epoch not in self.ready_at, "two READY at one epoch"
            self.ready_at.add(epoch)
        if self.state is RankState.LOST and state is not RankState.LOST:
            assert epoch > self.epoch, "back from LOST without a new epoch"
        self.state, self.epoch = state, epoch


boots = st.sampled_from([A, B, VLLM])
epochs = st.integers(0, 4)
events = st.one_of(
    st.tuples(st.just("hello"), boots),
    st.tuples(st.just("ready"), boots, epochs),
    st.tuples(st.just("beat"), boots, epochs, st.sampled_from([None, 0.0, 40.0, 1000.0])),
    st.tuples(st.just("progress"), boots, epochs),
    st.tuples(st.just("goodbye"), boots, epochs),
    st.tuples(st.just("lost")),
    st.tuples(st.just("tick"), st.sampled_from([0.1, 1.3, 3.1, 31.0])),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(events, max_size=40))
def test_no_order_of_events_breaks_the_lease(walk: list[tuple[Any, ...]]) -> None:
    state = Walk()
    for event in walk:
        state.step(event)


def test_every_order_of_five_events_keeps_the_invariants() -> None:
    alphabet: list[tuple[Any, ...]] = [
        ("hello", A),
        ("hello", B),
        ("ready", A, 1),
        ("ready", B, 2),
        ("beat", A, 1, None),
        ("lost",),
        ("tick", 3.1),
    ]
    for order in itertools.product(alphabet, repeat=5):
        walk = Walk()
        for event in order:
            walk.step(event)
