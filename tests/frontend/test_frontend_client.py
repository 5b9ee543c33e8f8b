"""Requests through real sockets to engines that answer, lag, die, freeze and lie."""

from __future__ import annotations

import asyncio
import gc
import random
from pathlib import Path

import msgspec
import pytest
import uvloop
from frontend_world import PATIENCE, collect, eventually, request, world
from stub_engine import expected_tokens

from dpi_engine.frontend.events import ClientClosed, RankEvent
from dpi_engine.frontend.interface import (
    EngineError,
    InvalidRequest,
    NoReadyRank,
    Overloaded,
    RankElsewhere,
    RankLost,
)
from dpi_engine.frontend.utility import UtilityTimeout
from dpi_engine.wire.messages import (
    Dialect,
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EventType,
    FinishReason,
    LogprobsLists,
    RankState,
)

DIALECTS = pytest.mark.parametrize("dialect", list(Dialect))


@DIALECTS
@pytest.mark.parametrize("tcp", [False, True])
def test_tokens_come_whole_and_in_order_with_one_finish_reason(tmp_path: Path, dialect: Dialect, tcp: bool) -> None:
    async def run() -> None:
        async with world(tmp_path, 2, dialect=dialect, tcp=tcp) as w:
            assert w.client.max_model_len == 2048
            for name in ("a", "b"):
                tokens, deltas = await collect(w.client, request(name, [5, 6], 20))
                assert tokens == expected_tokens([5, 6], 20)
                assert [d.finish_reason for d in deltas if d.finish_reason] == ["length"]
                assert deltas[-1].finish_reason == "length"
                assert deltas[0].cached_tokens == 0
            sent = [add for engine in w.engines for add in engine.seen]
            assert {add.external_req_id for add in sent} == {"a", "b"}
            assert all(len(add.request_id) == len("a-") + 8 for add in sent)
            if dialect is Dialect.DPI:
                assert all(add.sampling_params and add.sampling_params.seed is not None for add in sent)
                assert all(add.epoch == 1 for add in sent)
            else:
                assert all(add.sampling_params and add.sampling_params.seed is None for add in sent)
            assert w.empty()

    asyncio.run(run())


def test_requests_are_balanced_over_four_ranks(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 4) as w:
            await asyncio.gather(*(collect(w.client, request(f"r{i}")) for i in range(40)))
            assert [len(engine.seen) for engine in w.engines] == [10, 10, 10, 10]
            assert w.empty()

    asyncio.run(run())


def test_a_pinned_rank_gets_its_requests_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 4, first_rank=4) as w:
            for i in range(5):
                _, deltas = await collect(w.client, request(f"r{i}", data_parallel_rank=6))
                assert {delta.rank for delta in deltas} == {6}
            assert [len(engine.seen) for engine in w.engines] == [0, 0, 5, 0]
            with pytest.raises(RankElsewhere, match="serves ranks 4 to 7"):
                await collect(w.client, request(data_parallel_rank=1))
            with pytest.raises(InvalidRequest, match="expected 0 to 7"):
                await collect(w.client, request(data_parallel_rank=8))
            assert w.empty()

    asyncio.run(run())


@pytest.mark.parametrize("way", ["cancel", "aclose", "drop"])
def test_leaving_early_aborts_in_the_engine(tmp_path: Path, way: str) -> None:
    async def run() -> None:
        async with world(tmp_path, 1, engine={"manual": True}) as w:
            (engine,) = w.engines
            engine.allow(2)
            stream = w.client.generate(request(max_tokens=1000))
            assert (await anext(stream)).new_token_ids
            if way == "cancel":

                async def read() -> None:
                    async for _ in stream:
                        pass

                task = asyncio.create_task(read())
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                assert w.client.in_flight == 0  # no further turn of the loop needed
            elif way == "aclose":
                await stream.aclose()  # type: ignore[attr-defined]
                assert w.client.in_flight == 0
            else:
                del stream
                gc.collect()
            await eventually(lambda: engine.aborted == [engine.seen[0].request_id], "the abort at the engine")
            await eventually(lambda: not engine.running, "nothing runs")
            assert w.empty()

    asyncio.run(run())


def test_a_request_not_started_is_not_sent(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 1) as w:
            stream = w.client.generate(request())
            await stream.aclose()  # type: ignore[attr-defined]
            assert [token async for token in stream] == []
            await collect(w.client, request("other"))
            assert [add.external_req_id for add in w.engines[0].seen] == ["other"]

    asyncio.run(run())


@pytest.mark.parametrize("sentinel", [False, True])
@DIALECTS
def test_a_rank_that_dies_takes_only_its_own_requests(tmp_path: Path, sentinel: bool, dialect: Dialect) -> None:
    events: list[RankEvent] = []

    async def run() -> None:
        options = {"dialect": dialect, "on_event": events.append, "engine": {"manual": True}}
        async with world(tmp_path, 4, **options) as w:
            streams = [w.client.generate(request(f"r{i}", [i + 1], 6)) for i in range(8)]
            first = [asyncio.create_task(anext(stream)) for stream in streams]
            await eventually(lambda: sum(len(e.running) for e in w.engines) == 8, "all requests at the engines")
            for engine in w.engines:
                engine.allow(1)
            deltas = await asyncio.gather(*first)
            assert [d.new_token_ids for d in deltas] == [expected_tokens([i + 1], 1) for i in range(8)]
            w.engines[2].die(sentinel)
            lost, done = 0, 0
            for delta, stream, i in zip(deltas, streams, range(8), strict=True):
                if delta.rank == 2:
                    with pytest.raises(RankLost, match="rank 2 was lost"):
                        async with asyncio.timeout(PATIENCE):
                            await anext(stream)
                    lost += 1
                else:
                    w.engines[delta.rank].allow(5)
                    rest = [token async for d in stream for token in [d] for token in d.new_token_ids]
                    assert rest == expected_tokens([i + 1], 6)[1:]
                    done += 1
            assert (lost, done) == (2, 6)
            w_ready = [info.rank for info in w.client.ranks() if info.state == RankState.READY]
            assert w_ready == [0, 1, 3]
            for engine in w.engines:
                engine.manual = False
                if engine.rank != 2:
                    engine.allow(0)
            await asyncio.gather(*(collect(w.client, request(f"s{i}")) for i in range(9)))
            assert len(w.engines[2].seen) == 2
            assert w.empty()
            assert [(e.rank, e.requests_lost) for e in events if e.state == RankState.LOST] == [(2, 2)]

    asyncio.run(run())


def test_a_new_life_of_a_rank_gets_work_and_the_old_one_is_lost(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 1, engine={"manual": True}) as w:
            old = w.engines[0]
            task = asyncio.create_task(collect(w.client, request(max_tokens=3)))
            await eventually(lambda: old.running, "the request at the engine")
            new = w.add(0, epoch=2)
            with pytest.raises(RankLost, match="started anew"):
                async with asyncio.timeout(PATIENCE):
                    await task
            tokens, _ = await collect(w.client, request("b", [9], 4))
            assert tokens == expected_tokens([9], 4)
            assert len(new.seen) == 1
            assert w.empty()

    asyncio.run(run())


def test_frames_of_an_old_epoch_are_dropped_and_counted(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 1, engine={"manual": True, "epoch": 5}) as w:
            (engine,) = w.engines
            task = asyncio.create_task(collect(w.client, request(max_tokens=2)))
            await eventually(lambda: engine.running, "the request at the engine")
            wire_id = engine.seen[0].request_id
            for epoch in (4, 6):
                stale = EngineCoreOutput(wire_id, [77], finish_reason=FinishReason.STOP)
                engine.send(EngineCoreOutputs(engine_index=0, outputs=[stale], epoch=epoch))
            engine.allow(2)
            tokens, _ = await task
            assert tokens == expected_tokens([1, 2, 3], 2)
            assert w.client.counters.snapshot()[("output", "stale_epoch")] == 2

    asyncio.run(run())


def test_tokens_delivered_once_are_not_delivered_again_and_a_gap_is_an_error(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 1, engine={"manual": True}) as w:
            (engine,) = w.engines

            def put(wire_id: str, tokens: list[int], index: int, reason: FinishReason | None = None) -> None:
                logprobs = LogprobsLists([[t] for t in tokens], [[-float(t)] for t in tokens], [1] * len(tokens))
                output = EngineCoreOutput(wire_id, tokens, logprobs, finish_reason=reason, output_index=index)
                engine.send(EngineCoreOutputs(engine_index=0, outputs=[output], epoch=1))

            task = asyncio.create_task(collect(w.client, request("a")))
            await eventually(lambda: len(engine.seen) == 1, "the request at the engine")
            put(engine.seen[0].request_id, [10, 11], 0)
            put(engine.seen[0].request_id, [10, 11], 0)
            put(engine.seen[0].request_id, [11, 12, 13], 1, FinishReason.STOP)
            tokens, deltas = await task
            assert tokens == [10, 11, 12, 13]
            rows = [row for d in deltas if d.logprobs for row in d.logprobs.token_ids]
            assert rows == [[10], [11], [12], [13]]

            task = asyncio.create_task(collect(w.client, request("b")))
            await eventually(lambda: len(engine.seen) == 2, "the request at the engine")
            put(engine.seen[1].request_id, [10], 3)
            with pytest.raises(EngineError, match="output index 3 came where 0 was expected"):
                await task
            await eventually(lambda: engine.aborted == [engine.seen[1].request_id], "its abort")
            assert w.empty()

    asyncio.run(run())


def test_a_slow_reader_gets_merged_deltas(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 1, engine={"manual": True}) as w:
            (engine,) = w.engines
            stream = w.client.generate(request(max_tokens=500))
            first = asyncio.create_task(anext(stream))
            await eventually(lambda: engine.running, "the request at the engine")
            engine.allow(1)
            assert (await first).new_token_ids == expected_tokens([1, 2, 3], 1)
            state = stream._stream  # type: ignore[attr-defined]
            engine.allow(499)
            await eventually(lambda: state.finished, "all tokens here")
            rest = [delta async for delta in stream]
            assert len(rest) == 1
            assert rest[0].new_token_ids == expected_tokens([1, 2, 3], 500)[1:]
            assert rest[0].finish_reason == "length"

    asyncio.run(run())


def test_merged_deltas_keep_logprobs_events_and_cached_tokens(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 1, engine={"manual": True}) as w:
            (engine,) = w.engines
            stream = w.client.generate(request())
            first = asyncio.create_task(anext(stream))
            await eventually(lambda: engine.running, "the request at the engine")
            wire_id = engine.seen[0].request_id
            outputs = [
                EngineCoreOutput(wire_id, [], events=[EngineCoreEvent(EventType.QUEUED, 1.0)]),
                EngineCoreOutput(
                    wire_id,
                    [4],
                    LogprobsLists([[4, 5]], [[-0.5, -1.0]], [1]),
                    new_prompt_logprobs_tensors=LogprobsLists([[1]], [[-2.0]], [3]),
                    events=[EngineCoreEvent(EventType.SCHEDULED, 2.0)],
                ),
                EngineCoreOutput(
                    wire_id,
                    [6],
                    LogprobsLists([[6, 7]], [[-0.1, -3.0]], [1]),
                    output_index=1,
                    finish_reason=FinishReason.STOP,
                    stop_reason=42,
                ),
            ]
            engine.send(EngineCoreOutputs(engine_index=0, outputs=outputs, epoch=1))
            delta = await first
            assert delta.new_token_ids == [4, 6]
            assert delta.logprobs == LogprobsLists([[4, 5], [6, 7]], [[-0.5, -1.0], [-0.1, -3.0]], [1, 1])
            assert delta.prompt_logprobs == LogprobsLists([[1]], [[-2.0]], [3])
            assert [event.type for event in delta.events or ()] == [EventType.QUEUED, EventType.SCHEDULED]
            assert (delta.finish_reason, delta.stop_reason) == ("stop", 42)
            assert [d async for d in stream] == []

    asyncio.run(run())


def test_a_thousand_concurrent_requests_leave_nothing_behind(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 4) as w:

            async def one(i: int) -> str:
                stream = w.client.generate(request(f"r{i}", [i + 1, 7], 5))
                tokens = []
                async for delta in stream:
                    tokens += delta.new_token_ids
                    if i % 3 == 0:
                        await stream.aclose()  # type: ignore[attr-defined]
                        return "left"
                assert tokens == expected_tokens([i + 1, 7], 5)
                return "read"

            results = await asyncio.gather(*(one(i) for i in range(1000)))
            assert results.count("read") >= 666
            assert w.empty()
            await eventually(lambda: not any(engine.running for engine in w.engines), "idle engines")
            assert len({add.request_id for engine in w.engines for add in engine.seen}) == 1000
            assert w.client.counters.total() == 0

    asyncio.run(run())


def test_requests_left_at_any_point_leave_nothing_behind(tmp_path: Path) -> None:
    rng = random.Random(3)

    async def run() -> None:
        async with world(tmp_path, 3) as w:

            async def one(i: int) -> None:
                stream = w.client.generate(request(f"r{i}", [i + 1], 12))
                for _ in range(rng.randrange(6)):
                    await anext(stream, None)
                    if rng.random() < 0.3:
                        await asyncio.sleep(0)
                for _ in range(rng.randrange(3)):
                    await stream.aclose()  # type: ignore[attr-defined]

            tasks = [asyncio.create_task(one(i)) for i in range(500)]
            for task in tasks:
                if rng.random() < 0.3:
                    task.cancel()
                if rng.random() < 0.1:
                    await asyncio.sleep(0.001)
            await asyncio.gather(*tasks, return_exceptions=True)
            del tasks
            gc.collect()
            await eventually(w.empty, "nothing in the client")
            await eventually(lambda: not any(engine.running for engine in w.engines), "idle engines")
            assert (await collect(w.client, request("after")))[0] == expected_tokens([1, 2, 3], 8)

    asyncio.run(run())


def test_it_runs_in_uvloop_too(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 2) as w:
            results = await asyncio.gather(*(collect(w.client, request(f"r{i}", [i + 1], 30)) for i in range(64)))
            assert [tokens for tokens, _ in results] == [expected_tokens([i + 1], 30) for i in range(64)]
            assert w.empty()

    uvloop.run(run())


def test_the_same_client_id_twice_is_two_requests(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 2) as w:
            one, two = await asyncio.gather(
                collect(w.client, request("same", [1], 5)), collect(w.client, request("same", [2], 5))
            )
            assert (one[0], two[0]) == (expected_tokens([1], 5), expected_tokens([2], 5))

    asyncio.run(run())


def test_the_queue_limit_refuses_and_recovers(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 1, engine={"manual": True}, max_queued_requests=2) as w:
            (engine,) = w.engines
            tasks = [asyncio.create_task(collect(w.client, request(f"r{i}", max_tokens=1))) for i in range(2)]
            await eventually(lambda: len(engine.running) == 2, "two requests at the engine")
            with pytest.raises(Overloaded, match="the limit is 2"):
                await collect(w.client, request("third"))
            engine.allow(1)
            await asyncio.gather(*tasks)
            engine.allow(1)
            await collect(w.client, request("fourth", max_tokens=1))
            assert w.empty()

    asyncio.run(run())


def test_errors_of_the_engine_become_exceptions_of_their_kind(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 1, engine={"manual": True}) as w:
            (engine,) = w.engines
            cases = [
                ("prompt_too_long: 9 tokens, 8 fit", None, InvalidRequest, "9 tokens, 8 fit"),
                ("logits are not numbers", None, EngineError, "rank 0: logits are not numbers"),
                ("full", "queue_full", Overloaded, "full"),
                (None, None, EngineError, "no reason"),
            ]
            for i, (error, code, kind, text) in enumerate(cases):
                task = asyncio.create_task(collect(w.client, request(f"r{i}")))
                await eventually(lambda i=i: len(engine.seen) == i + 1, "the request at the engine")
                output = EngineCoreOutput(
                    engine.seen[i].request_id, [], finish_reason=FinishReason.ERROR, error=error, stop_reason=code
                )
                engine.send(EngineCoreOutputs(engine_index=0, outputs=[output], epoch=1))
                with pytest.raises(kind, match=text) as caught:
                    await task
                assert type(caught.value) is kind
            assert w.empty()

    asyncio.run(run())


def test_an_abort_by_the_engine_ends_the_stream_with_that_reason(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 1, engine={"manual": True}) as w:
            (engine,) = w.engines
            task = asyncio.create_task(collect(w.client, request()))
            await eventually(lambda: engine.running, "the request at the engine")
            output = EngineCoreOutput(engine.seen[0].request_id, [], finish_reason=FinishReason.ABORT)
            engine.send(EngineCoreOutputs(engine_index=0, outputs=[output], epoch=1))
            _, deltas = await task
            assert [d.finish_reason for d in deltas] == ["abort"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "got no tokens"), ([1, -4], "token id -4"), ([1] * 2048, "at most 2047")],
)
def test_prompts_that_no_engine_can_run_are_refused(tmp_path: Path, prompt: list[int], message: str) -> None:
    async def run() -> None:
        async with world(tmp_path, 1) as w:
            with pytest.raises(InvalidRequest, match=message):
                await collect(w.client, request(prompt=prompt))
            assert w.engines[0].seen == []

    asyncio.run(run())


def test_utility_calls_reach_every_rank_and_only_by_known_names(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 3) as w:
            answers = await w.client.utility("sleep", 1)
            assert answers == {rank: [rank, "sleep", [1]] for rank in range(3)}
            with pytest.raises(InvalidRequest, match=r"collective_rpc.*reset_prefix_cache"):
                await w.client.utility("collective_rpc", "x")
            with pytest.raises(EngineError, match="no profiler here"):
                await w.client.utility("profile", True)
            assert all(len(engine.calls) == 2 for engine in w.engines)
            assert w.empty()

    asyncio.run(run())


def test_a_utility_call_that_is_not_answered_ends_by_its_deadline_and_names_the_rank(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 2) as w:
            w.engines[1].answer_utility = False
            with pytest.raises(UtilityTimeout, match=r"ranks \[1\]"):
                await w.client.utility("is_sleeping", timeout=2.0)  # the other rank answers in it
            assert w.empty()
            w.engines[1].answer_utility = True
            assert set(await w.client.utility("is_sleeping")) == {0, 1}

    asyncio.run(run())


def test_a_utility_call_ends_when_its_rank_dies(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 2) as w:
            w.engines[1].answer_utility = False
            call = asyncio.create_task(w.client.utility("reset_prefix_cache", timeout=2 * PATIENCE))
            await eventually(lambda: w.engines[1].calls, "the call at the engine")
            w.engines[1].die()
            with pytest.raises(RankLost, match="rank 1"):
                async with asyncio.timeout(PATIENCE):
                    await call
            assert w.empty()

    asyncio.run(run())


def test_closing_ends_readers_and_aborts_their_requests(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 1, engine={"manual": True}) as w:
            (engine,) = w.engines
            task = asyncio.create_task(collect(w.client, request()))
            await eventually(lambda: engine.running, "the request at the engine")
            await w.client.close()
            with pytest.raises(ClientClosed):
                await task
            with pytest.raises(ClientClosed):
                await collect(w.client, request("late"))
            await eventually(lambda: engine.aborted == [engine.seen[0].request_id], "the abort at the engine")
            assert not w.client.ready()

    asyncio.run(run())


def test_an_address_in_use_is_named(tmp_path: Path) -> None:
    from dpi_engine.frontend.client import ZmqEngineClient

    async def run() -> None:
        async with world(tmp_path, 1, tcp=True) as w:
            taken = w.client.input_endpoints
            with pytest.raises(OSError, match=taken[0].replace(".", r"\.")):
                await ZmqEngineClient(taken, [f"ipc://{tmp_path}/x"], num_ranks=1).start()

    asyncio.run(run())


def test_waiting_for_ranks_names_those_that_are_missing(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 2, start=False) as w:
            w.add(1)
            await w.client.wait_ready(PATIENCE, 1)
            with pytest.raises(NoReadyRank, match="rank 0 is NEW"):
                await w.client.wait_ready(0.1, 2)

    asyncio.run(run())


def test_the_shortest_model_length_is_adopted(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 2, start=False) as w:
            w.add(0, max_model_len=512)
            w.add(1, max_model_len=256)
            await w.client.wait_ready(PATIENCE, 2)
            assert w.client.max_model_len == 256
            assert msgspec.json.encode(w.client.ranks())

    asyncio.run(run())
