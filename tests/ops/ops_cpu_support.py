"""Kernels of both instruction sets, and plain-torch expressions of what they compute."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path

import pytest
import torch

from dpi_engine.config.sources import default_cache_dir
from dpi_engine.ops import build
from dpi_engine.ops.cpu import CpuOps, make_cpu_ops
from dpi_engine.ops.interface import PAGE_SIZE, HeadShape, RopeTable, StepTensors

THREADS = 2
ISAS = build.possible_isas(build.cpu_features())
if not ISAS:
    pytest.skip("the kernels have no instruction set that this processor has", allow_module_level=True)
INT8_ISAS = [isa for isa in ISAS if isa != "avx2"]
KINDS = [(isa, dtype) for isa in ISAS for dtype in (torch.float32, torch.bfloat16)]


def kind_name(value: object) -> str:
    return str(value).replace("torch.", "")


KERNELS = default_cache_dir(os.environ, Path.home())
"""Where each instruction set is compiled once for all test processes, also of later runs: the name is a checksum."""


@functools.cache
def ops_for(isa: str, dtype: torch.dtype, threads: int = THREADS, quantization: str | None = None) -> CpuOps:
    before = os.environ.get("DPI_CPU_ISA")
    os.environ["DPI_CPU_ISA"] = isa
    try:
        return make_cpu_ops(dtype, threads, KERNELS, quantization)
    finally:
        if before is None:
            del os.environ["DPI_CPU_ISA"]
        else:
            os.environ["DPI_CPU_ISA"] = before


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, bf16: float = 0.01) -> None:
    """float32 within 1e-5; bfloat16 (one rounding is up to 0.004) within `bf16`, absolute and relative."""
    tolerance = 1e-5 if dtype is torch.float32 else bf16
    torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=tolerance)


def rope_table(dim: int, positions: int = 600) -> RopeTable:
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, dim, 2).float() / dim))
    angles = torch.outer(torch.arange(positions).float(), frequencies)
    return RopeTable(angles.cos().contiguous(), angles.sin().contiguous())


def make_step(chunks: list[tuple[int, int]], blocks: int, seed: int = 0) -> StepTensors:
    """chunks: (computed before, in this step) of each sequence. Block tables are scattered over all blocks but 0."""
    generator = torch.Generator().manual_seed(seed)
    order = (torch.randperm(blocks - 1, generator=generator) + 1).tolist()
    width = max(1, max(math.ceil((before + m) / PAGE_SIZE) for before, m in chunks))
    tables = torch.zeros(len(chunks), width, dtype=torch.int32)
    positions, slots, cu = [], [], [0]
    for i, (before, m) in enumerate(chunks):
        for p in range(math.ceil((before + m) / PAGE_SIZE)):
            tables[i, p] = order.pop()
        for t in range(before, before + m):
            positions.append(t)
            slots.append(int(tables[i, t // PAGE_SIZE]) * PAGE_SIZE + t % PAGE_SIZE)
        cu.append(cu[-1] + m)
    n = cu[-1]
    return StepTensors(
        ids=torch.zeros(n, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slots=torch.tensor(slots, dtype=torch.int64),
        block_tables=tables,
        kv_lens=torch.tensor([before + m for before, m in chunks], dtype=torch.int32),
        cu_q=torch.tensor(cu, dtype=torch.int32),
        rows=torch.tensor(cu[1:], dtype=torch.int64) - 1,
        max_q=max(m for _, m in chunks),
        max_kv=max(before + m for before, m in chunks),
    )


def prefix_of(step: StepTensors, chunks: list[tuple[int, int]]) -> StepTensors | None:
    """The step that computes what `step` takes as computed before, in the same blocks."""
    positions, slots, cu = [], [], [0]
    for i, (before, _) in enumerate(chunks):
        positions += range(before)
        slots += [int(step.block_tables[i, t // PAGE_SIZE]) * PAGE_SIZE + t % PAGE_SIZE for t in range(before)]
        cu.append(cu[-1] + before)
    if not positions:
        return None
    return StepTensors(
        ids=torch.zeros(cu[-1], dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slots=torch.tensor(slots, dtype=torch.int64),
        block_tables=step.block_tables,
        kv_lens=torch.tensor([before for before, _ in chunks], dtype=torch.int32),
        cu_q=torch.tensor(cu, dtype=torch.int32),
        rows=torch.zeros(0, dtype=torch.int64),
        max_q=max(before for before, _ in chunks),
        max_kv=max(before for before, _ in chunks),
    )


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rotate(x: torch.Tensor, rope: RopeTable, positions: torch.Tensor) -> torch.Tensor:
    """x [n, heads, dim] in float32."""
    c, s = rope.cos[positions].unsqueeze(1), rope.sin[positions].unsqueeze(1)
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int) -> torch.Tensor:
    """q [m, heads, dim]: the last m queries over all keys k, v [kv, kv_heads, dim], in float64."""
    m, heads, _ = q.shape
    total, group = k.shape[0], heads // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    rows, columns = torch.arange(total - m, total).unsqueeze(1), torch.arange(total)
    seen = columns <= rows
    if window:
        seen &= columns > rows - window
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).float()


def random_qkv(n: int, shape: HeadShape, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, (shape.heads + 2 * shape.kv_heads) * shape.dim, generator=generator).to(dtype)
