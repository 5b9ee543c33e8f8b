"""The channel between the launcher and its own children: a ROUTER on an ipc path in the private run directory.

Children report what they see and do; the launcher tells them the ranks' states and when to drain. Frames are msgpack of
the tagged structs below. Nothing outside the pod reaches this socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from dpi_engine.wire.messages import LoadRecord, RankInfo
from dpi_engine.wire.places import Place

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.25
"""A child reports at least this often."""
STARTING_INTERVAL_S = 0.1
"""As long as it does not serve: whoever waits for it should hear of it soon."""


class LockstepReport(msgspec.Struct, kw_only=True):
    """Totals of a rank that steps together with others, since its process started; `group` is the epoch of now."""

    group: int
    waves: int
    syncs: int
    dummy_steps: int
    breaks: int
    formed: int
    exchange_s: float


class EngineReport(msgspec.Struct, tag="engine", kw_only=True):
    """What an engine process says of itself. `step_age_s` is None while it has nothing to compute."""

    rank: int
    stage: str = ""
    ready: bool = False
    boot_id: str = ""
    epoch: int = 0
    steps: int = 0
    step_age_s: float | None = None
    load: LoadRecord | None = None
    fields: dict[str, Any] = {}
    group_epoch: int = 0  # under which the group's head knows it
    head_lost: str = ""  # why the group's head is away while the own front end is there
    refused: str = ""  # by the group's head, while requests are served
    places: list[Place] = []  # where all ranks of the group are, if the head has told this one
    malformed: dict[str, int] = {}
    lockstep: LockstepReport | None = None  # where ranks share experts
    workers: list[int] = []  # processes that share the layers, where there is more than this one
    error: str = ""


class ApiReport(msgspec.Struct, tag="api", kw_only=True):
    """What an API server says of itself."""

    index: int
    pid: int = 0
    listening: bool = False
    ready: bool = False
    in_flight: int = 0
    loads: list[LoadRecord] = []  # newest of each rank
    lost: dict[int, str] = {}  # ranks whose connection to this front end is gone, and why
    linked: list[int] = []  # ranks that it has a connection to
    max_model_len: int = 0  # as its ranks told it; 0 while none has
    malformed: dict[str, int] = {}
    error: str = ""


class CoordinatorReport(msgspec.Struct, tag="coordinator", kw_only=True):
    listening: bool = False
    malformed: dict[str, int] = {}
    error: str = ""


class UtilityResult(msgspec.Struct, tag="utility_result", kw_only=True):
    """`status`: the HTTP status that goes with `error`, 400 where a rank refused the call."""

    call_id: int
    results: dict[int, Any] = {}
    error: str = ""
    status: int = 200


class RankTable(msgspec.Struct, tag="ranks", kw_only=True):
    """States of all ranks that this front end routes to, and where the others have their endpoint, where known."""

    ranks: list[RankInfo]
    elsewhere: dict[int, str] = {}
    max_model_len: int = 0  # as front ends of this launch have heard it; vLLM ranks tell it once in their life


class Drain(msgspec.Struct, tag="drain", kw_only=True):
    """Take no new work, finish what runs within `timeout_s`, then exit 0."""

    timeout_s: float


class UtilityCall(msgspec.Struct, tag="utility", kw_only=True):
    call_id: int
    method: str
    args: list[Any] = []
    timeout_s: float = 30.0


FromChild = EngineReport | ApiReport | CoordinatorReport | UtilityResult
ToChild = RankTable | Drain | UtilityCall

_encoder = msgspec.msgpack.Encoder()
_from_child = msgspec.msgpack.Decoder(FromChild)
_to_child = msgspec.msgpack.Decoder(ToChild)


class ControlServer:
    """The launcher's end (asyncio). `on_message(name, message)` is called for every report.

    Raises OSError when the endpoint cannot be bound.
    """

    def __init__(self, endpoint: str, on_message: Callable[[str, FromChild], None]) -> None:
        self.endpoint = endpoint
        self._on_message = on_message
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted child takes over its name
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as e:
            self._socket.close(0)
            raise OSError(e.errno, f"cannot bind {endpoint}: {e.strerror}") from None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._receive())

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                name, message = frames[0].decode(), _from_child.decode(frames[-1])
            except (msgspec.MsgspecError, UnicodeDecodeError) as e:
                log.warning("control channel: message not understood: %s", e)
                continue
            try:
                self._on_message(name, message)
            except Exception:
                log.exception("control channel: handling a report of %s failed", name)

    async def send(self, name: str, message: ToChild) -> None:
        """Queue `message` for the child `name`; dropped when it is not connected."""
        with contextlib.suppress(zmq.ZMQError):
            await self._socket.send_multipart([name.encode(), _encoder.encode(message)])

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._socket.close()


def _interval(report: FromChild) -> float:
    """Seconds until the report after this one."""
    serves = report.ready if isinstance(report, EngineReport) else getattr(report, "listening", True)
    return REPORT_INTERVAL_S if serves else STARTING_INTERVAL_S


class ControlThread:
    """An engine's or the coordinator's end: a thread that sends `report()` and hands over what the launcher says.

    `on_message` runs in that thread.
    """

    def __init__(
        self, endpoint: str, name: str, report: Callable[[], FromChild], on_message: Callable[[ToChild], None]
    ) -> None:
        self._endpoint, self._name = endpoint, name
        self._report, self._on_message = report, on_message
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Send a last report and end the thread; waits a second at most."""
        self._stop.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        socket: Any = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._name.encode())
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.SNDHWM, 64)
        socket.connect(self._endpoint)
        due = 0.0
        try:
            while True:
                last = self._stop.is_set()
                now = time.monotonic()
                if now >= due or last:
                    report = self._report()
                    due = now + _interval(report)
                    with contextlib.suppress(zmq.Again):
                        socket.send(_encoder.encode(report), zmq.NOBLOCK)
                if last:
                    return
                if socket.poll(max(10, int((due - now) * 1000))):
                    try:
                        self._on_message(_to_child.decode(socket.recv()))
                    except msgspec.MsgspecError as e:
                        log.warning("control channel: message not understood: %s", e)
        except Exception:
            log.exception("control channel ended")
        finally:
            socket.close()


class ControlTask:
    """An API server's end (asyncio)."""

    def __init__(
        self, endpoint: str, name: str, report: Callable[[], FromChild], on_message: Callable[[ToChild], None]
    ) -> None:
        self._report, self._on_message = report, on_message
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.connect(endpoint)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._send_loop()), loop.create_task(self._receive_loop())]

    async def send(self, message: FromChild) -> None:
        await self._socket.send(_encoder.encode(message))

    async def _send_loop(self) -> None:
        while True:
            report = self._report()
            await self.send(report)
            await asyncio.sleep(_interval(report))

    async def _receive_loop(self) -> None:
        while True:
            frame = await self._socket.recv()
            try:
                message = _to_child.decode(frame)
            except msgspec.MsgspecError as e:
                log.warning("control channel: message not understood: %s", e)
                continue
            try:
                self._on_message(message)
            except Exception:
                log.exception("control channel: handling a %s failed", type(message).__name__)

    async def close(self) -> None:
        with contextlib.suppress(zmq.ZMQError):
            await self.send(self._report())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
