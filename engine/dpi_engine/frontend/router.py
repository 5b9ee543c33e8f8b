"""Which rank gets a request. Pure: no clock, no I/O; every call is O(log distinct scores) or better.

The router counts exactly what this front end has in flight on each rank. The engine's own numbers say how much *other*
work the rank has: what it reported minus what was ours at that moment. So a report older than a dispatch never erases
that dispatch, and a burst is spread well before any report comes.

Ranks of equal score stand in one bucket, a number with a bit for each of them. A pick takes the next rank of the lowest
bucket, round from a place that moves on with every pick, unless the session or prefix of the request points to another
rank of the bucket. Every front end begins at a place of its own: they see the same numbers, and would else all send
their next request to the same rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from dpi_engine.frontend.affinity import AffinityTable
from dpi_engine.frontend.interface import InvalidRequest, NoReadyRank, RankElsewhere
from dpi_engine.wire.messages import RankState

KV_PRESSURE_START = 0.5
"""KV cache use from which a rank is charged for it."""

KV_PRESSURE_WEIGHT = 6.0
"""Extra requests charged per waiting request (and for the one to be placed) and per unit of KV use above the start."""


@dataclass(slots=True)
class Placement:
    """Where a request went: global rank, and the epoch of that rank when it was picked."""

    rank: int
    epoch: int
    prompt_tokens: int
    prefilled: bool = False


@dataclass(slots=True)
class _Rank:
    rank: int
    state: RankState = RankState.NEW
    epoch: int = 0
    # Ours, exact.
    requests: dict[str, Placement] = field(default_factory=dict)
    pending_tokens: int = 0  # prompt tokens of ours without a first output token
    # The engine's, as of its last report.
    known: bool = False
    seq: int = -1
    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0
    other_requests: int = 0
    other_tokens: int = 0
    since: int = 0  # requests of ours that went there after the report
    bucket: int | None = None  # None: gets no new work


class Router:
    """Ranks `first_rank` .. `first_rank + num_ranks - 1`; all ranks named here are global.

    `client_count` front ends share the ranks and none sees what another has sent since the last report, so a rank
    counts for at least `client_count` times our own requests there. `client_index` shifts where the rotation starts.
    `group_size`: ranks over all launches, where other front ends serve the rest; `elsewhere(rank)` says where one is.
    `prefill_unit`: prompt tokens that weigh as much as one more request (tokens of one step's budget).
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        first_rank: int = 0,
        client_index: int = 0,
        client_count: int = 1,
        prefill_unit: int = 512,
        affinity_capacity: int = 65536,
        group_size: int | None = None,
        elsewhere: Callable[[int], str] = lambda rank: "it is served by another launch",
    ) -> None:
        if num_ranks < 1 or client_count < 1 or not 0 <= client_index < client_count or prefill_unit < 1:
            raise ValueError(
                f"router: num_ranks={num_ranks}, client_index={client_index}, client_count={client_count}, "
                f"prefill_unit={prefill_unit}: expected num_ranks, client_count, prefill_unit >= 1 and "
                "0 <= client_index < client_count"
            )
        self.first_rank = first_rank
        self.num_ranks = num_ranks
        self._group_size = max(group_size or 0, first_rank + num_ranks)
        self._elsewhere = elsewhere
        self._clients = client_count
        self._unit = prefill_unit
        self._ranks = [_Rank(first_rank + i) for i in range(num_ranks)]
        self._start = self._next = num_ranks * client_index // client_count
        self._by_request: dict[str, Placement] = {}
        self._affinity = AffinityTable(affinity_capacity)
        self._buckets: dict[int, int] = {}  # score -> ranks that have it, bit i for the i-th rank here
        self._scores: list[int] = []  # heap of bucket scores; those of emptied buckets leave when they reach the top
        self._num_ready = 0
        # Of the ranks that are ready and have reported: how many, their requests, their prompt tokens to compute.
        self._heard = self._heard_requests = self._heard_tokens = 0
        self.queued = 0  # requests of ours without a first output token

    # -- what is asked ---------------------------------------------------------------------------------------------

    @property
    def num_ready(self) -> int:
        return self._num_ready

    @property
    def in_flight(self) -> int:
        """Requests of this front end on all ranks."""
        return len(self._by_request)

    def state(self, rank: int) -> RankState:
        return self._rank(rank).state

    def epoch(self, rank: int) -> int:
        return self._rank(rank).epoch

    def own(self, rank: int) -> tuple[int, int]:
        """(requests, prompt tokens not yet prefilled) of this front end on a rank."""
        entry = self._rank(rank)
        return len(entry.requests), entry.pending_tokens

    def reported(self, rank: int) -> tuple[int, int, float] | None:
        """(waiting, running, kv_usage) as the engine said last; None before its first report."""
        entry = self._rank(rank)
        return (entry.waiting, entry.running, entry.kv_usage) if entry.known else None

    def placement(self, request_id: str) -> Placement | None:
        return self._by_request.get(request_id)

    def score(self, rank: int) -> int:
        """What the next request would meet there, in requests; lower is better."""
        return self._score(self._rank(rank))

    def check_pinned(self, rank: int) -> None:
        """Raise InvalidRequest for a rank that does not exist, RankElsewhere for one that other front ends serve."""
        last = self.first_rank + self.num_ranks - 1
        if self.first_rank <= rank <= last:
            return
        here = f"rank {last}" if self.num_ranks == 1 else f"ranks {self.first_rank} to {last}"
        if 0 <= rank < self._group_size:
            raise RankElsewhere(f"data_parallel_rank {rank}: this endpoint serves {here}; {self._elsewhere(rank)}")
        raise InvalidRequest(
            f"data_parallel_rank: rank {rank} does not exist; expected 0 to {self._group_size - 1} "
            f"(ranks are counted over all nodes; this endpoint serves {here})"
        )

    # -- what happens ----------------------------------------------------------------------------------------------

    def set_state(self, rank: int, state: RankState, epoch: int) -> list[str]:
        """Take over a rank's state. Returns the requests that were in flight on a life of the rank that is over.

        They are forgotten here. A lower epoch than the known one is a late message and changes nothing. Under a higher
        one the engine has started anew: its old requests are gone, its numbers unknown.
        """
        entry = self._rank(rank)
        if epoch < entry.epoch:
            return []
        gone: list[str] = []
        if state == RankState.LOST or epoch > entry.epoch:
            gone = list(entry.requests)
            for request_id in gone:
                self.finish(request_id)
        self._hear(entry, -1)
        if state == RankState.LOST or epoch > entry.epoch:
            entry.known, entry.seq = False, -1
            entry.waiting = entry.running = 0
            entry.kv_usage = 0.0
            entry.other_requests = entry.other_tokens = entry.since = 0
        was = entry.state
        entry.state, entry.epoch = state, epoch
        self._hear(entry, 1)
        if state == RankState.READY and was != RankState.READY and not entry.known:
            self._assume(entry, *self._mean_load())
        self._num_ready += (state == RankState.READY) - (was == RankState.READY)
        if state == RankState.READY and was != RankState.READY and self._num_ready == self.num_ranks:
            self._next = self._start
        self._place(entry)
        return gone

    def report(
        self,
        rank: int,
        epoch: int,
        seq: int | None,
        waiting: int,
        running: int,
        kv_usage: float,
        waiting_tokens: int = 0,
    ) -> bool:
        """Take over an engine's absolute numbers; False if they are of another epoch or not newer than the known ones.

        `seq` None: unnumbered, always taken.
        """
        entry = self._rank(rank)
        if epoch != entry.epoch or entry.state == RankState.LOST or (seq is not None and seq <= entry.seq):
            return False
        if seq is not None:
            entry.seq = seq
        self._hear(entry, -1)
        entry.known, entry.since = True, 0
        entry.waiting, entry.running = max(0, waiting), max(0, running)
        entry.kv_usage = min(1.0, max(0.0, kv_usage)) if kv_usage == kv_usage else 1.0
        entry.other_requests = max(0, entry.waiting + entry.running - len(entry.requests))
        entry.other_tokens = max(0, waiting_tokens - entry.pending_tokens)
        self._hear(entry, 1)
        self._place(entry)
        return True

    def refresh_unknown(self) -> None:
        """Rate the ready ranks that have not reported yet as loaded as the others are now. Call it now and then."""
        unknown = [entry for entry in self._ranks if not entry.known and entry.state == RankState.READY]
        if unknown:
            mean = self._mean_load()
            for entry in unknown:
                self._assume(entry, *mean)
                self._place(entry)

    def pick(
        self, request_id: str, prompt_tokens: int, pinned: int | None = None, affinity: Iterable[Hashable] = ()
    ) -> Placement:
        """Choose a rank for a request and book it there.

        `affinity`: keys of `affinity_keys`, the most telling first. Raises InvalidRequest (pinned rank out of range, id
        in flight already), RankElsewhere, NoReadyRank.
        """
        if request_id in self._by_request:
            raise InvalidRequest(f"request_id {request_id!r}: already in flight; expected an id of its own")
        keys = tuple(affinity)
        if pinned is not None:
            self.check_pinned(pinned)
            entry = self._rank(pinned)
            if entry.state != RankState.READY:
                raise NoReadyRank(
                    f"data_parallel_rank {pinned}: the rank is {entry.state.value}, expected READY; "
                    "try again later or leave the rank open"
                )
        else:
            entry = self._lowest(keys)
        placement = Placement(entry.rank, entry.epoch, prompt_tokens)
        entry.requests[request_id] = placement
        entry.pending_tokens += prompt_tokens
        entry.since += 1
        if entry.known:
            self._heard_requests += 1
            self._heard_tokens += prompt_tokens
        self._by_request[request_id] = placement
        self.queued += 1
        if keys:
            self._affinity.record(keys, entry.rank, entry.epoch)
        self._place(entry)
        return placement

    def prefilled(self, request_id: str) -> None:
        """The request's first output token is here: its prompt is work no more. Unknown ids are ignored."""
        placement = self._by_request.get(request_id)
        if placement is not None and not placement.prefilled:
            placement.prefilled = True
            self.queued -= 1
            entry = self._rank(placement.rank)
            entry.pending_tokens -= placement.prompt_tokens
            if entry.known and entry.state == RankState.READY:
                self._heard_tokens -= placement.prompt_tokens
            if placement.prompt_tokens:
                self._place(entry)

    def finish(self, request_id: str) -> Placement | None:
        """The request is over, however it ended. Idempotent; None for an unknown id."""
        placement = self._by_request.pop(request_id, None)
        if placement is None:
            return None
        entry = self._rank(placement.rank)
        self._hear(entry, -1)
        del entry.requests[request_id]
        if not placement.prefilled:
            entry.pending_tokens -= placement.prompt_tokens
            self.queued -= 1
        self._hear(entry, 1)
        self._place(entry)
        return placement

    # -- inside ----------------------------------------------------------------------------------------------------

    def _rank(self, rank: int) -> _Rank:
        index = rank - self.first_rank
        if not 0 <= index < self.num_ranks:
            raise IndexError(f"rank {rank} not in {self.first_rank}..{self.first_rank + self.num_ranks - 1}")
        return self._ranks[index]

    def _score(self, entry: _Rank) -> int:
        own = len(entry.requests)
        # What we sent since the report, the other front ends are likely to have sent too: they see the same numbers.
        unseen = (self._clients - 1) * min(entry.since, own)
        requests = max(self._clients * own, own + entry.other_requests + unseen)
        tokens = max(self._clients * entry.pending_tokens, entry.pending_tokens + entry.other_tokens)
        score = requests + tokens // self._unit
        if entry.kv_usage > KV_PRESSURE_START:
            score += int((entry.waiting + 1) * KV_PRESSURE_WEIGHT * (entry.kv_usage - KV_PRESSURE_START))
        return score

    def _mean_load(self) -> tuple[int, int]:
        """(requests, prompt tokens to compute) of an average rank that has reported; 0, 0 if none has."""
        if not self._heard:
            return 0, 0
        return -(-self._heard_requests // self._heard), self._heard_tokens // self._heard

    def _hear(self, entry: _Rank, sign: int) -> None:
        """Count a rank's load among those heard of, or take it out before it changes (`sign` -1)."""
        if entry.known and entry.state == RankState.READY:
            self._heard += sign
            self._heard_requests += sign * (len(entry.requests) + entry.other_requests)
            self._heard_tokens += sign * (entry.pending_tokens + entry.other_tokens)

    @staticmethod
    def _assume(entry: _Rank, requests: int, tokens: int) -> None:
        # Not heard from is not the same as idle.
        entry.other_requests = max(0, requests - len(entry.requests))
        entry.other_tokens = max(0, tokens - entry.pending_tokens)

    def _place(self, entry: _Rank) -> None:
        """Move a rank to the bucket of its score."""
        bucket = self._score(entry) if entry.state == RankState.READY else None
        if bucket == entry.bucket:
            return
        bit = 1 << (entry.rank - self.first_rank)
        if entry.bucket is not None:
            self._buckets[entry.bucket] ^= bit
        entry.bucket = bucket
        if bucket is not None:
            members = self._buckets.get(bucket)
            if members is None:
                if len(self._buckets) > 2 * self.num_ranks + 64:
                    self._drop_empty_buckets()
                members = 0
                heapq.heappush(self._scores, bucket)
            self._buckets[bucket] = members | bit

    def _drop_empty_buckets(self) -> None:
        """At most one bucket per rank is in use: the empty ones go before they outnumber those many times."""
        self._buckets = {score: members for score, members in self._buckets.items() if members}
        self._scores = sorted(self._buckets)

    def _lowest(self, keys: tuple[Hashable, ...]) -> _Rank:
        while self._scores:
            members = self._buckets[self._scores[0]]
            if members:
                break
            del self._buckets[heapq.heappop(self._scores)]
        else:
            raise NoReadyRank(
                f"no rank is ready ({self._states()}); expected at least one of {self.num_ranks}; try again later"
            )
        here = self._next
        self._next = (here + 1) % self.num_ranks
        for rank, epoch in self._affinity.candidates(keys) if keys else ():
            index = rank - self.first_rank
            if members >> index & 1 and self._ranks[index].epoch == epoch:
                return self._ranks[index]
        ahead = members >> here
        if ahead:
            return self._ranks[here + (ahead & -ahead).bit_length() - 1]
        return self._ranks[(members & -members).bit_length() - 1]

    def _states(self) -> str:
        counts: dict[str, int] = {}
        for entry in self._ranks:
            counts[entry.state.value] = counts.get(entry.state.value, 0) + 1
        return ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
