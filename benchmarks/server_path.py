"""CPU time of an API server per streamed token: output message, text, event, socket.

    python benchmarks/server_path.py --streams 1 32 64

The server is a process of its own with real sockets on both sides. This process is engine and clients in lockstep: a
step's message goes out when every client has the event of the one before. So every token is an event of its own however
busy the machine is, and what the clients spend is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import zmq

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "engine")]

from suite.served import texts_of  # noqa: E402
from suite.servers import SMOLLM2, free_ports  # noqa: E402
from suite.texts import Texts  # noqa: E402

from dpi_engine.config.sources import default_cache_dir, resolve_model  # noqa: E402
from dpi_engine.tokenizer.bundle import load_tokenizer  # noqa: E402
from dpi_engine.wire import codec  # noqa: E402
from dpi_engine.wire.messages import (  # noqa: E402
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    LoadRecord,
    ReadyResponse,
)

SERVER_START_S = 60.0
EVENT = b"data: "
LAST = b"data: [DONE]\n\n"


def serve(folder: str, port: int, loop: str) -> None:
    """The server, until it is killed."""
    from dpi_engine.frontend.client import ZmqEngineClient
    from dpi_engine.server.app import make_app
    from dpi_engine.server.metrics import Metrics
    from dpi_engine.server.options import ServerOptions
    from dpi_engine.server.serving import listening

    bundle = load_tokenizer(resolve_model(SMOLLM2, default_cache_dir(os.environ, Path.home())))

    async def main() -> None:
        metrics = Metrics("m", 8192)
        client = ZmqEngineClient(
            [f"ipc://{folder}/in"],
            [f"ipc://{folder}/out"],
            num_ranks=1,
            on_stats=metrics.on_stats,
            on_step=metrics.on_iteration,
        )
        await client.start()
        await client.wait_ready(SERVER_START_S)
        app = make_app(client, bundle, ServerOptions(model_names=("m",), model_root="m"), metrics)
        async with listening(app, "127.0.0.1", port):
            await asyncio.Event().wait()

    if loop == "uvloop":
        import uvloop

        uvloop.run(main())
    else:
        asyncio.run(main())


class Engine:
    """Rank 0: takes requests, gives each a token per step."""

    def __init__(self, folder: str) -> None:
        self._context = zmq.Context()
        self._requests = self._context.socket(zmq.DEALER)
        self._requests.setsockopt(zmq.IDENTITY, b"\x00\x00" + b"bootboot")
        self._requests.connect(f"ipc://{folder}/in")
        self._outputs = self._context.socket(zmq.PUSH)
        self._outputs.connect(f"ipc://{folder}/out")
        ready = ReadyResponse(max_model_len=8192, num_gpu_blocks=1, block_size=16, epoch=1)
        self._requests.send(codec.encode_ready_response(ready))
        self._seq = 0
        self.running: list[EngineCoreRequest] = []

    def take(self, count: int) -> None:
        while len(self.running) < count:
            _, payload = codec.decode_request(self._requests.recv_multipart())
            if isinstance(payload, EngineCoreRequest):
                self.running.append(payload)

    def step(self, index: int, last: bool) -> None:
        self._seq += 1
        outputs = [
            EngineCoreOutput(r.request_id, [r.prompt_token_ids[index % len(r.prompt_token_ids)]], output_index=index)
            for r in self.running
        ]
        if last:
            for output in outputs:
                output.finish_reason = FinishReason.LENGTH
        load = LoadRecord(0, 1, self._seq, 0, len(self.running), 0.1)
        message = EngineCoreOutputs(outputs=outputs, epoch=1, load=load, step_tokens=len(outputs))
        self._outputs.send_multipart(codec.encode_outputs(message))
        if last:
            self.running = []


class Clients:
    """Connections with one stream each."""

    def __init__(self, port: int, bodies: Sequence[dict[str, Any]]) -> None:
        self._selector = selectors.DefaultSelector()
        self._socks = []
        for body in bodies:
            sock = socket.create_connection(("127.0.0.1", port))
            content = json.dumps(body).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
            sock.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
            self._selector.register(sock, selectors.EVENT_READ)
            self._socks.append(sock)

    def wait(self, mark: bytes) -> None:
        """Until every client has got `mark` in what it read; more than one event is not looked for."""
        missing = set(self._socks)
        while missing:
            for key, _ in self._selector.select(30):
                data = key.fileobj.recv(65536)  # type: ignore[union-attr]
                if not data:
                    raise RuntimeError("the server closed a stream")
                if b"HTTP/1.1 200" not in data[:20] and data.startswith(b"HTTP/"):
                    raise RuntimeError(data[:500].decode())
                if mark in data:
                    missing.discard(key.fileobj)  # type: ignore[arg-type]

    def close(self) -> None:
        for sock in self._socks:
            sock.close()
        self._selector.close()


def cpu_clock(pid: int) -> int:
    """The clock that counts a process's CPU time (clock_getcpuclockid(3))."""
    return (~pid << 3) | 2


def measure(
    streams: int, steps: int, rounds: int, pause_s: float, port: int, pid: int, engine: Engine, texts: Texts
) -> dict[str, float]:
    """Medians over the rounds: microseconds of the server's CPU per token and per step, user's share, per request."""
    per_token, users, starts = [], [], []
    process = psutil.Process(pid)
    for _ in range(rounds):
        prompts = texts.take(streams, 128)
        bodies = [
            {"model": "m", "prompt": p, "max_tokens": steps, "temperature": 0, "ignore_eos": True, "stream": True}
            for p in prompts
        ]
        begun = time.clock_gettime(cpu_clock(pid))
        clients = Clients(port, bodies)
        engine.take(streams)
        engine.step(0, False)
        clients.wait(EVENT)
        before, user = time.clock_gettime(cpu_clock(pid)), process.cpu_times().user
        for step in range(1, steps - 1):
            time.sleep(pause_s)
            engine.step(step, False)
            clients.wait(EVENT)
        spent = time.clock_gettime(cpu_clock(pid)) - before
        users.append((process.cpu_times().user - user) / max(spent, 1e-9))
        per_token.append(spent / (streams * (steps - 2)) * 1e6)
        engine.step(steps - 1, True)
        clients.wait(LAST)
        ended = time.clock_gettime(cpu_clock(pid))
        starts.append((ended - begun - spent) / streams * 1e6)
        clients.close()
    found = statistics.median(per_token)
    return {
        "us_per_token": found,
        "best": min(per_token),
        "tok_s_per_core": 1e6 / found,
        "us_per_step": found * streams,
        "user_share": statistics.median(users),
        "us_per_request": statistics.median(starts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 64])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause-ms", type=float, default=0.0, help="before each step, as long as a model computes")
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    parser.add_argument("--serve", nargs=2, metavar=("FOLDER", "PORT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve[0], int(args.serve[1]), args.loop)
        return
    port, texts = free_ports(1), texts_of(SMOLLM2)
    heads = ("streams", "us/token", "best", "tok/s core", "us/step", "user", "us/request")
    print("  ".join(f"{head:>10}" for head in heads))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--loop", args.loop, "--serve", folder, str(port)]
        with subprocess.Popen(command) as process:
            try:
                engine = Engine(folder)
                deadline = time.monotonic() + SERVER_START_S
                while True:
                    try:
                        socket.create_connection(("127.0.0.1", port)).close()
                        break
                    except OSError:
                        if time.monotonic() > deadline or process.poll() is not None:
                            raise
                        time.sleep(0.1)
                for streams in args.streams:
                    r = measure(
                        streams, args.steps, args.rounds, args.pause_ms / 1000, port, process.pid, engine, texts
                    )
                    cells = (
                        f"{streams}",
                        f"{r['us_per_token']:.1f}",
                        f"{r['best']:.1f}",
                        f"{r['tok_s_per_core']:,.0f}",
                        f"{r['us_per_step']:.0f}",
                        f"{r['user_share']:.0%}",
                        f"{r['us_per_request']:.0f}",
                    )
                    print("  ".join(f"{cell:>10}" for cell in cells), flush=True)
            finally:
                process.kill()


if __name__ == "__main__":
    main()
