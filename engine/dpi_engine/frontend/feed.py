"""The coordinator's publications as a front end reads them, and its wake-ups for waves."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import zmq

from dpi_engine.frontend.transport import Feed, Transport
from dpi_engine.wire import codec
from dpi_engine.wire.coordination import CoordinatorUpdate, RankLease, RankTable, WakeUp, decode_update
from dpi_engine.wire.counters import WireCounters
from dpi_engine.wire.errors import WireError
from dpi_engine.wire.messages import Dialect, LoadRecord, RankInfo, RankState

logger = logging.getLogger(__name__)

NAME = "coordinator"


class VllmUpdate(msgspec.Struct, array_like=True):
    """`[[[waiting, running, kv_usage], ...] | nil, wave, running]`: counts of all ranks of the group, by rank."""

    counts: list[tuple[int, int, float]] | None
    wave: int
    running: bool


_vllm_decoder = msgspec.msgpack.Decoder(VllmUpdate)


class CoordinatorFeed:
    """Subscribes to a coordinator.

    `on_load` gets numbered records, `on_counts(rank, waiting, running, kv_usage)` vLLM's counts, `on_ranks` the head's
    table when it is news.

    `waves`: the model is a mixture of experts, so the first request to an idle group must wake the others.
    """

    def __init__(
        self,
        transport: Transport,
        endpoint: str,
        dialect: Dialect,
        counters: WireCounters,
        *,
        on_load: Callable[[LoadRecord], None],
        on_counts: Callable[[int, int, int, float], None],
        on_ranks: Callable[[list[RankInfo]], None],
        waves: bool = False,
    ) -> None:
        self._vllm = dialect is Dialect.VLLM
        self._counters = counters
        self._on_load = on_load
        self._on_counts = on_counts
        self._on_ranks = on_ranks
        self._waves = waves
        self._table_number = (-1, -1)
        self.wave = 0
        self.running = False
        self.updates = 0
        self._transport = transport
        self._feed: Feed = transport.subscribe(endpoint, NAME, self._on_message)

    def close(self) -> None:
        self._transport.unsubscribe(self._feed)

    def dispatched(self, rank: int, identity: bytes) -> None:
        """A request went to a rank: wake the others if the group is idle."""
        if self._waves and not self.running:
            self.running = True
            self._feed.send(codec.encode(WakeUp(identity if self._vllm else rank, self.wave)))

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        try:
            codec.check_frames([frame.buffer for frame in frames], 1, 1, "coordinator update")
            if self._vllm:
                self._take_vllm(codec.decode_as(_vllm_decoder, frames[0].buffer, "coordinator update"))
            else:
                self._take(decode_update(frames[0].buffer))
        except WireError as error:
            self._counters.count(NAME, error.code)
            logger.debug("dropped a coordinator update: %s", error)

    def _take_vllm(self, update: VllmUpdate) -> None:
        self.updates += 1
        self.wave, self.running = update.wave, update.running
        for rank, (waiting, running, kv_usage) in enumerate(update.counts or ()):
            self._on_counts(rank, waiting, running, kv_usage)

    def _take(self, update: CoordinatorUpdate) -> None:
        self.updates += 1
        self.wave, self.running = update.wave, update.running
        # The table first: loads of a rank's new life count only once its epoch is known.
        if update.ranks is not None:
            self._take_table(update.ranks)
        for record in update.loads or ():
            self._on_load(record)

    def _take_table(self, table: RankTable) -> None:
        number = (table.head, table.seq)
        if number <= self._table_number:
            return
        try:
            infos = [_rank_info(lease) for lease in table.ranks]
        except ValueError as error:
            raise WireError("malformed", f"rank table: {error}") from None
        self._table_number = number
        self._on_ranks(infos)


def _rank_info(lease: RankLease) -> RankInfo:
    return RankInfo(rank=lease.rank, state=RankState(lease.state), epoch=lease.epoch, boot_id=lease.boot_id.hex())
