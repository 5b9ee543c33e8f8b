"""Blocks: holds, eviction order, and finding by content."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dpi_engine.core.blocks import BlockPool
from dpi_engine.core.prefix import PrefixHasher


def names(*tokens: int, salt: str | None = None, namespace: str = "") -> list[bytes]:
    hasher = PrefixHasher(2, namespace)
    hashes: list[bytes] = []
    hasher.extend(hashes, hasher.root(salt), tokens, len(tokens))
    return hashes


def filled(pool: BlockPool, hashes: list[bytes]) -> list[int]:
    blocks = pool.allocate(len(hashes))
    for block, key in zip(blocks, hashes, strict=True):
        pool.publish(block, key)
    return blocks


def test_allocates_all_but_the_null_block_and_never_more() -> None:
    pool = BlockPool(5, 2)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.usage == 1.0
    with pytest.raises(ValueError, match="1 wanted, 0 free"):
        pool.allocate(1)
    pool.check_integrity()


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 2), (0, 2), (2, 0)])
def test_refuses_a_pool_without_room(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="expected at least"):
        BlockPool(num_blocks, block_size)


def test_a_block_is_given_back_exactly_once() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.allocate(2)
    pool.release(blocks)
    assert pool.num_free == 3
    with pytest.raises(ValueError, match="nobody holds it"):
        pool.release(blocks)


def test_a_shared_block_stays_until_its_last_holder_leaves() -> None:
    pool = BlockPool(4, 2)
    blocks = filled(pool, names(1, 2, 3, 4))
    pool.acquire(blocks)
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 3
    pool.check_integrity()


def test_finds_only_an_unbroken_run_from_the_start() -> None:
    pool = BlockPool(8, 2)
    hashes = names(1, 2, 3, 4, 5, 6)
    blocks = filled(pool, hashes)
    assert pool.find(hashes) == blocks
    assert pool.find(names(1, 2, 3, 4, 9, 9)) == blocks[:2]
    pool.forget(blocks[1:2])
    assert pool.find(hashes) == blocks[:1]


def test_a_freed_block_is_found_revived_and_off_the_free_list() -> None:
    pool = BlockPool(6, 2)
    hashes = names(1, 2, 3, 4)
    blocks = filled(pool, hashes)
    pool.release(blocks)
    found = pool.find(hashes)
    assert found == blocks and pool.count_free(found) == 2
    pool.acquire(found)
    assert pool.num_free == 3 and pool.count_free(found) == 0
    assert not set(found) & set(pool.free_order())
    assert set(pool.allocate(3)).isdisjoint(found)


def test_eviction_takes_blocks_without_content_then_the_oldest_and_of_a_chain_the_tail_first() -> None:
    pool = BlockPool(8, 2)
    old = filled(pool, names(1, 2, 3, 4))
    recent = filled(pool, names(5, 6, 7, 8))
    plain = pool.allocate(1)
    pool.release(old)
    pool.release(recent)
    pool.release(plain)
    never_used = sorted({1, 2, 3, 4, 5, 6, 7} - {*old, *recent, *plain})
    order = pool.free_order()
    assert set(order[:3]) == {*plain, *never_used}
    assert order[3:] == [old[1], old[0], recent[1], recent[0]]
    pool.allocate(4)
    assert pool.find(names(1, 2, 3, 4)) == old[:1]
    assert pool.find(names(5, 6, 7, 8)) == recent


def test_a_block_handed_out_again_is_no_longer_found() -> None:
    pool = BlockPool(3, 2)
    blocks = filled(pool, names(1, 2, 3, 4))
    pool.release(blocks)
    pool.allocate(2)
    assert pool.find(names(1, 2, 3, 4)) == [] and pool.num_cached == 0
    pool.check_integrity()


def test_equal_content_keeps_the_held_block_findable() -> None:
    pool = BlockPool(6, 2)
    (key,) = names(1, 2)
    first, second, third = pool.allocate(3)
    pool.publish(first, key)
    pool.publish(second, key)
    assert pool.find([key]) == [first]
    pool.release([first])
    pool.publish(third, key)
    assert pool.find([key]) == [third]
    assert pool.free_order()[0] == first
    pool.check_integrity()


def test_reset_is_refused_while_blocks_are_held() -> None:
    pool = BlockPool(6, 2)
    hashes = names(1, 2)
    blocks = filled(pool, hashes)
    assert pool.reset() is False
    assert pool.find(hashes) == blocks
    pool.release(blocks)
    assert pool.reset() is True
    assert pool.find(hashes) == [] and pool.num_free == 5
    pool.check_integrity()


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (names(1, 2, 3, 4)[1], names(3, 4)[0]),
        (names(1, 2, 3, 4)[1], names(2, 1, 3, 4)[1]),
        (names(1, 2)[0], names(1, 2, salt="")[0]),
        (names(1, 2, salt="a")[0], names(1, 2, salt="b")[0]),
        (names(1, 2, namespace="m")[0], names(1, 2, namespace="n")[0]),
        (names(1, 2, namespace="m", salt="n")[0], names(1, 2, namespace="mn", salt="")[0]),
        (names(1, 256)[0], names(257, 0)[0]),
    ],
    ids=["parent", "order", "empty salt", "salt", "model", "salt is not model", "token borders"],
)
def test_what_shapes_the_content_shapes_the_name(left: bytes, right: bytes) -> None:
    assert left != right
    assert len(left) == 32


def test_names_are_the_same_at_once_and_bit_by_bit() -> None:
    hasher = PrefixHasher(2)
    root = hasher.root("s")
    tokens = list(range(9))
    at_once: list[bytes] = []
    hasher.extend(at_once, root, tokens, 9)
    stepwise: list[bytes] = []
    for count in range(10):
        hasher.extend(stepwise, root, tokens, count)
    assert at_once == stepwise and len(at_once) == 4


class PoolMachine(RuleBasedStateMachine):
    """The pool against a plain model: a counter per block, and a list of free ones ordered by last release."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9, 1)
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes] = {}

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_free:
            return
        order = self.pool.free_order()
        blocks = self.pool.allocate(count)
        assert blocks == order[:count]
        for block in blocks:
            self.content.pop(block, None)
        self.tables.append(blocks)

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def acquire(self, tokens: list[int]) -> None:
        hasher = PrefixHasher(1)
        hashes: list[bytes] = []
        hasher.extend(hashes, hasher.root(None), tokens, len(tokens))
        found = self.pool.find(hashes)
        assert [self.content[block] for block in found] == hashes[: len(found)]
        assert len(found) == len(hashes) or hashes[len(found)] not in self.content.values()
        free = self.pool.num_free
        used_up = self.pool.count_free(found)
        self.pool.acquire(found)
        assert self.pool.num_free == free - used_up
        self.tables.append(found)

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=3), data=st.data())
    def publish(self, tokens: list[int], data: st.DataObject) -> None:
        tables = [table for table in self.tables if len(table) >= len(tokens)]
        if not tables:
            return
        table = data.draw(st.sampled_from(tables))
        hasher = PrefixHasher(1)
        hashes: list[bytes] = []
        hasher.extend(hashes, hasher.root(None), tokens, len(tokens))
        for block, key in zip(table, hashes, strict=False):
            self.pool.publish(block, key)
            if block in self.content:
                continue
            other = next((b for b, k in self.content.items() if k == key), None)
            if other is None:
                self.content[block] = key
            elif self.pool.refs(other) == 0:
                del self.content[other]
                self.content[block] = key

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if not self.tables:
            return
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        before = self.pool.free_order()
        self.pool.release(table)
        freed = [block for block in reversed(table) if self.pool.refs(block) == 0]
        cached = [block for block in freed if block in self.content]
        plain = [block for block in freed if block not in self.content]
        assert self.pool.free_order() == plain[::-1] + before + cached

    @rule()
    def reset(self) -> None:
        assert self.pool.reset() == (not any(self.tables))
        if not any(self.tables):
            self.content.clear()

    @invariant()
    def counts(self) -> None:
        self.pool.check_integrity()
        held = [block for table in self.tables for block in table]
        for block in range(1, 9):
            assert self.pool.refs(block) == held.count(block)
        assert self.pool.num_cached == len(self.content)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
