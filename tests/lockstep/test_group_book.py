"""Epochs of a group: when a new one begins, who is told, and what a head that is new goes on from."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from mesh_harness import KEY

from dpi_engine.wire import handshake as hs
from dpi_engine.wire.group import GroupBook, GroupTable, Member

AT = {rank: f"tcp://127.0.0.1:{29750 + rank}" for rank in range(3)}


def ready(*epochs: int) -> dict[int, tuple[int, str]]:
    """Rank i READY under the i-th epoch; 0: not READY."""
    return {rank: (epoch, AT[rank]) for rank, epoch in enumerate(epochs) if epoch}


def test_every_change_of_the_ready_ranks_is_an_epoch_and_nothing_else_is() -> None:
    book = GroupBook(3, KEY)
    assert book.news_for(0) is None
    assert book.update(ready(1, 0, 0), "rank 1, rank 2")
    assert book.update(ready(1, 1, 1), "")
    assert book.table == GroupTable(2, KEY, [Member(r, 1, AT[r]) for r in range(3)], "")
    assert not book.update(ready(1, 1, 1), "")
    assert book.update(ready(1, 1, 0), "rank 2 (LOST)")
    assert (book.table.epoch, len(book.table.members), book.table.missing) == (3, 2, "rank 2 (LOST)")
    assert not book.update(ready(1, 1, 0), "rank 2 (LOADING)")
    assert book.table.missing == "rank 2 (LOADING)"
    assert book.update(ready(1, 1, 2), "")


def test_ranks_are_told_until_they_know() -> None:
    book = GroupBook(2, KEY)
    book.update(ready(1, 1), "")
    assert book.news_for(0) is book.news_for(1) is book.table
    book.heard(0, 1, 0)
    assert book.news_for(0) is None and book.news_for(1) is book.table


def test_links_that_were_given_up_are_made_anew_once() -> None:
    book = GroupBook(2, KEY)
    book.update(ready(1, 1), "")
    book.heard(0, 1, 1)
    assert book.update(ready(1, 1), "") and book.table.epoch == 2
    book.heard(1, 1, 1)  # the other one says so too, later
    book.heard(0, 2, 1)
    assert not book.update(ready(1, 1), "")


def test_a_new_head_goes_on_from_the_highest_epoch_that_a_rank_knows() -> None:
    book = GroupBook(2, KEY)
    book.heard(0, 7, 7)
    book.update(ready(5, 0), "rank 1")
    assert book.table.epoch == 8
    book.heard(1, 8, 8)  # of the head before, whose epoch 8 was another one
    book.update(ready(5, 5), "")
    assert book.table.epoch == 9 and book.news_for(1) is book.table


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("ready"), st.lists(st.integers(0, 3), min_size=3, max_size=3)),
            st.tuples(st.just("heard"), st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 30))),
        ),
        max_size=40,
    )
)
def test_epochs_only_grow_and_a_complete_group_always_comes_within_reach(events: list) -> None:
    book, epochs = GroupBook(3, KEY), [0]
    for kind, value in events:
        if kind == "heard":
            book.heard(*value)
        else:
            book.update(ready(*value), "")
        epochs.append(book.table.epoch)
    assert epochs == sorted(epochs)
    seen, left = [0] * 3, [0] * 3
    for _ in range(3):  # all are READY; each hears and answers
        for rank in range(3):
            book.heard(rank, seen[rank], left[rank])
        book.update(ready(9, 9, 9), "")
        for rank in range(3):
            if (table := book.news_for(rank)) is not None:
                seen[rank] = table.epoch
    assert len(book.table.members) == 3 and seen == [book.table.epoch] * 3


def test_the_head_tells_a_group_and_the_rank_what_it_knows_in_messages_of_the_handshake() -> None:
    table = GroupTable(4, KEY, [Member(0, 1, AT[0])], "rank 1 (LOST)")
    head = hs.decode_head_message(hs.encode_head_message(hs.HeadMessage(status=hs.BEAT, epoch=2, group=table)))
    assert isinstance(head, hs.HeadMessage) and head.group == table
    beat = hs.EngineMessage(status=hs.BEAT, epoch=2, group_seen=4, group_left=3)
    assert hs.decode_engine_message(hs.encode_engine_message(beat)) == beat
    dense = hs.EngineMessage(status=hs.BEAT, epoch=2)
    assert set(msgspec.msgpack.decode(hs.encode_engine_message(dense))) == {"status", "epoch"}
