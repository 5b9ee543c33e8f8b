"""How an engine finds its head: HELLO, repeated with back-off until an answer, a refusal or the deadline."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from dpi_engine.wire import handshake as hs
from dpi_engine.wire.counters import WireCounters
from dpi_engine.wire.errors import HandshakeTimeout, Refusal, TypedRefusal, WireError
from dpi_engine.wire.lease import LeaseTimings
from dpi_engine.wire.messages import WIRE_VERSION, Dialect
from dpi_engine.wire.sockets import backoff, make_socket, receive, resolve

log = logging.getLogger(__name__)

SOCKET = "engine_handshake"

GREETING_S = 30.0
"""How long a head may take to greet. It does as soon as its loop turns: so long only where a thousand ranks come."""


@dataclass(slots=True)
class Registrar:
    """Who registers where. `endpoint` may hold a name; it is looked up at every try."""

    rank: int
    endpoint: str
    local: bool
    headless: bool
    dialect: Dialect
    timings: LeaseTimings
    counters: WireCounters
    context: zmq.Context[Any]
    stop: threading.Event
    declared: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    pod: str = ""
    trouble: str = ""
    """What was in the way of the last attempt; empty before the first one has failed and once one has not."""

    def message(self, status: str, epoch: int, **extra: Any) -> bytes:
        """A message of this engine under `epoch`."""
        message = hs.EngineMessage(status=status, local=self.local, headless=self.headless, epoch=epoch, **extra)
        return hs.encode_engine_message(message, self.dialect)

    def _hello(self, epoch: int, replaces: bytes) -> bytes:
        return self.message(
            hs.HELLO,
            epoch,
            version=WIRE_VERSION,
            pod=self.pod,
            pid=os.getpid(),
            replaces=replaces,
            fingerprint=self.fingerprint,
            fields=self.declared,
        )

    def register(
        self,
        boot_id: bytes,
        epoch: int,
        deadline: float,
        replaces: bytes = b"",
        enough: Callable[[], bool] = lambda: False,
    ) -> tuple[Any, hs.InitMessage]:
        """HELLO as `boot_id` until the head answers or `deadline` (monotonic seconds): the open socket and the answer.

        `epoch` is the highest this rank ever had, `replaces` its boot id before. A vLLM head dies of a second HELLO, so
        in that dialect one is sent per connection, and only when it stands. `enough` is asked after
        every attempt whether to leave it at that. What is in the way is in `trouble`, and now and then in the log.
        Raises TypedRefusal, or HandshakeTimeout naming what was last in the way.
        """
        hello = self._hello(epoch, replaces)
        self.trouble = ""
        began = told = time.monotonic()
        refused_since: float | None = None
        tried = False
        for pause in backoff():
            left = deadline - time.monotonic()
            if left <= 0 or self.stop.is_set() or (tried and enough()):
                break
            tried = True
            if self.trouble and time.monotonic() - told >= self.timings.report:
                told = time.monotonic()
                log.warning(
                    "rank %d has looked for the head at %s for %.0f s: %s",
                    self.rank, self.endpoint, told - began, self.trouble,
                )  # fmt: skip
            try:
                sock = make_socket(
                    self.context,
                    zmq.DEALER,
                    connect=resolve(self.endpoint),
                    identity=hs.identity(self.rank, boot_id),
                    immediate=True,
                )
            except OSError as error:
                self.trouble = str(error)
                self.stop.wait(min(pause, left))
                continue
            try:
                reply = self._ask(sock, deadline, boot_id, hello)
            except TypedRefusal as refusal:
                sock.close(0)
                # The lease of a dead predecessor takes a while to end; a living one will still be there then.
                now = time.monotonic()
                refused_since = refused_since or now
                if refusal.code != Refusal.DUPLICATE_RANK or now - refused_since > 2 * self.timings.lost:
                    raise
                self.trouble = refusal.message
                self.stop.wait(min(pause, self.timings.beat * 4))
                continue
            except TimeoutError as error:
                sock.close(0)
                self.trouble = str(error)
                self.stop.wait(min(pause, max(0.0, deadline - time.monotonic())))
                continue
            except BaseException:
                sock.close(0)
                raise
            self.trouble = ""
            return sock, reply
        last = self.trouble or "no attempt was made"
        raise HandshakeTimeout(f"rank {self.rank} could not register with the head at {self.endpoint}: {last}")

    def _ask(self, sock: Any, deadline: float, boot_id: bytes, hello: bytes) -> hs.InitMessage:
        """One attempt. Raises TimeoutError when the head cannot be reached or does not answer in time."""
        attempt = min(deadline, time.monotonic() + self.timings.lost)
        self._poll(sock, zmq.POLLOUT, attempt, "no connection")
        if self.dialect is Dialect.DPI:
            self._await_greeting(sock, deadline)
            attempt = min(deadline, time.monotonic() + self.timings.lost)
        sock.send(hello, zmq.NOBLOCK)
        if self.dialect is Dialect.VLLM:
            attempt = deadline
        while True:
            self._poll(sock, zmq.POLLIN, attempt, f"{self.endpoint} is connected but does not answer HELLO")
            frames = receive(sock, flags=zmq.NOBLOCK)
            if frames == hs.GREETING:
                continue
            try:
                reply = hs.decode_head_message(frames[-1])
            except WireError as error:
                self.counters.count(SOCKET, error.code)
                continue
            if isinstance(reply, hs.PlacesMessage):
                continue
            if isinstance(reply, hs.HeadMessage):
                if reply.error is not None:
                    raise TypedRefusal(reply.error.code, reply.error.message, reply.error.details)
                continue
            if self.dialect is Dialect.DPI and reply.version != WIRE_VERSION:
                theirs = f"wire version {reply.version}" if reply.version else "the vllm dialect"
                raise TypedRefusal(
                    Refusal.PROTOCOL_VERSION,
                    f"the head at {self.endpoint} speaks {theirs}, this rank wire version {WIRE_VERSION}; use one "
                    "release, or --data-parallel-protocol vllm with a vLLM head",
                )
            if self.dialect is Dialect.DPI and reply.boot_id != boot_id:
                self.counters.count(SOCKET, "bad_identity")
                continue
            return reply

    def _await_greeting(self, sock: Any, deadline: float) -> None:
        """Until the other side shows that it is a head of ours, before it is told anything.

        Raises TypedRefusal when it has not on a connection that stood for GREETING_S, TimeoutError when the connection
        broke or at the deadline.
        """
        end = time.monotonic() + GREETING_S
        silent = (
            f"{self.endpoint} is connected and does not greet as the head of this release does: it is a vLLM head, or "
            "one that speaks vLLM's protocol (then give --data-parallel-protocol vllm here too), or of another release"
        )
        while not sock.poll(max(0, min(200, int((min(end, deadline) - time.monotonic()) * 1000)))):
            if self.stop.is_set():
                raise TimeoutError("the engine is stopping")
            if not sock.getsockopt(zmq.EVENTS) & zmq.POLLOUT:
                raise TimeoutError(f"the connection to {self.endpoint} broke before a word was said")
            now = time.monotonic()
            if now >= end:
                raise TypedRefusal(Refusal.PROTOCOL_VERSION, silent)
            if now >= deadline:
                raise TimeoutError(silent)

    def _poll(self, sock: Any, event: int, until: float, failure: str) -> None:
        while not self.stop.is_set():
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError(failure)
            if sock.poll(min(200, int(left * 1000) + 1), event):
                return
        raise TimeoutError("the engine is stopping")
