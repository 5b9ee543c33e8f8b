"""Linears whose weights have 8 bits (int8 or e4m3) and activations 16: half of what a decode step reads.

Numbers become 16 bits on their way into the matrix units, which is exact; the scale of each output comes last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpi_engine.ops.cuda.runtime import multiprocessors, pow2, widen_dots
from dpi_engine.ops.eight_bit import EightBitLinear

BLOCK_K = 128
MOST_ROWS = 128


@triton.jit
def _linear(x, weight, scale, bias, out, rows, IN: tl.constexpr, OUT: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """out [rows, OUT]: x [rows, IN] times weight [OUT, IN], each output by its scale, and bias."""
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there, inside = row < rows, column < OUT
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, IN, BLOCK_K):
        at = k + tl.arange(0, BLOCK_K)
        a_mask = there[:, None] & (at < IN)[None, :]
        a = tl.load(x + row.to(tl.int64)[:, None] * IN + at[None, :], mask=a_mask, other=0.0)
        mask = inside[:, None] & (at < IN)[None, :]
        b = tl.load(weight + column.to(tl.int64)[:, None] * IN + at[None, :], mask=mask, other=0.0)
        if WIDE:
            a = a.to(tl.float32)
        total += tl.dot(a, tl.trans(b.to(a.dtype)), input_precision="tf32x3")
    value = total * tl.load(scale + column, mask=inside, other=0.0)[None, :]
    if HAS_BIAS:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    where = row.to(tl.int64)[:, None] * OUT + column[None, :]
    tl.store(out + where, value.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])


def outputs_at_once(rows_tiles: int, outputs: int, processors: int) -> int:
    """BLOCK_N: the widest with which each multiprocessor has two programs."""
    for block in (128, 64, 32):
        if rows_tiles * triton.cdiv(outputs, block) >= 2 * processors:
            return block
    return 16


def linear(x: Tensor, packed: EightBitLinear) -> Tensor:
    """As `Ops.linear`. x contiguous."""
    n, inputs = x.shape
    outputs = packed.weight.shape[0]
    out = torch.empty(n, outputs, dtype=x.dtype, device=x.device)
    if not n:
        return out
    block_m = min(MOST_ROWS if x.dtype != torch.float32 else 32, max(16, pow2(n)))
    tiles = triton.cdiv(n, block_m)
    block_n = outputs_at_once(tiles, outputs, multiprocessors(x.device))
    block_k = BLOCK_K
    if x.dtype == torch.float32:
        block_n, block_k = min(block_n, 64), BLOCK_K // 2
    _linear[(triton.cdiv(outputs, block_n), tiles)](
        x, packed.weight, packed.scale, packed.scale if packed.bias is None else packed.bias, out, n,
        IN=inputs, OUT=outputs, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        HAS_BIAS=packed.bias is not None, WIDE=widen_dots(x.dtype),
        num_warps=8 if block_m * block_n > 8192 else 4, num_stages=2 if x.dtype == torch.float32 else 3,
    )  # fmt: skip
    return out
