"""Readers that are called when their tokens come, in the same turn of the event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from frontend_world import eventually, request, world
from stub_engine import expected_tokens

from dpi_engine.frontend.interface import EngineError, Generation, NoReadyRank, RankLost


class Listener:
    """Takes what comes at once, or what has gathered when `open` is set again."""

    def __init__(self, source: Generation) -> None:
        self.source = source
        self.open = True
        self.calls = 0
        self.tokens: list[int] = []
        self.reasons: list[str] = []
        self.errors: list[EngineError] = []

    def __call__(self) -> None:
        self.calls += 1
        if self.open:
            self.take()

    def take(self) -> None:
        try:
            delta = self.source.take()
        except EngineError as error:
            self.errors.append(error)
            return
        if delta is not None:
            self.tokens += delta.new_token_ids
            if delta.finish_reason:
                self.reasons.append(delta.finish_reason)


def test_each_message_calls_its_readers_and_a_slow_one_gets_the_rest_merged(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 1, engine={"manual": True}) as w:
            (engine,) = w.engines
            listeners = [Listener(w.client.generate(request(f"r{i}", [i + 1], 6))) for i in range(3)]
            for listener in listeners:
                listener.source.listen(listener)
            listeners[2].open = False
            await eventually(lambda: len(engine.running) == 3, "all requests at the engine")
            for step in range(1, 6):
                engine.allow(1)
                await eventually(lambda step=step: listeners[1].calls == step, "a call for each token")
            assert [listener.tokens for listener in listeners[:2]] == [expected_tokens([i + 1], 5) for i in range(2)]
            assert listeners[2].calls == 5 and not listeners[2].tokens
            engine.allow(1)
            await eventually(lambda: listeners[2].calls == 6, "the last token")
            listeners[2].take()
            for i, listener in enumerate(listeners):
                assert listener.tokens == expected_tokens([i + 1], 6) and listener.reasons == ["length"]
                assert listener.source.take() is None
            assert w.empty()

    asyncio.run(run())


def test_a_reader_that_leaves_within_its_call_aborts_only_its_own_request(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 1, engine={"manual": True}) as w:
            (engine,) = w.engines
            first, second = (w.client.generate(request(name, [1], 6)) for name in "ab")
            stays = Listener(second)
            first.listen(first.leave)
            second.listen(stays)
            await eventually(lambda: len(engine.running) == 2, "both requests at the engine")
            engine.allow(6)
            await eventually(lambda: stays.reasons == ["length"], "the other request's end")
            await eventually(lambda: len(engine.aborted) == 1, "the abort at the engine")
            assert engine.aborted[0].startswith("a-") and stays.tokens == expected_tokens([1], 6)
            assert w.empty()

    asyncio.run(run())


def test_a_reader_that_fails_loses_its_own_request_and_no_other(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 1, engine={"manual": True}) as w:
            (engine,) = w.engines
            bad, good = (w.client.generate(request(name, [1], 6)) for name in "ab")

            def fail() -> None:
                raise ValueError("a fault of the reader")

            stays = Listener(good)
            bad.listen(fail)
            good.listen(stays)
            await eventually(lambda: len(engine.running) == 2, "both requests at the engine")
            engine.allow(6)
            await eventually(lambda: stays.reasons == ["length"], "the other request's end")
            await eventually(lambda: len(engine.aborted) == 1, "the abort at the engine")
            assert stays.tokens == expected_tokens([1], 6)
            assert w.empty()

    asyncio.run(run())


def test_a_lost_rank_calls_its_readers_who_get_their_tokens_and_then_the_error_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 1, engine={"manual": True}) as w:
            (engine,) = w.engines
            listener = Listener(w.client.generate(request(max_tokens=100)))
            listener.open = False
            listener.source.listen(listener)
            engine.allow(2)
            await eventually(lambda: listener.calls == 2, "two tokens")
            engine.die(sentinel=True)
            await eventually(lambda: listener.calls == 3, "the news of the loss")
            for _ in range(3):
                listener.take()
            assert listener.tokens == expected_tokens([1, 2, 3], 2)
            assert [type(error) for error in listener.errors] == [RankLost]
            assert w.empty()

    asyncio.run(run())


def test_what_is_wrong_from_the_start_is_raised_by_listen(tmp_path: Path) -> None:
    async def run() -> None:
        async with world(tmp_path, 1, start=False) as w:
            source = w.client.generate(request())
            with pytest.raises(NoReadyRank):
                source.listen(lambda: None)
            source.leave()
            assert source.take() is None and w.empty()

    asyncio.run(run())
