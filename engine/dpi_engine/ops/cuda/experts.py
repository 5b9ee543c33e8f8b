"""Experts of a layer as grouped matrix products over rows sorted by expert. Nothing is read on the host.

Each expert's rows fill tiles of BLOCK_M; tiles are numbered over all experts, and a program finds its expert from the
running count of tiles. There are never more than rows // BLOCK_M + experts of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpi_engine.ops.cuda.runtime import pow2, widen_dots
from dpi_engine.ops.torch_moe import PackedExperts

BLOCK_K = 64
COMBINE_BLOCK = 1024


@triton.jit
def _my_tile(ends, tile, COUNT: tl.constexpr, COUNT_PAD: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of `tile` (COUNT: none), its first row, and the end of the expert's rows. ends [COUNT]: where the rows
    of each expert end."""
    each = tl.arange(0, COUNT_PAD)
    known = each < COUNT
    end = tl.load(ends + each, mask=known, other=0)
    start = tl.load(ends + each - 1, mask=known & (each > 0), other=0)
    tiles = tl.where(known, (end - start + BLOCK_M - 1) // BLOCK_M, 0)
    until = tl.cumsum(tiles, 0)
    expert = tl.sum((known & (until <= tile)).to(tl.int32), 0)
    mine = each == expert
    before = tl.sum(tl.where(mine, until - tiles, 0), 0)
    first = tl.sum(tl.where(mine, start, 0), 0) + (tile - before) * BLOCK_M
    return expert, first, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def _gate_up(x, order, ends, weight, out, HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr,
             COUNT: tl.constexpr, COUNT_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_K: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """out [rows, INNER] in sorted order: silu(gate) * up of the token of each row."""
    expert, first, end = _my_tile(ends, tl.program_id(0), COUNT, COUNT_PAD, BLOCK_M)
    if expert >= COUNT:
        return
    row = first + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there, inside = row < end, column < INNER
    token = tl.load(order + row, mask=there, other=0) // TOP_K
    base = weight + expert.to(tl.int64) * (2 * INNER * HIDDEN)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, HIDDEN, BLOCK_K):
        at = k + tl.arange(0, BLOCK_K)
        a = tl.load(x + token[:, None] * HIDDEN + at[None, :], mask=there[:, None] & (at < HIDDEN)[None, :], other=0.0)
        where = column[None, :] * HIDDEN + at[:, None]
        mask = inside[None, :] & (at < HIDDEN)[:, None]
        g = tl.load(base + where, mask=mask, other=0.0)
        u = tl.load(base + INNER * HIDDEN + where, mask=mask, other=0.0)
        if WIDE:
            a = a.to(tl.float32)
            g = g.to(tl.float32)
            u = u.to(tl.float32)
        gate += tl.dot(a, g, input_precision="tf32x3")
        up += tl.dot(a, u, input_precision="tf32x3")
    value = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64)[:, None] * INNER + column[None, :], value, mask=there[:, None] & inside[None, :])


@triton.jit
def _down(inner, order, ends, weight, out, HIDDEN: tl.constexpr, INNER: tl.constexpr, COUNT: tl.constexpr,
          COUNT_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
          WIDE: tl.constexpr):  # fmt: skip
    """out [rows, HIDDEN] where each row came from: token * top_k + choice."""
    expert, first, end = _my_tile(ends, tl.program_id(0), COUNT, COUNT_PAD, BLOCK_M)
    if expert >= COUNT:
        return
    row = first + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there, inside = row < end, column < HIDDEN
    place = tl.load(order + row, mask=there, other=0)
    base = weight + expert.to(tl.int64) * (INNER * HIDDEN)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, INNER, BLOCK_K):
        at = k + tl.arange(0, BLOCK_K)
        a_mask = there[:, None] & (at < INNER)[None, :]
        a = tl.load(inner + row.to(tl.int64)[:, None] * INNER + at[None, :], mask=a_mask, other=0.0)
        mask = inside[None, :] & (at < INNER)[:, None]
        b = tl.load(base + column[None, :] * INNER + at[:, None], mask=mask, other=0.0)
        if WIDE:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        total += tl.dot(a, b, input_precision="tf32x3")
    where = place[:, None] * HIDDEN + column[None, :]
    tl.store(out + where, total.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit
def _combine(results, ids, weights, out, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """out [tokens, HIDDEN]: weighted sum of each token's results; those of choices that are not here were not made."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(TOP_K):
        choice = token * TOP_K + j
        here = tl.load(ids + choice) >= 0
        part = tl.load(results + choice * HIDDEN + at, mask=here & (at < HIDDEN), other=0.0).to(tl.float32)
        # The weight of a choice that is not here may be not-a-number.
        total += tl.where(here, part * tl.load(weights + choice), 0.0)
    tl.store(out + token * HIDDEN + at, total.to(out.dtype.element_ty), mask=at < HIDDEN)


def rows_at_once(rows: int, count: int) -> int:
    """BLOCK_M for `rows` choices of `count` experts: about what one expert gets, so that tiles are not mostly empty."""
    return min(128, max(16, pow2(rows // count)))


def experts(x: Tensor, ids: Tensor, weights: Tensor, packed: PackedExperts) -> Tensor:
    """As `Ops.experts`."""
    m, hidden = x.shape
    out = torch.empty_like(x)
    if not m:
        return out
    k, count, inner_size = ids.shape[1], packed.gate_up.shape[0], packed.down.shape[2]
    wanted = torch.where(ids < 0, count, ids).flatten()
    ordered, order = wanted.sort(stable=True)
    ends = torch.searchsorted(
        ordered, torch.arange(count, device=x.device, dtype=ordered.dtype), right=True, out_int32=True
    )
    rows = m * k
    block_m = rows_at_once(rows, count)
    block_n, block_k = 64, BLOCK_K
    if x.dtype == torch.float32:  # products of float32 take three of a narrower type, and their registers
        block_m, block_k = min(block_m, 64), BLOCK_K // 2
    tiles = rows // block_m + min(count, rows)
    common = {
        "HIDDEN": hidden, "INNER": inner_size, "COUNT": count, "COUNT_PAD": pow2(count), "BLOCK_M": block_m,
        "BLOCK_N": block_n, "BLOCK_K": block_k, "WIDE": widen_dots(x.dtype), "num_warps": 8 if block_m == 128 else 4,
        "num_stages": 2 if x.dtype == torch.float32 else 3,
    }  # fmt: skip
    inner = torch.empty(rows, inner_size, dtype=x.dtype, device=x.device)
    results = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    _gate_up[(tiles, triton.cdiv(inner_size, block_n))](x, order, ends, packed.gate_up, inner, TOP_K=k, **common)
    _down[(tiles, triton.cdiv(hidden, block_n))](inner, order, ends, packed.down, results, **common)
    block = min(COMBINE_BLOCK, pow2(hidden))
    _combine[(m, triton.cdiv(hidden, block))](
        results, ids, weights, out, HIDDEN=hidden, TOP_K=k, BLOCK=block, num_warps=4
    )
    return out
