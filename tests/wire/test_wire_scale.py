"""Groups of a thousand ranks: all are READY, nothing on the way looks at every rank, and limits are named."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from wire_harness import HeadThread, Stage, until

from dpi_engine.coordinator import Coordinator
from dpi_engine.frontend.transport import Transport
from dpi_engine.wire import handshake as hs
from dpi_engine.wire.coordination import (
    LEAST_LOAD_INTERVAL,
    LOADS_PER_SECOND,
    CoordinatorState,
    Publish,
    decode_load_report,
    decode_update,
    encode_load_report,
    least_load_interval,
)
from dpi_engine.wire.counters import WireCounters
from dpi_engine.wire.errors import WireError
from dpi_engine.wire.head import RANKS_PER_SECOND, HeadAddresses, HeadHandshake
from dpi_engine.wire.lease import Group, LeaseTimings, Peer
from dpi_engine.wire.messages import WIRE_VERSION, LoadRecord, Pace, RankState
from dpi_engine.wire.sockets import RuntimeDir, TooFewDescriptors, make_context, make_socket, need_descriptors
from dpi_engine.wire.waves import WaveBoard

MANY = 1100
SLOW = LeaseTimings().scaled(20)
"""For a test process that plays a thousand ranks on a machine that does other things too."""


class ManyRanks:
    """HELLO and READY of many ranks from one thread, each on a connection of its own."""

    def __init__(self, endpoint: str, count: int) -> None:
        need_descriptors(2 * count, f"{count} ranks of a test")
        self.context = make_context(count)
        self.poller = zmq.Poller()
        self.sockets: dict[Any, int] = {}
        self.acknowledged: set[int] = set()
        for rank in range(count):
            sock = make_socket(
                self.context, zmq.DEALER, connect=endpoint, identity=hs.identity(rank, b"%08d" % rank), peers=count
            )
            self.sockets[sock] = rank
            self.poller.register(sock, zmq.POLLIN)
            self._say(sock, hs.EngineMessage(status=hs.HELLO, local=False, headless=True, version=WIRE_VERSION))

    @staticmethod
    def _say(sock: Any, message: hs.EngineMessage) -> None:
        sock.send(hs.encode_engine_message(message))

    def answer(self, patience_ms: int) -> None:
        for sock, _ in self.poller.poll(patience_ms):
            frame = sock.recv()
            if not frame:
                continue  # the greeting
            message = hs.decode_head_message(frame)
            if isinstance(message, hs.InitMessage):
                self._say(sock, hs.EngineMessage(status=hs.READY, local=False, headless=True, epoch=message.epoch))
            elif message.status == hs.READY:
                self.acknowledged.add(self.sockets[sock])

    def close(self) -> None:
        self.context.destroy(0)


def test_1100_ranks_that_say_hello_at_one_time_are_all_ready() -> None:
    head = HeadThread(["tcp://127.0.0.1:*"], Group(MANY, frozenset()), HeadAddresses([], []), timings=SLOW)
    try:
        ranks = ManyRanks(head.endpoints[0], MANY)
        try:
            until(
                lambda: ranks.answer(100) or len(ranks.acknowledged) == MANY, f"{MANY} ranks have their acknowledgement"
            )
            until(
                lambda: head.changes and all(info.state is RankState.READY for info in head.changes[-1]),
                "the table that is told says so",
            )
            assert head.counters.total() == 0
            # Two changes of each rank; a table of all ranks for every one of them would be millions of rows.
            assert len(head.changes) < MANY
        finally:
            ranks.close()
    finally:
        head.close()


def test_changes_of_a_large_group_are_gathered_and_the_last_one_is_told() -> None:
    size = 400
    told: list[list[Any]] = []

    async def scene() -> None:
        head = HeadHandshake(
            ["tcp://127.0.0.1:*"], Group(size, frozenset()), HeadAddresses([], []), on_change=told.append
        )
        await head.start()
        try:
            table = head._table
            for rank in range(size):
                peer = Peer(rank, f"{rank:016x}")
                table.hello(peer, time.monotonic(), local=False, headless=True, version=WIRE_VERSION)
                head._notify()
            deadline = time.monotonic() + 60
            while len(told) < 2 and time.monotonic() < deadline:
                await asyncio.sleep(size / RANKS_PER_SECOND)
        finally:
            await head.close()

    asyncio.run(scene())
    assert 2 <= len(told) < size
    assert all(info.state is RankState.HELLO for info in told[-1])


def test_many_subscriptions_at_one_time_are_confirmed_together() -> None:
    with Stage(size=300, coordinator=True, group=Group(300, frozenset())) as stage:
        assert stage.coordinator is not None
        back = stage.coordinator.endpoints[1]
        socks = [make_socket(stage.context, zmq.XSUB, connect=back) for _ in range(50)]
        try:
            for sock in socks:
                sock.send(b"\x01")
            words = 0
            for sock in socks:
                assert sock.poll(60_000), "a subscription was not confirmed"
                while sock.poll(0):
                    assert sock.recv() == b"READY"
                    words += 1
            assert words < 50 * 50
        finally:
            for sock in socks:
                sock.close(0)


# ------------------------------------------------------------------------------------------------ load reports

LARGEST = LoadRecord(
    4095, 65535, 2**32 - 1, 65535, 65535, 1.0, 2**32 - 1, 2**32 - 1, 2**64 - 1, 2**64 - 1, 2, 65535, 2**32 - 1, 3
)


def test_a_load_report_has_at_most_64_bytes() -> None:
    assert len(encode_load_report(LARGEST, 65535)) <= 64
    assert len(encode_load_report(LoadRecord(1023, 1, 100_000, 3, 200, 0.41, 4000, 10, 10**9, 10**9), 1)) <= 48


def test_1024_ranks_in_use_for_years_report_in_64_bytes_each_and_the_coordinator_takes_all() -> None:
    """100 reports a second for a year, 65,535 lives of each rank and of the group, 10^18 prompt tokens."""
    size = 1024
    state = CoordinatorState(size, moe=True)
    sizes = []
    for rank in range(size):
        load = LoadRecord(
            rank, 65_535, 3_153_600_000, rank, 256, rank / size, 4_000_000_000, 10**9, 10**18, 10**18 - 1, rank % 3,
            65_535, 10**9, rank % 3,
        )  # fmt: skip
        frame = encode_load_report(load, 65_535)
        sizes.append(len(frame))
        state.on_load(decode_load_report(frame), 1.0)
    assert max(sizes) <= 64
    (publish,) = [action for action in state.due(2.0) if isinstance(action, Publish)]
    loads = decode_update(publish.payload).loads
    assert loads is not None
    assert [(r.rank, r.waiting, r.prefix_queries) for r in loads] == [(rank, rank, 10**18) for rank in range(size)]


@pytest.mark.parametrize("load", [LARGEST, LoadRecord(0, 1, 0, 0, 0, 0.0), LoadRecord(7, 2, 9, 1, 2, 0.25, pace=1)])
def test_a_load_report_says_what_the_record_says(load: LoadRecord) -> None:
    report = decode_load_report(encode_load_report(load, 5))
    read = report.record()
    assert report.head_epoch == 5
    assert read.kv_usage == pytest.approx(load.kv_usage, abs=1e-5)
    assert [getattr(read, name) for name in read.__struct_fields__ if name != "kv_usage"] == [
        getattr(load, name) for name in load.__struct_fields__ if name != "kv_usage"
    ]


def test_a_load_report_out_of_range_is_refused_by_name() -> None:
    state = CoordinatorState(4)
    with pytest.raises(WireError, match=r"rank 9 is outside 0\.\.3"):
        state.on_load(decode_load_report(encode_load_report(LoadRecord(9, 1, 1, 0, 0, 0.0), 1)), 0.0)
    report = decode_load_report(encode_load_report(LoadRecord(1, 1, 1, 0, 0, 0.0), 1))
    report.kv_parts = 70_000
    with pytest.raises(WireError, match="KV cache use 70000, expected 0 to 65535"):
        state.on_load(report, 0.0)


def test_a_load_report_reaches_front_ends() -> None:
    with Stage(size=2, coordinator=True) as stage:
        assert stage.coordinator is not None
        front, _, pull = stage.coordinator.endpoints
        sub = make_socket(stage.context, zmq.XSUB, connect=front)
        push = make_socket(stage.context, zmq.PUSH, connect=pull)
        try:
            sub.send(b"\x01")
            push.send(encode_load_report(LoadRecord(1, 1, 1, 2, 3, 0.5), 1))

            def there() -> bool:
                assert sub.poll(60_000), "no publication"
                update = decode_update(sub.recv())
                return any((r.rank, r.waiting, r.running) == (1, 2, 3) for r in update.loads or ())

            until(there, "the load of rank 1 is published")
        finally:
            sub.close(0)
            push.close(0)


def test_ranks_of_a_large_group_report_less_often() -> None:
    assert least_load_interval(2) == LEAST_LOAD_INTERVAL
    assert 1024 / least_load_interval(1024) <= LOADS_PER_SECOND


# ------------------------------------------------------------------------------------------------ waves


def test_a_report_of_a_large_group_does_not_make_the_wave_board_look_at_all_ranks() -> None:
    class Counting(list):  # type: ignore[type-arg]
        looked = 0

        def __getitem__(self, index: Any) -> Any:
            Counting.looked += 1
            return super().__getitem__(index)

        def __iter__(self) -> Iterator[Any]:
            Counting.looked += len(self)
            return super().__iter__()

    board = WaveBoard(4096)
    board._known = Counting(board._known)
    for rank in range(4096):
        board.report(LoadRecord(rank, 1, 1, 0, 0, 0.0, group=1, wave=0, pace=Pace.REST))
        board.due(0.0)
    board.wake(0, 3)
    board.due(1.0)
    assert Counting.looked <= 3 * 4096


# ------------------------------------------------------------------------------------------------ limits


@contextlib.contextmanager
def soft_limit(soft: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_of_descriptors_is_raised_where_ranks_need_it() -> None:
    with soft_limit(1024):
        need_descriptors(100, "few")
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1024
        need_descriptors(1500, "some")
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 1500


TOO_MANY = 1 << 30


@pytest.mark.parametrize("what", ["head", "coordinator", "front end"])
def test_a_hard_limit_that_is_too_low_is_named_at_start(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    at = [f"ipc://{tmp_path}/{name}" for name in "abc"]

    async def begin() -> None:
        if what == "head":
            await HeadHandshake(at[:1], Group(2000, frozenset()), HeadAddresses([], [])).start()
        elif what == "coordinator":
            Coordinator(CoordinatorState(2000), front=at[:1], back=at[1:2], pull=at[2:])
        else:
            ignore = lambda frames: None  # noqa: E731
            Transport(
                at[:1], at[1:2], WireCounters(), ranks=2000, on_input=ignore, on_output=ignore, on_disconnect=ignore
            )

    with pytest.raises(TooFewDescriptors, match=rf"{what} of 2000 ranks: 6256 file descriptors .* is 4096; raise it"):
        asyncio.run(begin())


def test_a_context_holds_more_sockets_than_the_library_allows_by_itself() -> None:
    context = make_context(1200)
    try:
        socks = [context.socket(zmq.PAIR) for _ in range(1200)]
        assert len(socks) == 1200
    finally:
        context.destroy(0)


def test_more_sockets_than_the_library_can_hold_are_refused_by_name() -> None:
    with pytest.raises(OSError, match="ZMQ sockets in one context, libzmq holds at most"):
        make_context(TOO_MANY)


# ------------------------------------------------------------------------------------------------ folders of sockets


def test_a_folder_whose_path_is_too_long_for_sockets_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    with RuntimeDir(str(long)) as folder:
        assert folder.path.parent == Path("/tmp")
        with make_context(1) as context, context.socket(zmq.PULL) as sock:
            sock.bind(folder.ipc("handshake"))
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(OSError, match="is too long a path; set TMPDIR"):
        RuntimeDir()
