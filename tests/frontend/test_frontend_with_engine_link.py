"""The client with the real head and the real engine side of the wire: join, work, death, return under a new epoch."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
import zmq.asyncio
from frontend_world import collect, eventually, request
from stub_engine import expected_tokens

from dpi_engine.frontend.client import ZmqEngineClient
from dpi_engine.frontend.events import RankEvent
from dpi_engine.frontend.interface import RankLost
from dpi_engine.wire.codec import UtilityCall, utility_reply
from dpi_engine.wire.engine_link import EngineLink
from dpi_engine.wire.head import HeadAddresses, HeadHandshake
from dpi_engine.wire.lease import Group, LeaseTimings
from dpi_engine.wire.lease_keeper import LeaseKeeper
from dpi_engine.wire.messages import (
    Dialect,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    LoadRecord,
    RankState,
    ReadyResponse,
    RequestType,
)

WAIT = 120.0
FAST = LeaseTimings().scaled(0.8)


class Rank:
    """An engine main loop as short as it can be: one token per request and round."""

    def __init__(self, rank: int, endpoint: str, dialect: Dialect) -> None:
        self.rank = rank
        self.link = EngineLink(
            rank=rank,
            endpoint=endpoint,
            local=True,
            headless=False,
            dialect=dialect,
            timings=FAST,
        )
        self.work: dict[str, tuple[EngineCoreRequest, int]] = {}
        self.hold = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.link.connect(WAIT)
        self.link.open_io(ReadyResponse(max_model_len=512, num_gpu_blocks=8, block_size=16), WAIT)
        self.link.ready(timeout=WAIT)
        seq = 0
        while not self._stop.is_set():
            self.link.inbox.wait(0.0 if self.work and not self.hold else 0.05)
            for item in self.link.inbox.drain():
                if item.kind is RequestType.ADD:
                    self.work[item.payload.request_id] = (item.payload, 0)
                elif item.kind is RequestType.ABORT:
                    for request_id in item.payload:
                        self.work.pop(request_id, None)
                elif item.kind is RequestType.UTILITY:
                    call: UtilityCall = item.payload
                    reply = utility_reply(call.call_id, call.method)
                    self.link.send(call.client_index, EngineCoreOutputs(engine_index=self.rank, utility_output=reply))
            if self.hold or not self.work:
                continue
            seq += 1
            outputs = []
            for request_id, (add, index) in list(self.work.items()):
                assert add.prompt_token_ids is not None and add.sampling_params is not None
                token = expected_tokens(add.prompt_token_ids, index + 1)[-1]
                output = EngineCoreOutput(request_id, [token], output_index=index)
                self.work[request_id] = (add, index + 1)
                if index + 1 == add.sampling_params.max_tokens:
                    output.finish_reason = FinishReason.LENGTH
                    del self.work[request_id]
                outputs.append(output)
            load = LoadRecord(self.rank, self.link.epoch, seq, 0, len(self.work), 0.0)
            self.link.send(0, EngineCoreOutputs(engine_index=self.rank, outputs=outputs, load=load))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(WAIT)

    def die(self) -> None:
        self.stop()
        self.link.dead("a bad step")
        self.link.close()


@pytest.mark.parametrize("dialect", list(Dialect))
def test_ranks_join_work_die_and_return(tmp_path: Path, dialect: Dialect, monkeypatch: pytest.MonkeyPatch) -> None:
    goodbye = LeaseKeeper.goodbye

    def slowly(self: LeaseKeeper, reason: str, timeout: float) -> None:
        """Long enough for the head to answer: it has given the rank up by the last word on the other connection."""
        time.sleep(5 * FAST.beat)
        goodbye(self, reason, timeout)
        time.sleep(5 * FAST.beat)

    monkeypatch.setattr(LeaseKeeper, "goodbye", slowly)

    async def run() -> None:
        def tell_head(event: RankEvent) -> None:
            if event.state == RankState.LOST:
                head.unreachable(event.rank, event.reason)

        client = ZmqEngineClient(
            [f"ipc://{tmp_path}/in"], [f"ipc://{tmp_path}/out"], num_ranks=2, dialect=dialect, on_event=tell_head
        )
        await client.start()
        context = zmq.asyncio.Context()
        head = HeadHandshake(
            [f"ipc://{tmp_path}/head"],
            Group(2, frozenset({0, 1}), vllm=dialect is Dialect.VLLM),
            HeadAddresses(inputs=client.input_endpoints, outputs=client.output_endpoints),
            timings=FAST,
            on_change=client.set_ranks,
            context=context,
        )
        await head.start()
        ranks = [Rank(rank, head.endpoints[0], dialect) for rank in range(2)]
        try:
            await client.wait_ready(WAIT, 2)
            assert client.max_model_len == 512
            results = await asyncio.gather(*(collect(client, request(f"r{i}", [i + 1], 6)) for i in range(8)))
            assert [tokens for tokens, _ in results] == [expected_tokens([i + 1], 6) for i in range(8)]
            assert sorted(deltas[0].rank for _, deltas in results) == [0] * 4 + [1] * 4
            assert await client.utility("reset_prefix_cache") == dict.fromkeys(range(2), "reset_prefix_cache")

            for rank in ranks:
                rank.hold = True
            tasks = [asyncio.create_task(collect(client, request(f"s{i}", [i + 1], 6))) for i in range(4)]
            await eventually(lambda: all(len(rank.work) == 2 for rank in ranks), "two requests at each")
            await asyncio.to_thread(ranks[1].die)
            ranks[0].hold = False
            async with asyncio.timeout(WAIT):
                outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert sum(isinstance(outcome, RankLost) for outcome in outcomes) == 2
            assert client.ranks()[1].state == RankState.LOST
            assert client.in_flight == 0

            ranks.append(Rank(1, head.endpoints[0], dialect))
            await client.wait_ready(WAIT, 2)
            if dialect is Dialect.DPI:
                assert client.ranks()[1].epoch == 2
            tokens, _ = await collect(client, request("t", [3], 6, data_parallel_rank=1))
            assert tokens == expected_tokens([3], 6)
            assert ("output", "handler_error") not in client.counters.snapshot()
        finally:
            for rank in ranks:
                await asyncio.to_thread(rank.stop)
                await asyncio.to_thread(rank.link.close)
            await head.close()
            await client.close()
            context.destroy(0)

    asyncio.run(run())
