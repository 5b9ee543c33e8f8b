"""Blocks of the key/value cache: who holds them, which are free, and which can be found again by what they contain."""

from __future__ import annotations

from collections.abc import Sequence

NULL_BLOCK = 0
"""Never handed out: padding in block tables points here, and it anchors the free list."""


class BlockPool:
    """Reference counts, free list and prefix index over `num_blocks` blocks (ids 1 .. num_blocks-1 are usable).

    The free list is a doubly linked ring through two integer lists, anchored at the null block, so that taking a block
    out of its middle costs the same as taking one from its end. A free block keeps its content, and stays findable by
    its hash, until it is handed out again. Blocks leave the list at the head: first those without findable content,
    then the least recently used. Every operation is O(1) per block.
    """

    __slots__ = ("_by_hash", "_hash_of", "_next", "_prev", "_refs", "block_size", "num_blocks", "num_free")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Raises ValueError unless there is at least one usable block of at least one token."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks: expected at least 2 (block 0 is never used), got {num_blocks}")
        if block_size < 1:
            raise ValueError(f"block_size: expected at least 1, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks - 1
        self._refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def usage(self) -> float:
        """Fraction of the usable blocks that a sequence holds, 0 to 1."""
        return 1.0 - self.num_free / (self.num_blocks - 1)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` tokens fill."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each held once. Raises ValueError (and takes none) if fewer are free."""
        if count > self.num_free:
            raise ValueError(f"blocks: {count} wanted, {self.num_free} free")
        taken = []
        block = self._next[NULL_BLOCK]
        for _ in range(count):
            taken.append(block)
            key = self._hash_of[block]
            if key is not None:
                del self._by_hash[key]
                self._hash_of[block] = None
            self._refs[block] = 1
            block = self._next[block]
        self._next[NULL_BLOCK] = block
        self._prev[block] = NULL_BLOCK
        self.num_free -= count
        return taken

    def acquire(self, blocks: Sequence[int]) -> None:
        """Hold found blocks once more; those that were free leave the free list."""
        for block in blocks:
            if self._refs[block] == 0:
                self._unlink(block)
                self.num_free -= 1
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each block of a sequence's table.

        Goes from the tail, so that the end of a chain is reused before what it hangs on. Raises ValueError for a block
        that nobody holds.
        """
        for block in reversed(blocks):
            refs = self._refs[block]
            if refs <= 0:
                raise ValueError(f"block {block}: released, but nobody holds it")
            self._refs[block] = refs - 1
            if refs == 1:
                if self._hash_of[block] is None:
                    self._link_after(NULL_BLOCK, block)
                else:
                    self._link_after(self._prev[NULL_BLOCK], block)
                self.num_free += 1

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest run of `hashes`, from the first, that is in the cache. Holds nothing."""
        found = []
        get = self._by_hash.get
        for key in hashes:
            block = get(key)
            if block is None:
                break
            found.append(block)
        return found

    def count_free(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` are on the free list: acquiring them uses up that many free blocks."""
        refs = self._refs
        return sum(1 for block in blocks if refs[block] == 0)

    def publish(self, block: int, key: bytes) -> None:
        """Make a held, computed block findable under `key`.

        Where another block has the same content already, that one stays the one to be found while somebody holds it;
        if it is free, the held block takes its place, because it will live longer.
        """
        if self._hash_of[block] is not None:
            return
        other = self._by_hash.get(key)
        if other is not None:
            if self._refs[other] > 0:
                return
            self._hash_of[other] = None
            self._unlink(other)
            self._link_after(NULL_BLOCK, other)
        self._hash_of[block] = key
        self._by_hash[key] = block

    def forget(self, blocks: Sequence[int]) -> None:
        """Nobody shall find these blocks any more (their content is not to be trusted). Holds are not touched."""
        for block in blocks:
            key = self._hash_of[block]
            if key is not None:
                del self._by_hash[key]
                self._hash_of[block] = None

    def reset(self) -> bool:
        """Forget all content. Refused (False, nothing changed) while any block is held."""
        if self.num_free != self.num_blocks - 1:
            return False
        self._by_hash.clear()
        self._hash_of = [None] * self.num_blocks
        return True

    @property
    def num_cached(self) -> int:
        """How many blocks, held or free, can be found by content."""
        return len(self._by_hash)

    def refs(self, block: int) -> int:
        """How many sequences hold `block`."""
        return self._refs[block]

    def free_order(self) -> list[int]:
        """Free blocks in the order in which they would be handed out. O(n), for tests and inspection."""
        order = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            order.append(block)
            block = self._next[block]
        return order

    def check_integrity(self) -> None:
        """Raise AssertionError if counts, ring and index disagree. O(n), for tests."""
        order = self.free_order()
        free = set(order)
        _require(len(free) == len(order) == self.num_free, "free list repeats a block or its count is wrong")
        _require(NULL_BLOCK not in free and self._refs[NULL_BLOCK] == 0, "the null block was handed out")
        backwards = []
        block = self._prev[NULL_BLOCK]
        while block != NULL_BLOCK:
            backwards.append(block)
            block = self._prev[block]
        _require(backwards[::-1] == order, "free list differs when read backwards")
        for block in range(1, self.num_blocks):
            _require((self._refs[block] == 0) == (block in free), f"block {block}: held and free, or neither")
        _require(
            {block: key for key, block in self._by_hash.items()}
            == {block: key for block, key in enumerate(self._hash_of) if key is not None},
            "prefix index and the blocks' hashes disagree",
        )

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before

    def _link_after(self, before: int, block: int) -> None:
        after = self._next[before]
        self._next[before] = block
        self._prev[block] = before
        self._next[block] = after
        self._prev[after] = block


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
