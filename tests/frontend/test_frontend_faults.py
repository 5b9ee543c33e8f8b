"""Ranks that freeze, vanish and come back, tables and feeds of the coordinator, and bytes from strangers."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from frontend_world import PATIENCE, collect, eventually, request, world
from stub_engine import StubEngine, expected_tokens

from dpi_engine.coordinator import Coordinator
from dpi_engine.frontend.interface import NoReadyRank, RankLost
from dpi_engine.wire import codec
from dpi_engine.wire.coordination import CoordinatorState, RankLease, RankTable
from dpi_engine.wire.messages import (
    DEAD_SENTINEL,
    Dialect,
    EngineCoreOutput,
    EngineCoreOutputs,
    LoadRecord,
    RankInfo,
    RankState,
    ReadyResponse,
    SchedulerStats,
)
from dpi_engine.wire.sockets import make_socket


def test_a_suspect_rank_gets_no_new_work_and_keeps_what_it_has(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 2) as w:
            frozen, alive = w.engines
            frozen.freeze()
            streams = [asyncio.create_task(collect(w.client, request(f"r{i}", [i + 1], 4))) for i in range(4)]
            await eventually(lambda: len(alive.seen) == 2, "two of four at the rank that works")
            w.client.set_ranks([w.info(frozen, RankState.SUSPECT), w.info(alive)])
            await asyncio.gather(*(collect(w.client, request(f"s{i}")) for i in range(6)))
            assert len(alive.seen) == 8
            with pytest.raises(NoReadyRank, match="SUSPECT"):
                await collect(w.client, request(data_parallel_rank=0))
            frozen.thaw()
            w.client.set_ranks([w.info(frozen)])
            assert [tokens for tokens, _ in await asyncio.gather(*streams)] == [
                expected_tokens([i + 1], 4) for i in range(4)
            ]
            assert w.empty()

    asyncio.run(run())


def test_a_rank_that_the_table_calls_lost_ends_its_requests_with_the_reason(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 2, engine={"manual": True}) as w:
            tasks = [asyncio.create_task(collect(w.client, request(f"r{i}", max_tokens=2))) for i in range(2)]
            await eventually(lambda: all(engine.running for engine in w.engines), "requests at both")
            w.client.set_ranks([w.info(w.engines[0], RankState.LOST, error="no beat for 3 s"), w.info(w.engines[1])])
            w.engines[1].allow(2)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            lost = [result for result in results if isinstance(result, RankLost)]
            assert len(lost) == 1
            assert "rank 0" in str(lost[0])
            assert "no beat for 3 s" in str(lost[0])
            w.client.set_ranks([w.info(w.engines[0], RankState.READY)])
            assert w.client.ready()

    asyncio.run(run())


def test_a_rank_is_ready_only_when_table_and_engine_speak_of_the_same_epoch(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 1, start=False) as w:
            client = w.client

            def state() -> RankState:
                return client.ranks()[0].state

            client.set_ranks([RankInfo(rank=0, state=RankState.READY, epoch=2)])
            assert state() == RankState.LOADING  # its engine has not introduced itself
            w.add(0, epoch=1)
            await eventually(lambda: client._links[0].identity, "the old life's introduction")
            assert state() == RankState.LOADING
            w.add(0, epoch=2)
            await client.wait_ready(PATIENCE)
            client.set_ranks([RankInfo(rank=0, state=RankState.LOST, epoch=1)])  # late news of the old life
            assert state() == RankState.READY
            w.add(0, epoch=3)
            await eventually(lambda: state() == RankState.LOADING, "the new life waits for the head")
            client.set_ranks([RankInfo(rank=0, state=RankState.READY, epoch=3)])
            assert (await collect(client, request()))[0] == expected_tokens([1, 2, 3], 8)
            assert len(w.engines[2].seen) == 1

    asyncio.run(run())


def test_a_connection_that_breaks_and_heals_costs_its_requests_and_leaves_no_orphans(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 2, engine={"manual": True}) as w:
            tasks = [asyncio.create_task(collect(w.client, request(f"r{i}"))) for i in range(2)]
            engine = w.engines[0]
            await eventually(lambda: len(engine.running) == 1, "a request at the engine")
            endpoint = w.client.input_endpoints[0]
            engine.disconnect(endpoint)
            async with asyncio.timeout(PATIENCE):
                results = await asyncio.gather(tasks[0], return_exceptions=True)
            assert isinstance(results[0], RankLost)
            assert w.client.ranks()[0].state == RankState.LOST
            for i in range(3):
                task = asyncio.create_task(collect(w.client, request(f"s{i}", max_tokens=1)))
                await eventually(lambda: len(w.engines[1].running) == 2, "the request at the other rank")
                w.engines[1].allow(1)
                await task
            engine.connect(endpoint)
            await eventually(lambda: w.client.ranks()[0].state == RankState.READY, "the way is back")
            await eventually(lambda: not engine.running, "the orphan's abort")
            w.engines[1].allow(50)
            await tasks[1]
            assert w.empty()

    asyncio.run(run())


@contextmanager
def coordinator(tmp_path: Path, size: int, dialect: Dialect, moe: bool = False) -> Iterator[Coordinator]:
    ends = [[f"ipc://{tmp_path}/{name}"] for name in ("front", "back", "pull")]
    made = Coordinator(
        CoordinatorState(size, dialect, moe, time.monotonic()), front=ends[0], back=ends[1], pull=ends[2]
    )
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.stop()
        thread.join(PATIENCE)


@contextmanager
def pusher(endpoint: str) -> Iterator[Any]:
    context = zmq.Context()
    try:
        yield make_socket(context, zmq.PUSH, connect=endpoint, linger_ms=1000)
    finally:
        context.destroy(1000)


def test_the_coordinator_brings_table_and_loads(tmp_path: Path) -> None:
    heard: list[tuple[int, Any]] = []

    async def run() -> None:
        with coordinator(tmp_path, 2, Dialect.DPI), pusher(f"ipc://{tmp_path}/pull") as push:
            options: dict[str, Any] = {
                "coordinator": f"ipc://{tmp_path}/front",
                "on_stats": lambda rank, stats: heard.append((rank, stats)),
                "engine": {"report": False},
            }
            async with world(tmp_path, 2, **options) as w:
                for seq, state in enumerate((RankState.SUSPECT, RankState.READY)):
                    leases = [RankLease(0, state.value, 1), RankLease(1, RankState.READY.value, 1)]
                    push.send(codec.encode(RankTable(1, seq, leases)))
                    await eventually(lambda state=state: w.client.ranks()[0].state == state, f"rank 0 is {state.value}")
                record = LoadRecord(0, 1, 7, 3, 4, 0.25)
                push.send_multipart(codec.encode_outputs(EngineCoreOutputs(engine_index=0, epoch=1, load=record)))
                await eventually(lambda: (0, record) in heard, "the load of rank 0")
                info = w.client.ranks()[0]
                assert (info.waiting, info.running, info.kv_usage) == (3, 4, 0.25)
                for i in range(5):
                    await collect(w.client, request(f"r{i}"))
                assert [len(engine.seen) for engine in w.engines] == [0, 5]
                push.send(codec.encode(RankTable(1, 9, [RankLease(0, "READY", 1), RankLease(1, "ASLEEP", 1)])))
                counters = w.client.counters
                await eventually(lambda: counters.total("coordinator"), "a table with an unknown state is counted")
                assert w.client.ready()

    asyncio.run(run())


def test_a_front_end_follows_the_coordinator_that_its_engines_name(tmp_path: Path) -> None:
    """As where the head is another launch, and then another one again. Its table is not the one to route by."""
    heard: list[LoadRecord] = []

    def introduction(at: str) -> list[bytes]:
        ready = ReadyResponse(max_model_len=512, num_gpu_blocks=8, block_size=16, dp_stats_address=at, epoch=1)
        return [codec.encode_ready_response(ready, Dialect.DPI)]

    async def run() -> None:
        options: dict[str, Any] = {
            "follow_coordinator": True,
            "on_stats": lambda rank, stats: heard.append(stats),
            "engine": {"report": False},
        }
        async with world(tmp_path, 1, **options) as w:
            (engine,) = w.engines
            for number in (1, 2):
                folder = tmp_path / str(number)
                folder.mkdir()
                with coordinator(folder, 1, Dialect.DPI), pusher(f"ipc://{folder}/pull") as push:
                    engine.send_raw_input(introduction(f"ipc://{folder}/front"))
                    record = LoadRecord(0, 1, number, 3, number, 0.25)
                    push.send_multipart(codec.encode_outputs(EngineCoreOutputs(engine_index=0, epoch=1, load=record)))
                    await eventually(lambda record=record: record in heard, f"loads of coordinator {number}")
                    push.send(codec.encode(RankTable(1, number, [RankLease(0, RankState.LOST.value, 1)])))
                    feed = w.client._feed
                    assert feed is not None
                    seen = feed.updates
                    await eventually(lambda feed=feed, seen=seen: feed.updates > seen, "its table has come")
                    assert w.client.ranks()[0].state == RankState.READY
            engine.send_raw_input(introduction("nonsense://"))
            await eventually(lambda: w.client.counters.total("coordinator"), "an address of no use is counted")
            await collect(w.client, request())
            assert w.empty()

    asyncio.run(run())


def test_counts_of_a_vllm_coordinator_and_its_wake_up(tmp_path: Path) -> None:
    async def run() -> None:
        with (
            coordinator(tmp_path, 2, Dialect.VLLM, moe=True) as made,
            pusher(f"ipc://{tmp_path}/pull") as push,
        ):
            context = zmq.Context()
            engine_side = make_socket(context, zmq.XSUB, connect=f"ipc://{tmp_path}/back", receive_hwm=100)
            engine_side.send(b"\x01")
            options: dict[str, Any] = {"coordinator": f"ipc://{tmp_path}/front", "waves": True}
            try:
                async with world(tmp_path, 2, dialect=Dialect.VLLM, **options) as w:
                    stats = SchedulerStats(num_running_reqs=5, num_waiting_reqs=2)
                    message = EngineCoreOutputs(engine_index=1, scheduler_stats=stats)
                    push.send_multipart(codec.encode_outputs(message, Dialect.VLLM))
                    await eventually(lambda: w.client.ranks()[1].running == 5, "counts of rank 1")
                    await collect(w.client, request())
                    assert [len(engine.seen) for engine in w.engines] == [1, 0]
                    await eventually(lambda: engine_side.poll(0) and engine_side.recv() == b"\x02", "START_DP_WAVE")
                    assert engine_side.recv() == b"\x92\x00\xc4\x02\x00\x00"  # wave 0, all but the rank that has it
                    assert made.state.wave == 0
            finally:
                context.destroy(0)

    asyncio.run(run())


GARBAGE = [
    b"",
    b"\xc1",
    b"\x93\x00",
    b"\xff" * 40,
    codec.encode({"status": "HELLO"}),
    codec.encode([0, [["id"]], "stats"]),
    codec.encode([70000, []]),
    codec.encode([0, [], None, 0.0, None, None, None, None, None, -1, [0] * 3]),
]


GARBAGE_ROUNDS = 700  # of 36 messages, 25,200 in all


def test_garbage_on_every_socket_is_counted_and_changes_nothing(tmp_path: Path) -> None:
    rng = random.Random(7)

    async def run() -> None:
        with coordinator(tmp_path, 1, Dialect.DPI):
            async with world(tmp_path, 1, coordinator=f"ipc://{tmp_path}/front") as w:
                client, (engine,) = w.client, w.engines
                context = zmq.Context()
                out = make_socket(context, zmq.PUSH, connect=client.output_endpoints[0], linger_ms=1000)
                strange = make_socket(
                    context, zmq.DEALER, connect=client.input_endpoints[0], identity=b"\x63\x00", linger_ms=1000
                )
                odd = make_socket(
                    context, zmq.DEALER, connect=client.input_endpoints[0], identity=b"12345", linger_ms=1000
                )
                try:
                    task = asyncio.create_task(collect(client, request(max_tokens=400)))
                    for _ in range(GARBAGE_ROUNDS):
                        await asyncio.sleep(0)
                        for frame in (*GARBAGE, rng.randbytes(rng.randrange(1, 200))):
                            out.send_multipart([frame, *([b"more"] * rng.randrange(3))])
                            strange.send(frame)
                            odd.send_multipart([frame, frame])
                            engine.send_raw_input([frame, b"x"])
                    out.send_multipart([b"x"] * 2000)
                    assert (await task)[0] == expected_tokens([1, 2, 3], 400)
                    await eventually(
                        lambda: client.counters.total("input") >= 27 * GARBAGE_ROUNDS, "bad introductions counted"
                    )
                    await eventually(
                        lambda: client.counters.total("output") > 9 * GARBAGE_ROUNDS, "bad outputs counted"
                    )
                    assert not any(reason == "handler_error" for _, reason in client.counters.snapshot())
                    assert client.max_model_len == 2048
                    assert (await collect(client, request("after")))[0] == expected_tokens([1, 2, 3], 8)
                    assert w.empty()
                finally:
                    context.destroy(0)

    asyncio.run(run())


def test_a_last_word_from_an_unknown_connection_costs_no_rank(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 2, dialect=Dialect.VLLM) as w:
            for i in range(4):
                await collect(w.client, request(f"r{i}"))
            with pusher(w.client.output_endpoints[0]) as push:
                push.send(DEAD_SENTINEL)
                counters = w.client.counters
                await eventually(lambda: counters.snapshot().get(("output", "dead_without_rank")), "it is counted")
            assert [info.state for info in w.client.ranks()] == [RankState.READY] * 2
            w.engines[1].send_raw([DEAD_SENTINEL])
            await eventually(lambda: w.client.ranks()[1].state == RankState.LOST, "the rank whose word it was")
            assert "reported that it died" in w.client.ranks()[1].stage
            assert w.client.ranks()[0].state == RankState.READY

    asyncio.run(run())


def test_outputs_for_a_request_of_another_rank_are_not_delivered(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 2, engine={"manual": True}) as w:
            task = asyncio.create_task(collect(w.client, request(max_tokens=2, data_parallel_rank=0)))
            await eventually(lambda: w.engines[0].running, "the request at rank 0")
            forged = EngineCoreOutput(w.engines[0].seen[0].request_id, [666])
            w.engines[1].send(EngineCoreOutputs(engine_index=1, outputs=[forged], epoch=1))
            await eventually(lambda: w.client.late_outputs == 1, "it is passed over")
            w.engines[0].allow(2)
            assert (await task)[0] == expected_tokens([1, 2, 3], 2)

    asyncio.run(run())


def test_a_vllm_process_that_is_stopped_is_lost(tmp_path: Path) -> None:
    """It sends no beats; the silence of its sockets tells."""

    async def run() -> None:
        async with world(tmp_path, 2, dialect=Dialect.VLLM, start=False) as w:
            w.add(0)
            command = [sys.executable, str(Path(__file__).with_name("stub_engine.py")), "--rank", "1", "--manual"]
            command += ["--dialect", "vllm", "--input", w.client.input_endpoints[0]]
            command += ["--output", w.client.output_endpoints[0]]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
            try:
                await w.client.wait_ready(PATIENCE, 2)
                task = asyncio.create_task(collect(w.client, request(data_parallel_rank=1)))
                await eventually(lambda: w.client.in_flight == 1, "a request at it")
                os.kill(process.pid, signal.SIGSTOP)
                with pytest.raises(RankLost, match="rank 1"):
                    async with asyncio.timeout(PATIENCE):
                        await task
                assert (await collect(w.client, request()))[0] == expected_tokens([1, 2, 3], 8)
                assert w.empty()
            finally:
                os.kill(process.pid, signal.SIGCONT)
                process.kill()
                process.wait(PATIENCE)

    asyncio.run(run())


def test_two_front_ends_share_ranks_and_get_their_own_tokens(tmp_path: Path) -> None:
    async def run() -> None:
        (tmp_path / "0").mkdir()
        (tmp_path / "1").mkdir()
        shared: dict[str, Any] = {"start": False, "client_count": 2}
        async with (
            world(tmp_path / "0", 2, client_index=0, **shared) as one,
            world(tmp_path / "1", 2, client_index=1, **shared) as two,
        ):
            ends = [[*one.client.input_endpoints, *two.client.input_endpoints]]
            ends.append([*one.client.output_endpoints, *two.client.output_endpoints])
            engines = [StubEngine(rank, *ends) for rank in range(2)]
            try:
                await asyncio.gather(one.client.wait_ready(PATIENCE, 2), two.client.wait_ready(PATIENCE, 2))
                jobs = [collect(w.client, request(f"r{i}", [i + 1])) for i in range(10) for w in (one, two)]
                results = await asyncio.gather(*jobs)
                assert [tokens for tokens, _ in results] == [expected_tokens([i // 2 + 1], 8) for i in range(20)]
                assert [len(engine.seen) for engine in engines] == [10, 10]
                firsts = {engine.rank for engine in engines for add in engine.seen if add.external_req_id == "r0"}
                assert len(firsts) == 2  # they began at different ranks
                assert one.client.late_outputs == two.client.late_outputs == 0
            finally:
                for engine in engines:
                    engine.stop()

    asyncio.run(run())


def test_a_front_end_that_is_started_anew_meets_vllm_ranks_that_introduce_themselves_no_more(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 2, start=False, dialect=Dialect.VLLM, seek_ranks=True) as w:
            w.add(0, introduce=False)
            await w.client.wait_ready(PATIENCE)
            assert w.client.linked() == [0]
            w.client.max_model_len = 64  # its launcher knows it from the front end before
            assert (await collect(w.client, request()))[0] == expected_tokens([1, 2, 3], 8)
            w.add(1)  # one that starts later introduces itself
            await w.client.wait_ready(PATIENCE, 2)
            assert w.client.max_model_len == 2048
            w.engines[0].die()
            await eventually(lambda: w.client.linked() == [1], "the first is gone")
            assert w.empty()

    asyncio.run(run())


def test_a_first_front_end_waits_for_introductions(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 1, start=False, dialect=Dialect.VLLM) as w:
            w.add(0, introduce=False)
            with pytest.raises(NoReadyRank):
                await w.client.wait_ready(2.5)
            assert w.client.linked() == []

    asyncio.run(run())
