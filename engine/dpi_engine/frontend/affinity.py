"""Which rank saw a session or a prompt prefix last. Pure: no clock, no I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

PREFIX_LENGTHS = (1024, 256, 64)
"""Prompt lengths in tokens at which a prefix gets a key, longest first."""


def affinity_keys(
    prompt_token_ids: Sequence[int], session_id: str | None = None, cache_salt: str | None = None
) -> tuple[Hashable, ...]:
    """Keys of a request, most telling first: its session, then its prompt's prefixes.

    A prompt shorter than the shortest prefix has no prefix key: there is nothing worth keeping in a cache. The salt is
    part of every key, since ranks do not share cached blocks between salts either.
    """
    keys: list[Hashable] = []
    if session_id:
        keys.append((cache_salt, session_id))
    length = len(prompt_token_ids)
    keys.extend((cache_salt, n, hash(tuple(prompt_token_ids[:n]))) for n in PREFIX_LENGTHS if n <= length)
    return tuple(keys)


class AffinityTable:
    """Bounded map key -> (rank, epoch); the entries least recently used go first."""

    def __init__(self, capacity: int = 65536) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def candidates(self, keys: Iterable[Hashable]) -> Iterable[tuple[int, int]]:
        """(rank, epoch) of the keys that are known, in the order of the keys."""
        entries = self._entries
        return [entries[key] for key in keys if key in entries]

    def record(self, keys: Iterable[Hashable], rank: int, epoch: int) -> None:
        """The request with these keys went to `rank` in its life `epoch`."""
        entries = self._entries
        for key in keys:
            entries[key] = (rank, epoch)
            entries.move_to_end(key)
        while len(entries) > self._capacity:
            entries.popitem(last=False)
