"""Which pod holds which ranks, as a head tells the pods whose front ends serve a part of the ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from dpi_engine.wire.messages import RankInfo


class Place(msgspec.Struct, array_like=True, frozen=True):
    """Ranks `first` .. `last` are, or were last, in `pod`."""

    first: int
    last: int
    pod: str


def places_of(infos: Iterable[RankInfo]) -> list[Place]:
    """Runs of ranks in one pod; ranks whose pod is not known are left out."""
    found: list[Place] = []
    for info in sorted(infos, key=lambda i: i.rank):
        if not info.pod:
            continue
        if found and found[-1].pod == info.pod and found[-1].last == info.rank - 1:
            found[-1] = Place(found[-1].first, info.rank, info.pod)
        else:
            found.append(Place(info.rank, info.rank, info.pod))
    return found
