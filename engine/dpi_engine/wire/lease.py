"""Who is alive: the lease table of a head's ranks. Pure: every event carries the time, nothing is read or sent.

NEW -> HELLO -> LOADING -> READY <-> SUSPECT -> LOST, then back by a HELLO under a higher epoch. A frame of an old
epoch changes nothing and is answered with FENCED. A vLLM engine has no boot id and sends no beats: silence means
nothing for it, it is lost by a disconnect or by the end of its process, and is back when the connection is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpi_engine.wire.errors import Refusal
from dpi_engine.wire.handshake import LeaseTimes
from dpi_engine.wire.messages import WIRE_VERSION, RankInfo, RankState

DRAINING = "draining"
"""Stage of a rank that was told to stop and still finishes requests."""

LEFT = "left"
"""First word of a rank's error when it said goodbye."""

ALIVE = frozenset({RankState.HELLO, RankState.LOADING, RankState.READY, RankState.SUSPECT})


@dataclass(frozen=True, slots=True)
class LeaseTimings:
    """Durations in seconds.

    beat: between beats, both ways.
    suspect, lost: silence of a READY rank until it gets no new work, until it is given up.
    loading: silence allowed before READY, since imports hold the interpreter; every message extends it.
    step_suspect, step_lost: age of a step that does not end although beats come.
    report: between reports of missing ranks.
    resend: between load records when nothing changes.
    rejoin: how long an engine that lost its head tries to find a new one.
    """

    beat: float = 0.25
    suspect: float = 1.25
    lost: float = 3.0
    loading: float = 30.0
    step_suspect: float = 30.0
    step_lost: float = 300.0
    report: float = 10.0
    resend: float = 1.0
    rejoin: float = 60.0

    def scaled(self, factor: float) -> LeaseTimings:
        """All durations times `factor`."""
        return LeaseTimings(**{name: getattr(self, name) * factor for name in self.__slots__})

    def wire(self) -> LeaseTimes:
        """What the ranks are told."""
        return LeaseTimes(beat=self.beat, suspect=self.suspect, lost=self.lost)


Diff = Callable[[dict[str, Any], dict[str, Any]], Sequence[Any]]
"""diff(expected, got) -> differences, each with attributes `field`, `expected`, `got`."""


@dataclass(frozen=True, slots=True)
class Group:
    """What a head expects of its ranks.

    size: ranks of the whole group. local: the ranks that live beside the head. only_local: no other ones are expected,
    as by a front end whose launch is not the head. remote_headless: whether the other ranks run without a front end
    (internal balancing) or with their own (hybrid, external and multi-port). declared: fingerprint fields of the head,
    compared with `diff` at HELLO; None leaves the comparison out. coupled: the ranks step together, so that none can
    compute while one is missing. vllm: the group speaks vLLM's protocol; a group of our own takes no vLLM engines, and
    its head greets, so that ranks of ours know it before they say a word.
    """

    size: int
    local: frozenset[int]
    remote_headless: bool = True
    declared: dict[str, Any] = field(default_factory=dict)
    diff: Diff | None = None
    only_local: bool = False
    coupled: bool = False
    vllm: bool = False

    @property
    def expected(self) -> list[int]:
        """Ranks that may join, ascending."""
        return sorted(self.local) if self.only_local else list(range(self.size))

    @property
    def expected_text(self) -> str:
        ranks = self.expected
        if not ranks:
            return "none"
        return f"{ranks[0]}..{ranks[-1]}"


@dataclass(frozen=True, slots=True)
class Peer:
    """Who sent a message: `boot_id` is hexadecimal and empty for a vLLM engine; `address` as the socket saw it."""

    rank: int
    boot_id: str = ""
    pod: str = ""
    address: str = ""
    pid: int | None = None

    def __str__(self) -> str:
        parts = [f"pod {self.pod}" if self.pod else "", f"boot id {self.boot_id}" if self.boot_id else "vLLM engine"]
        parts += [f"address {self.address}" if self.address else "", f"pid {self.pid}" if self.pid else ""]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Accept:
    """The event was taken under `epoch`; `changed` when the rank's state moved."""

    epoch: int
    changed: bool = False


@dataclass(frozen=True, slots=True)
class Refuse:
    """The event was refused and changed nothing."""

    code: Refusal
    message: str
    details: dict[str, Any] = field(default_factory=dict)


Decision = Accept | Refuse


@dataclass(frozen=True, slots=True)
class Missing:
    """A rank that is not READY, and since how many seconds it has been in its state."""

    rank: int
    state: RankState
    stage: str
    since_s: float

    def __str__(self) -> str:
        stage = f", {self.stage}" if self.stage else ""
        return f"rank {self.rank} ({self.state}{stage}, since {self.since_s:.0f} s)"


@dataclass(slots=True)
class _Rank:
    rank: int
    local: bool
    since: float
    state: RankState = RankState.NEW
    epoch: int = 0
    peer: Peer | None = None
    stage: str = "no HELLO yet"
    fingerprint: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    last_seen: float | None = None
    step_age: float | None = None
    steps: int = 0
    restarts: int = 0
    error: str = ""
    exchange: str = ""
    load: tuple[int, int, float] | None = None
    cut_off: bool = False  # lost because nothing reaches it, which may pass


class LeaseTable:
    """All ranks of one group. Every method that takes an event returns what to answer; `tick` lets time pass."""

    def __init__(self, group: Group, timings: LeaseTimings, now: float, resolved: dict[str, Any] | None = None) -> None:
        self.group = group
        self.timings = timings
        self._ranks = {r: _Rank(r, r in group.local, now) for r in group.expected}
        self._resolved = resolved
        self._resolved_given = resolved is not None

    # ------------------------------------------------------------------------------------------ events

    def hello(
        self,
        peer: Peer,
        now: float,
        *,
        local: bool,
        headless: bool,
        version: int = 0,
        known_epoch: int = 0,
        replaces: str = "",
        fingerprint: str = "",
        fields: dict[str, Any] | None = None,
    ) -> Decision:
        """A rank asks to join. Accepted: HELLO state under a new epoch (the same one when this HELLO is a repeat)."""
        refusal = self._check_hello(peer, local, headless, version, fields or {})
        if refusal is not None:
            return refusal
        entry = self._ranks[peer.rank]
        if entry.state in ALIVE and entry.peer is not None:
            same = entry.peer.boot_id == peer.boot_id
            if same and entry.state is RankState.HELLO and peer.boot_id:
                entry.last_seen = now
                return Accept(entry.epoch)
            # A vLLM identity is served on one connection at a time, so before READY its second HELLO is a restart.
            # After READY the connection is closed, and of a rank that is not routed to from here nothing else tells.
            unseen = not self.group.remote_headless and not entry.local
            restart = same and not peer.boot_id and (entry.state is RankState.HELLO or unseen)
            if not restart and (not replaces or replaces != entry.peer.boot_id):
                return Refuse(
                    Refusal.DUPLICATE_RANK,
                    f"rank {peer.rank} is taken: held by [{entry.peer}] in state {entry.state}, "
                    f"asked for by [{peer}]; give every process its own rank, or stop the other one",
                    {"rank": peer.rank, "holder": str(entry.peer), "asker": str(peer), "state": str(entry.state)},
                )
        if entry.peer is not None:
            entry.restarts += 1
        entry.epoch = max(entry.epoch, known_epoch) + 1
        entry.peer = peer
        entry.fingerprint, entry.fields = fingerprint, dict(fields or {})
        entry.last_seen, entry.step_age, entry.steps, entry.error, entry.load = now, None, 0, "", None
        entry.cut_off = False
        self._move(entry, RankState.HELLO, "HELLO answered", now)
        return Accept(entry.epoch, True)

    def progress(self, peer: Peer, epoch: int, stage: str, fraction: float | None, now: float) -> Decision:
        """The rank tells what it is loading; extends its deadline."""
        entry = self._current(peer, epoch)
        if isinstance(entry, Refuse):
            return entry
        entry.last_seen = now
        if entry.state not in (RankState.HELLO, RankState.LOADING):
            return Accept(entry.epoch)
        text = stage if fraction is None else f"{stage} {min(max(fraction, 0.0), 1.0):.0%}"
        changed = entry.state is not RankState.LOADING or entry.stage != text
        if entry.state is RankState.HELLO:
            self._move(entry, RankState.LOADING, text, now)
        entry.stage = text
        return Accept(entry.epoch, changed)

    def ready(
        self,
        peer: Peer,
        epoch: int,
        now: float,
        fingerprint: str = "",
        fields: dict[str, Any] | None = None,
        exchange: str = "",
    ) -> Decision:
        """The rank has loaded. `fields` are what it resolved; they must equal those of the ranks that came first.
        `exchange`: where it takes links of the others, if ranks step together.

        A vLLM engine does not hear of a refusal, so one that differs is LOST by it."""
        entry = self._current(peer, epoch)
        if isinstance(entry, Refuse):
            return entry
        entry.exchange = exchange
        if entry.state in (RankState.READY, RankState.SUSPECT):
            if peer.boot_id:
                entry.last_seen = now
                return Accept(entry.epoch)  # a repeat whose acknowledgement was lost
            return Refuse(Refusal.READY_BEFORE_HELLO, f"rank {peer.rank} sent READY twice")
        if fields and self.group.diff is not None:
            refusal = self._check_resolved(peer, fields, entry)
            if refusal is not None:
                if not peer.boot_id:
                    self._lose(entry, refusal.message, now)
                return refusal
        entry.fields = {**entry.fields, **(fields or {})}
        entry.fingerprint = fingerprint or entry.fingerprint
        entry.last_seen = now
        self._move(entry, RankState.READY, "", now)
        return Accept(entry.epoch, True)

    def beat(
        self,
        peer: Peer,
        epoch: int,
        step_age: float | None,
        steps: int,
        now: float,
        draining: bool = False,
        load: tuple[int, int, float] | None = None,
        waits: str = "",
    ) -> Decision:
        """A sign of life; `step_age` seconds since the step in progress began, None when idle.

        `load`: (waiting, running, kv_usage) where nobody else here hears of it.

        `waits`: why it can take no new work just now; SUSPECT for as long.

        A rank that is `draining` finishes what it has and gets no new work: SUSPECT until it leaves.
        """
        entry = self._current(peer, epoch)
        if isinstance(entry, Refuse):
            return entry
        entry.last_seen, entry.step_age, entry.steps, entry.load = now, step_age, steps, load
        stuck = step_age is not None and step_age > self.timings.step_suspect
        if draining and entry.state in (RankState.READY, RankState.SUSPECT):
            changed = entry.stage != DRAINING
            self._move(entry, RankState.SUSPECT, DRAINING, now)
            return Accept(entry.epoch, changed)
        if waits and entry.state in (RankState.READY, RankState.SUSPECT):
            changed = entry.stage != waits
            self._move(entry, RankState.SUSPECT, waits, now)
            return Accept(entry.epoch, changed)
        if entry.state is RankState.SUSPECT and not stuck:
            self._move(entry, RankState.READY, "", now)
            return Accept(entry.epoch, True)
        return Accept(entry.epoch)

    def goodbye(self, peer: Peer, epoch: int, reason: str, now: float) -> Decision:
        """The rank leaves in order."""
        entry = self._current(peer, epoch)
        if isinstance(entry, Refuse):
            return entry
        self._lose(entry, f"{LEFT}: {reason}" if reason else LEFT, now)
        return Accept(entry.epoch, True)

    def lost(self, rank: int, reason: str, now: float, epoch: int | None = None) -> bool:
        """Positive news that a rank is gone (socket unreachable, process ended). True when that changed its state.

        `epoch` limits the news to one incarnation: it is ignored when the rank has come back since.
        """
        entry = self._ranks.get(rank)
        if entry is None:
            return False
        if entry.state not in ALIVE or (epoch is not None and epoch != entry.epoch):
            if entry.state in (RankState.NEW, RankState.LOST) and epoch is None:
                entry.error = reason  # a process that ends before its HELLO: shown among the missing
                entry.stage = reason
            return False
        self._lose(entry, reason, now)
        return True

    def cut_off(self, rank: int, reason: str, now: float, epoch: int | None = None) -> bool:
        """Nothing reaches the rank any more. As `lost`, but a vLLM engine is back with its connection: `reached`."""
        changed = self.lost(rank, reason, now, epoch)
        if changed:
            self._ranks[rank].cut_off = True
        return changed

    def reached(self, rank: int, now: float) -> bool:
        """The connection of a vLLM engine that was cut off stands again: the same life of it. True when it was."""
        entry = self._ranks.get(rank)
        if entry is None or entry.peer is None or entry.peer.boot_id:
            return False  # an engine of our own registers anew
        if entry.state is not RankState.LOST or not entry.cut_off:
            return False
        entry.error, entry.cut_off, entry.last_seen = "", False, now
        self._move(entry, RankState.READY, "", now)
        return True

    def tick(self, now: float) -> list[int]:
        """Let time pass: ranks whose state changed."""
        t = self.timings
        changed = []
        for entry in self._ranks.values():
            if entry.state not in ALIVE or entry.peer is None or not entry.peer.boot_id or entry.last_seen is None:
                continue
            silence = now - entry.last_seen
            loading = entry.state in (RankState.HELLO, RankState.LOADING)
            if silence > (t.loading if loading else t.lost):
                doing = f" while {entry.stage}" if entry.state is RankState.LOADING else ""
                self._lose(entry, f"silent for {silence:.1f} s{doing}", now)
            elif loading:
                continue
            elif entry.step_age is not None and entry.step_age + silence > t.step_lost:
                self._lose(entry, f"one step has not ended for {entry.step_age + silence:.0f} s", now)
            elif entry.state is RankState.READY and silence > t.suspect:
                self._move(entry, RankState.SUSPECT, f"no beat for {silence:.1f} s", now)
            elif (
                entry.state is RankState.READY
                and entry.step_age is not None
                and entry.step_age + silence > t.step_suspect
            ):
                self._move(
                    entry, RankState.SUSPECT, f"one step has not ended for {entry.step_age + silence:.0f} s", now
                )
            else:
                continue
            changed.append(entry.rank)
        return changed

    # ------------------------------------------------------------------------------------------- views

    def __contains__(self, rank: int) -> bool:
        return rank in self._ranks

    def peer(self, rank: int) -> Peer | None:
        """Holder of the rank's lease while it is alive."""
        entry = self._ranks[rank]
        return entry.peer if entry.state in ALIVE else None

    def state(self, rank: int) -> RankState:
        return self._ranks[rank].state

    def epoch(self, rank: int) -> int:
        return self._ranks[rank].epoch

    def missing(self, now: float) -> list[Missing]:
        """Ranks that never got READY or are lost: what to name at the deadline and before it."""
        return [
            Missing(e.rank, e.state, e.stage, now - e.since)
            for e in self._ranks.values()
            if e.state not in (RankState.READY, RankState.SUSPECT)
        ]

    def members(self) -> dict[int, tuple[int, str]]:
        """Epoch and exchange address of the ranks that can step."""
        return {
            e.rank: (e.epoch, e.exchange)
            for e in self._ranks.values()
            if e.state in (RankState.READY, RankState.SUSPECT) and e.exchange
        }

    def absent(self) -> str:
        """The ranks without which a coupled group cannot take new work, and why, in words; empty when it can."""
        away = [
            f"rank {e.rank} ({e.state}{': ' + e.stage if e.stage else ''})"
            for e in self._ranks.values()
            if e.state not in (RankState.READY, RankState.SUSPECT) or e.stage == DRAINING or not e.exchange
        ]
        more = f" and {len(away) - 4} more" if len(away) > 4 else ""
        return ", ".join(away[:4]) + more

    def infos(self, now: float) -> list[RankInfo]:
        """All ranks as `/ranks` shows them; loads are filled in by whoever knows them.

        In a coupled group a READY rank is shown as SUSPECT while another one is away: it can take no new work.
        """
        absent = self.absent() if self.group.coupled else ""

        def shown(e: _Rank) -> tuple[RankState, str]:
            if absent and e.state is RankState.READY:
                return RankState.SUSPECT, f"waits for {absent}"
            return e.state, e.stage

        return [
            RankInfo(
                rank=e.rank,
                state=shown(e)[0],
                stage=shown(e)[1],
                epoch=e.epoch,
                boot_id=e.peer.boot_id if e.peer else "",
                local=e.local,
                pod=e.peer.pod if e.peer else "",
                fingerprint=e.fingerprint,
                fields=e.fields,
                steps=e.steps,
                step_age_s=e.step_age,
                last_seen_s=None if e.last_seen is None else now - e.last_seen,
                pid=e.peer.pid if e.peer else None,
                restarts=e.restarts,
                error=e.error,
                waiting=e.load[0] if e.load else 0,
                running=e.load[1] if e.load else 0,
                kv_usage=e.load[2] if e.load else 0.0,
            )
            for e in self._ranks.values()
        ]

    # ---------------------------------------------------------------------------------------- internals

    def _check_hello(
        self, peer: Peer, local: bool, headless: bool, version: int, fields: dict[str, Any]
    ) -> Refuse | None:
        group, rank = self.group, peer.rank
        if rank not in self._ranks:
            return self._out_of_range(rank)
        if peer.boot_id and version != WIRE_VERSION:
            return Refuse(
                Refusal.PROTOCOL_VERSION,
                f"rank {rank} speaks wire version {version}, the head {WIRE_VERSION}; run one release on all nodes",
                {"expected": WIRE_VERSION, "got": version},
            )
        if not peer.boot_id and not group.vllm:
            return Refuse(
                Refusal.PROTOCOL_VERSION,
                f"rank {rank} is a vLLM engine, or one of ours that speaks its protocol; give this launch and all "
                "others --data-parallel-protocol vllm, or run the rank with `dpi serve` and without it",
                {"expected": "dpi", "got": "vllm"},
            )
        expected_local = rank in group.local
        if local != expected_local:
            where = "beside the head" if expected_local else "on another node"
            return Refuse(
                Refusal.LOCALITY,
                f"rank {rank} is expected {where}, but says that it is {'local' if local else 'remote'}; check "
                "--data-parallel-size-local and --data-parallel-start-rank on both sides",
                {"rank": rank, "expected_local": expected_local},
            )
        expected_headless = group.remote_headless and not local
        if headless != expected_headless:
            todo = "add --headless there" if expected_headless else "drop --headless there"
            return Refuse(
                Refusal.HEADLESS,
                f"rank {rank} came with headless={headless}, the head needs headless={expected_headless}; {todo}",
                {"rank": rank, "expected_headless": expected_headless},
            )
        if peer.boot_id and group.diff is not None:
            return self._mismatch(rank, "declared", group.declared, fields)
        return None

    def _check_resolved(self, peer: Peer, fields: dict[str, Any], entry: _Rank) -> Refuse | None:
        others = any(
            e.state in (RankState.READY, RankState.SUSPECT) for e in self._ranks.values() if e.rank != entry.rank
        )
        if self._resolved is None or (not others and not self._resolved_given):
            self._resolved = dict(fields)
            return None
        both = self._resolved.keys() & fields.keys()
        return self._mismatch(peer.rank, "resolved", {k: self._resolved[k] for k in both}, {k: fields[k] for k in both})

    def _mismatch(self, rank: int, part: str, expected: dict[str, Any], got: dict[str, Any]) -> Refuse | None:
        assert self.group.diff is not None
        differences = [{"field": d.field, "expected": d.expected, "got": d.got} for d in self.group.diff(expected, got)]
        if not differences:
            return None
        text = "; ".join(f"{d['field']}: expected {d['expected']!r}, got {d['got']!r}" for d in differences[:8])
        more = f" and {len(differences) - 8} more" if len(differences) > 8 else ""
        return Refuse(
            Refusal.FINGERPRINT,
            f"rank {rank} would not run the same configuration ({part}): {text}{more}",
            {"rank": rank, "part": part, "differences": differences},
        )

    def _current(self, peer: Peer, epoch: int) -> _Rank | Refuse:
        """The entry that `peer` holds, or why it holds none. A vLLM engine knows no epochs."""
        entry = self._ranks.get(peer.rank)
        if entry is None:
            return self._out_of_range(peer.rank)
        if entry.peer is None:
            return Refuse(Refusal.READY_BEFORE_HELLO, f"rank {peer.rank} has not said HELLO", {"rank": peer.rank})
        holds = entry.state in ALIVE and entry.peer.boot_id == peer.boot_id
        if not holds or (peer.boot_id and epoch != entry.epoch):
            why = f"its lease ended ({entry.stage})" if entry.state is RankState.LOST else "another process holds it"
            return Refuse(
                Refusal.FENCED,
                f"epoch {epoch} of rank {peer.rank} is over: {why}; register again",
                {"rank": peer.rank, "epoch": epoch, "current": entry.epoch},
            )
        return entry

    def _out_of_range(self, rank: int) -> Refuse:
        group = self.group
        where = "this front end" if group.only_local else "the head"
        return Refuse(
            Refusal.RANK_OUT_OF_RANGE,
            f"rank {rank} is outside {group.expected_text} (data-parallel-size {group.size} at {where})",
            {"rank": rank, "size": group.size},
        )

    def _lose(self, entry: _Rank, reason: str, now: float) -> None:
        entry.error, entry.cut_off = reason, False
        self._move(entry, RankState.LOST, reason, now)

    @staticmethod
    def _move(entry: _Rank, state: RankState, stage: str, now: float) -> None:
        if state is not entry.state:
            entry.since = now
        entry.state, entry.stage = state, stage
