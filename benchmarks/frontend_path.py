"""Cost of one output message in the front end: decode, hand over, wake each reader once, readers run.

Real frames go through a real PULL socket, one message per step; the next one is sent when every reader has its token.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time

import zmq

from dpi_engine.frontend.client import ZmqEngineClient
from dpi_engine.frontend.interface import GenerationRequest
from dpi_engine.wire import codec
from dpi_engine.wire.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    LoadRecord,
    ReadyResponse,
    SamplingParams,
)


async def measure(streams: int, steps: int, folder: str) -> list[float]:
    client = ZmqEngineClient([f"ipc://{folder}/in{streams}"], [f"ipc://{folder}/out{streams}"], num_ranks=1)
    await client.start()
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, b"\x00\x00" + b"bootboot")
    dealer.connect(client.input_endpoints[0])
    push = context.socket(zmq.PUSH)
    push.connect(client.output_endpoints[0])
    ready = ReadyResponse(max_model_len=8192, num_gpu_blocks=1, block_size=16, epoch=1)
    dealer.send(codec.encode_ready_response(ready))
    await client.wait_ready(10)
    arrived = 0
    step_done = asyncio.Event()

    async def read(index: int) -> None:
        nonlocal arrived
        sampling = SamplingParams(max_tokens=steps + 1)
        request = GenerationRequest(request_id=f"r{index}", prompt_token_ids=[1], sampling=sampling)
        async for _ in client.generate(request):
            arrived += 1
            if arrived % streams == 0:
                step_done.set()

    tasks = [asyncio.create_task(read(i)) for i in range(streams)]
    ids: list[str] = []
    while len(ids) < streams:
        await asyncio.sleep(0)
        if dealer.poll(0):
            _, payload = codec.decode_request(dealer.recv_multipart())
            ids.append(payload.request_id)  # type: ignore[union-attr]
    costs = []
    for step in range(steps):
        outputs = [EngineCoreOutput(i, [step], output_index=step) for i in ids]
        load = LoadRecord(0, 1, step, 0, streams, 0.1)
        frames = codec.encode_outputs(EngineCoreOutputs(engine_index=0, outputs=outputs, epoch=1, load=load))
        step_done.clear()
        start = time.perf_counter()
        push.send_multipart(frames)
        await step_done.wait()
        costs.append(time.perf_counter() - start)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.close()
    context.destroy(0)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--uvloop", action="store_true")
    args = parser.parse_args()
    print(f"{'streams':>7}  {'us per message p50':>18}  {'p99':>8}  {'us per token':>12}")
    with tempfile.TemporaryDirectory() as folder:
        for streams in args.streams:
            if args.uvloop:
                import uvloop

                costs = uvloop.run(measure(streams, args.steps, folder))
            else:
                costs = asyncio.run(measure(streams, args.steps, folder))
            p50, p99 = statistics.median(costs) * 1e6, statistics.quantiles(costs, n=100)[98] * 1e6
            print(f"{streams:>7}  {p50:>18.0f}  {p99:>8.0f}  {p50 / streams:>12.2f}")


if __name__ == "__main__":
    main()
