"""Calls every kernel of one instruction set with small and ragged sizes; prints the names of those that were called.

Run by test_ops_cpu_sanitizers.py in a process of its own. What the kernels compute is compared with plain torch
elsewhere: here only what they read and write counts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from ops_cpu_support import make_step, ops_for, prefix_of, random_qkv, rope_table
from torch import Tensor

from dpi_engine.config.moe_spec import MoeSpec, checked_moe
from dpi_engine.ops import native_library
from dpi_engine.ops.cpu import CpuOps
from dpi_engine.ops.interface import HeadShape, LatentShape, StepTensors

BLOCKS = 40
WIDTHS = (1, 7, 16, 33, 96)
ROWS = (0, 1, 5, 13)
LINEARS = (  # rows, inputs, outputs; the last two are deeper than one part of the sums of their kernels
    (1, 1, 1), (0, 8, 8), (1, 33, 17), (2, 64, 64), (3, 16, 130), (5, 31, 70), (6, 48, 65), (7, 96, 33), (199, 18, 20),
    (4, 2051, 34), (2, 4100, 20),
)  # fmt: skip
HEADS = (HeadShape(1, 1, 2), HeadShape(6, 2, 64), HeadShape(5, 5, 50), HeadShape(17, 1, 48), HeadShape(4, 2, 80))
LATENTS = (LatentShape(1, 2, 2), LatentShape(3, 20, 6), LatentShape(2, 64, 16), LatentShape(20, 34, 10))
CHUNKS: tuple[list[tuple[int, int]], ...] = ([(0, 1)], [(37, 1), (0, 21), (16, 5), (130, 1)], [(15, 1)] * 4, [(0, 40)])
EXPERTS = ((1, 1, 1, 1, 1), (9, 33, 7, 5, 3), (13, 64, 48, 8, 2), (0, 16, 16, 4, 2))  # rows, hidden, inner, experts, k
MIXTURES: tuple[dict[str, Any], ...] = (
    {"num_experts": 5, "top_k": 2},
    {"num_experts": 17, "top_k": 17, "scoring": "sigmoid", "normalize": True},
    {"num_experts": 12, "top_k": 3, "groups": 4, "kept_groups": 2, "group_best": 2, "scoring": "sigmoid"},
)


class Called:
    """The library, noting which of its functions are asked for."""

    def __init__(self, library: Any) -> None:
        self._library, self.names = library, {"dpi_prepare"}  # which `load` has called

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self._library, name)


def rows_and_linears(ops: CpuOps) -> None:
    for width in WIDTHS:
        for n in ROWS:
            x = torch.randn(n, width).to(ops.dtype)
            for kind in (torch.float32, torch.bfloat16):
                weight = torch.ones(width, dtype=kind)
                ops.rms_norm(x, weight, 1e-5)
                ops.add_rms_norm(x, x.clone(), weight, 1e-5)
                ops.embed(torch.arange(n) % 3, torch.randn(3, width).to(kind))
            ops.silu_mul(torch.cat((x, x), 1))
    large = torch.randn(200, 192).to(ops.dtype)  # enough for several threads
    ops.silu_mul(ops.rms_norm(large, torch.ones(192), 1e-5))
    ops.embed(torch.zeros(200, dtype=torch.int64), torch.randn(1, 192))
    for n, inputs, outputs in LINEARS:
        x, weight = torch.randn(n, inputs).to(ops.dtype), torch.randn(outputs, inputs)
        for bias in (None, torch.randn(outputs)):
            ops.linear(x, ops.pack_linear(weight, bias))
        both = torch.cat((weight, weight))
        for bias in (None, torch.randn(2 * outputs)):
            ops.gated_linear(x, ops.pack_gated(both, bias))


def steps() -> Iterator[tuple[StepTensors, StepTensors | None]]:
    for chunks in CHUNKS:
        step = make_step(chunks, BLOCKS)
        yield step, prefix_of(step, chunks)


def attention(ops: CpuOps) -> None:
    for shape in HEADS:
        for step, before in steps():
            for window, norm in ((0, None), (17, torch.ones(shape.dim))):
                cache, rope = ops.new_cache(BLOCKS, shape), rope_table(shape.dim, 200)
                for part in (before, step):
                    if part is None:
                        continue
                    qkv = random_qkv(part.slots.shape[0], shape, ops.dtype, 1)
                    q = ops.rope_write(qkv, part, rope, cache, shape, norm, norm)
                    ops.attention(q, part, cache, shape, 0.125, window)


def latent_attention(ops: CpuOps) -> None:
    plain = 6
    for shape in LATENTS:
        for step, before in steps():
            cache, rope = ops.new_latent_cache(BLOCKS, shape), rope_table(shape.rope, 200)
            for part in (before, step):
                if part is None:
                    continue
                n = part.slots.shape[0]
                q = torch.randn(n, shape.heads * (plain + shape.rope)).to(ops.dtype)
                absorbed = torch.randn(shape.heads, n, shape.rank).to(ops.dtype)
                latent = torch.randn(n, shape.dim).to(ops.dtype)
                q = ops.latent_write(q, absorbed, latent, part, rope, cache, shape, torch.ones(shape.rank), 1e-6)
                ops.latent_attention(q, part, cache, shape, 0.125)


def experts(ops: CpuOps) -> None:
    for n, hidden, inner, count, k in EXPERTS:
        shapes = (inner, hidden), (inner, hidden), (hidden, inner)
        packed = ops.pack_experts(count, hidden, inner, lambda _, s=shapes: tuple(torch.randn(*each) for each in s))
        ids = torch.stack([torch.randperm(count)[:k] for _ in range(n)]) if n else torch.zeros(0, k)
        ids = ids.to(torch.int32)
        ids[::3, 0] = -1
        ops.experts(torch.randn(n, hidden).to(ops.dtype), ids, torch.rand(n, k), packed)
    for known in MIXTURES:
        moe = checked_moe(MoeSpec(intermediate_size=8, layers=(0,), **known), "test")
        for hidden in (1, 18):
            for n in (0, 1, 7, 500):
                for bias in (None, torch.randn(moe.num_experts)):
                    router = ops.pack_router(torch.randn(moe.num_experts, hidden), bias, moe)
                    ops.route(torch.randn(n, hidden).to(ops.dtype), router)


def vocabulary(ops: CpuOps) -> None:
    for kind in (torch.float32, torch.bfloat16):
        for n, width in ((1, 1), (3, 17), (2, 1000), (5, 64)):
            logits = torch.randn(n, width).to(kind)
            ops.argmax(logits)
            ops.row_logsumexp(logits)
            for k in (1, 5, 300):
                ops.topk(logits, k)


def recorded(ops: CpuOps) -> None:
    """Loops of a team of threads, in a program."""
    table, weight = torch.randn(9, 48), torch.ones(48)
    packed = ops.pack_gated(torch.randn(96, 48))
    for n in (1, 4):
        step = make_step([(0, 1)] * n, BLOCKS)

        def forward(step: StepTensors = step) -> Tensor:
            x = ops.embed(step.ids, table)
            for _ in range(6):
                x = ops.rms_norm(ops.gated_linear(x, packed), weight, 1e-5)
            return x

        assert ops.replay(ops.record(step, forward), step) is not None


def main(isa: str) -> None:
    torch.manual_seed(0)
    load = native_library.load
    names: set[str] = set()

    def noted(path: Any) -> Any:
        called = Called(load(path))
        called.names = names | called.names
        return called

    native_library.load = noted  # type: ignore[assignment]
    kinds = [(torch.float32, None), (torch.bfloat16, None)] + [(torch.bfloat16, "int8")] * (isa != "avx2")
    for dtype, quantization in kinds:
        for threads in (1, 3):
            ops = ops_for(isa, dtype, threads, quantization)
            rows_and_linears(ops)
            if quantization is None:
                attention(ops)
                latent_attention(ops)
                experts(ops)
                vocabulary(ops)
            if ops.can_record:
                recorded(ops)
            names |= ops._calls.library.names
    print(*sorted(names))


if __name__ == "__main__":
    main(sys.argv[1])
