"""A head, front ends and a coordinator on real sockets, run by threads of the test process."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from dpi_engine.coordinator import Coordinator
from dpi_engine.wire.coordination import CoordinatorState
from dpi_engine.wire.counters import WireCounters
from dpi_engine.wire.engine_link import EngineLink
from dpi_engine.wire.head import HeadAddresses, HeadHandshake
from dpi_engine.wire.lease import Group, LeaseTimings
from dpi_engine.wire.messages import Dialect, RankInfo, RankState, ReadyResponse
from dpi_engine.wire.sockets import bound_endpoint, make_socket
from free_ports import PORTS, is_free

FAST = LeaseTimings().scaled(0.8)
"""Beats every 200 ms, LOST after 2.4 s: quick, yet not so quick that a busy machine looks like a dead rank."""

PATIENCE = 120.0
"""Seconds until a test gives up on what must happen; nothing is asserted about when it happens before that."""


def until(condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    """Wait for a true value and return it; fail by name."""
    end = time.monotonic() + patience
    while not (value := condition()):
        assert time.monotonic() < end, f"did not happen: {what}"
        time.sleep(0.01)
    return value


@dataclass
class FieldDiff:
    field: str
    expected: Any
    got: Any


def diff(expected: dict[str, Any], got: dict[str, Any]) -> list[FieldDiff]:
    keys = sorted(expected.keys() | got.keys())
    return [FieldDiff(k, expected.get(k), got.get(k)) for k in keys if expected.get(k) != got.get(k)]


class HeadThread:
    """A HeadHandshake with its event loop in a thread."""

    def __init__(self, endpoints: list[str], group: Group, addresses: HeadAddresses, **options: Any) -> None:
        self.changes: list[list[RankInfo]] = []
        self.counters = WireCounters()
        options.setdefault("timings", FAST)
        self._loop = asyncio.new_event_loop()
        self._context = zmq.asyncio.Context()
        self.head = HeadHandshake(
            endpoints,
            group,
            addresses,
            counters=self.counters,
            on_change=self.changes.append,
            context=self._context,
            **options,
        )
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.call(self.head.start())
        self.endpoints = self.head.endpoints

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE)

    def do(self, function: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return function()

        return self.call(run())

    def info(self, rank: int) -> RankInfo:
        return self.do(self.head.ranks)[rank]

    def wait_state(self, rank: int, state: RankState) -> RankInfo:
        """Until the rank is in that state; what was seen then."""

        def there() -> RankInfo | None:
            info = self.info(rank)
            return info if info.state is state else None

        return until(there, f"rank {rank} is {state}")

    def close(self) -> None:
        self.call(self.head.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()
        self._context.destroy(0)


def greeting_router(context: zmq.Context[Any], endpoint: str) -> Any:
    """A ROUTER that greets as a head does, and leaves the rest to the test."""
    router = make_socket(context, zmq.ROUTER)
    router.setsockopt(zmq.PROBE_ROUTER, 1)
    router.bind(endpoint)
    return router


class FrontEnd:
    """The sockets of one front end: ROUTER for requests, PULL for outputs."""

    def __init__(self, context: zmq.Context[Any], endpoint: Callable[[str], str]) -> None:
        self.router = make_socket(context, zmq.ROUTER, bind=endpoint("in"))
        self.input = bound_endpoint(self.router)
        self.pull = make_socket(context, zmq.PULL, bind=endpoint("out"))
        self.output = bound_endpoint(self.pull)

    def read(self, sock: Any, what: str, patience: float = PATIENCE) -> list[bytes]:
        assert sock.poll(int(patience * 1000)), f"did not come: {what}"
        return sock.recv_multipart()

    def close(self) -> None:
        self.router.close(0)
        self.pull.close(0)


def own_endpoint() -> str:
    """Where whoever comes later can be bound again: nobody else is given that port meanwhile."""
    return f"tcp://127.0.0.1:{PORTS.take(1)}"


def until_free(endpoint: str) -> str:
    """The same, once whoever was bound there has let go: libzmq closes sockets some time after `close`."""
    until(lambda: is_free(int(endpoint.rpartition(":")[2])), f"{endpoint} is free")
    return endpoint


class Stage:
    """Everything a test needs, over ipc or tcp, taken down in order by `close`."""

    def __init__(
        self,
        transport: str = "ipc",
        size: int = 2,
        front_ends: int = 1,
        coordinator: bool = False,
        dialect: Dialect = Dialect.DPI,
        moe: bool = False,
        **head_options: Any,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dw"))
        self.context: zmq.Context[Any] = zmq.Context()
        self.dialect = dialect
        self.size = size
        self.links: list[EngineLink] = []
        self._transport = transport
        self.fronts = [FrontEnd(self.context, self._front_endpoint(i)) for i in range(front_ends)]
        self.coordinator: Coordinator | None = None
        self._coordinator_thread: threading.Thread | None = None
        self._coordinator_at = [self.endpoint(f"c{i}") for i in range(3)]
        self._moe = moe
        if coordinator:
            self.start_coordinator()
        group = head_options.pop("group", None) or Group(size, frozenset(range(size)), vllm=dialect is Dialect.VLLM)
        self._group, self._head_options = group, head_options
        self._head_at = [self.endpoint("h")]
        self.start_head()

    def endpoint(self, name: str) -> str:
        return own_endpoint() if self._transport == "tcp" else f"ipc://{self.folder}/{name}"

    def _front_endpoint(self, index: int) -> Callable[[str], str]:
        return lambda name: self.endpoint(f"f{index}-{name}")

    def start_head(self) -> None:
        addresses = HeadAddresses(
            inputs=[f.input for f in self.fronts],
            outputs=[f.output for f in self.fronts],
            coordinator_input=self._coordinator_at[1] if self.coordinator else None,
            coordinator_output=self._coordinator_at[2] if self.coordinator else None,
            stats_publish=self._coordinator_at[0] if self.coordinator else None,
        )
        self.head = HeadThread(self._head_at, self._group, addresses, **self._head_options)
        self._head_at = self.head.endpoints

    def start_coordinator(self) -> None:
        front, back, pull = self._coordinator_at
        state = CoordinatorState(self.size, self.dialect, self._moe, time.monotonic())
        self.coordinator = Coordinator(state, front=[front], back=[back], pull=[pull])
        self._coordinator_at = self.coordinator.endpoints
        self._coordinator_thread = threading.Thread(target=self.coordinator.run, daemon=True)
        self._coordinator_thread.start()

    def stop_coordinator(self) -> None:
        assert self.coordinator is not None and self._coordinator_thread is not None
        self.coordinator.stop()
        self._coordinator_thread.join(PATIENCE)
        assert not self._coordinator_thread.is_alive()

    def link(self, rank: int, **options: Any) -> EngineLink:
        options = {"local": rank in self._group.local, "timings": FAST, "dialect": self.dialect, **options}
        options.setdefault("headless", not options["local"])
        link = EngineLink(rank=rank, endpoint=self.head.endpoints[0], **options)
        self.links.append(link)
        return link

    def up(self, rank: int, resolved: dict[str, Any] | None = None, **options: Any) -> EngineLink:
        """A rank brought to READY."""
        link = self.link(rank, **options)
        link.connect(PATIENCE)
        link.progress("loading weights", 0.5)
        link.open_io(response(rank), PATIENCE)
        link.ready(resolved, timeout=PATIENCE)
        return link

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.head.close()
        if self.coordinator is not None:
            self.stop_coordinator()
        for front in self.fronts:
            front.close()
        self.context.destroy(0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def response(rank: int) -> ReadyResponse:
    return ReadyResponse(max_model_len=512, num_gpu_blocks=64, block_size=16, data_parallel_rank=rank)
