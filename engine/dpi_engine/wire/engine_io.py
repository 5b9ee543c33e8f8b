"""Requests in, outputs out: one thread that owns an engine's sockets to front ends and coordinator for one epoch.

The step loop never waits here. Outputs are queued, encoded and sent by the thread; a front end that does not read has
its backlog dropped at a limit and is reported, so it can neither stop the others nor fill memory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from dpi_engine.wire.codec import MAX_FRAMES, decode_request, encode_outputs, encode_ready_response
from dpi_engine.wire.coordination import encode_load_report, least_load_interval
from dpi_engine.wire.counters import WireCounters
from dpi_engine.wire.errors import WireError
from dpi_engine.wire.handshake import Addresses
from dpi_engine.wire.inbox import Inbox, InboxItem, LinkEvent
from dpi_engine.wire.lease import LeaseTimings
from dpi_engine.wire.messages import (
    Dialect,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    LoadRecord,
    ReadyResponse,
    RequestType,
    SchedulerStats,
)
from dpi_engine.wire.sockets import Waker, make_socket, receive, resolve

log = logging.getLogger(__name__)

SEND_HWM = 1000
LINGER_MS = 4000
UNMET_LINGER_MS = 1000
"""The same for a front end whose connection has not been seen yet."""
BATCH = 256
COORDINATOR_READY = b"READY"


@dataclass(slots=True)
class _Client:
    """A front end: its PUSH socket and what could not be sent yet."""

    socket: Any
    backlog: deque[list[bytes]] = field(default_factory=deque)
    backlog_bytes: int = 0
    dropped: bool = False


class EngineIO:
    """Opened once per registration. `started` is set when front ends have the ready response and the coordinator (where
    there is one) has confirmed the subscription. `peers_gone_since` is when the last front end's connection closed,
    None while one is connected. A front end that comes back, the same or started anew, gets the ready response again.
    """

    def __init__(
        self,
        *,
        rank: int,
        epoch: int,
        identity: bytes,
        addresses: Addresses,
        dialect: Dialect,
        ready_response: ReadyResponse,
        group_epoch: int | None = None,
        inbox: Inbox,
        counters: WireCounters,
        timings: LeaseTimings,
        client_limit: int,
        context: zmq.Context[Any],
    ) -> None:
        """Opens the sockets and starts the thread. Raises OSError for an endpoint that cannot be used.

        `group_epoch`: what goes to the coordinator bears this epoch, which the group's head gave.
        """
        self.rank = rank
        self.epoch = epoch
        self.group_epoch = epoch if group_epoch is None else group_epoch
        self.started = threading.Event()
        self.error: Exception | None = None
        self.peers_gone_since: float | None = None
        self._dialect = dialect
        self._inbox = inbox
        self._counters = counters
        self._timings = timings
        self._limit = client_limit
        self._outgoing: deque[tuple[int, EngineCoreOutputs | bytes]] = deque()
        self._load: LoadRecord | None = None
        self._load_dirty = False
        self._load_sent = 0.0
        self._load_interval = least_load_interval(ready_response.data_parallel_size)
        self._reports: deque[EngineCoreOutputs] = deque()
        self._stopping = False
        self._linger_ms = LINGER_MS
        self._waker = Waker()
        self._output_context: zmq.Context[Any] = zmq.Context()
        self._inputs: list[Any] = []
        self._monitors: dict[Any, int] = {}
        self._connected: set[int] = set()
        self._introduced: set[int] = set()
        self._clients: list[_Client] = []
        self._subscription: Any = None
        self._coordinator: Any = None
        self._context, self._identity, self._addresses = context, identity, addresses
        self._joined: tuple[Addresses, bytes] | None = None
        try:
            self._open(context, identity, addresses)
            self._introduction = encode_ready_response(ready_response, dialect)
            for sock in self._inputs:
                sock.send(self._introduction, zmq.NOBLOCK)
        except BaseException:
            self._close_sockets()
            raise
        self._thread = threading.Thread(target=self._run, name=f"engine-io-{rank}", daemon=True)
        self._thread.start()

    def _open(self, context: zmq.Context[Any], identity: bytes, addresses: Addresses) -> None:
        for index, endpoint in enumerate(addresses.inputs):
            sock = make_socket(context, zmq.DEALER, identity=identity)
            self._inputs.append(sock)
            events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            self._monitors[sock.get_monitor_socket(events)] = index
            sock.setsockopt(zmq.IPV6, 1 if endpoint.startswith("tcp://[") else 0)
            sock.connect(resolve(endpoint))
        for endpoint in addresses.outputs:
            connect = resolve(endpoint)
            sock = make_socket(self._output_context, zmq.PUSH, connect=connect, linger_ms=LINGER_MS, send_hwm=SEND_HWM)
            self._clients.append(_Client(sock))
        self._open_coordinator(addresses)

    def _open_coordinator(self, addresses: Addresses) -> None:
        self._addresses = addresses
        if addresses.coordinator_input is not None and addresses.coordinator_output is not None:
            self._subscription = make_socket(
                self._context, zmq.XSUB, connect=resolve(addresses.coordinator_input), identity=self._identity
            )
            self._subscription.send(b"\x01")
            self._coordinator = make_socket(
                self._context, zmq.PUSH, connect=resolve(addresses.coordinator_output), send_hwm=SEND_HWM
            )

    # --------------------------------------------------------------------------------- from the main thread

    def send(self, client_index: int, outputs: EngineCoreOutputs | bytes) -> None:
        """Queue one message for a front end; never waits."""
        self._outgoing.append((client_index, outputs))
        self._waker.wake()

    def report_load(self, load: LoadRecord, outputs: EngineCoreOutputs | None = None) -> None:
        """The rank's load now; sent soon, and again every `resend` seconds so that a new coordinator learns it.

        `outputs` (a wave that began or ended) goes to the coordinator at once, and takes the load along.
        """
        new, self._load_dirty = not self._load_dirty, True
        self._load = load
        if outputs is not None:
            outputs.load = load
            self._reports.append(outputs)
            self._waker.wake()
        elif new or time.monotonic() - self._load_sent >= self._load_interval:
            self._waker.wake()

    def join_group(self, addresses: Addresses, epoch: int, ready_response: ReadyResponse) -> None:
        """The group has a new head, or this rank a new epoch there: its coordinator may be somewhere else.

        Front ends are introduced again where that changed, so that they follow.
        """
        self.group_epoch = epoch
        self._joined = (addresses, encode_ready_response(ready_response, self._dialect))
        self._waker.wake()

    def close(self, last_word: bytes | None = None, timeout: float = 5.0, linger_ms: int = LINGER_MS) -> None:
        """Send what is queued (and `last_word` to every front end), close the sockets, end the thread.

        `linger_ms`: how long it may take front ends to take what was sent.
        """
        self._linger_ms = linger_ms
        if last_word is not None:
            for index in range(len(self._clients)):
                self._outgoing.append((index, last_word))
        self._stopping = True
        self._waker.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    # ------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waker.fd, zmq.POLLIN)
        for sock in [*self._inputs, *self._monitors]:
            poller.register(sock, zmq.POLLIN)
        if self._subscription is not None:
            poller.register(self._subscription, zmq.POLLIN)
        else:
            self.started.set()
        try:
            while not self._stopping:
                for client in self._clients:
                    if client.backlog:
                        poller.register(client.socket, zmq.POLLOUT)
                    elif client.socket in poller:
                        poller.unregister(client.socket)
                ready = dict(poller.poll(self._wait_ms()))
                self._waker.clear()
                self._follow_group(poller)
                # News of a connection before what came on it: a front end that is back does not ask for its old ones.
                for monitor, index in self._monitors.items():
                    if monitor in ready:
                        self._on_monitor(monitor, index)
                for index, sock in enumerate(self._inputs):
                    if sock in ready:
                        self._drain(sock, "input", index)
                if self._subscription is not None and self._subscription in ready:
                    self._drain(self._subscription, "coordinator_subscription", -1)
                self._flush()
                self._send_reports()
                self._send_load()
            self._flush()
        except Exception as error:
            if not self._stopping:
                self.error = error
                log.exception("rank %d: the wire thread ended", self.rank)
        finally:
            self._close_sockets()

    def _follow_group(self, poller: zmq.Poller) -> None:
        joined, self._joined = self._joined, None
        if joined is None:
            return
        addresses, introduction = joined
        names = ("coordinator_input", "coordinator_output", "frontend_stats_publish_address")
        self._load_dirty = self._load is not None
        if all(getattr(addresses, n) == getattr(self._addresses, n) for n in names):
            return
        if self._subscription is not None:
            poller.unregister(self._subscription)
        for sock in (self._subscription, self._coordinator):
            if sock is not None:
                sock.close(0)
        self._subscription = self._coordinator = None
        try:
            self._open_coordinator(addresses)
        except OSError as error:  # loads go to front ends with outputs; the next head may name a better address
            self._counters.count("coordinator_subscription", "bad_address")
            log.error("rank %d: the head named a coordinator that cannot be reached: %s", self.rank, error)
        if self._subscription is not None:
            poller.register(self._subscription, zmq.POLLIN)
        self._introduction = introduction
        for index in self._connected:
            with contextlib.suppress(zmq.Again):
                self._inputs[index].send(introduction, zmq.NOBLOCK)

    def _wait_ms(self) -> int:
        if self._coordinator is None or self._load is None:
            return 1000
        gap = self._load_interval if self._load_dirty else self._timings.resend
        return min(1000, max(0, int((self._load_sent + gap - time.monotonic()) * 1000) + 1))

    def _drain(self, sock: Any, name: str, client_index: int) -> None:
        for _ in range(BATCH):
            try:
                frames = receive(sock, flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            except WireError as error:
                self._counters.count(name, error.code)
                continue
            try:
                self._take(frames, client_index)
            except WireError as error:
                self._counters.count(name, error.code)
                if error.request_id is not None and client_index >= 0:
                    self._fail_request(client_index, error.request_id, str(error))
            except Exception:  # whatever a stranger sends, the rank goes on
                self._counters.count(name, "internal")
                log.exception("rank %d: a message could not be handled", self.rank)

    def _take(self, frames: list[bytes], client_index: int) -> None:
        if client_index < 0:
            if frames == [COORDINATOR_READY]:
                self.started.set()
                return
            if frames[0] != RequestType.START_DP_WAVE.value:
                raise WireError("unknown_type", "a coordinator sends only READY and START_DP_WAVE")
        elif frames[0] == RequestType.START_DP_WAVE.value:
            raise WireError("unknown_type", "START_DP_WAVE comes from the coordinator only")
        kind, payload = decode_request(frames)
        if isinstance(payload, EngineCoreRequest):
            payload.client_index = client_index
            if payload.epoch not in (0, self.epoch):
                raise WireError(
                    "stale_epoch",
                    f"the request was sent to epoch {payload.epoch} of rank {self.rank}, which is at {self.epoch}",
                    payload.request_id,
                )
        self._inbox.put(InboxItem(kind, payload, client_index))

    def _fail_request(self, client_index: int, request_id: str, message: str) -> None:
        output = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, error=message)
        outputs = EngineCoreOutputs(self.rank, [output], finished_requests=[request_id])
        self._outgoing.append((client_index, outputs))

    def _flush(self) -> None:
        for client_index, client in enumerate(self._clients):
            while client.backlog and self._push(client, client.backlog[0]):
                client.backlog_bytes -= _size(client.backlog.popleft())
            if client.dropped and not client.backlog and client.socket.getsockopt(zmq.EVENTS) & zmq.POLLOUT:
                client.dropped = False
                log.warning("rank %d: front end %d reads again", self.rank, client_index)
                self._inbox.put(InboxItem(LinkEvent.CLIENT_BACK, "it reads again", client_index))
        while self._outgoing:
            client_index, message = self._outgoing.popleft()
            if not 0 <= client_index < len(self._clients):
                self._counters.count("output", "unknown_client")
                continue
            try:
                frames = [message] if isinstance(message, bytes) else self._encode(message)
            except Exception:
                self._counters.count("output", "encode")
                log.exception("rank %d: an output could not be encoded", self.rank)
                continue
            if len(frames) > MAX_FRAMES:
                self._counters.count("output", "frame_count")
                continue
            self._send_to(client_index, frames)

    def _encode(self, outputs: EngineCoreOutputs) -> list[bytes]:
        if not outputs.timestamp:
            outputs.timestamp = time.monotonic()
        outputs.epoch = self.epoch
        return encode_outputs(outputs, self._dialect)

    def _send_to(self, client_index: int, frames: list[bytes]) -> None:
        client = self._clients[client_index]
        if client.dropped:
            self._counters.count("output", "client_dropped")
            return
        if not client.backlog and self._push(client, frames):
            return
        client.backlog.append(frames)
        client.backlog_bytes += _size(frames)
        if client.backlog_bytes <= self._limit:
            return
        thrown, count = client.backlog_bytes, len(client.backlog)
        client.backlog.clear()
        client.backlog_bytes, client.dropped = 0, True
        self._counters.count("output", "client_dropped", count)
        reason = f"it does not read; {thrown} bytes for it thrown away"
        log.error("rank %d: front end %d: %s", self.rank, client_index, reason)
        self._inbox.put(InboxItem(LinkEvent.CLIENT_DROPPED, reason, client_index))

    @staticmethod
    def _push(client: _Client, frames: list[bytes]) -> bool:
        try:
            client.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _send_reports(self) -> None:
        while self._reports:
            outputs = self._reports.popleft()
            if self._coordinator is None:
                continue
            outputs.engine_index, outputs.epoch, outputs.timestamp = self.rank, self.group_epoch, time.monotonic()
            if outputs.load is self._load:
                self._load_dirty, self._load_sent = False, outputs.timestamp
            try:
                self._coordinator.send_multipart(encode_outputs(outputs, self._dialect), zmq.NOBLOCK)
            except zmq.Again:
                self._counters.count("coordinator_report", "send_queue_full")
                self._load_dirty = True

    def _send_load(self) -> None:
        load, now = self._load, time.monotonic()
        if load is None or self._coordinator is None:
            return
        gap = self._load_interval if self._load_dirty else self._timings.resend
        if now - self._load_sent < gap:
            return
        # A vLLM coordinator takes every report for a change, so it gets no repeats.
        repeat, self._load_dirty, self._load_sent = not self._load_dirty, False, now
        if repeat and self._dialect is Dialect.VLLM:
            return
        if self._dialect is Dialect.VLLM:
            stats = SchedulerStats(
                num_running_reqs=load.running, num_waiting_reqs=load.waiting, kv_cache_usage=load.kv_usage
            )
            outputs = EngineCoreOutputs(self.rank, scheduler_stats=stats, timestamp=now)
            frames = encode_outputs(outputs, self._dialect)
        else:
            frames = [encode_load_report(load, self.group_epoch)]
        try:
            self._coordinator.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._counters.count("coordinator_report", "send_queue_full")

    def _on_monitor(self, monitor: Any, index: int) -> None:
        while True:
            try:
                event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._on_connected(index)
            elif index in self._connected:
                self._on_disconnected(index)

    def _on_connected(self, index: int) -> None:
        self._connected.add(index)
        self.peers_gone_since = None
        if index not in self._introduced:  # the first introduction waited in the socket for this
            self._introduced.add(index)
            return
        log.info("rank %d: front end %d is connected again", self.rank, index)
        with contextlib.suppress(zmq.Again):
            self._inputs[index].send(self._introduction, zmq.NOBLOCK)
        self._inbox.put(InboxItem(LinkEvent.CLIENT_BACK, "it is connected again", index))

    def _on_disconnected(self, index: int) -> None:
        self._connected.discard(index)
        if not self._connected:
            self.peers_gone_since = time.monotonic()
        self._inbox.put(InboxItem(LinkEvent.CLIENT_DROPPED, "its connection closed", index))

    def _close_sockets(self) -> None:
        # The last outputs leave before the inputs close: a front end takes the closing of those for the rank's end.
        for index, client in enumerate(self._clients):
            # One that was never seen may be connecting just now; one that is gone takes nothing any more.
            met = self._linger_ms if index in self._connected else 0
            unmet = min(self._linger_ms, UNMET_LINGER_MS) if index not in self._introduced else 0
            client.socket.close(max(met, unmet))
        self._output_context.term()
        for sock in self._inputs:
            with contextlib.suppress(zmq.ZMQError):  # the context may have been destroyed under it
                sock.disable_monitor()
            sock.close(0)
        for sock in (self._subscription, self._coordinator):
            if sock is not None:
                sock.close(0)
        self._waker.close()


def _size(frames: list[bytes]) -> int:
    return sum(len(frame) for frame in frames)
