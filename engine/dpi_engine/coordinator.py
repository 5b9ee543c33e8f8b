"""The coordinator: gathers the ranks' loads, publishes them to all front ends, and wakes ranks for waves.

Run as `python -m dpi_engine.coordinator --front EP --back EP --pull EP`. It keeps nothing that the ranks do not send
again by themselves, so it may be restarted at any time. What it decides is in `wire/coordination.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from dpi_engine.wire.codec import MAX_FRAMES, Dead, check_frames, decode_outputs
from dpi_engine.wire.coordination import (
    Action,
    CoordinatorState,
    Publish,
    decode_load_report,
    decode_rank_table,
    decode_wake_up,
)
from dpi_engine.wire.counters import WireCounters
from dpi_engine.wire.errors import WireError
from dpi_engine.wire.messages import Dialect
from dpi_engine.wire.sockets import Waker, bound_endpoint, make_socket, need_descriptors, rank_descriptors, receive

log = logging.getLogger(__name__)

READY = b"READY"
SUBSCRIBE = b"\x01"
UNSUBSCRIBE = b"\x00"
PUBLISH_HWM = 1000
CONFIRMED_PER_SECOND = 5_000
"""A confirmation reaches all ranks that have subscribed: so many are sent in a second at most, over all ranks."""


class Coordinator:
    """The sockets around a CoordinatorState: XPUB to front ends, XPUB to engines, PULL from engines and lease owner."""

    def __init__(
        self,
        state: CoordinatorState,
        *,
        front: Sequence[str],
        back: Sequence[str],
        pull: Sequence[str],
        counters: WireCounters | None = None,
        on_counters: Callable[[dict[tuple[str, str], int]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Binds at once; raises OSError naming the endpoint that cannot be bound, or the limit that is too low.

        `on_counters` gets a snapshot of the counters after every periodic publication.
        """
        need_descriptors(rank_descriptors(state.size), f"coordinator of {state.size} ranks")
        self.state = state
        self.counters = counters or WireCounters()
        self._on_counters = on_counters
        self._clock = clock
        self._context = zmq.Context()
        self._waker = Waker()
        self._stopped = False
        self._unconfirmed = False
        self._confirmed = -1.0
        self._sockets: list[Any] = []
        try:
            self._front = self._open(zmq.XPUB, front)
            self._back = self._open(zmq.XPUB, back)
            self._pull = self._open(zmq.PULL, pull)
        except BaseException:
            self._close()
            raise
        self.endpoints = [bound_endpoint(sock) for sock in self._sockets]

    def _open(self, kind: int, endpoints: Sequence[str]) -> Any:
        sock = make_socket(self._context, kind, bind=endpoints, send_hwm=PUBLISH_HWM, peers=self.state.size)
        self._sockets.append(sock)
        return sock

    def stop(self) -> None:
        """End `run` soon; may be called from another thread or a signal handler."""
        self._stopped = True
        self._waker.wake()

    def run(self) -> None:
        """Serve until `stop`, then close the sockets."""
        poller = zmq.Poller()
        poller.register(self._waker.fd, zmq.POLLIN)
        handlers: dict[Any, Callable[[list[bytes]], list[Action]]] = {
            self._back: self._on_back,
            self._pull: self._on_pull,
            self._front: self._on_front,
        }
        for sock in handlers:
            poller.register(sock, zmq.POLLIN)
        try:
            while not self._stopped:
                due = self.state.next_due()
                if self._unconfirmed:
                    due = min(due, self._confirm_due())
                wait = max(0.0, due - self._clock())
                ready = {sock for sock, _ in poller.poll(int(wait * 1000) + 1)}
                self._waker.clear()
                for sock, handler in handlers.items():
                    if sock in ready:
                        self._drain(sock, handler)
                self._confirm()
                self._act(self.state.due(self._clock()), periodic=True)
        finally:
            self._close()

    def _drain(self, sock: Any, handler: Callable[[list[bytes]], list[Action]]) -> None:
        """Take what waits, at most 256 messages a turn so that a flood on one socket starves no other."""
        name = {self._back: "coordinator_back", self._pull: "coordinator_pull", self._front: "coordinator_front"}[sock]
        for _ in range(256):
            try:
                frames = receive(sock, flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            except WireError as error:
                self.counters.count(name, error.code)
                continue
            try:
                self._act(handler(frames))
            except WireError as error:
                self.counters.count(name, error.code)
            except Exception:  # whatever a stranger sends, the coordinator goes on
                self.counters.count(name, "internal")
                log.exception("coordinator: a message could not be handled")

    def _on_back(self, frames: list[bytes]) -> list[Action]:
        if frames == [SUBSCRIBE]:
            self._unconfirmed = True
        elif frames != [UNSUBSCRIBE]:
            raise WireError("malformed", "coordinator: engines only subscribe on this socket")
        return []

    def _confirm_due(self) -> float:
        return self._confirmed + self.state.size / CONFIRMED_PER_SECOND

    def _confirm(self) -> None:
        """Every engine waits for a word after it subscribed; those who had it before pass over it."""
        if self._unconfirmed and self._clock() >= self._confirm_due():
            self._unconfirmed, self._confirmed = False, self._clock()
            with contextlib.suppress(zmq.Again):
                self._back.send(READY, zmq.NOBLOCK)

    def _on_pull(self, frames: list[bytes]) -> list[Action]:
        check_frames(frames, 1, MAX_FRAMES, "coordinator")
        now = self._clock()
        if frames[0][1:3] == b"\xa1L":
            return self.state.on_load(decode_load_report(frames[0]), now)
        if frames[0][1:7] == b"\xa5RANKS":
            return self.state.on_ranks(decode_rank_table(frames[0]), now)
        outputs = decode_outputs(frames)
        if isinstance(outputs, Dead):
            raise WireError("malformed", "coordinator: the sentinel of a dying engine goes to front ends only")
        return self.state.on_engine(outputs, now)

    def _on_front(self, frames: list[bytes]) -> list[Action]:
        if frames == [SUBSCRIBE]:
            return [self.state.snapshot()]
        if frames == [UNSUBSCRIBE]:
            return []
        check_frames(frames, 1, 1, "wake-up")
        return self.state.on_front_end(decode_wake_up(frames[0]), self._clock())

    def _act(self, actions: list[Action], periodic: bool = False) -> None:
        for action in actions:
            try:
                if isinstance(action, Publish):
                    self._front.send(action.payload, zmq.NOBLOCK)
                else:
                    self._back.send_multipart(action.frames(self.state.dialect), zmq.NOBLOCK)
            except zmq.Again:
                self.counters.count("coordinator_front", "send_queue_full")
        if periodic and actions and self._on_counters is not None:
            self._on_counters(self.counters.snapshot())

    def _close(self) -> None:
        for sock in self._sockets:
            sock.close(0)
        self._context.term()
        self._waker.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the process; endpoints may be given several times (ipc for local peers, tcp for the others)."""
    parser = argparse.ArgumentParser(prog="dpi-coordinator", description="Load and wave coordinator of a DP group.")
    parser.add_argument("--front", action="append", required=True, help="endpoint that front ends subscribe to")
    parser.add_argument("--back", action="append", required=True, help="endpoint that engines subscribe to")
    parser.add_argument("--pull", action="append", required=True, help="endpoint that engines report to")
    parser.add_argument("--size", type=int, required=True, help="number of ranks")
    parser.add_argument("--dialect", type=Dialect, choices=list(Dialect), default=Dialect.DPI)
    parser.add_argument("--moe", action="store_true", help="the model needs waves")
    parser.add_argument("--log-level", default="INFO")
    args = parser.parse_args(argv)
    if not 1 <= args.size <= 65536:
        parser.error(f"--size must be in 1..65536, got {args.size}")
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s coordinator %(message)s")
    state = CoordinatorState(args.size, args.dialect, args.moe, time.monotonic())
    stop: list[Coordinator] = []
    pending = False

    def on_signal(signum: int, frame: Any) -> None:
        nonlocal pending
        pending = True
        for coordinator in stop:
            coordinator.stop()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    try:
        coordinator = Coordinator(state, front=args.front, back=args.back, pull=args.pull)
    except OSError as error:
        log.error("%s", error)
        return 1
    stop.append(coordinator)
    if pending:
        coordinator.stop()
    log.info("coordinator of %d ranks on %s", args.size, ", ".join(coordinator.endpoints))
    coordinator.run()
    log.info("coordinator stopped, wire errors: %d", coordinator.counters.total())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
