"""Requests whose rank is lost go on at another one, with every token delivered once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from frontend_world import PATIENCE, World, collect, eventually, request, world
from stub_engine import StubEngine, expected_tokens

from dpi_engine.frontend.events import ClientClosed
from dpi_engine.frontend.interface import RankLost
from dpi_engine.wire.messages import (
    Dialect,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    RankState,
    SamplingParams,
)

PROMPT = [5, 6, 7]
WHOLE = expected_tokens(PROMPT, 20)


class Reader:
    """A request in a task; what it got so far."""

    def __init__(self, w: World, name: str = "r", **more: Any) -> None:
        self.tokens: list[int] = []
        self.ranks: list[int] = []
        self._w = w
        self._request = request(name, PROMPT, 20, **more)
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> list[int]:
        async for delta in self._w.client.generate(self._request):
            self.tokens += delta.new_token_ids
            self.ranks.append(delta.rank)
        return self.tokens

    async def has(self, count: int) -> None:
        await eventually(lambda: len(self.tokens) >= count, f"{count} tokens")

    async def result(self) -> list[int]:
        async with asyncio.timeout(PATIENCE):
            return await self.task


async def at_work(w: World) -> StubEngine:
    """The one engine that has a request."""
    await eventually(lambda: any(e.running for e in w.engines), "the request at an engine")
    return next(e for e in w.engines if e.running)


async def begun(w: World, tokens: int) -> tuple[Reader, StubEngine]:
    """A reader that has its first `tokens`, and the engine that they came from."""
    reader = Reader(w)
    engine = await at_work(w)
    engine.allow(tokens)
    await reader.has(tokens)
    return reader, engine


def other(w: World, engine: StubEngine) -> StubEngine:
    return next(e for e in w.engines if e is not engine)


def lose(w: World, *engines: StubEngine) -> None:
    w.client.set_ranks(
        [w.info(e, RankState.LOST if e in engines else RankState.READY, error="no beat") for e in w.engines]
    )


@pytest.mark.parametrize("before", [0, 1, 7])
def test_a_request_goes_on_at_another_rank_with_the_tokens_it_has(tmp_path: Path, before: int) -> None:
    replayed: list[int] = []

    async def run() -> None:
        async with world(
            tmp_path, 2, engine={"manual": True}, max_replays=1, on_replay=replayed.append, max_queued_requests=5
        ) as w:
            reader, first = await begun(w, before)
            lose(w, first)
            second = other(w, first)
            await eventually(lambda: second.running, "the request at the other rank")
            (add,) = second.seen
            assert add.output_token_ids == WHOLE[:before]
            assert add.request_id != first.seen[0].request_id and add.external_req_id == "r"
            assert add.sampling_params.seed == first.seen[0].sampling_params.seed is not None
            assert w.client.queued == 1 and w.client.in_flight == 1
            first.allow(5)  # it was only cut off and goes on: nobody listens any more
            second.allow(1)
            await reader.has(before + 1)
            assert w.client.queued == 0
            second.allow(50)
            assert await reader.result() == WHOLE
            assert reader.ranks[-1] == second.rank and replayed == [first.rank]
            assert w.empty()

    asyncio.run(run())


def test_a_rank_that_dies_without_a_word_is_left_behind_too(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 2, engine={"manual": True}, max_replays=1) as w:
            reader, first = await begun(w, 3)
            first.die()
            other(w, first).allow(50)
            assert await reader.result() == WHOLE
            assert w.empty()

    asyncio.run(run())


def test_many_requests_are_spread_over_the_ranks_that_are_left(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 3, engine={"manual": True}, max_replays=1) as w:
            readers = [Reader(w, f"r{i}") for i in range(12)]
            await eventually(lambda: [len(e.running) for e in w.engines] == [4, 4, 4], "four at each")
            lose(w, w.engines[0])
            await eventually(lambda: [len(e.running) for e in w.engines[1:]] == [6, 6], "six at each that is left")
            for engine in w.engines[1:]:
                engine.allow(200)
            assert [await r.result() for r in readers] == [WHOLE] * 12
            assert w.empty()

    asyncio.run(run())


def test_a_request_that_loses_more_ranks_than_it_may_ends(tmp_path: Path) -> None:
    """It may be what ends them."""

    async def run() -> None:
        async with world(tmp_path, 3, engine={"manual": True}, max_replays=1) as w:
            reader = Reader(w)
            first = await at_work(w)
            first.die()
            await eventually(lambda: any(e.running for e in w.engines if e is not first), "at the second rank")
            second = next(e for e in w.engines if e is not first and e.running)
            second.die()
            with pytest.raises(RankLost, match=f"rank {second.rank} was lost"):
                await reader.result()
            third = next(e for e in w.engines if e not in (first, second))
            assert third.seen == [] and w.empty()

    asyncio.run(run())


def test_ranks_that_end_together_cost_a_request_one_replay(tmp_path: Path) -> None:
    """As those of a pod that is killed: the news of the second comes a little later than that of the first."""

    async def run() -> None:
        async with world(tmp_path, 3, engine={"manual": True}, max_replays=1) as w:
            reader, first = await begun(w, 2)
            lose(w, first)
            for _ in range(3):
                await asyncio.sleep(0)
            taken = {stream.rank for stream in w.client._streams.values()}
            second, third = sorted((e for e in w.engines if e is not first), key=lambda e: e.rank not in taken)
            lose(w, first, second)
            third.allow(50)
            assert await reader.result() == WHOLE
            assert second.seen == [] and w.empty()

    asyncio.run(run())


@pytest.mark.parametrize("case", ["pinned", "none allowed", "one rank"])
def test_what_may_not_go_on_elsewhere_ends_at_once(tmp_path: Path, case: str) -> None:
    async def run() -> None:
        ranks = 1 if case == "one rank" else 2
        async with world(tmp_path, ranks, engine={"manual": True}, max_replays=0 if case == "none allowed" else 3) as w:
            reader = Reader(w, data_parallel_rank=1) if case == "pinned" else Reader(w)
            first = await at_work(w)
            lose(w, first)
            with pytest.raises(RankLost, match="no beat"):
                await reader.result()
            assert w.empty() and sum(len(e.seen) for e in w.engines) == 1

    asyncio.run(run())


def test_a_request_waits_while_no_rank_takes_it(tmp_path: Path) -> None:
    """As where ranks share experts: none takes work until the lost one is back."""

    async def run() -> None:
        async with world(tmp_path, 2, engine={"manual": True}, max_replays=1) as w:
            reader = Reader(w)
            first = await at_work(w)
            second = other(w, first)
            first.allow(2)
            await reader.has(2)
            w.client.set_ranks([w.info(first, RankState.LOST), w.info(second, RankState.SUSPECT, stage="waits")])
            await eventually(lambda: len(w.client._replays) == 1, "it waits")
            assert w.client.in_flight == 1
            w.client.set_ranks([w.info(second)])
            second.allow(50)
            assert await reader.result() == WHOLE
            assert w.empty()

    asyncio.run(run())


def test_a_request_that_no_rank_takes_in_time_ends_with_both_reasons(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 2, engine={"manual": True}, max_replays=1, replay_wait=0.5) as w:
            reader = Reader(w)
            await at_work(w)
            lose(w, *w.engines)
            with pytest.raises(RankLost, match=r"rank \d was lost .*no beat; no other rank took it within .* s: "):
                await reader.result()
            assert w.empty()

    asyncio.run(run())


@pytest.mark.parametrize("before", [0, 2])
def test_under_vllms_protocol_only_a_request_without_tokens_begins_again(tmp_path: Path, before: int) -> None:
    async def run() -> None:
        async with world(tmp_path, 2, engine={"manual": True}, max_replays=1, dialect=Dialect.VLLM) as w:
            reader, first = await begun(w, before)
            first.die()
            if before:
                with pytest.raises(RankLost):
                    await reader.result()
            else:
                other(w, first).allow(50)
                assert await reader.result() == WHOLE
            assert w.empty()

    asyncio.run(run())


def test_a_request_that_met_a_new_life_of_its_rank_is_sent_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 2, engine={"manual": True}, max_replays=1) as w:
            reader = Reader(w)
            first = await at_work(w)
            (wire_id,) = first.running
            first.running.clear()
            refused = EngineCoreOutput(
                wire_id, [], finish_reason=FinishReason.ERROR, error="stale_epoch: sent under epoch 1, this is 2"
            )
            first.send(
                EngineCoreOutputs(engine_index=first.rank, epoch=1, outputs=[refused], finished_requests=[wire_id])
            )
            await eventually(lambda: any(e.running for e in w.engines), "it was sent again")
            for engine in w.engines:
                engine.allow(50)
            assert await reader.result() == WHOLE
            assert w.empty()

    asyncio.run(run())


@pytest.mark.parametrize("end", ["the reader leaves", "the client closes"])
def test_a_request_that_waits_can_be_ended(tmp_path: Path, end: str) -> None:
    async def run() -> None:
        async with world(tmp_path, 2, engine={"manual": True}, max_replays=1) as w:
            reader = Reader(w)
            first = await at_work(w)
            lose(w, *w.engines)
            await eventually(lambda: len(w.client._replays) == 1, "it waits")
            if end == "the client closes":
                await w.client.close()
                with pytest.raises(ClientClosed):
                    await reader.result()
                return
            reader.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader.task
            second = other(w, first)
            w.client.set_ranks([w.info(second)])
            assert (await asyncio.gather(collect(w.client, request("s", max_tokens=1)), ticks(second)))[0][0]
            assert [add.external_req_id for add in second.seen] == ["s"]
            assert w.empty()

    async def ticks(engine: StubEngine) -> None:
        await eventually(lambda: engine.running, "the next request")
        engine.allow(1)

    asyncio.run(run())


def test_log_probabilities_and_limits_count_what_came_before(tmp_path: Path) -> None:
    """The other rank is told the request as it was, so that it counts all outputs."""

    async def run() -> None:
        async with world(tmp_path, 2, engine={"manual": True}, max_replays=1) as w:
            sampling = SamplingParams(max_tokens=6, min_tokens=4, temperature=0.7, presence_penalty=0.5, seed=3)
            asked = request("r", PROMPT)
            asked.sampling = sampling
            task = asyncio.create_task(collect(w.client, asked))
            first = await at_work(w)
            first.allow(4)
            await eventually(lambda: all(i >= 4 for _, i in first.running.values()), "four tokens")
            stream = next(iter(w.client._streams.values()))
            await eventually(lambda: len(stream.output_token_ids) == 4, "they came")
            lose(w, first)
            second = other(w, first)
            second.allow(50)
            async with asyncio.timeout(PATIENCE):
                tokens, deltas = await task
            assert second.seen[0].sampling_params == first.seen[0].sampling_params == sampling
            assert tokens == expected_tokens(PROMPT, 6) and deltas[-1].finish_reason == "length"

    asyncio.run(run())
