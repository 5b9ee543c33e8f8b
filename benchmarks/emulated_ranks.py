"""Many ranks in one process, on real sockets: everything of a rank's wire but its model.

Each emulated rank has the sockets that a real one has (handshake, one input and one output per front end, subscription
and reports at the coordinator), speaks the `dpi` dialect with the engine's own codec, and keeps its lease by beats. Its
compute is a stub that sleeps: every `step_s` seconds each running request gets a token. One event loop serves all ranks
of a process, where a real rank has threads and a process of its own: the ranks' side is emulated, the other is not.

    python benchmarks/emulated_ranks.py --head tcp://127.0.0.1:29550 --first 0 --count 512 --size 1024
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from dpi_engine.wire import handshake as hs
from dpi_engine.wire.codec import decode_request, encode_outputs, encode_ready_response
from dpi_engine.wire.coordination import encode_load_report, least_load_interval
from dpi_engine.wire.counters import WireCounters
from dpi_engine.wire.messages import (
    WIRE_VERSION,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    LoadRecord,
    ReadyResponse,
    RequestType,
)
from dpi_engine.wire.reader import SocketReader
from dpi_engine.wire.sockets import make_context, make_socket, need_descriptors

SLICES = 16
"""Into so many groups the ranks are parted, so that they neither beat nor step all at once."""

MAX_RUNNING = 256
"""Requests that a rank computes at once; the others wait."""

BLOCKS = 4096
"""KV cache blocks of a rank, of 16 tokens."""

RESEND_S = 1.0
"""After so many seconds a load is reported again although it has not changed, as engines do."""


def sockets_of(ranks: int, front_ends: int) -> int:
    """ZMQ sockets of so many ranks."""
    return ranks * (3 + 2 * front_ends)


class EmulatedRank:
    """One rank: HELLO on `hello`, ready when the head has acknowledged READY. Lives in the fleet's event loop."""

    def __init__(self, fleet: Fleet, rank: int) -> None:
        self.rank = rank
        self.epoch = 0
        self.ready = False
        self.running: dict[str, tuple[EngineCoreRequest, int]] = {}
        self.waiting: dict[str, EngineCoreRequest] = {}
        self._fleet = fleet
        self._boot_id = hs.new_boot_id()
        self._identity = hs.identity(rank, self._boot_id)
        self._tokens = 0
        self._seq = 0
        self._steps = 0
        self._reported = 0.0
        self._dirty = True
        self._subscribed = False
        self._handshake, self._handshake_reader = fleet.open(zmq.DEALER, self._on_head, self._identity)
        # Made before HELLO, connected after its answer: a real rank makes them in a process of its own.
        self._inputs = [fleet.open(zmq.DEALER, self._on_request, self._identity) for _ in range(fleet.front_ends)]
        self._outputs = [fleet.open(zmq.PUSH)[0] for _ in range(fleet.front_ends)]
        self._subscription, self._subscription_reader = fleet.open(zmq.XSUB, self._on_coordinator, self._identity)
        self._coordinator: Any = fleet.open(zmq.PUSH)[0]
        self._handshake.connect(fleet.head)

    def hello(self) -> None:
        message = hs.EngineMessage(
            status=hs.HELLO,
            local=False,
            headless=True,
            version=WIRE_VERSION,
            pod=f"emulated-{os.getpid()}",
            pid=os.getpid(),
            fields=self._fleet.declared,
        )
        self._say(message)

    def beat(self) -> None:
        if self.epoch:
            self._say(hs.EngineMessage(status=hs.BEAT, epoch=self.epoch, steps=self._steps))

    def step(self) -> None:
        """The end of a step that slept: a token for every request that runs, then waiting ones are let in."""
        if not (self.running or self.waiting):
            self._report(time.monotonic())
            return
        self._steps += 1
        by_client: dict[int, list[EngineCoreOutput]] = {}
        over = []
        for request_id, (request, done) in self.running.items():
            last = done + 1 == self._fleet.length_of(request)
            output = EngineCoreOutput(
                request_id, [done], finish_reason=FinishReason.LENGTH if last else None, output_index=done
            )
            by_client.setdefault(request.client_index, []).append(output)
            self.running[request_id] = (request, done + 1)
            self._tokens += 1
            if last:
                over.append(request_id)
        for request_id in over:
            request, done = self.running.pop(request_id)
            self._tokens -= done + len(request.prompt_token_ids or ())
        while self.waiting and len(self.running) < MAX_RUNNING:
            request_id = next(iter(self.waiting))
            request = self.waiting.pop(request_id)
            self.running[request_id] = (request, 0)
            self._tokens += len(request.prompt_token_ids or ())
        self._seq += 1
        self._dirty = True
        load = self._load()
        now = time.monotonic()
        for client, rows in by_client.items():
            outputs = EngineCoreOutputs(self.rank, rows, timestamp=now, epoch=self.epoch, load=load)
            with contextlib.suppress(zmq.Again):
                self._outputs[client].send_multipart(encode_outputs(outputs), zmq.NOBLOCK)
        self._report(now)

    @property
    def in_flight(self) -> int:
        return len(self.running) + len(self.waiting)

    # ------------------------------------------------------------------------------------------------ inside

    def _load(self) -> LoadRecord:
        waiting_tokens = sum(len(r.prompt_token_ids or ()) for r in self.waiting.values())
        usage = min(1.0, self._tokens / (BLOCKS * 16))
        return LoadRecord(self.rank, self.epoch, self._seq, len(self.waiting), len(self.running), usage, waiting_tokens)

    def _report(self, now: float) -> None:
        """To the coordinator, as often as engines do."""
        gap = least_load_interval(self._fleet.size) if self._dirty else RESEND_S
        if self._coordinator is None or now - self._reported < gap:
            return
        self._dirty, self._reported = False, now
        payload = encode_load_report(self._load(), self.epoch)
        self._fleet.count_report(len(payload))
        with contextlib.suppress(zmq.Again):
            self._coordinator.send(payload, zmq.NOBLOCK)

    def _say(self, message: hs.EngineMessage) -> None:
        with contextlib.suppress(zmq.Again):
            self._handshake.send(hs.encode_engine_message(message), zmq.NOBLOCK)
        self._handshake_reader.kick()

    def _on_head(self, frames: list[zmq.Frame]) -> None:
        if not len(frames[-1]):
            return  # the greeting
        message = hs.decode_head_message(frames[-1].buffer)
        if isinstance(message, hs.InitMessage):
            if not self.epoch:
                self.epoch = message.epoch
                self._fleet.later(lambda: self._connect(message.addresses))
        elif isinstance(message, hs.HeadMessage):
            if message.error is not None:
                raise RuntimeError(f"rank {self.rank}: {message.error.code}: {message.error.message}")
            if message.status == hs.READY and not self.ready:
                self.ready = True
                self._fleet.one_is_ready()

    def _connect(self, addresses: hs.Addresses) -> None:
        fleet = self._fleet
        response = ReadyResponse(
            max_model_len=4096,
            num_gpu_blocks=BLOCKS,
            block_size=16,
            dp_stats_address=addresses.frontend_stats_publish_address,
            data_parallel_size=fleet.size,
            data_parallel_rank=self.rank,
            epoch=self.epoch,
        )
        introduction = encode_ready_response(response)
        for endpoint, (sock, reader) in zip(addresses.inputs, self._inputs, strict=True):
            sock.connect(endpoint)
            sock.send(introduction, zmq.NOBLOCK)
            reader.kick()
        for endpoint, sock in zip(addresses.outputs, self._outputs, strict=True):
            sock.connect(endpoint)
        if addresses.coordinator_input is None or addresses.coordinator_output is None:
            self._coordinator = None
            self._say_ready()
            return
        self._subscription.connect(addresses.coordinator_input)
        self._subscription.send(b"\x01", zmq.NOBLOCK)
        self._subscription_reader.kick()
        self._coordinator.connect(addresses.coordinator_output)

    def _on_coordinator(self, frames: list[zmq.Frame]) -> None:
        if frames[0].bytes == b"READY" and not self._subscribed:
            self._subscribed = True
            self._say_ready()

    def _say_ready(self) -> None:
        resolved = self._fleet.resolved
        self._say(hs.EngineMessage(status=hs.READY, local=False, headless=True, epoch=self.epoch, fields=resolved))

    def _on_request(self, frames: list[zmq.Frame]) -> None:
        kind, payload = decode_request([frame.buffer for frame in frames])
        if kind is RequestType.ADD:
            self.waiting[payload.request_id] = payload
            self._seq += 1
            self._dirty = True
        elif kind is RequestType.ABORT:
            for request_id in payload:
                if self.waiting.pop(request_id, None) is None and request_id in self.running:
                    request, done = self.running.pop(request_id)
                    self._tokens -= done + len(request.prompt_token_ids or ())
            self._seq += bool(payload)


class Fleet:
    """`ranks` of a group of `size` in the running event loop, joined at the handshake socket `head`.

    length_of(request): tokens that a request gets. declared, resolved: fingerprint fields sent in HELLO and READY.
    """

    def __init__(
        self,
        head: str,
        ranks: range,
        *,
        size: int,
        front_ends: int = 1,
        step_s: float = 0.25,
        beat_s: float = 0.25,
        declared: dict[str, Any] | None = None,
        resolved: dict[str, Any] | None = None,
    ) -> None:
        need_descriptors(2 * sockets_of(len(ranks), front_ends), f"{len(ranks)} emulated ranks")
        self.head, self.size, self.front_ends = head, size, front_ends
        self.declared, self.resolved = declared or {}, resolved or {}
        self.reports = self.report_bytes = self.longest_report = 0
        self.counters = WireCounters()
        self._step_s, self._beat_s = step_s, beat_s
        self._connections = sockets_of(len(ranks), front_ends)
        self._context = make_context(self._connections)
        self._opened: list[tuple[Any, SocketReader | None]] = []
        self._ready = 0
        self._todo: deque[Callable[[], None]] = deque()
        self._some = asyncio.Event()
        self._all_ready = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.ranks = [EmulatedRank(self, rank) for rank in ranks]

    def length_of(self, request: EngineCoreRequest) -> int:
        return max(1, (request.sampling_params.max_tokens if request.sampling_params else None) or 1)

    async def join(self, timeout: float) -> float:
        """HELLO of every rank, then wait until all are READY. Returns when the last HELLO went out (monotonic s).

        Raises TimeoutError saying how many were ready after `timeout` seconds.
        """
        for rank in self.ranks:
            rank.hello()
        last_hello = time.monotonic()
        self._tasks = [
            asyncio.create_task(self._every(self._beat_s, lambda rank: rank.beat())),
            asyncio.create_task(self._work()),
        ]
        try:
            async with asyncio.timeout(timeout):
                await self._all_ready.wait()
        except TimeoutError:
            raise TimeoutError(
                f"{self._ready} of {len(self.ranks)} emulated ranks are READY after {timeout:g} s"
            ) from None
        return last_hello

    def start_steps(self) -> None:
        self._tasks.append(asyncio.create_task(self._every(self._step_s, lambda rank: rank.step())))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for sock, reader in self._opened:
            if reader is not None:
                reader.close()
            sock.close(0)
        await asyncio.to_thread(self._context.term)

    # ----------------------------------------------------------------------------------------------- for its ranks

    def open(
        self,
        kind: int,
        handler: Callable[[list[zmq.Frame]], None] | None = None,
        identity: bytes | None = None,
    ) -> tuple[Any, Any]:
        sock = make_socket(self._context, kind, identity=identity, peers=self._connections)
        reader = None if handler is None else SocketReader(sock, "emulated", handler, self.counters)
        self._opened.append((sock, reader))
        return sock, reader

    def later(self, action: Callable[[], None]) -> None:
        """Do this when the beats that are due have been sent: one rank's start must not silence the others."""
        self._todo.append(action)
        self._some.set()

    async def _work(self) -> None:
        while True:
            await self._some.wait()
            self._some.clear()
            while self._todo:
                self._todo.popleft()()
                await asyncio.sleep(0)

    def one_is_ready(self) -> None:
        self._ready += 1
        if self._ready == len(self.ranks):
            self._all_ready.set()

    def count_report(self, size: int) -> None:
        self.reports += 1
        self.report_bytes += size
        self.longest_report = max(self.longest_report, size)

    async def _every(self, period: float, action: Callable[[EmulatedRank], None]) -> None:
        """`action` for every rank once per `period`, a slice of the ranks at a time."""
        begin, turn = time.monotonic(), 0
        while True:
            turn += 1
            await asyncio.sleep(max(0.0, begin + turn * period / SLICES - time.monotonic()))
            for rank in self.ranks[turn % SLICES :: SLICES]:
                action(rank)


SAMPLE_S = 0.1


async def serve(args: argparse.Namespace) -> None:
    """Join, then step until standard input ends; events are JSON lines on standard output."""

    def say(**event: Any) -> None:
        print(json.dumps(event), flush=True)

    loop = asyncio.get_running_loop()
    ranks = range(args.first, args.first + args.count)
    fleet = Fleet(args.head, ranks, size=args.size, front_ends=args.front_ends, step_s=args.step, beat_s=args.beat)
    say(event="opened")
    await loop.run_in_executor(None, sys.stdin.readline)  # all fleets say HELLO at one time
    last_hello = await fleet.join(args.timeout)
    say(event="joined", last_hello=last_hello, ready=time.monotonic())
    fleet.start_steps()
    over = loop.run_in_executor(None, sys.stdin.readline)
    samples: dict[int, tuple[int, int]] = {}
    counts: dict[str, int] = {}
    while not over.done():
        turn = math.floor(time.monotonic() / SAMPLE_S) + 1
        await asyncio.sleep(turn * SAMPLE_S - time.monotonic())
        loads = [rank.in_flight for rank in fleet.ranks]
        samples[turn] = (max(loads), sum(loads))
        counts[str(turn)] = fleet.reports
    say(
        event="over",
        samples=samples,
        reports=counts,
        longest_report=fleet.longest_report,
        mean_report=fleet.report_bytes / max(1, fleet.reports),
        errors=fleet.counters.total(),
    )
    await fleet.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", required=True, help="handshake endpoint")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--size", type=int, required=True, help="ranks of the group")
    parser.add_argument("--front-ends", type=int, default=1)
    parser.add_argument("--step", type=float, default=0.25, help="seconds that a step sleeps")
    parser.add_argument("--beat", type=float, default=0.25, help="seconds between beats")
    parser.add_argument("--timeout", type=float, default=120.0)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
