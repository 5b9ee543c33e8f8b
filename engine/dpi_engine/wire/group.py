"""The group of ranks that step together, as the head knows it and tells it. Pure.

The head numbers groups by an epoch, which grows with every change: a rank is lost, is READY again, or has left the
links of an epoch because one of them broke. Only a complete group, with every rank READY, is linked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

KEY_BYTES = 16


class Member(msgspec.Struct, array_like=True):
    """`epoch` is that of the rank's lease, `endpoint` (tcp://IP:PORT) where it takes links."""

    rank: int
    epoch: int
    endpoint: str


class GroupTable(msgspec.Struct, array_like=True):
    """One epoch. `key` is known to the head and its ranks only, and opens every link. `missing`: who is not READY and
    why, in words; empty when the group is complete."""

    epoch: int
    key: bytes
    members: list[Member]
    missing: str = ""


@dataclass(slots=True)
class GroupBook:
    """The head's side: which epoch holds, who knows of it.

    `key` is drawn by the head once per start. Every method returns or leaves an epoch; `update` makes the next one.
    """

    size: int
    key: bytes
    table: GroupTable = field(init=False)
    _signature: tuple[tuple[int, int, str], ...] = ()
    _seen: dict[int, int] = field(default_factory=dict)
    _again: bool = False

    def __post_init__(self) -> None:
        self.table = GroupTable(0, self.key, [], "no rank is ready yet")

    def heard(self, rank: int, seen: int, left: int) -> bool:
        """A rank knows epoch `seen`, and has given up the links of epoch `left` (0: of none). True: `update` is due."""
        self._seen[rank] = seen
        if seen > self.table.epoch:  # of a head before this one: go on from there
            self.table.epoch, self._again = seen, True
        if left and left >= self.table.epoch:
            self._again = True
        return self._again

    def update(self, ready: Mapping[int, tuple[int, str]], missing: str) -> bool:
        """The READY ranks now, with lease epoch and endpoint. True when that made a new epoch."""
        signature = tuple(sorted((rank, epoch, endpoint) for rank, (epoch, endpoint) in ready.items()))
        if signature == self._signature and not self._again:
            self.table.missing = missing
            return False
        self._signature, self._again = signature, False
        members = [Member(*entry) for entry in signature]
        self.table = GroupTable(self.table.epoch + 1, self.key, members, missing)
        return True

    def news_for(self, rank: int) -> GroupTable | None:
        """The table, unless the rank has it."""
        return self.table if self.table.epoch and self._seen.get(rank, -1) < self.table.epoch else None
