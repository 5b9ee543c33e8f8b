"""Decode steps and prompts of large random models in this process: milliseconds, share of the memory's and the matrix
units' speed, and how long the GPU rests between steps.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import torch

from dpi_engine.config.model_spec import ModelSpec
from dpi_engine.models.registry import Model
from dpi_engine.ops import Ops, select_ops
from dpi_engine.ops.interface import PAGE_SIZE
from dpi_engine.worker.graphs import CudaRecorder, DecodeGraphs, Recorder
from dpi_engine.worker.null_step import null_step
from gpu_steps.graphs import MAX_LEN, Again, decodes, loop
from gpu_steps.machine import copy_bandwidth
from gpu_steps.models import quick_model
from gpu_steps.shapes import StepBytes, config

READ_GOAL, MATRIX_GOAL, REST_GOAL = 0.60, 0.45, 0.03
"""Of the memory's speed at one stream, of the matrix units' for prompts, and the GPU's rest between steps."""


@dataclass(frozen=True, slots=True)
class Plan:
    dtype: str
    streams: tuple[int, ...]
    prompts: tuple[int, ...]
    repeats: int


PLANS = {"cuda": Plan("bfloat16", (1, 8, 64, 256), (2048, 16384), 20), "cpu": Plan("float32", (1, 4), (64,), 2)}


class Clock:
    """Seconds of work on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def matrix_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large product of matrices, the best of some."""
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    clock, best = Clock(device), 0.0
    for _ in range(6):
        began = clock.now()
        a @ b
        best = max(best, 2 * size**3 / (clock.now() - began))
    return best


def flops_per_token(spec: ModelSpec, context: int) -> float:
    """Of one prompt token with `context` keys on average before it; the head is not counted."""
    attention = spec.hidden_size * (2 * spec.q_size + 2 * spec.kv_size)
    mlp = 3 * spec.hidden_size * spec.intermediate_size
    if spec.moe is not None:
        mlp = 3 * spec.hidden_size * spec.moe.intermediate_size * spec.moe.top_k
    return 2.0 * spec.num_layers * (attention + mlp) + 4.0 * spec.num_layers * spec.q_size * context


def verdict(value: float, goal: float, *, most: bool = False) -> str:
    met = value <= goal if most else value >= goal
    return f"goal {goal:.0%} {'met' if met else 'MISSED'}"


@torch.inference_mode()
def decode_table(shape: str, model: Model, ops: Ops, recorder: Recorder, plan: Plan, peak: float) -> dict[int, float]:
    found = {}
    steps = [decodes(n, ops.device, n) for n in plan.streams]
    caches = model.new_caches(max(blocks for _, blocks in steps))
    most = max(plan.streams)
    graphs = DecodeGraphs(ops, lambda step: model.forward(step, caches), model.spec.vocab_size, most, MAX_LEN)
    graphs.sizes = sorted(plan.streams)
    graphs.capture(recorder, lambda stage, done: None)
    clock = Clock(ops.device)
    print(f"{'streams':>8} {'step ms':>8} {'launched':>9} {'GB/step':>8} {'GB/s':>7} {'of copies':>10} {'tok/s':>9}")
    for n, (step, _) in zip(plan.streams, steps, strict=True):
        seconds = []
        for run in (graphs.run, lambda step: model.forward(step, caches)):
            run(step)
            began = clock.now()
            for _ in range(plan.repeats):
                run(step)
            seconds.append((clock.now() - began) / plan.repeats)
        found[n] = seconds[0]
        size = StepBytes.of(shape, ops.dtype.itemsize, n)
        read = size.weights + size.token * int(step.kv_lens.sum())
        rate = read / seconds[0]
        goal = verdict(rate / peak, READ_GOAL) if n == 1 else ""
        print(f"{n:>8} {1e3 * seconds[0]:>8.2f} {1e3 * seconds[1]:>9.2f} {read / 1e9:>8.2f} {rate / 1e9:>7.0f} "
              f"{rate / peak:>10.1%} {n / seconds[0]:>9.0f}  {goal}", flush=True)  # fmt: skip
    return found


@torch.inference_mode()
def prompt_table(model: Model, ops: Ops, plan: Plan, peak: float) -> None:
    clock = Clock(ops.device)
    for n in plan.prompts:
        caches = model.new_caches(-(-n // PAGE_SIZE) + 1)
        step = null_step(n, ops.device)
        step.block_tables = torch.arange(1, -(-n // PAGE_SIZE) + 1, dtype=torch.int32, device=ops.device).unsqueeze(0)
        step.slots = torch.arange(PAGE_SIZE, PAGE_SIZE + n, device=ops.device)
        model.forward(step, caches)
        began = clock.now()
        for _ in range(3):
            model.forward(step, caches)
        seconds = (clock.now() - began) / 3
        rate = n * flops_per_token(model.spec, n // 2) / seconds
        print(f"prompt of {n} tokens: {1e3 * seconds:.1f} ms, {rate / 1e12:.1f} TFLOP/s, {rate / peak:.1%} of the "
              f"matrix peak, {verdict(rate / peak, MATRIX_GOAL)}", flush=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shape", default="llama-8b", help="of gpu_steps.shapes; tiny on the CPU")
    args = parser.parse_args()
    plan, shape = PLANS[args.device], args.shape if args.device == "cuda" else "tiny"
    ops = select_ops(args.device, plan.dtype, "cuda" if args.device == "cuda" else "torch")
    copies, matrices = copy_bandwidth(args.device), matrix_peak(ops.device, ops.dtype)
    began = time.perf_counter()
    model = quick_model(shape, ops, max(MAX_LEN, *plan.prompts) + 1)
    print(f"{shape}, {plan.dtype}, {ModelSpec.from_config(config(shape)).num_layers} layers, made in "
          f"{time.perf_counter() - began:.1f} s; copies {copies / 1e9:.0f} GB/s, "
          f"matrices {matrices / 1e12:.1f} TFLOP/s", flush=True)  # fmt: skip
    recorder: Recorder = CudaRecorder(ops.device) if args.device == "cuda" else Again()
    recorded = decode_table(shape, model, ops, recorder, plan, copies)
    prompt_table(model, ops, plan, matrices)
    if ops.draws:
        steps, ahead, wall = loop(model, ops, recorder, 8, 128)
        # Sampling is not recorded, so it counts as rest here: the true rest is smaller.
        rest = max(0.0, 1 - steps * recorded[8] / wall)
        print(f"8 streams through the core: {8 * 127 / wall:.0f} tokens/s, {ahead} of {steps} steps launched ahead; "
              f"{rest:.1%} of the time outside recorded steps, {verdict(rest, REST_GOAL, most=True)}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
