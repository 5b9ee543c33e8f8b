"""Recorded decode steps against the same steps launched kernel by kernel, and the loop that is one step ahead.

The loop runs while torch treats whatever stops the host for the device as an error; only the wait for a step's tokens,
which is an event, is none.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator

import torch

from dpi_engine.core.ahead import AheadCore
from dpi_engine.core.limits import SchedulerConfig
from dpi_engine.core.scheduler import Scheduler
from dpi_engine.models.registry import Model
from dpi_engine.ops import Ops, select_ops
from dpi_engine.ops.interface import PAGE_SIZE, StepTensors
from dpi_engine.wire.messages import EngineCoreRequest, SamplingParams
from dpi_engine.worker.ahead_runner import AheadRunner
from dpi_engine.worker.graphs import CudaRecorder, DecodeGraphs, Recorder
from gpu_steps.models import quick_model

MAX_LEN = 1024
NEAR = 2e-3
"""Float32 logits, whose largest are about 3, may differ by this: padded steps cut sums otherwise."""


class Again:
    """For a dry run without CUDA: calls what it recorded."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


def decodes(count: int, device: torch.device, seed: int) -> tuple[StepTensors, int]:
    """A step of `count` sequences of random lengths; also the blocks that it needs."""
    rng = random.Random(seed)
    lengths = [rng.randrange(1, MAX_LEN - 1) for _ in range(count)]
    pages = [-(-n // PAGE_SIZE) for n in lengths]
    tables = torch.zeros(count, max(pages), dtype=torch.int32)
    order = list(range(1, sum(pages) + 1))
    rng.shuffle(order)
    at = 0
    for row, n in enumerate(pages):
        tables[row, :n] = torch.tensor(order[at : at + n])
        at += n
    last = torch.tensor(lengths) - 1
    slots = tables.gather(1, (last // PAGE_SIZE).unsqueeze(1)).squeeze(1).long() * PAGE_SIZE + last % PAGE_SIZE
    return StepTensors(
        ids=torch.tensor([rng.randrange(1000) for _ in range(count)], device=device),
        positions=last.to(device),
        slots=slots.to(device),
        block_tables=tables.to(device),
        kv_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        cu_q=torch.arange(count + 1, dtype=torch.int32, device=device),
        rows=torch.arange(count, device=device),
        max_q=1,
        max_kv=max(lengths),
    ), sum(pages) + 1


@torch.inference_mode()
def same_logits(model: Model, ops: Ops, recorder: Recorder, most: int) -> float:
    """The largest difference between replayed and launched steps of many sizes, each after a larger one."""
    steps = [decodes(count, ops.device, count) for count in (most, most - 1, most // 2 + 1, 3, 1)]
    caches = model.new_caches(max(blocks for _, blocks in steps))
    for cache in caches:
        cache.normal_()
    graphs = DecodeGraphs(ops, lambda step: model.forward(step, caches), model.spec.vocab_size, most, MAX_LEN)
    seconds = graphs.capture(recorder, lambda stage, done: None)
    print(f"recorded steps of {graphs.sizes} sequences in {seconds:.1f} s")
    worst = 0.0
    for step, _ in steps:
        want = model.forward(step, caches).clone()
        got = graphs.run(step)
        if got is None:
            raise RuntimeError(f"no graph fits a step of {step.ids.shape[0]} decodes")
        worst = max(worst, float((got - want).abs().max()))
    return worst


@contextlib.contextmanager
def no_stops(device: torch.device) -> Iterator[None]:
    """Within, a call that stops the host until the device is done raises RuntimeError."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def loop(model: Model, ops: Ops, recorder: Recorder, streams: int, tokens: int) -> tuple[int, int, float]:
    """Steps, steps that were launched ahead, and seconds of `streams` random streams of `tokens` tokens."""
    blocks = streams * (-(-(tokens + 40) // PAGE_SIZE) + 1) + 1
    limits = {"max_num_seqs": streams, "max_model_len": MAX_LEN, "num_blocks": blocks, "max_num_batched_tokens": 2048}
    runner = AheadRunner(model, ops, **limits)
    runner.warm_up()
    runner.record(lambda stage, done: None, recorder)
    config = SchedulerConfig(block_size=PAGE_SIZE, vocab_size=model.spec.vocab_size, **limits)
    core = AheadCore(Scheduler(config), runner)
    for i in range(streams):
        heat = {"temperature": 0.0} if i % 2 else {"temperature": 1.0, "top_p": 0.9, "top_k": 50}
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=i, **heat)
        core.add(EngineCoreRequest(f"r{i}", [1 + i] * 20, sampling_params=params), time.monotonic())
    core.step(time.monotonic())  # the prompts
    steps = came = 0
    began = time.perf_counter()
    with no_stops(ops.device):
        while core.has_work():
            out = core.step(time.monotonic())
            steps += 1
            came += sum(len(o.new_token_ids) for entries in out.outputs.values() for o in entries)
    if came != streams * (tokens - 1):
        raise RuntimeError(f"{came} tokens came out in place of {streams * (tokens - 1)}")
    return steps, core.ahead, time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    device = parser.parse_args().device
    good = True
    for shape in ("tiny", "tiny-moe") if device == "cpu" else ("qwen3-0.6b", "tiny-moe"):
        ops = select_ops(device, "float32", "cuda" if device == "cuda" else "torch")
        model = quick_model(shape, ops, MAX_LEN)
        recorder: Recorder = CudaRecorder(ops.device) if device == "cuda" else Again()
        worst = same_logits(model, ops, recorder, 64 if device == "cuda" else 9)
        print(f"{shape}: replayed logits differ by {worst:.1e} at most ({NEAR:.0e} may be)")
        good &= worst <= NEAR
        if not ops.draws:
            print(f"{shape}: ops '{ops.name}' draw on the host, so no step is launched ahead")
            continue
        steps, ahead, seconds = loop(model, ops, recorder, 8, 64)
        print(f"{shape}: {steps} steps, {ahead} of them launched ahead, {1e3 * seconds / steps:.2f} ms each, no stop")
        good &= ahead >= steps - 3
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
