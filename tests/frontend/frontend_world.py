"""A client and stub engines around a test, and waiting for what they do with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from stub_engine import StubEngine

from dpi_engine.frontend.client import ZmqEngineClient
from dpi_engine.frontend.interface import GenerationRequest, TokenDelta
from dpi_engine.wire.messages import Dialect, RankInfo, RankState, SamplingParams

PATIENCE = 120.0
"""Seconds until a test gives up on what must happen: a bound for what hangs, far beyond what a loaded machine takes."""


async def eventually(check: Callable[[], Any], what: str, timeout: float = PATIENCE) -> None:
    deadline = time.monotonic() + timeout
    while not check():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        await asyncio.sleep(0.002)


def request(name: str = "r", prompt: list[int] | None = None, max_tokens: int = 8, **more: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=[1, 2, 3] if prompt is None else prompt,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        **more,
    )


async def collect(client: ZmqEngineClient, req: GenerationRequest) -> tuple[list[int], list[TokenDelta]]:
    async with asyncio.timeout(PATIENCE):
        deltas = [delta async for delta in client.generate(req)]
    return [token for delta in deltas for token in delta.new_token_ids], deltas


class World:
    def __init__(self, client: ZmqEngineClient) -> None:
        self.client = client
        self.engines: list[StubEngine] = []

    def add(self, rank: int, **options: Any) -> StubEngine:
        client = self.client
        options.setdefault("dialect", client._dialect)
        engine = StubEngine(rank, client.input_endpoints[:1], client.output_endpoints[:1], **options)
        self.engines.append(engine)
        return engine

    def info(self, engine: StubEngine, state: RankState = RankState.READY, **more: Any) -> RankInfo:
        return RankInfo(rank=engine.rank, state=state, epoch=engine.epoch, boot_id=engine.boot_id.hex(), **more)

    def empty(self) -> bool:
        """Nothing of any request is left in the client."""
        client = self.client
        router = client._router
        return (
            client.in_flight == router.in_flight == router.queued == 0
            and all(router.own(rank) == (0, 0) for rank in client._links.ranks())
            and len(client._utility) == 0
        )


@asynccontextmanager
async def world(
    tmp_path: Path, num_ranks: int = 1, *, start: bool = True, tcp: bool = False, **options: Any
) -> AsyncIterator[World]:
    """`num_ranks` ready stub engines (with engine options under `engine`) and a client that runs."""
    engine_options = options.pop("engine", {})
    options.setdefault("dialect", Dialect.DPI)
    places = ["tcp://127.0.0.1:*"] * 2 if tcp else [f"ipc://{tmp_path}/in", f"ipc://{tmp_path}/out"]
    client = ZmqEngineClient(places[:1], places[1:], num_ranks=num_ranks, **options)
    await client.start()
    made = World(client)
    try:
        if start:
            for rank in client._links.ranks():
                made.add(rank, **engine_options)
            await client.wait_ready(PATIENCE, num_ranks)
        yield made
    finally:
        await client.close()
        for engine in made.engines:
            engine.stop()
