"""A decode step of ours beside one of transformers with a static cache under torch.compile: same shape, same process.

Both have random weights of the same sizes and every sequence as many keys. Of a large model only the first layers are
made, on both sides: torch.compile takes seconds for each.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch

from dpi_engine.ops import select_ops
from dpi_engine.ops.interface import PAGE_SIZE, StepTensors
from dpi_engine.worker.graphs import CudaRecorder, DecodeGraphs, Recorder
from gpu_steps import shapes
from gpu_steps.decode import Clock
from gpu_steps.graphs import Again
from gpu_steps.models import quick_model

WARM = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """`compiler`: torch.compile's mode, or `eager` for its backend that compiles nothing, to try the script."""

    shape: str
    layers: int
    dtype: str
    streams: tuple[int, ...]
    context: int
    repeats: int
    compiler: str


PLANS = {
    "cuda": Plan("llama-8b", 8, "bfloat16", (1, 8, 64), 1024, 20, "reduce-overhead"),
    "cpu": Plan("tiny", 2, "float32", (1, 4), 64, 2, "eager"),
}


def even_step(count: int, context: int, device: torch.device) -> tuple[StepTensors, int]:
    """`count` sequences that each decode the last of `context` keys; also the blocks that they need."""
    pages = -(-context // PAGE_SIZE)
    tables = torch.arange(1, count * pages + 1, dtype=torch.int32, device=device).view(count, pages)
    last = torch.full((count,), context - 1, device=device)
    return StepTensors(
        ids=torch.arange(count, device=device),
        positions=last,
        slots=tables[:, -1].long() * PAGE_SIZE + last % PAGE_SIZE,
        block_tables=tables,
        kv_lens=torch.full((count,), context, dtype=torch.int32, device=device),
        cu_q=torch.arange(count + 1, dtype=torch.int32, device=device),
        rows=torch.arange(count, device=device),
        max_q=1,
        max_kv=context,
    ), count * pages + 1


def timed(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of one call, after WARM others."""
    clock = Clock(device)
    for _ in range(WARM):
        run()
    began = clock.now()
    for _ in range(repeats):
        run()
    return (clock.now() - began) / repeats


@torch.inference_mode()
def ours(plan: Plan, device: str) -> dict[int, float]:
    ops = select_ops(device, plan.dtype, "cuda" if device == "cuda" else "torch")
    recorder: Recorder = CudaRecorder(ops.device) if device == "cuda" else Again()
    model = quick_model(plan.shape, ops, plan.context + 1)
    steps = {n: even_step(n, plan.context, ops.device) for n in plan.streams}
    caches = model.new_caches(max(blocks for _, blocks in steps.values()))
    graphs = DecodeGraphs(
        ops, lambda step: model.forward(step, caches), model.spec.vocab_size, max(plan.streams), plan.context
    )
    graphs.sizes = sorted(plan.streams)
    graphs.capture(recorder, lambda stage, done: None)
    return {n: timed(lambda step=step: graphs.run(step), ops.device, plan.repeats) for n, (step, _) in steps.items()}


@torch.inference_mode()
def theirs(plan: Plan, device: str) -> dict[int, float]:
    from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

    place = torch.device(device)
    settings = shapes.config(plan.shape)
    config = AutoConfig.for_model(**{k: v for k, v in settings.items() if k != "architectures"})
    with place:
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, plan.dtype)).eval()
    how = {"backend": "eager"} if plan.compiler == "eager" else {"mode": plan.compiler, "fullgraph": True}
    found = {}
    for n in plan.streams:
        torch.compiler.reset()
        cache = StaticCache(config=model.config, max_cache_len=plan.context + WARM + plan.repeats)
        prompt = torch.zeros(n, plan.context - 1, dtype=torch.int64, device=place)
        model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        step = torch.compile(model, **how)
        token = torch.arange(n, device=place).unsqueeze(1)
        where = torch.full((n, 1), plan.context - 1, device=place)

        def run(step=step, cache=cache, token=token, where=where) -> None:  # type: ignore[no-untyped-def]
            if plan.compiler != "eager":
                torch.compiler.cudagraph_mark_step_begin()
            step(input_ids=token, position_ids=where, past_key_values=cache, use_cache=True)

        began = time.perf_counter()
        found[n] = timed(run, place, plan.repeats)
        print(f"transformers, {n} streams: compiled and timed in {time.perf_counter() - began:.0f} s", flush=True)
        del cache, step
    return found


def main() -> int:
    import transformers

    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    device = parser.parse_args().device
    plan = PLANS[device]
    few = {**shapes.SHAPES, plan.shape: {**shapes.SHAPES[plan.shape], "num_hidden_layers": plan.layers}}
    with mock.patch.dict(shapes.SHAPES, few):
        mine = ours(plan, device)
        if device == "cuda":
            torch.cuda.empty_cache()
        other = theirs(plan, device)
    how = "its eager backend (dry run)" if plan.compiler == "eager" else f"mode {plan.compiler}"
    print(f"{plan.layers} layers of {plan.shape}, {plan.dtype}, {plan.context} keys; transformers "
          f"{transformers.__version__}, static cache, torch.compile with {how}")  # fmt: skip
    print(f"{'streams':>8} {'ours ms':>9} {'theirs ms':>10} {'ratio':>7}")
    for n in plan.streams:
        print(f"{n:>8} {1e3 * mine[n]:>9.2f} {1e3 * other[n]:>10.2f} {other[n] / mine[n]:>7.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
