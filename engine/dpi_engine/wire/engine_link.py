"""The engine's side of the wire: registration, beats, and the channels that carry work.

The main thread computes; a thread per lease keeps it (`LeaseKeeper`), another (`EngineIO`) moves requests and outputs.
When whoever routes to this rank is lost or has given it up, the link registers anew under the same rank with a new boot
id while the weights stay loaded, and tells the main loop by events in the inbox.

In hybrid, external and multi-port balancing that is the rank's own front end, and the rank registers twice: its own
front end gives the addresses of requests and outputs and the epoch under which they go, the group's head those of the
coordinator and what all ranks share. That the head is away then ends nothing: it is looked for until it is back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from dpi_engine.wire import handshake as hs
from dpi_engine.wire.counters import WireCounters
from dpi_engine.wire.engine_io import EngineIO
from dpi_engine.wire.errors import HandshakeTimeout, TypedRefusal
from dpi_engine.wire.inbox import Inbox, InboxItem, LinkEvent
from dpi_engine.wire.lease import LeaseTimings
from dpi_engine.wire.lease_keeper import LeaseKeeper, Load, Peers
from dpi_engine.wire.messages import (
    DEAD_SENTINEL,
    Dialect,
    EngineCoreOutputs,
    LoadRecord,
    ReadyResponse,
)
from dpi_engine.wire.places import Place
from dpi_engine.wire.registration import Registrar

CLIENT_LIMIT = 64 << 20

OWN_FRONT_END_S = 10.0
"""Least seconds for the own front end's answer, however late the head's came: it is in the same pod."""


class EngineLink:
    """One rank's connection to whoever routes to it, to its head and its front ends.

    rank: global. endpoint: handshake socket of whoever routes to this rank (a name in it is looked up at every try).
    local, headless: as that one must expect them. head: handshake socket of the group's head where that is another one.
    declared: fingerprint fields and `fingerprint` their digest, sent in HELLO. step: returns (seconds since the step in
    progress began or None when idle, steps so far); called by the threads that keep leases. client_limit: bytes that
    may wait for one front end before they are dropped.
    """

    def __init__(
        self,
        *,
        rank: int,
        endpoint: str,
        local: bool,
        headless: bool,
        head: str | None = None,
        dialect: Dialect = Dialect.DPI,
        declared: dict[str, Any] | None = None,
        fingerprint: str = "",
        pod: str = "",
        step: Callable[[], tuple[float | None, int]] = lambda: (None, 0),
        timings: LeaseTimings | None = None,
        counters: WireCounters | None = None,
        client_limit: int = CLIENT_LIMIT,
        boot_id: bytes | None = None,
    ) -> None:
        self.rank = rank
        self.dialect = dialect
        self.timings = timings or LeaseTimings()
        self.counters = counters or WireCounters()
        self.inbox = Inbox()
        self.init: hs.InitMessage | None = None
        self.failure: Exception | None = None
        self._serving = False
        self.head_lost = ""
        """Why the group's head is away while the own front end is there; empty while it is not."""
        self._client_limit = client_limit
        self._context: zmq.Context[Any] = zmq.Context()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._ready_response: ReadyResponse | None = None
        self._io: EngineIO | None = None
        self._last_load: LoadRecord | None = None
        first_boot_id = b"" if dialect is Dialect.VLLM else (boot_id or hs.new_boot_id())

        def registrar(at: str, local: bool, headless: bool) -> Registrar:
            return Registrar(
                rank=rank,
                endpoint=at,
                local=local,
                headless=headless,
                dialect=dialect,
                timings=self.timings,
                counters=self.counters,
                context=self._context,
                stop=self._stop,
                declared=declared or {},
                fingerprint=fingerprint,
                pod=pod,
            )

        self._lease = LeaseKeeper(
            registrar(endpoint, local, headless),
            _Routed(self),
            boot_id=first_boot_id,
            step=step,
            rejoin=self.timings.rejoin,
        )
        self._group: LeaseKeeper | None = None
        if head is not None:
            self._group = LeaseKeeper(
                registrar(head, False, False),
                _Member(self),
                boot_id=first_boot_id,
                step=step,
                load=self._load_of_beat,
            )

    @property
    def boot_id(self) -> bytes:
        """Of the registration by which this rank is routed to."""
        return self._lease.boot_id

    @property
    def epoch(self) -> int:
        """Under which requests and outputs go."""
        return self._lease.epoch

    @property
    def group_epoch(self) -> int:
        """Under which the group's head knows this rank; the same as `epoch` where the head routes to it."""
        return (self._group or self._lease).epoch

    @property
    def trouble(self) -> str:
        """What is in the way of a registration that is being tried; empty while nothing is."""
        return next((keeper.registrar.trouble for keeper in self._keepers() if keeper.registrar.trouble), "")

    @property
    def places(self) -> list[Place]:
        """In which pods the group's ranks are; the head tells one rank of a pod with front ends of its own."""
        return self._group.places if self._group is not None else []

    # ------------------------------------------------------------------------------------- main thread: start

    def connect(self, timeout: float) -> hs.InitMessage:
        """HELLO, and the answers. Beats begin here.

        With a second lease the answer is put together: requests and outputs as the own front end says, the rest as the
        head does. Raises TypedRefusal with the reason, or HandshakeTimeout naming what was last in the way.
        """
        end = time.monotonic() + timeout
        if self._group is not None:
            self._group.connect(timeout)
        self._lease.connect(max(OWN_FRONT_END_S, end - time.monotonic()))
        init = self._whole_init()
        self.init = init
        return init

    def couple(self, peers: Peers, waits: Callable[[], str]) -> None:
        """Before READY: this rank steps together with all others, over these links. The head says when they change.

        `waits`: why it cannot step just now, empty while it can; an own front end that is not the head's is told.
        """
        (self._group or self._lease).peers = peers
        if self._group is not None:
            self._lease.waits = waits

    def left_group(self) -> None:
        """Tell the head at once that the links of an epoch were given up (`peers.left`)."""
        (self._group or self._lease).beat_now()

    def progress(self, stage: str, fraction: float | None = None) -> None:
        """Tell what is being loaded; only the newest is sent. Extends the loading deadline."""
        for keeper in self._keepers():
            keeper.progress(stage, fraction)

    def open_io(self, ready_response: ReadyResponse, timeout: float) -> None:
        """Connect to front ends and coordinator and send the ready response.

        `dp_stats_address` and `epoch` are filled in. Raises HandshakeTimeout when the coordinator does not answer.
        """
        end = time.monotonic() + timeout
        with self._lock:
            self._ready_response = ready_response
            self._open_io()
        while True:
            with self._lock:
                io, failure = self._io, self.failure
            if failure is not None:
                raise failure
            if io is not None and io.started.wait(0.05):
                return
            if io is not None and io.error is not None:
                raise io.error
            if io is None:
                self._stop.wait(0.05)  # registering anew; the lease's thread opens the sockets
            if time.monotonic() > end:
                raise HandshakeTimeout(f"rank {self.rank}: the coordinator did not confirm the subscription")

    def ready(self, resolved: dict[str, Any] | None = None, fingerprint: str = "", timeout: float = 30.0) -> None:
        """READY with the resolved fingerprint fields. Returns when it was taken (vllm: when sent).

        Where there are two leases the group's head takes it first: a rank that it refuses is never routed to.
        Raises TypedRefusal (a mismatch names field, expected, got), or HandshakeTimeout.
        """
        for keeper in self._keepers():
            keeper.ready(resolved or {}, fingerprint, timeout)
        self._serving = True

    # -------------------------------------------------------------------------------------- main thread: work

    def send(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        """Queue one message for a front end; never waits. Dropped while the link registers anew."""
        io = self._io
        if io is None:
            self.counters.count("output", "no_link")
            return
        io.send(client_index, outputs)

    def report_load(self, load: LoadRecord, outputs: EngineCoreOutputs | None = None) -> None:
        """This rank's load; `epoch` is filled in. `outputs`: what else the coordinator is told, now, with the load."""
        load.epoch = self.epoch
        self._last_load = load
        io = self._io
        if io is not None:
            io.report_load(load, outputs)

    def drain(self) -> None:
        """Tell that this rank finishes what it has and wants no new work (vllm: there is no such word)."""
        for keeper in self._keepers():
            keeper.drain()

    def goodbye(self, reason: str, timeout: float = 2.0) -> None:
        """Leave in order: queued outputs are sent, the head is told, everything is closed."""
        self._leave(reason, None, timeout)

    def dead(self, reason: str, timeout: float = 2.0) -> None:
        """The engine cannot go on: the sentinel to every front end, the reason to the head, everything is closed."""
        self._leave(reason, DEAD_SENTINEL, timeout)

    def close(self) -> None:
        """End the threads and close the sockets without a word (the head sees the connection close)."""
        self._stop.set()
        for keeper in self._keepers():
            keeper.close()
        with self._lock:
            io, self._io = self._io, None
        if io is not None:
            io.close(linger_ms=0)
        self._context.destroy(linger=0)

    def _leave(self, reason: str, last_word: bytes | None, timeout: float) -> None:
        for keeper in self._keepers():
            keeper.leave()
        with self._lock:
            io, self._io = self._io, None
        if io is not None:
            io.close(last_word, timeout)
        for keeper in self._keepers():
            keeper.goodbye(reason, timeout)
        self._stop.set()
        for keeper in self._keepers():
            keeper.close(int(timeout * 1000))
        self._context.destroy()  # sockets were closed with a linger of their own: this waits for them, bounded

    # ------------------------------------------------------------------------------------------------ leases

    def _keepers(self) -> list[LeaseKeeper]:
        """The head's first."""
        return [self._lease] if self._group is None else [self._group, self._lease]

    def _load_of_beat(self) -> Load | None:
        load = self._last_load
        return None if load is None else (load.waiting, load.running, load.kv_usage)

    def _whole_init(self) -> hs.InitMessage:
        """What the own front end said of requests and outputs, and the head of everything else."""
        own = self._lease.init
        assert own is not None
        if self._group is None:
            return own
        head = self._group.init
        assert head is not None
        addresses = msgspec.structs.replace(head.addresses, inputs=own.addresses.inputs, outputs=own.addresses.outputs)
        return msgspec.structs.replace(head, addresses=addresses, epoch=own.epoch, boot_id=own.boot_id)

    def _open_io(self) -> None:
        """Open the channels of this registration; caller holds `_lock`."""
        if self.init is None or self._ready_response is None or self._io is not None:
            return
        response = self._ready_response
        response.dp_stats_address = self.init.addresses.frontend_stats_publish_address
        response.epoch = self.epoch
        self._io = EngineIO(
            rank=self.rank,
            epoch=self.epoch,
            group_epoch=self.group_epoch,
            identity=hs.identity(self.rank, self.boot_id),
            addresses=self.init.addresses,
            dialect=self.dialect,
            ready_response=response,
            inbox=self.inbox,
            counters=self.counters,
            timings=self.timings,
            client_limit=self._client_limit,
            context=self._context,
        )

    def _over(self, error: Exception) -> None:
        with self._lock:
            self.failure = error
        for keeper in self._keepers():
            keeper.fail(error)
        self.inbox.put(InboxItem(LinkEvent.GAVE_UP, error, -1))


class _Holder:
    """What both leases ask of the link."""

    def __init__(self, link: EngineLink) -> None:
        self.link = link

    def may_say_ready(self) -> bool:
        io = self.link._io
        return io is not None and io.started.is_set()

    def over(self, error: Exception) -> None:
        self.link._over(error)


class _Routed(_Holder):
    """The lease by which the rank is routed to: its channels stand and fall with it."""

    def failure_of_io(self) -> Exception | None:
        io = self.link._io
        return None if io is None else io.error

    def gone(self) -> str:
        io = self.link._io
        since = io.peers_gone_since if io is not None else None
        late = since is not None and time.monotonic() - since > self.link.timings.lost
        return "every front end closed its connection" if late else ""

    def lost(self, event: LinkEvent, reason: str) -> None:
        link = self.link
        link.inbox.put(InboxItem(event, reason, -1))
        if link.dialect is not Dialect.VLLM:  # there the channels may come back by themselves
            self._close_io()

    def regained(self, init: hs.InitMessage | None) -> None:
        link = self.link
        if init is not None:
            self._close_io()
            with link._lock:
                link.init = link._whole_init()
                link._open_io()
        link.inbox.put(InboxItem(LinkEvent.REJOINED, init, -1))

    def _close_io(self) -> None:
        link = self.link
        with link._lock:
            io, link._io = link._io, None
        if io is not None:
            io.close(linger_ms=0)


class _Member(_Holder):
    """The lease with the head of the group. While it is away the rank serves on under its own front end."""

    def failure_of_io(self) -> Exception | None:
        return None  # the other lease tells

    def over(self, error: Exception) -> None:
        """A new head refuses this rank. Its own front end is there still, so what runs can be finished."""
        if not (isinstance(error, TypedRefusal) and self.link._serving):
            super().over(error)
            return
        self.link.head_lost = str(error)
        self.link.inbox.put(InboxItem(LinkEvent.GROUP_REFUSED, error, -1))

    def gone(self) -> str:
        return ""  # a vLLM head says nothing after READY

    def lost(self, event: LinkEvent, reason: str) -> None:
        self.link.head_lost = reason
        self.link.inbox.put(InboxItem(LinkEvent.GROUP_LOST, reason, -1))

    def regained(self, init: hs.InitMessage | None) -> None:
        link = self.link
        if init is None:
            return
        with link._lock:
            io, response = link._io, link._ready_response
            if link.init is not None:
                link.init = link._whole_init()
            if io is not None and response is not None:
                response.dp_stats_address = init.addresses.frontend_stats_publish_address
                io.join_group(init.addresses, init.epoch, response)
        link.head_lost = ""
        link.inbox.put(InboxItem(LinkEvent.GROUP_JOINED, init, -1))
