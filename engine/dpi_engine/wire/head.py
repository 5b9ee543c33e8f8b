"""The head's side of the handshake: one ROUTER, open for life, and the lease of every rank.

Nothing that arrives can end it: a bad message is counted and, where its sender can be reached, answered with a typed
error. A peer's dialect is read off the length of its identity. In a group of our own the head greets everyone who
connects with an empty message, so that its ranks know it for one of ours before they say a word.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from dpi_engine.wire import handshake as hs
from dpi_engine.wire.codec import check_frames
from dpi_engine.wire.counters import WireCounters
from dpi_engine.wire.errors import HandshakeTimeout, Refusal, WireError
from dpi_engine.wire.group import KEY_BYTES, GroupBook
from dpi_engine.wire.lease import Decision, Group, LeaseTable, LeaseTimings, Missing, Peer, Refuse
from dpi_engine.wire.messages import WIRE_VERSION, Dialect, RankInfo, RankState
from dpi_engine.wire.places import Place, places_of
from dpi_engine.wire.reader import SocketReader
from dpi_engine.wire.sockets import bound_endpoint, make_socket, need_descriptors, rank_descriptors

log = logging.getLogger(__name__)

SOCKET = "handshake"
SEND_HWM = 1000
PLACES_PER_SECOND = 50
"""Pods that may be told of all places in a second."""
AT_ONCE = 64
"""Groups up to this size are told of every change of a state at once."""
RANKS_PER_SECOND = 10_000
"""Of larger groups changes are gathered, so that tables of at most so many ranks in a second are told."""


@dataclass(slots=True)
class HeadAddresses:
    """Endpoints that init hands out; list index i is front end i. Local ranks get the ipc ones where there are any.

    `inputs` and `outputs` are empty where other launches have front ends of their own. `own_inputs`, `own_outputs`: of
    local ranks that have a front end each.
    """

    inputs: list[str]
    outputs: list[str]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    stats_publish: str | None = None
    local_inputs: list[str] = field(default_factory=list)
    local_outputs: list[str] = field(default_factory=list)
    local_coordinator_input: str | None = None
    local_coordinator_output: str | None = None
    local_stats_publish: str | None = None
    own_inputs: dict[int, list[str]] = field(default_factory=dict)
    own_outputs: dict[int, list[str]] = field(default_factory=dict)

    def of(self, rank: int, local: bool) -> hs.Addresses:
        """What a local or a remote rank is told."""
        inputs = (self.local_inputs if local else []) or self.inputs
        outputs = (self.local_outputs if local else []) or self.outputs
        return hs.Addresses(
            inputs=self.own_inputs.get(rank, inputs) if local else inputs,
            outputs=self.own_outputs.get(rank, outputs) if local else outputs,
            coordinator_input=(self.local_coordinator_input if local else None) or self.coordinator_input,
            coordinator_output=(self.local_coordinator_output if local else None) or self.coordinator_output,
            frontend_stats_publish_address=(self.local_stats_publish if local else None) or self.stats_publish,
        )


class HeadHandshake:
    """Registers ranks and keeps their leases.

    endpoints: where the ROUTER binds (tcp and/or ipc). `on_change` gets all ranks after every change of a state (in a
    large group after several, see RANKS_PER_SECOND); `on_report` the missing ranks every `timings.report` seconds while
    there are any. `dtype` is what the head settled for `auto`. `rendezvous`: five ports for a group of
    vLLM engines that share experts, by which they find each other on the host of rank 0; init then waits for that
    rank's HELLO. `clock` gives seconds.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        group: Group,
        addresses: HeadAddresses,
        *,
        timings: LeaseTimings | None = None,
        counters: WireCounters | None = None,
        on_change: Callable[[list[RankInfo]], None] | None = None,
        on_report: Callable[[list[Missing]], None] | None = None,
        dtype: str = "auto",
        fingerprint: str = "",
        resolved: dict[str, Any] | None = None,
        rendezvous: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
        context: zmq.Context[Any] | None = None,
    ) -> None:
        self.timings = timings or LeaseTimings()
        self.counters = counters or WireCounters()
        self.group = group
        self.addresses = addresses
        self.dtype = dtype
        self.fingerprint = fingerprint
        self._rendezvous = list(rendezvous)
        self._held: dict[int, tuple[bytes, Peer, bool, int]] = {}  # who waits for init: rank 0 is not there yet
        self.head_id = hs.new_boot_id()
        self.endpoints: list[str] = list(endpoints)
        self._clock = clock
        self._on_change = on_change
        self._on_report = on_report
        self._table = LeaseTable(group, self.timings, clock(), resolved)
        # A view without asyncio: what has come in is taken in bursts, and sending never waits.
        self._context: zmq.Context[Any] = zmq.Context.shadow(context or zmq.Context.instance())
        self._socket: Any = None
        self._reader: SocketReader | None = None
        self._book = GroupBook(group.size, os.urandom(KEY_BYTES)) if group.coupled else None
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        count = len(group.expected)
        self._gap = count / RANKS_PER_SECOND if count > AT_ONCE else 0.0
        self._told = -self._gap
        self._tell_later: asyncio.Handle | None = None
        self._group_later: asyncio.Handle | None = None
        self.stopping = False
        """Set when ranks leave because the head does: they are not reported as missing."""
        self._logged: dict[Refusal, float] = {}

    # -------------------------------------------------------------------------------------------- life

    async def start(self) -> None:
        """Bind and begin to answer. Raises OSError naming the endpoint that cannot be bound, or the limit that is too
        low for so many ranks."""
        count = len(self.group.expected)
        need_descriptors(rank_descriptors(count), f"head of {count} ranks")
        sock = make_socket(self._context, zmq.ROUTER, send_hwm=SEND_HWM, peers=count)
        if not self.group.vllm:
            sock.setsockopt(zmq.PROBE_ROUTER, 1)  # greets: an empty message to everyone who connects
        bound = []
        try:
            for endpoint in self.endpoints:
                sock.setsockopt(zmq.IPV6, 1 if endpoint.startswith("tcp://[") else 0)
                try:
                    sock.bind(endpoint)
                except zmq.ZMQError as error:
                    raise OSError(error.errno, f"cannot bind {endpoint}: {error.strerror}") from None
                bound.append(bound_endpoint(sock))
        except BaseException:
            sock.close(0)
            raise
        self.endpoints = bound
        self._socket = sock
        self._reader = SocketReader(sock, SOCKET, self._on_message, self.counters)
        self._tasks = [
            asyncio.create_task(self._beat_loop(), name="handshake-beat"),
            asyncio.create_task(self._report_loop(), name="handshake-report"),
            asyncio.create_task(self._places_loop(), name="handshake-places"),
        ]

    async def close(self) -> None:
        """Stop answering and close the socket. Ranks notice by the silence."""
        for later in (self._tell_later, self._group_later):
            if later is not None:
                later.cancel()
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []
        if self._reader is not None:
            self._reader.close()
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None

    # ------------------------------------------------------------------------------------------- views

    def ranks(self) -> list[RankInfo]:
        """All ranks now."""
        return self._table.infos(self._clock())

    def missing(self) -> list[Missing]:
        """Ranks that are not READY, with stage and seconds in it."""
        return self._table.missing(self._clock())

    async def wait_ready(self, timeout: float) -> None:
        """Return when every rank is READY. Raises HandshakeTimeout naming the missing after `timeout` seconds."""
        end = self._clock() + timeout
        while missing := self.missing():
            left = end - self._clock()
            if left <= 0:
                raise HandshakeTimeout(
                    f"after {timeout:.0f} s {len(missing)} of {len(self.group.expected)} ranks are missing: "
                    f"{describe(missing)}"
                )
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, 1.0)):
                    await self._changed.wait()

    # ------------------------------------------------------------------------------------- news from outside

    def process_exited(self, rank: int, reason: str) -> None:
        """The supervisor saw the process of a local rank end."""
        if self._table.lost(rank, reason, self._clock()):
            self._notify()

    def unreachable(self, rank: int, reason: str, epoch: int | None = None) -> None:
        """A front end cannot reach the rank any more (its incarnation `epoch`, where known)."""
        if self._table.cut_off(rank, reason, self._clock(), epoch):
            self._notify()

    def reached(self, rank: int) -> None:
        """A front end reaches the rank again, in the same life of it."""
        if self._table.reached(rank, self._clock()):
            log.info("rank %d is connected again", rank)
            self._notify()

    # --------------------------------------------------------------------------------------------- loops

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        try:
            self._handle(frames)
        except Exception:  # whatever a stranger sends, the head goes on
            self.counters.count(SOCKET, "internal")
            log.exception("handshake: a message could not be handled")

    async def _beat_loop(self) -> None:
        slept, turn = self._clock(), 0
        while True:
            await asyncio.sleep(self.timings.beat / 2)
            turn += 1
            last, slept = slept, self._clock()
            try:
                # After a standstill of this process the ranks' beats still lie unread: judge in the next round.
                if slept - last < self.timings.suspect and self._table.tick(slept):
                    self._notify()
                for rank in self.group.expected if turn % 2 else ():
                    self._beat(rank)
            except Exception:
                self.counters.count(SOCKET, "internal")
                log.exception("handshake: a round of beats failed")

    def _beat(self, rank: int) -> None:
        peer = self._table.peer(rank)
        if peer is None or not peer.boot_id:
            return
        group = self._book.news_for(rank) if self._book is not None else None
        beat = hs.HeadMessage(status=hs.BEAT, epoch=self._table.epoch(rank), head_id=self.head_id, group=group)
        self._send(hs.identity(rank, bytes.fromhex(peer.boot_id)), hs.encode_head_message(beat), lost=rank)

    def _regroup(self) -> None:
        """A new epoch if the group has changed, told to its ranks at once: some wait in an exchange for a lost one."""
        book = self._book
        if book is None or not book.update(self._table.members(), self._table.absent()):
            return
        table = book.table
        if len(table.members) == self.group.size:
            log.info("group %d: all %d ranks are ready to step together", table.epoch, self.group.size)
        elif table.members:
            log.info("group %d is not complete: %s", table.epoch, table.missing)

        if self._group_later is None:  # not within this call: a rank that cannot be told changes the group again
            self._group_later = asyncio.get_running_loop().call_soon(self._tell_group)

    def _tell_group(self) -> None:
        self._group_later = None
        for rank in self.group.expected:
            self._beat(rank)

    async def _places_loop(self) -> None:
        """Tell one rank of every pod that has front ends of its own where all ranks are, whenever that has changed."""
        told: dict[int, tuple[int, list[Place]]] = {}
        while not self.group.remote_headless:
            # The message grows with the pods, and so does the number of its readers.
            await asyncio.sleep(max(self.timings.resend, len(told) / PLACES_PER_SECOND))
            try:
                infos = self.ranks()
                places = places_of(infos)
                payload = hs.encode_places(hs.PlacesMessage(head_id=self.head_id, places=places))
                readers: dict[str, RankInfo] = {}
                for info in infos:
                    if not info.local and info.boot_id and self._table.peer(info.rank) is not None:
                        readers.setdefault(info.pod, info)
                told = {rank: known for rank, known in told.items() if rank in {i.rank for i in readers.values()}}
                for info in readers.values():
                    if told.get(info.rank) != (info.epoch, places):
                        told[info.rank] = (info.epoch, places)
                        self._send(hs.identity(info.rank, bytes.fromhex(info.boot_id)), payload, lost=info.rank)
            except Exception:
                self.counters.count(SOCKET, "internal")
                log.exception("handshake: a round of places failed")

    async def _report_loop(self) -> None:
        while True:
            await asyncio.sleep(self.timings.report)
            missing = self.missing()
            if not missing or self.stopping:
                continue
            log.warning("%d of %d ranks are missing: %s", len(missing), len(self.group.expected), describe(missing))
            if self._on_report is not None:
                self._on_report(missing)

    # ------------------------------------------------------------------------------------------ messages

    def _handle(self, frames: list[zmq.Frame]) -> None:
        raw = [frame.bytes for frame in frames]
        sender = raw[0]
        try:
            check_frames(raw, 2, 2, "handshake")
            rank, boot_id = hs.parse_identity(sender)
            message = hs.decode_engine_message(raw[1])
        except WireError as error:
            self.counters.count(SOCKET, error.code)
            code = Refusal.BAD_IDENTITY if error.code == "bad_identity" else Refusal.BAD_MESSAGE
            self._log_refusal(code, f"message from {_address(frames[-1]) or 'an unnamed peer'} dropped: {error.detail}")
            self._refuse(sender, Refuse(code, error.detail))
            return
        peer = Peer(rank, boot_id.hex(), _printable(message.pod, 253), _address(frames[-1]), message.pid or None)
        before = self._table.state(rank) if rank in self._table else None
        decision = self._decide(peer, message)
        if isinstance(decision, Refuse):
            self.counters.count(SOCKET, decision.code.value)
            self._log_refusal(decision.code, f"{message.status} refused for [{peer}]: {decision.message}")
            self._refuse(sender, decision)
            if rank in self._table and self._table.state(rank) is not before:
                self._notify()
            return
        state = self._table.state(rank)
        if state is not before:
            log.info("rank %d: %s, epoch %d [%s]", rank, state, decision.epoch, peer)
        if message.status == hs.HELLO:
            self._welcome(sender, peer, bool(message.local), decision.epoch)
        elif message.status == hs.READY and boot_id:
            ack = hs.HeadMessage(status=hs.READY, epoch=decision.epoch, head_id=self.head_id)
            self._send(sender, hs.encode_head_message(ack), lost=rank)
        book = self._book if message.status in (hs.READY, hs.BEAT) else None
        if book is not None and book.heard(rank, message.group_seen, message.group_left):
            self._regroup()
        if decision.changed:
            self._notify()

    def _decide(self, peer: Peer, message: hs.EngineMessage) -> Decision:
        now, table = self._clock(), self._table
        if message.status == hs.HELLO:
            return table.hello(
                peer,
                now,
                local=bool(message.local),
                headless=bool(message.headless),
                version=message.version,
                known_epoch=message.epoch,
                replaces=message.replaces.hex(),
                fingerprint=_printable(message.fingerprint, 128),
                fields=message.fields,
            )
        if message.status == hs.READY:
            fingerprint = _printable(message.fingerprint, 128)
            fields = message.fields
            if message.parallel_config_hash is not None:  # what a vLLM engine that shares experts has in their place
                fields = {"parallel_config_hash": _printable(message.parallel_config_hash, 128)}
            return table.ready(peer, message.epoch, now, fingerprint, fields, message.exchange)
        if message.status == hs.BEAT:
            return table.beat(
                peer,
                message.epoch,
                message.step_age,
                message.steps,
                now,
                message.draining,
                message.load,
                _printable(message.waits, 500),
            )
        if message.status == hs.PROGRESS:
            return table.progress(peer, message.epoch, _printable(message.stage, 200), message.fraction, now)
        return table.goodbye(peer, message.epoch, _printable(message.reason, 500), now)

    def _welcome(self, sender: bytes, peer: Peer, local: bool, epoch: int) -> None:
        """Answer a HELLO, or hold the answer until rank 0 is there to be met."""
        if not self._rendezvous:
            self._send_init(sender, peer, local, epoch)
            return
        self._held[peer.rank] = (sender, peer, local, epoch)
        if self._table.state(0) not in (RankState.HELLO, RankState.LOADING):
            log.info("rank %d waits for rank 0, where the ranks that share experts meet", peer.rank)
            return
        held, self._held = self._held, {}
        for rank, waiting in sorted(held.items()):
            if self._table.epoch(rank) == waiting[3]:
                self._send_init(*waiting)

    def _parallel_config(self) -> dict[str, Any]:
        """What vLLM engines that share experts set on themselves; nothing for others."""
        if not self._rendezvous or (first := self._table.peer(0)) is None:
            return {}
        return {
            "data_parallel_master_ip": first.address,
            "data_parallel_master_port": self._rendezvous[0],
            "_data_parallel_master_port_list": self._rendezvous[1:],
            "_coord_store_port": 0,
            "data_parallel_size": self.group.size,
        }

    def _send_init(self, sender: bytes, peer: Peer, local: bool, epoch: int) -> None:
        init = hs.InitMessage(
            addresses=self.addresses.of(peer.rank, local),
            parallel_config=self._parallel_config(),
            version=WIRE_VERSION,
            epoch=epoch,
            boot_id=sender[2:],
            head_id=self.head_id,
            lease=self.timings.wire(),
            dtype=self.dtype,
            fingerprint=self.fingerprint,
            fields=self.group.declared,
        )
        dialect = Dialect.DPI if peer.boot_id else Dialect.VLLM
        self._send(sender, hs.encode_init(init, dialect), lost=peer.rank)

    def _log_refusal(self, code: Refusal, text: str) -> None:
        """One line per kind and report interval: a stranger must not fill the log; the counters have every one."""
        now = self._clock()
        if now - self._logged.get(code, -self.timings.report) >= self.timings.report:
            self._logged[code] = now
            log.warning("handshake: %s", text)

    def _refuse(self, sender: bytes, refusal: Refuse) -> None:
        body = hs.ErrorBody(code=refusal.code.value, message=refusal.message, details=refusal.details)
        message = hs.HeadMessage(status=hs.ERROR, head_id=self.head_id, error=body)
        self._send(sender, hs.encode_head_message(message), lost=None)

    def _send(self, identity: bytes, payload: bytes, lost: int | None) -> None:
        """Send to a peer that may be gone; where `lost` names a rank, an unreachable one is LOST at once."""
        if self._socket is None:
            return  # closed
        try:
            self._socket.send_multipart([identity, payload], flags=zmq.NOBLOCK)
        except zmq.Again:
            self.counters.count(SOCKET, "send_queue_full")  # a frozen peer; its silence will tell
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                self.counters.count(SOCKET, "send")
            elif lost is not None and self._table.lost(lost, "its handshake connection is closed", self._clock()):
                self._notify()
        finally:
            if self._reader is not None:
                self._reader.kick()

    def _notify(self) -> None:
        """A state changed: tell it now, or in a large group as soon as the table may go out again."""
        if self._tell_later is not None:
            return
        wait = self._told + self._gap - time.monotonic()
        if wait > 0:
            self._tell_later = asyncio.get_running_loop().call_later(wait, self._tell)
        else:
            self._tell()

    def _tell(self) -> None:
        self._tell_later, self._told = None, time.monotonic()
        self._regroup()
        self._changed.set()
        if self._on_change is not None:
            self._on_change(self.ranks())


def _address(frame: zmq.Frame) -> str:
    """The IP that a message came from; empty for ipc, where the library gives user and process in place of one."""
    try:
        seen = str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return ""
    return "" if seen.startswith("localhost:") else seen


def _printable(text: str, limit: int) -> str:
    """Text from outside, cut and without what could break a line of the log."""
    cut = text[:limit]
    return cut if cut.isprintable() else "".join(c if c.isprintable() else "?" for c in cut)


def describe(missing: list[Missing]) -> str:
    """Missing ranks in words; a long list is cut after 16."""
    text = "; ".join(str(m) for m in missing[:16])
    return text if len(missing) <= 16 else f"{text}; and {len(missing) - 16} more"
