"""Ranks without a model, for measuring a front end alone: real handshake and sockets, answers that are the prompt.

    python benchmarks/suite/stub_engine.py --head tcp://127.0.0.1:29550 --ranks 2 --step-ms 40

Speaks vLLM's dialect, so that the same ranks serve under either head. Every step gives each running request one token,
the next one of its prompt, so that what a front end detokenizes is real text. Runs until its standard input ends.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "engine"))

from dpi_engine.wire.engine_link import EngineLink
from dpi_engine.wire.inbox import LinkEvent
from dpi_engine.wire.lease import LeaseTimings
from dpi_engine.wire.messages import (
    Dialect,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    LoadRecord,
    PrefillStats,
    ReadyResponse,
    RequestType,
    SchedulerStats,
    UtilityOutput,
)

CONNECT_S = 600.0
BLOCKS = 4096
KNOWN_CALLS: dict[str, Any] = {"get_supported_tasks": ["generate"], "is_sleeping": False, "is_scheduler_paused": False}


class StubRank:
    """One rank; `serve` runs until `stop`. step_s: seconds from step to step, 0: as fast as it goes."""

    def __init__(self, rank: int, head: str, size: int, step_s: float, stop: threading.Event) -> None:
        self.rank, self.size, self.step_s, self.stop = rank, size, step_s, stop
        self.running: dict[str, tuple[EngineCoreRequest, int]] = {}
        self._seq = 0
        # A front end that is kept busy on purpose is not a lost one.
        timings = dataclasses.replace(LeaseTimings(), lost=60.0)
        self.link = EngineLink(
            rank=rank, endpoint=head, local=False, headless=True, dialect=Dialect.VLLM, timings=timings
        )

    def join(self) -> None:
        """Handshake with the head. Raises HandshakeTimeout."""
        self.link.connect(CONNECT_S)
        response = ReadyResponse(
            max_model_len=2048,
            num_gpu_blocks=BLOCKS,
            block_size=16,
            dtype="bfloat16",
            vllm_version="0.32.0",
            data_parallel_rank=self.rank,
            data_parallel_size=self.size,
            max_num_seqs=256,
            max_num_batched_tokens=4096,
            instance_id=f"stub-{self.rank}",
        )
        self.link.open_io(response, CONNECT_S)
        self.link.ready(timeout=CONNECT_S)

    def serve(self) -> None:
        due = time.monotonic()
        while not self.stop.is_set():
            for item in self.link.inbox.drain():
                self._take(item.kind, item.payload, item.client_index)
            now = time.monotonic()
            if not self.running:
                self.link.inbox.wait(0.2)
                due = time.monotonic()
            elif now < due:
                time.sleep(due - now)  # what comes meanwhile waits for the step, as with a real engine
            else:
                due = max(now, due + self.step_s)
                self._step()
        self.link.goodbye("stopped")

    def _take(self, kind: RequestType | LinkEvent, payload: Any, client: int) -> None:
        if kind is RequestType.ADD:
            payload.client_index = client
            self.running[payload.request_id] = (payload, 0)
        elif kind is RequestType.ABORT:
            for request_id in payload:
                self.running.pop(request_id, None)
        elif kind is RequestType.UTILITY:
            reply = UtilityOutput(payload.call_id, None, [None, KNOWN_CALLS.get(payload.method)])
            self.link.send(payload.client_index, EngineCoreOutputs(self.rank, utility_output=reply))
        elif kind is LinkEvent.GAVE_UP:
            raise payload

    def _step(self) -> None:
        by_client: dict[int, list[EngineCoreOutput]] = {}
        finished: dict[int, list[str]] = {}
        for request_id, (request, index) in list(self.running.items()):
            prompt, sampling = request.prompt_token_ids, request.sampling_params
            assert prompt and sampling is not None
            output = EngineCoreOutput(request_id, [prompt[index % len(prompt)]], output_index=index)
            if index == 0:
                output.prefill_stats = PrefillStats(num_prompt_tokens=len(prompt))
            if index + 1 >= (sampling.max_tokens or 16):
                output.finish_reason = FinishReason.LENGTH
                del self.running[request_id]
                finished.setdefault(request.client_index, []).append(request_id)
            else:
                self.running[request_id] = (request, index + 1)
            by_client.setdefault(request.client_index, []).append(output)
        stats = SchedulerStats(num_running_reqs=len(self.running))
        for client, outputs in by_client.items():
            message = EngineCoreOutputs(
                self.rank,
                outputs,
                scheduler_stats=stats,
                timestamp=time.monotonic(),
                finished_requests=finished.get(client),
            )
            self.link.send(client, message)
        self._seq += 1
        self.link.report_load(LoadRecord(self.rank, self.link.epoch, self._seq, 0, len(self.running), 0.0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", required=True, help="handshake endpoint of the head")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=40.0)
    args = parser.parse_args()
    stop = threading.Event()
    ranks = [StubRank(r, args.head, args.ranks, args.step_ms / 1000, stop) for r in range(args.ranks)]
    failed: list[str] = []

    def life(rank: StubRank) -> None:
        try:
            rank.join()
            print(f"rank {rank.rank} joined", flush=True)
            rank.serve()
        except Exception as e:
            failed.append(f"rank {rank.rank}: {type(e).__name__}: {e}")
            print(failed[-1], flush=True)
            os._exit(1)  # the other rank may wait for the head for minutes

    threads = [threading.Thread(target=life, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join(10)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
