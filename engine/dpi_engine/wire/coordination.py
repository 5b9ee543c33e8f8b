"""What the coordinator knows and decides, and its messages. Pure: no sockets, no clock."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from dpi_engine.wire.codec import Buffer, StartWave, decode_as, encode, encode_request
from dpi_engine.wire.errors import WireError
from dpi_engine.wire.messages import Dialect, EngineCoreOutputs, LoadRecord, RequestType
from dpi_engine.wire.waves import WaveBoard

CHANGE_INTERVAL = 0.1
"""Seconds from a change to its publication, at least that between two."""
IDLE_INTERVAL = 5.0
"""Seconds between publications when nothing changes."""
LEAST_LOAD_INTERVAL = 0.01
"""Seconds between two load reports of a rank; steps in between are summed up by the next one."""
LOADS_PER_SECOND = 10_000
"""Load reports that a coordinator gets from all ranks at most: of many ranks each reports less often."""


def least_load_interval(size: int) -> float:
    """Least seconds between two load reports of one of `size` ranks."""
    return max(LEAST_LOAD_INTERVAL, size / LOADS_PER_SECOND)


class RankLease(msgspec.Struct, array_like=True):
    """A rank's place in the routing table: only `READY` gets new work. `boot_id` is empty for a vLLM engine."""

    rank: int
    state: str
    epoch: int
    boot_id: bytes = b""


class RankTable(msgspec.Struct, array_like=True, tag="RANKS"):
    """The lease owner -> coordinator -> front ends: all ranks, numbered. A higher `head` number replaces any `seq`."""

    head: int
    seq: int
    ranks: list[RankLease]


KV_UNIT = 65535
"""A load report says KV cache use in these parts of the whole."""


class LoadReport(msgspec.Struct, array_like=True, tag="L"):
    """Engine -> coordinator in the `dpi` dialect: a LoadRecord in at most 64 bytes while epochs and requests are below
    2**16 and sums below 2**32 (prefix cache tokens 2**64). `head_epoch`: under which the group's head knows the rank.
    `mode`: sleep level in the upper four bits, pace in the lower four."""

    head_epoch: int
    rank: int
    epoch: int
    seq: int
    waiting: int
    running: int
    kv_parts: int
    waiting_tokens: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    mode: int
    group: int
    wave: int

    def record(self) -> LoadRecord:
        """What front ends are told. Raises WireError for a share of the cache beyond the whole."""
        if not 0 <= self.kv_parts <= KV_UNIT:
            raise WireError("malformed", f"load report: KV cache use {self.kv_parts}, expected 0 to {KV_UNIT}")
        return LoadRecord(
            self.rank,
            self.epoch,
            self.seq,
            self.waiting,
            self.running,
            self.kv_parts / KV_UNIT,
            self.waiting_tokens,
            self.preemptions,
            self.prefix_queries,
            self.prefix_hits,
            self.mode >> 4,
            self.group,
            self.wave,
            self.mode & 15,
        )


def encode_load_report(load: LoadRecord, head_epoch: int) -> bytes:
    """The frame of a load alone; with a wave's begin or end it goes in EngineCoreOutputs."""
    report = LoadReport(
        head_epoch,
        load.rank,
        load.epoch,
        load.seq,
        load.waiting,
        load.running,
        round(min(1.0, max(0.0, load.kv_usage)) * KV_UNIT),
        load.waiting_tokens,
        load.preemptions,
        load.prefix_queries,
        load.prefix_hits,
        load.sleep_level << 4 | load.pace,
        load.group,
        load.wave,
    )
    return encode(report)


class CoordinatorUpdate(msgspec.Struct, array_like=True):
    """Coordinator -> front ends in the `dpi` dialect. The first three positions mean what they mean in vLLM's message:
    loads (nil: unchanged), wave, whether a wave runs; `ranks` is nil when unchanged."""

    loads: list[LoadRecord] | None
    wave: int
    running: bool
    ranks: RankTable | None = None


class WakeUp(msgspec.Struct, array_like=True):
    """Front end -> coordinator: the first request of a wave went to rank `exclude` (vLLM sends its identity)."""

    exclude: int | bytes | None
    wave: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Send `payload` to all front ends."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send START_DP_WAVE to all engines. `group` is of the `dpi` dialect: the epoch of the group that is meant."""

    wave: int
    exclude: int | bytes | None
    group: int = 0

    def frames(self, dialect: Dialect = Dialect.DPI) -> list[bytes]:
        return encode_request(RequestType.START_DP_WAVE, StartWave(self.wave, self.exclude, self.group), dialect)


Action = Publish | Broadcast


class CoordinatorState:
    """What the coordinator knows of `size` ranks; times are arguments in seconds.

    Publication is due CHANGE_INTERVAL after the first unpublished change, else IDLE_INTERVAL after the last one; events
    in between do not postpone it.

    Waves (`moe`): in the `vllm` dialect ranks report that a wave began or ended, and what vLLM's coordinator does
    follows from that. In the `dpi` dialect ranks report where they stand, and a WaveBoard says whom to wake.
    """

    def __init__(self, size: int, dialect: Dialect = Dialect.DPI, moe: bool = False, now: float = 0.0) -> None:
        self.size = size
        self.dialect = dialect
        self.moe = moe
        self.wave = 0
        self.running = False
        self._loads = [LoadRecord(rank, 0, -1, 0, 0, 0.0) for rank in range(size)]
        self._load_epochs = [0] * size  # under which the head knew the rank that sent it
        self._table: RankTable | None = None
        self._published = now
        self._changed_at: float | None = None
        self._board = WaveBoard(size) if moe and dialect is Dialect.DPI else None

    # ------------------------------------------------------------------------------------------ events

    def on_engine(self, outputs: EngineCoreOutputs, now: float) -> list[Action]:
        """A wave report, or a load in its longer form. Raises WireError for a rank outside the group."""
        rank = outputs.engine_index
        load = outputs.load
        if load is not None and load.rank != rank:
            raise WireError("bad_rank", f"coordinator: rank {rank} sent the load of rank {load.rank}")
        self._check_rank(rank)
        if load is not None:
            self._take(load, outputs.epoch, now)
        elif outputs.scheduler_stats is not None:
            s = outputs.scheduler_stats
            old = self._loads[rank]
            counts = (s.num_waiting_reqs, s.num_running_reqs, s.kv_cache_usage)
            self._take(LoadRecord(rank, 0, old.seq + 1, *counts), 0, now)
        if self._board is not None:
            return self._follow(self._board, self._loads[rank], now)
        actions: list[Action] = []
        if self.moe and outputs.wave_complete is not None and outputs.wave_complete >= self.wave:
            self.wave, self.running = outputs.wave_complete + 1, False
            actions.append(self._wave_changed())
        wave = outputs.start_wave if self.moe else None
        if wave is not None and (wave > self.wave or (wave == self.wave and not self.running)):
            self.wave, self.running = wave, True
            actions += [self._wave_changed(), Broadcast(wave, rank)]
        return actions

    def on_load(self, report: LoadReport, now: float) -> list[Action]:
        """A rank's load. Raises WireError for a rank outside the group."""
        self._check_rank(report.rank)
        self._take(report.record(), report.head_epoch, now)
        return [] if self._board is None else self._follow(self._board, self._loads[report.rank], now)

    def on_front_end(self, wake: WakeUp, now: float = 0.0) -> list[Action]:
        """A front end sent the first request of a wave. Dense models have no waves."""
        if not self.moe or self.running:
            return []
        if self._board is not None:
            self._board.wake(wake.wave, _rank_of(wake.exclude))
            return self._wake(self._board, now)
        return [Broadcast(self.wave, None if wake.wave < self.wave else wake.exclude)]

    def on_ranks(self, table: RankTable, now: float) -> list[Action]:
        """The lease owner's table; an older one is ignored. News of a rank goes out at once."""
        if len(table.ranks) != self.size:
            raise WireError("bad_rank", f"coordinator: a table of {len(table.ranks)} ranks for a group of {self.size}")
        old = self._table
        if old is not None and (table.head, table.seq) <= (old.head, old.seq):
            return []
        same = old is not None and old.ranks == table.ranks
        self._table = table
        if self.dialect is Dialect.VLLM or same:
            return []
        return [Publish(self._payload(None, table))]

    def due(self, now: float) -> list[Action]:
        """The periodic publication and repeated wake-ups, when their time has come."""
        actions: list[Action] = []
        if now >= self._publication_due():
            self._published, self._changed_at = now, None
            actions.append(self.snapshot())
        if self._board is not None:
            actions += self._wake(self._board, now)
        return actions

    def snapshot(self) -> Publish:
        """All that is known, for a front end that has just subscribed."""
        return Publish(self._payload(self._loads, self._table))

    def next_due(self) -> float:
        """When `due` will have something to send next if nothing changes."""
        repeat = self._board.next_due() if self._board is not None else None
        publication = self._publication_due()
        return publication if repeat is None else min(publication, repeat)

    # ---------------------------------------------------------------------------------------- internals

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise WireError("bad_rank", f"coordinator: rank {rank} is outside 0..{self.size - 1}")

    def _publication_due(self) -> float:
        if self._changed_at is not None:
            return max(self._changed_at, self._published + CHANGE_INTERVAL)
        return self._published + IDLE_INTERVAL

    def _follow(self, board: WaveBoard, load: LoadRecord, now: float) -> list[Action]:
        changed = board.report(load)
        self.wave, self.running = board.wave, board.running
        return [*([self._wave_changed()] if changed else []), *self._wake(board, now)]

    @staticmethod
    def _wake(board: WaveBoard, now: float) -> list[Action]:
        start = board.due(now)
        return [] if start is None else [Broadcast(start.wave, start.exclude, start.group)]

    def _take(self, load: LoadRecord, epoch: int, now: float) -> None:
        """`epoch` is the head's; that in the record may be of the rank's own front end, which has begun anew since."""
        old = self._loads[load.rank]
        if (epoch, load.epoch, load.seq) <= (self._load_epochs[load.rank], old.epoch, old.seq):
            return  # overtaken, or the same record sent again
        self._loads[load.rank], self._load_epochs[load.rank] = load, epoch
        if self._changed_at is None:
            self._changed_at = now

    def _wave_changed(self) -> Publish:
        return Publish(self._payload(None, None))

    def _payload(self, loads: list[LoadRecord] | None, table: RankTable | None) -> bytes:
        if self.dialect is Dialect.VLLM:
            counts = None if loads is None else [[r.waiting, r.running, r.kv_usage] for r in loads]
            return encode([counts, self.wave, self.running])
        known = None if loads is None else [r for r in loads if r.seq >= 0]
        return encode(CoordinatorUpdate(known, self.wave, self.running, table))


_update_decoder = msgspec.msgpack.Decoder(CoordinatorUpdate)
_load_decoder = msgspec.msgpack.Decoder(LoadReport)
_table_decoder = msgspec.msgpack.Decoder(RankTable)
_wake_decoder = msgspec.msgpack.Decoder(WakeUp)


def decode_update(frame: Buffer) -> CoordinatorUpdate:
    """What a front end receives in the `dpi` dialect. Raises WireError."""
    return decode_as(_update_decoder, frame, "coordinator update")


def decode_load_report(frame: Buffer) -> LoadReport:
    """What an engine sends of its load alone. Raises WireError."""
    return decode_as(_load_decoder, frame, "load report")


def decode_rank_table(frame: Buffer) -> RankTable:
    """What the lease owner sends. Raises WireError."""
    return decode_as(_table_decoder, frame, "rank table")


def decode_wake_up(frame: Buffer) -> WakeUp:
    """What a front end sends. Raises WireError."""
    return decode_as(_wake_decoder, frame, "wake-up")


def _rank_of(exclude: int | bytes | None) -> int | None:
    """The rank that a wake-up leaves out; vLLM front ends send its identity."""
    if isinstance(exclude, bytes):
        return int.from_bytes(exclude[:2], "little") if len(exclude) >= 2 else None
    return exclude
