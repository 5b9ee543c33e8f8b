"""Requests whose rank was lost: which of them go on at another rank, and how long they wait for one.

A request is sent again with the tokens that its reader already has, so the stream goes on where it stood: random
numbers depend on the request's seed and the output's index alone, and penalties, limits and usage count the earlier
tokens. A request may be the reason why its rank was lost, so each is replayed a bounded number of times.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from dpi_engine.frontend.interface import EngineError, NoReadyRank, RankLost
from dpi_engine.frontend.streams import RequestStream

logger = logging.getLogger(__name__)

WAIT_S = 30.0
"""How long a request waits for a rank that takes it, where nothing else is said."""
SETTLE_S = 0.5
"""A request waits at least this long: ranks that end together, as those of one pod, are all known by then, so none of
them gets it next and uses up its replay."""


@dataclass(slots=True)
class _Waiting:
    stream: RequestStream
    lost: RankLost
    since: float
    until: float


class Replays:
    """Requests between two ranks. No I/O; times are in seconds.

    limit: how often one request may be replayed. wait_s: how long it may wait for a rank that takes it. alone: there
    is no other rank here. resumes: the ranks' protocol can say which tokens a request has; without, only a request
    that has none can begin again. place: sends a stream to some rank; raises NoReadyRank, or another EngineError that
    ends it. replayed(rank): a request of that lost rank goes on.
    """

    def __init__(
        self,
        limit: int,
        wait_s: float = WAIT_S,
        *,
        alone: bool,
        resumes: bool,
        place: Callable[[RequestStream], None],
        replayed: Callable[[int], None],
    ) -> None:
        self._limit = 0 if alone else limit
        self._wait_s = wait_s
        self._resumes = resumes
        self._place, self._replayed = place, replayed
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, stream: RequestStream, lost: RankLost, now: float) -> bool:
        """The stream's rank is lost. True: it waits here for `place_all`. False: it has ended in `lost`."""
        if stream.finished:
            return False
        pinned = stream.request.data_parallel_rank is not None
        if pinned or stream.replays >= self._limit or (stream.output_token_ids and not self._resumes):
            stream.fail(lost)
            return False
        stream.replays += 1
        self._waiting.append(_Waiting(stream, lost, now, now + self._wait_s))
        return True

    def place_all(self, now: float) -> None:
        """Send what has waited long enough, end what has waited too long.

        For when a rank may have become ready, and now and then.
        """
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            stream, rank = entry.stream, entry.stream.rank
            if stream.finished:
                continue  # its reader has left
            if now < entry.since + SETTLE_S:
                self._waiting.append(entry)
                continue
            try:
                self._place(stream)
            except NoReadyRank as error:
                if now < entry.until:
                    self._waiting.append(entry)
                else:
                    stream.fail(RankLost(f"{entry.lost}; no other rank took it within {self._wait_s:.0f} s: {error}"))
            except EngineError as error:
                stream.fail(error)
            else:
                logger.info(
                    "request %s goes on at rank %d after %d tokens: %s",
                    stream.request.request_id, stream.rank, len(stream.output_token_ids), entry.lost,
                )  # fmt: skip
                self._replayed(rank)

    def close(self, error: EngineError) -> None:
        """End all that wait."""
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            entry.stream.fail(error)
