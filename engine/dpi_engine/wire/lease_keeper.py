"""Keeps one registration of a rank alive: HELLO, progress, READY, beats, and HELLO anew when the lease was lost.

A rank has one of them with whoever routes to it, and in hybrid, external and multi-port balancing a second one with the
head of its group.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from dpi_engine.wire import handshake as hs
from dpi_engine.wire.errors import HandshakeTimeout, Refusal, TypedRefusal, WireError
from dpi_engine.wire.group import GroupTable
from dpi_engine.wire.inbox import LinkEvent
from dpi_engine.wire.messages import Dialect
from dpi_engine.wire.places import Place
from dpi_engine.wire.registration import SOCKET, Registrar
from dpi_engine.wire.sockets import Waker, receive

log = logging.getLogger(__name__)

# Whoever keeps the leases does not know this incarnation (any more): the answer is to register anew.
_REGISTER_AGAIN = frozenset({Refusal.FENCED.value, Refusal.READY_BEFORE_HELLO.value})

REPORT_MOST_S = 300.0
"""Longest time between two lines about a head that is looked for without a limit."""

Load = tuple[int, int, float]
"""(waiting, running, kv_usage)"""


class Peers(Protocol):
    """This rank's end of the links between ranks that step together (exchange/mesh.py). Read in the keeper's thread."""

    @property
    def endpoint(self) -> str: ...
    @property
    def seen(self) -> int: ...
    @property
    def left(self) -> int: ...
    def announce(self, table: GroupTable) -> None: ...


class LeaseHolder(Protocol):
    """The rank, as its keeper sees it. All but the first are called in the keeper's thread."""

    def may_say_ready(self) -> bool:
        """Front ends and coordinator are connected."""
        ...

    def failure_of_io(self) -> Exception | None:
        """Why the rank cannot go on, if it cannot."""
        ...

    def gone(self) -> str:
        """Why the other side is gone, where it sends no beats; empty while it is there."""
        ...

    def lost(self, event: LinkEvent, reason: str) -> None:
        """HEAD_LOST or FENCED; the rank is registered anew after this."""
        ...

    def regained(self, init: hs.InitMessage | None) -> None:
        """Registered anew; None: the other side had not gone, only the connection. May raise OSError."""
        ...

    def over(self, error: Exception) -> None:
        """There is no lease any more, for good."""
        ...


class LeaseKeeper:
    """One lease. `registrar.stop` ends its thread.

    step: (seconds since the step in progress began or None when idle, steps so far). load: sent along in beats where it
    is given. rejoin: seconds to look for the other side after losing it; None: for as long as the process lives.
    """

    def __init__(
        self,
        registrar: Registrar,
        holder: LeaseHolder,
        *,
        boot_id: bytes,
        step: Callable[[], tuple[float | None, int]],
        load: Callable[[], Load | None] = lambda: None,
        rejoin: float | None = None,
    ) -> None:
        self.registrar = registrar
        self.boot_id = boot_id
        self.init: hs.InitMessage | None = None
        self.epoch = 0
        self.places: list[Place] = []
        """Where all ranks are, if the head has told this one."""
        self.failure: Exception | None = None
        self.peers: Peers | None = None
        """Set before READY where ranks step together and the other side is the head of the group."""
        self.waits: Callable[[], str] = lambda: ""
        """Why the rank can take no new work just now; for a front end that does not see the group."""
        self._holder = holder
        self._step, self._load = step, load
        self._rejoin_s = rejoin
        self._timings, self._counters = registrar.timings, registrar.counters
        self._stop = registrar.stop
        self._socket: Any = None
        self._thread: threading.Thread | None = None
        self._waker = Waker()
        self._state = threading.Condition()
        self._progress: tuple[str, float | None] | None = None
        self._outbound: deque[bytes] = deque()
        self._resolved: tuple[str, dict[str, Any]] | None = None
        self._ready_sent = 0.0
        self._registered = False  # READY acknowledged (vllm: sent)
        self._over = False  # given up; another lease of this rank may go on
        self._served = False  # `ready` has returned: the main loop runs and learns by events
        self._refusal: TypedRefusal | None = None
        self._draining = False
        self._leaving = False
        self._say_seen = False  # the head waits for the word that a new epoch of the group has arrived
        self._seen = 0.0
        self._lost_after = self._timings.lost

    # ------------------------------------------------------------------------------------------ main thread

    def connect(self, timeout: float) -> hs.InitMessage:
        """HELLO, and the answer to it. Beats begin here. Raises TypedRefusal, HandshakeTimeout."""
        sock, init = self.registrar.register(self.boot_id, self.epoch, time.monotonic() + timeout)
        self._adopt(sock, init)
        self._thread = threading.Thread(target=self._run, name=f"lease-{self.registrar.rank}", daemon=True)
        self._thread.start()
        return init

    def progress(self, stage: str, fraction: float | None) -> None:
        """What is being loaded; only the newest is sent. Extends the loading deadline."""
        self._progress = (stage, fraction)
        self._waker.wake()

    def ready(self, resolved: dict[str, Any], fingerprint: str, timeout: float) -> None:
        """READY, as soon as the holder may say it. Returns when it was taken (vllm: sent).

        Raises TypedRefusal (a mismatch names field, expected, got), HandshakeTimeout, or what ended the lease.
        """
        with self._state:
            self._resolved = (fingerprint, resolved)
            self._waker.wake()
            done = self._state.wait_for(lambda: self._registered or self._refusal or self.failure, timeout)
            if self._refusal is not None:
                raise self._refusal
            if self.failure is not None:
                raise self.failure
            if not done:
                raise HandshakeTimeout(
                    f"rank {self.registrar.rank}: the head at {self.registrar.endpoint} did not take READY within "
                    f"{timeout:.0f} s"
                )
            self._served = True

    def fail(self, error: Exception) -> None:
        """The rank cannot go on for another reason: whoever waits in `ready` learns it."""
        with self._state:
            self.failure = self.failure or error
            self._state.notify_all()

    def beat_now(self) -> None:
        """Tell the head at once which epoch of the group was given up."""
        self._say_seen = True
        self._waker.wake()

    def drain(self) -> None:
        """Say that this rank finishes what it has and wants no new work (vllm: there is no such word)."""
        self._draining = True
        self._waker.wake()

    def leave(self) -> None:
        """The rank ends: should it be given up from now on, it does not register anew."""
        self._leaving = True

    def goodbye(self, reason: str, timeout: float) -> None:
        """Queue the last word and wait for it to be sent. The thread ends by `registrar.stop`, then call `close`."""
        if self.registrar.dialect is not Dialect.DPI or self._thread is None or not self._thread.is_alive():
            return
        if self._socket is None:
            return  # lost, and looked for: nobody is there to be told
        with self._state:
            self._outbound.append(self._message(hs.GOODBYE, reason=reason[:500]))
            self._waker.wake()
            self._state.wait_for(lambda: not self._outbound, timeout)

    def close(self, linger_ms: int = 0) -> None:
        """Join the thread, which `registrar.stop` ends, and close the socket."""
        self._waker.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        if self._socket is not None:
            self._socket.close(linger_ms)
            self._socket = None
        self._waker.close()

    # --------------------------------------------------------------------------------------------- registering

    def _message(self, status: str, **extra: Any) -> bytes:
        peers = self.peers
        if peers is not None and status in (hs.BEAT, hs.READY):
            extra |= {"group_seen": peers.seen, "group_left": peers.left}
            if status == hs.READY:
                extra["exchange"] = peers.endpoint
        return self.registrar.message(status, self.epoch, **extra)

    def _adopt(self, sock: Any, init: hs.InitMessage) -> None:
        with self._state:
            self._socket = sock
            self.init = init
            self.epoch = init.epoch
            self._registered = False
            self._ready_sent = 0.0
            self._seen = time.monotonic()
            if init.lease is not None:
                self._lost_after = init.lease.lost

    def _register_anew(self, replaces: bytes) -> None:
        """Raises TypedRefusal, HandshakeTimeout."""
        began, limit = time.monotonic(), self._rejoin_s or self._timings.report
        while True:
            try:
                sock, init = self.registrar.register(self.boot_id, self.epoch, time.monotonic() + limit, replaces)
            except HandshakeTimeout as error:
                if self._rejoin_s is not None or self._stop.is_set():
                    raise
                log.warning("%s; away for %.0f s, trying on", error, time.monotonic() - began)
                limit = min(2 * limit, REPORT_MOST_S)
                continue
            self._adopt(sock, init)
            return

    # ------------------------------------------------------------------------------------------- its thread

    def _run(self) -> None:
        vllm = self.registrar.dialect is Dialect.VLLM
        try:
            while not self._stop.is_set():
                loss = self._watch_vllm() if vllm else self._watch()
                if loss is None or self._stop.is_set():
                    return
                if self._leaving:
                    with self._state:  # nobody is left to hear a last word
                        self._outbound.clear()
                        self._state.notify_all()
                    return
                if not self._rejoin(*loss):
                    return
        except Exception as error:
            log.exception("rank %d: the lease thread ended", self.registrar.rank)
            self._give_up(error)

    def _watch(self) -> tuple[LinkEvent, str] | None:
        """Keep the lease until it is lost (what happened, and why) or the rank stops (None)."""
        poller = zmq.Poller()
        poller.register(self._waker.fd, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        beat, turn = self._timings.beat, time.monotonic()
        next_beat, said_draining = turn, False
        while True:
            stopping = self._stop.is_set()
            self._send_outbound()
            if stopping or self._over or self._cannot_go_on():
                return None
            now = time.monotonic()
            if now >= next_beat or self._draining > said_draining or self._say_seen:
                self._say_seen = False
                age, steps = self._step()
                said_draining = self._draining
                said: dict[str, Any] = {"draining": said_draining, "load": self._load(), "waits": self.waits()}
                self._send(self._message(hs.BEAT, step_age=age, steps=steps, **said))
                next_beat = now + beat
            self._send_ready(now)
            poller.poll(max(0, int((next_beat - time.monotonic()) * 1000)) + 1)
            self._waker.clear()
            last_turn, turn = turn, time.monotonic()
            fenced = self._receive()
            if fenced is not None:
                return LinkEvent.FENCED, fenced
            if turn - last_turn > self._timings.suspect:
                self._seen = turn  # this process stood still; the other side's beats may have been thrown away
            if turn - self._seen > self._lost_after:
                return LinkEvent.HEAD_LOST, f"no word from the head for {turn - self._seen:.1f} s"

    def _watch_vllm(self) -> tuple[LinkEvent, str] | None:
        """A vLLM head closes the handshake after READY; from then on only other connections tell."""
        while not self._stop.is_set() and not self._cannot_go_on():
            self._send_ready(time.monotonic())
            if gone := self._holder.gone():
                return LinkEvent.HEAD_LOST, gone
            self._stop.wait(self._timings.beat)
        return None

    def _cannot_go_on(self) -> bool:
        error = self._holder.failure_of_io()
        if error is None:
            return False
        self._give_up(error)
        return True

    def _receive(self) -> str | None:
        """Take what came; the message when this rank was given up."""
        while True:
            try:
                frames = receive(self._socket, flags=zmq.NOBLOCK)
                if frames == hs.GREETING:
                    continue  # the connection was made anew
                reply = hs.decode_head_message(frames[-1])
            except zmq.Again:
                return None
            except WireError as error:
                self._counters.count(SOCKET, error.code)
                continue
            self._seen = time.monotonic()
            if isinstance(reply, hs.PlacesMessage):
                self.places = reply.places
                continue
            if isinstance(reply, hs.InitMessage):
                continue  # the answer to a repeated HELLO
            if reply.error is not None:
                if reply.error.code in _REGISTER_AGAIN:
                    return reply.error.message
                refusal = TypedRefusal(reply.error.code, reply.error.message, reply.error.details)
                with self._state:
                    self._refusal = refusal
                    self._state.notify_all()
                if self._served:  # nobody waits in `ready`: the refusal met a rank that registered anew
                    self._give_up(refusal)
            elif reply.group is not None and reply.epoch == self.epoch and self.peers is not None:
                if reply.group.epoch > self.peers.seen:
                    self.peers.announce(reply.group)
                    self._say_seen = True
            elif reply.epoch == self.epoch and reply.status == hs.READY:
                with self._state:
                    self._registered = True
                    self._state.notify_all()

    def _send_outbound(self) -> None:
        progress, self._progress = self._progress, None
        if progress is not None:
            self._send(self._message(hs.PROGRESS, stage=progress[0], fraction=progress[1]))
        while self._outbound:
            self._send(self._outbound[0])
            with self._state:
                self._outbound.popleft()
                self._state.notify_all()

    def _send_ready(self, now: float) -> None:
        resolved = self._resolved
        if self._registered or self._refusal is not None or resolved is None or not self._holder.may_say_ready():
            return
        if self._ready_sent and now - self._ready_sent < self._timings.suspect:
            return
        self._ready_sent = now
        if not self._send(self._message(hs.READY, fingerprint=resolved[0], fields=resolved[1])):
            return
        if self.registrar.dialect is Dialect.VLLM:
            with self._state:
                self._registered = True
                self._state.notify_all()
            self._socket.close(5000)
            self._socket = None

    def _send(self, payload: bytes) -> bool:
        try:
            self._socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            return False  # not connected: beats are worth nothing later, READY is sent again
        return True

    def _rejoin(self, event: LinkEvent, reason: str) -> bool:
        """Tell the holder, register anew, tell it again. False when that failed for good."""
        rank = self.registrar.rank
        log.error("rank %d, epoch %d: %s (%s)", rank, self.epoch, event.value, reason)
        with self._state:
            self._registered = False
        self._holder.lost(event, reason)
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None
        if self.registrar.dialect is Dialect.VLLM:
            return self._rejoin_vllm()
        old, self.boot_id = self.boot_id, hs.new_boot_id()
        try:
            self._register_anew(replaces=old)
            assert self.init is not None
            self._holder.regained(self.init)
        except (TypedRefusal, HandshakeTimeout, OSError) as error:
            self._give_up(error)
            return False
        return True

    def _rejoin_vllm(self) -> bool:
        """A vLLM head that was only cut off knows this rank still and listens for no HELLO; one started anew does."""
        limit = self._rejoin_s or REPORT_MOST_S
        end = time.monotonic() + limit
        while not self._stop.is_set():
            # Its connections may come back while nobody takes the HELLO: then one more try, and that is enough.
            connected = not self._holder.gone()
            try:
                sock, init = self.registrar.register(
                    self.boot_id, self.epoch, end, enough=lambda: not self._holder.gone()
                )
            except (TypedRefusal, HandshakeTimeout) as error:
                refused = isinstance(error, TypedRefusal) and error.code != Refusal.DUPLICATE_RANK
                if connected and not refused:
                    with self._state:
                        self._registered = True
                    self._holder.regained(None)
                    return True
                if refused or time.monotonic() >= end:
                    self._give_up(error)
                    return False
                continue
            self._adopt(sock, init)
            try:
                self._holder.regained(init)
            except OSError as error:
                self._give_up(error)
                return False
            return True
        return False

    def _give_up(self, error: Exception) -> None:
        if self._stop.is_set():
            return
        self._over = True
        log.error("rank %d gives up: %s", self.registrar.rank, error)
        self.fail(error)
        self._holder.over(error)
