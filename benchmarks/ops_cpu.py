"""Time of whole model steps made of the CPU backend's operations, with random weights in the shapes of a 135M-parameter
decoder (SmolLM2: hidden 576, 9 query and 3 key/value heads of 64, 30 layers, vocabulary 49152).

    PYTHONPATH=engine python benchmarks/ops_cpu.py [--isa avx2,avx512bf16] [--dtype bfloat16] [--threads 2] [--parts]

Prints the least and the median time of each step; on a shared machine only the least can be compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch

from dpi_engine.ops import build
from dpi_engine.ops.cpu import CpuOps, make_cpu_ops
from dpi_engine.ops.interface import PAGE_SIZE, HeadShape, OpsUnavailable, RopeTable, StepTensors

HIDDEN, INTER, LAYERS, VOCAB, SHAPE = 576, 1536, 30, 49152, HeadShape(9, 3, 64)
STEPS = [  # name, sequences, computed before, in this step
    ("decode B=1, context 176", 1, 175, 1),
    ("decode B=8, context 176", 8, 175, 1),
    ("decode B=32, context 176", 32, 175, 1),
    ("decode B=1, context 2048", 1, 2047, 1),
    ("prefill 4 x 128", 4, 0, 128),
    ("prefill 1 x 1024", 1, 0, 1024),
    ("prefill 256 after 1792", 1, 1792, 256),
]


def make_step(sequences: int, before: int, count: int) -> StepTensors:
    pages = (before + count + PAGE_SIZE - 1) // PAGE_SIZE
    tables = (torch.randperm(sequences * pages) + 1).view(sequences, pages).int()
    positions = torch.arange(before, before + count).repeat(sequences)
    owner = torch.arange(sequences).repeat_interleave(count)
    slots = tables[owner, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
    return StepTensors(
        ids=torch.randint(0, VOCAB, (sequences * count,)),
        positions=positions,
        slots=slots,
        block_tables=tables,
        kv_lens=torch.full((sequences,), before + count, dtype=torch.int32),
        cu_q=(torch.arange(sequences + 1) * count).int(),
        rows=(torch.arange(sequences) + 1) * count - 1,
        max_q=count,
        max_kv=before + count,
    )


class Model:
    """The operations of a decoder in order, weights drawn at random."""

    def __init__(self, ops: CpuOps, blocks: int) -> None:
        def linear(inputs: int, outputs: int) -> object:
            return ops.pack_linear(torch.randn(outputs, inputs) * 0.02)

        width = (SHAPE.heads + 2 * SHAPE.kv_heads) * SHAPE.dim
        self.ops = ops
        self.table = (torch.randn(VOCAB, HIDDEN) * 0.02).to(ops.weight_dtype)
        self.head = ops.pack_linear(self.table)
        self.norm = torch.ones(HIDDEN)
        self.layers = [
            (
                linear(HIDDEN, width),
                linear(HIDDEN, HIDDEN),
                ops.pack_gated(torch.randn(2 * INTER, HIDDEN) * 0.02),
                linear(INTER, HIDDEN),
            )
            for _ in range(LAYERS)
        ]
        self.caches = [ops.new_cache(blocks, SHAPE) for _ in range(LAYERS)]
        angles = torch.outer(torch.arange(4096).float(), 1e5 ** (-torch.arange(0, SHAPE.dim, 2).float() / SHAPE.dim))
        self.rope = RopeTable(angles.cos(), angles.sin())

    def forward(self, step: StepTensors) -> torch.Tensor:
        ops = self.ops
        ops.begin(step)
        h = ops.embed(step.ids, self.table)
        delta = None
        for (qkv, out, gate_up, down), cache in zip(self.layers, self.caches, strict=True):
            x = ops.rms_norm(h, self.norm, 1e-5) if delta is None else ops.add_rms_norm(h, delta, self.norm, 1e-5)
            q = ops.rope_write(ops.linear(x, qkv), step, self.rope, cache, SHAPE)
            a = ops.attention(q, step, cache, SHAPE, 0.125)
            x = ops.add_rms_norm(h, ops.linear(a, out), self.norm, 1e-5)
            delta = ops.linear(ops.gated_linear(x, gate_up), down)
        if step.rows.shape[0] != h.shape[0]:
            h, delta = h[step.rows], delta[step.rows]
        return ops.argmax(ops.linear(ops.add_rms_norm(h, delta, self.norm, 1e-5), self.head))


def timed_parts(ops: CpuOps) -> dict[str, float]:
    """Wrap the operations of `ops` with clocks; the returned dict adds up the seconds of each."""
    spent: dict[str, float] = defaultdict(float)

    def wrap(name: str) -> None:
        inner = getattr(ops, name)

        def timed(*arguments: object, **named: object) -> object:
            start = time.perf_counter()
            result = inner(*arguments, **named)
            spent[name] += time.perf_counter() - start
            return result

        setattr(ops, name, timed)

    for name in ("linear", "gated_linear", "embed", "rms_norm", "add_rms_norm", "rope_write", "attention", "argmax"):
        wrap(name)
    return spent


def measure(model: Model, step: StepTensors, seconds: float) -> list[float]:
    model.forward(step)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        model.forward(step)
        times.append((time.perf_counter() - start) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = ",".join(build.possible_isas(build.cpu_features()))
    parser.add_argument("--isa", default=here, help="comma-separated: all that this processor has")
    parser.add_argument("--dtype", default="bfloat16", help="comma-separated: bfloat16, float32")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=2.0, help="per measurement")
    parser.add_argument("--only", default="", help="steps whose name contains this")
    parser.add_argument("--parts", action="store_true", help="also where the time goes")
    arguments = parser.parse_args()
    cache_dir = Path(os.environ.get("DPI_BENCH_CACHE", Path(tempfile.gettempdir()) / "dpi-ops-bench"))
    torch.set_grad_enabled(False)
    print(f"{'backend':<22} {'step':<26} {'least ms':>9} {'median ms':>10} {'tokens/s':>9}")
    for isa in arguments.isa.split(","):
        for dtype in arguments.dtype.split(","):
            os.environ["DPI_CPU_ISA"] = isa
            try:
                ops = make_cpu_ops(getattr(torch, dtype), arguments.threads, cache_dir)
            except OpsUnavailable as error:
                print(f"{isa} {dtype}: {error}")
                continue
            model = Model(ops, 32 * 12 + 1)
            spent = timed_parts(ops) if arguments.parts else {}
            for name, sequences, before, count in STEPS:
                if arguments.only not in name:
                    continue
                step = make_step(sequences, before, count)
                spent.clear()
                times = measure(model, step, arguments.seconds)
                least, rate = min(times), sequences * count / min(times) * 1e3
                print(f"{isa + ' ' + dtype:<22} {name:<26} {least:9.2f} {statistics.median(times):10.2f} {rate:9.0f}")
                if spent:
                    runs = len(times) + 1
                    print("    " + ", ".join(f"{part} {s / runs * 1e3:.2f}" for part, s in spent.items()), flush=True)


if __name__ == "__main__":
    main()
