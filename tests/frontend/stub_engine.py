"""An engine's side of the wire without a model: deterministic tokens, and every way to misbehave."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from dpi_engine.wire import codec
from dpi_engine.wire.messages import (
    DEAD_SENTINEL,
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
)
from dpi_engine.wire.sockets import Waker, make_socket


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    """What a stub generates for a prompt."""
    start = sum(prompt) * 31
    return [(start + k) % 1000 for k in range(count)]


class StubEngine:
    """Runs in a thread of its own. With `manual` it makes a step only when `allow` is called, else every `step_s`.

    `seen`: ADDs in order; `aborted`: ids of aborts; `calls`: utility calls; `running`: requests it works on.
    """

    def __init__(
        self,
        rank: int,
        inputs: list[str],
        outputs: list[str],
        *,
        dialect: Dialect = Dialect.DPI,
        epoch: int = 1,
        manual: bool = False,
        step_s: float = 0.0,
        max_model_len: int = 2048,
        answer_utility: bool = True,
        report: bool = True,
        introduce: bool = True,
    ) -> None:
        self.rank, self.dialect, self.epoch = rank, dialect, epoch
        self.boot_id = os.urandom(8) if dialect is Dialect.DPI else b""
        self.manual = manual
        self.step_ms = int(step_s * 1000)
        self.max_model_len = max_model_len
        self.answer_utility = answer_utility
        self.report = report
        self.seen: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.calls: list[codec.UtilityCall] = []
        self.running: dict[str, tuple[EngineCoreRequest, int]] = {}
        self.message_hook: Callable[[EngineCoreOutputs], None] = lambda message: None
        self._inputs, self._outputs, self._introduce = inputs, outputs, introduce
        self._permits = 0
        self._seq = 0
        self._todo: list[Callable[[], Any]] = []
        self._lock = threading.Lock()
        self._stop = False
        self._frozen = False
        self._thaw = threading.Event()
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name=f"stub engine {rank}", daemon=True)
        self._thread.start()

    # -- for tests -------------------------------------------------------------------------------------------------

    def allow(self, steps: int) -> None:
        def grant() -> None:
            self._permits += steps

        self._do(grant)

    def send_raw(self, frames: list[bytes], client: int = 0) -> None:
        """Frames on the output socket, whatever they are."""
        self._do(lambda: self._push[client].send_multipart(frames))

    def send_raw_input(self, frames: list[bytes], client: int = 0) -> None:
        """Frames on the input socket, where an engine normally introduces itself."""
        self._do(lambda: self._dealers[client].send_multipart(frames))

    def send(self, message: EngineCoreOutputs, client: int = 0) -> None:
        self.send_raw(codec.encode_outputs(message, self.dialect), client)

    def disconnect(self, endpoint: str) -> None:
        """Break the connection to a front end's input, without a word."""
        self._do(lambda: self._dealers[0].disconnect(endpoint))

    def connect(self, endpoint: str) -> None:
        """Connect again in the same life, without a new introduction."""
        self._do(lambda: self._dealers[0].connect(endpoint))

    def freeze(self) -> None:
        """Neither read nor write until `thaw`."""
        self._thaw.clear()
        self._frozen = True
        self._waker.wake()

    def thaw(self) -> None:
        self._frozen = False
        self._thaw.set()

    def die(self, sentinel: bool = False) -> None:
        """Go away without a word, or with the last word that engines have."""
        if sentinel:
            self.send_raw([DEAD_SENTINEL])
        self.stop()

    def stop(self) -> None:
        self._stop = True
        self.thaw()
        self._waker.wake()
        self._thread.join(60)
        assert not self._thread.is_alive()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _do(self, action: Callable[[], Any]) -> None:
        with self._lock:
            self._todo.append(action)
        self._waker.wake()

    def _run(self) -> None:
        context = zmq.Context()
        identity = self.rank.to_bytes(2, "little") + self.boot_id
        self._dealers = [make_socket(context, zmq.DEALER, connect=e, identity=identity) for e in self._inputs]
        self._push = [make_socket(context, zmq.PUSH, connect=e, linger_ms=1000) for e in self._outputs]
        poller = zmq.Poller()
        poller.register(self._waker.fd, zmq.POLLIN)
        for dealer in self._dealers:
            poller.register(dealer, zmq.POLLIN)
            if self._introduce:
                ready = ReadyResponse(
                    max_model_len=self.max_model_len,
                    num_gpu_blocks=64,
                    block_size=16,
                    data_parallel_rank=self.rank,
                    epoch=self.epoch,
                )
                dealer.send(codec.encode_ready_response(ready, self.dialect))
        next_step = 0.0
        try:
            while not self._stop:
                busy = self.running and (not self.manual or self._permits > 0)
                poller.poll(max(0, int((next_step - time.monotonic()) * 1000)) if busy else 1000)
                self._waker.clear()
                if self._frozen:
                    self._thaw.wait(120)
                with self._lock:
                    todo, self._todo = self._todo, []
                for action in todo:
                    action()
                for dealer in self._dealers:
                    with contextlib.suppress(zmq.Again):
                        while True:
                            self._take(dealer.recv_multipart(zmq.NOBLOCK))
                due = time.monotonic() >= next_step
                if self.running and due and (not self.manual or self._permits > 0):
                    self._permits -= 1
                    next_step = time.monotonic() + self.step_ms / 1000
                    self._step()
        finally:
            context.destroy(1000 if self._stop else 0)
            self._waker.close()

    def _take(self, frames: list[bytes]) -> None:
        kind, payload = codec.decode_request(frames)
        if kind is RequestType.ADD:
            assert isinstance(payload, EngineCoreRequest)
            self.seen.append(payload)
            if self.dialect is Dialect.DPI and payload.epoch != self.epoch:
                return
            self.running[payload.request_id] = (payload, len(payload.output_token_ids))
        elif kind is RequestType.ABORT:
            assert isinstance(payload, list)
            self.aborted.extend(payload)
            for request_id in payload:
                self.running.pop(request_id, None)
        elif kind is RequestType.UTILITY:
            assert isinstance(payload, codec.UtilityCall)
            self.calls.append(payload)
            if self.answer_utility:
                if payload.method == "profile":
                    reply = codec.utility_reply(payload.call_id, failure="no profiler here")
                else:
                    reply = codec.utility_reply(payload.call_id, [self.rank, payload.method, payload.args])
                message = EngineCoreOutputs(engine_index=self.rank, utility_output=reply, epoch=self.epoch)
                self._emit(payload.client_index, message)

    def _step(self) -> None:
        by_client: dict[int, list[EngineCoreOutput]] = {}
        for request_id, (request, index) in list(self.running.items()):
            assert request.prompt_token_ids is not None and request.sampling_params is not None
            limit = request.sampling_params.max_tokens or 16
            token = expected_tokens(request.prompt_token_ids, index + 1)[-1]
            output = EngineCoreOutput(request_id, [token], output_index=index)
            if index == 0:
                output.prefill_stats = PrefillStats(num_prompt_tokens=len(request.prompt_token_ids))
            if index + 1 >= limit:
                output.finish_reason = FinishReason.LENGTH
                del self.running[request_id]
            else:
                self.running[request_id] = (request, index + 1)
            by_client.setdefault(request.client_index, []).append(output)
        for client, outputs in by_client.items():
            finished = [o.request_id for o in outputs if o.finish_reason is not None]
            message = EngineCoreOutputs(
                engine_index=self.rank, outputs=outputs, finished_requests=finished or None, epoch=self.epoch
            )
            if self.report:
                self._seq += 1
                running = len(self.running)
                if self.dialect is Dialect.DPI:
                    message.load = LoadRecord(self.rank, self.epoch, self._seq, 0, running, 0.0)
                else:
                    message.scheduler_stats = SchedulerStats(num_running_reqs=running)
            self.message_hook(message)
            self._emit(client, message)

    def _emit(self, client: int, message: EngineCoreOutputs) -> None:
        self._push[client].send_multipart(codec.encode_outputs(message, self.dialect))


def main() -> None:
    """A stub in a process of its own, until its standard input ends."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--input", action="append", required=True, help="endpoint to take requests from")
    parser.add_argument("--output", action="append", required=True, help="endpoint to send outputs to")
    parser.add_argument("--dialect", type=Dialect, choices=list(Dialect), default=Dialect.DPI)
    parser.add_argument("--epoch", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--manual", action="store_true", help="take requests, never step")
    args = parser.parse_args()
    engine = StubEngine(
        args.rank,
        args.input,
        args.output,
        dialect=args.dialect,
        epoch=args.epoch,
        manual=args.manual,
        step_s=args.step_ms / 1000,
    )
    sys.stdin.read()
    engine.stop()


if __name__ == "__main__":
    main()
