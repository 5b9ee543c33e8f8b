"""Attention over the paged cache: one kernel for chunks of prompts, one for single queries.

A step may hold both kinds of sequences. Each kernel sees all of the step and leaves the other's alone, so nothing is
sorted and the host need not know which is which. The query heads that share a KV head are folded into the rows of a
matrix product, so keys and values are read once for all of them. Softmax runs in base two.

Single queries are few, and their keys many: `splits` programs share the keys of one, and a second kernel merges what
they found. How many depends on the sizes of the batch alone, so that a CUDA graph serves every length.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpi_engine.ops.cuda.runtime import multiprocessors, pow2, widen_dots
from dpi_engine.ops.interface import PAGE_SIZE, HeadShape, StepTensors

MAX_SPLITS = 32
LOG2E = 1 / math.log(2)


@triton.jit
def _tile(table, keys, values, q, scale, high, total, weight, n, end, lowest, query_at, kv_head,
          KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr,
          BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, WIDE: tl.constexpr, EIGHT: tl.constexpr):  # fmt: skip
    """Take BLOCK_N keys from `n` on into the running softmax: `high` is the largest score of each row, `total` the sum
    of weights, `weight` the weighted sum of values. Keys below `lowest` or from `end` on are not read."""
    at = n + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, DIM_PAD)
    there = (at >= lowest) & (at < end)
    page = tl.load(table + at // PAGE, mask=there, other=0).to(tl.int64)
    row = (page * PAGE + at % PAGE) * KV_HEADS + kv_head
    where = row[:, None] * DIM + dim[None, :]
    # A page holds what an earlier owner left: a masked key that is not a number would spoil the sums.
    mask = there[:, None] & (dim < DIM)[None, :]
    k = tl.load(keys + where, mask=mask, other=0.0)
    v = tl.load(values + where, mask=mask, other=0.0)
    if WIDE:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    elif EIGHT:  # exact: e4m3 has fewer bits in both parts
        k = k.to(q.dtype)
        v = v.to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
    seen = there[None, :] & (at[None, :] <= query_at[:, None])
    if WINDOW > 0:
        seen = seen & (at[None, :] > query_at[:, None] - WINDOW)
    scores = tl.where(seen, scores, float("-inf"))
    raised = tl.maximum(high, tl.max(scores, 1))
    # A row that has seen no key yet stays at zero weight in place of becoming not-a-number.
    base = tl.where(raised == float("-inf"), 0.0, raised)
    p = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(high - base)
    total = total * shrink + tl.sum(p, 1)
    if WIDE:  # noqa: SIM108 - a choice while compiling
        p = p.to(tl.bfloat16).to(tl.float32)
    else:
        p = p.to(v.dtype)
    weight = weight * shrink[:, None] + tl.dot(p, v, input_precision="tf32x3")
    return raised, total, weight


@triton.jit
def _chunks(q, keys, values, tables, kv_lens, cu_q, out, scale, sequences, table_stride,
            HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
            PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BATCH_PAD: tl.constexpr,
            WINDOW: tl.constexpr, WIDE: tl.constexpr, EIGHT: tl.constexpr):  # fmt: skip
    """Sequences of several queries. Tiles are numbered over all sequences: the first tile of sequence i is
    cu_q[i] // BLOCK_Q + i, which leaves at least as many as it needs and is known without reading lengths on the host.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    each = tl.arange(0, BATCH_PAD)
    firsts = tl.load(cu_q + each, mask=each < sequences, other=0) // BLOCK_Q + each
    sequence = tl.sum(((firsts <= tile) & (each < sequences)).to(tl.int32), 0) - 1
    q_first = tl.load(cu_q + sequence)
    q_count = tl.load(cu_q + sequence + 1) - q_first
    local = (tile - q_first // BLOCK_Q - sequence) * BLOCK_Q
    if (q_count < 2) | (local >= q_count):
        return
    before = tl.load(kv_lens + sequence) - q_count
    row = tl.arange(0, BLOCK_M)
    query = local + row // GROUP
    dim = tl.arange(0, DIM_PAD)
    head = kv_head * GROUP + row % GROUP
    valid = (row < BLOCK_Q * GROUP) & (query < q_count)
    where = ((q_first + query).to(tl.int64) * HEADS + head)[:, None] * DIM + dim[None, :]
    mask = valid[:, None] & (dim < DIM)[None, :]
    rows = tl.load(q + where, mask=mask, other=0.0)
    if WIDE:
        rows = rows.to(tl.float32)
    high = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weight = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    end = before + tl.minimum(local + BLOCK_Q, q_count)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(before + local + 1 - WINDOW, 0)
    for n in range(lowest // PAGE * PAGE, end, BLOCK_N):
        high, total, weight = _tile(
            tables + sequence * table_stride, keys, values, rows, scale, high, total, weight, n, end, lowest,
            before + query, kv_head, KV_HEADS, DIM, DIM_PAD, PAGE, BLOCK_N, WINDOW, WIDE, EIGHT,
        )  # fmt: skip
    found = weight / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + where, found.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _singles(q, keys, values, tables, kv_lens, cu_q, out, parts, peaks, scale, table_stride,
             HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
             PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
             WINDOW: tl.constexpr, WIDE: tl.constexpr, EIGHT: tl.constexpr):  # fmt: skip
    """Sequences of one query: split program_id(2) of its keys. With one split the result is final; else parts
    [sequences, heads, SPLITS, dim] and the base-two logarithms of their weights, peaks [sequences, heads, SPLITS]."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    q_row = tl.load(cu_q + sequence)
    if tl.load(cu_q + sequence + 1) - q_row != 1:
        return
    kv_len = tl.load(kv_lens + sequence)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(kv_len - WINDOW, 0)
    # Whole tiles for each split, so that only the last one of a sequence is cut.
    span = tl.cdiv(tl.cdiv(kv_len - lowest, SPLITS), BLOCK_N) * BLOCK_N
    begin = lowest + split * span
    end = tl.minimum(begin + span, kv_len)
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM_PAD)
    head = kv_head * GROUP + row
    mask = (row < GROUP)[:, None] & (dim < DIM)[None, :]
    rows = tl.load(q + (q_row.to(tl.int64) * HEADS + head)[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
    if WIDE:
        rows = rows.to(tl.float32)
    high = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weight = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    query_at = tl.zeros([BLOCK_M], tl.int32) + (kv_len - 1)
    for n in range(begin, end, BLOCK_N):
        high, total, weight = _tile(
            tables + sequence * table_stride, keys, values, rows, scale, high, total, weight, n, end, lowest,
            query_at, kv_head, KV_HEADS, DIM, DIM_PAD, PAGE, BLOCK_N, WINDOW, WIDE, EIGHT,
        )  # fmt: skip
    found = weight / tl.where(total > 0, total, 1.0)[:, None]
    if SPLITS == 1:
        where = (q_row.to(tl.int64) * HEADS + head)[:, None] * DIM + dim[None, :]
        tl.store(out + where, found.to(out.dtype.element_ty), mask=mask)
    else:
        place = (sequence.to(tl.int64) * HEADS + head) * SPLITS + split
        peak = tl.where(total > 0, high + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(peaks + place, peak, mask=row < GROUP)
        tl.store(parts + place[:, None] * DIM + dim[None, :], found, mask=mask & (total > 0)[:, None])


@triton.jit
def _merge(parts, peaks, cu_q, out, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
           SPLITS: tl.constexpr):  # fmt: skip
    """Put the parts of one query head together; a sequence without keys (padding) gives zeros."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    q_row = tl.load(cu_q + sequence)
    if tl.load(cu_q + sequence + 1) - q_row != 1:
        return
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, DIM_PAD)
    place = (sequence.to(tl.int64) * HEADS + head) * SPLITS + split
    peak = tl.load(peaks + place)
    top = tl.max(peak, 0)
    share = tl.where(peak == float("-inf"), 0.0, tl.exp2(peak - tl.where(top == float("-inf"), 0.0, top)))
    # Parts of splits without keys were never written.
    mask = (share > 0)[:, None] & (dim < DIM)[None, :]
    part = tl.load(parts + place[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
    whole = tl.sum(share, 0)
    found = tl.sum(part * share[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    tl.store(out + (q_row.to(tl.int64) * HEADS + head) * DIM + dim, found.to(out.dtype.element_ty), mask=dim < DIM)


def splits_for(sequences: int, kv_heads: int, processors: int) -> int:
    """Programs that share one query's keys, a power of two: enough in all to give each multiprocessor two."""
    wanted = -(-2 * processors // max(1, sequences * kv_heads))
    return min(MAX_SPLITS, pow2(wanted))


def keys_at_once(dim: int, dtype: torch.dtype) -> int:
    """Keys of a tile: such that two tiles of keys, two of values and the queries fit a multiprocessor's memory."""
    width = pow2(dim) * dtype.itemsize
    return 64 if width <= 256 else 32 if width <= 512 else 16


def queries_at_once(dim: int, dtype: torch.dtype) -> int:
    """Rows of a chunk's tile: as many as keep their sums in registers."""
    if dtype == torch.float32:
        return 32 if pow2(dim) <= 128 else 16
    return 128


def attention(
    q: Tensor, step: StepTensors, cache: Tensor, shape: HeadShape, scale: float, window: int, splits: int = 0
) -> Tensor:
    """As `Ops.attention`; cache [2, blocks, PAGE_SIZE, kv_heads, dim] of q's dtype or in e4m3. `splits` 0: as
    `splits_for` has it."""
    out = torch.empty_like(q)
    n, b = q.shape[0], step.kv_lens.shape[0]
    if not n:
        return out
    group, dim_pad = shape.heads // shape.kv_heads, max(16, pow2(shape.dim))
    block_n, wide = keys_at_once(shape.dim, q.dtype), widen_dots(q.dtype)
    common = {
        "HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "DIM": shape.dim, "DIM_PAD": dim_pad, "PAGE": PAGE_SIZE,
        "BLOCK_N": block_n, "WINDOW": window, "WIDE": wide,
        "EIGHT": cache.dtype == torch.float8_e4m3fn,
    }  # fmt: skip
    tables, stride = step.block_tables, step.block_tables.stride(0)
    if step.max_q > 1:
        block_m = max(pow2(group), queries_at_once(shape.dim, q.dtype))
        grid = (n // (block_m // group) + b, shape.kv_heads)
        _chunks[grid](
            q, cache[0], cache[1], tables, step.kv_lens, step.cu_q, out, scale * LOG2E, b, stride,
            BLOCK_M=block_m, BATCH_PAD=pow2(b), num_warps=8 if block_m * dim_pad > 8192 else 4, num_stages=2, **common,
        )  # fmt: skip
        if b == 1:
            return out
    splits = splits or splits_for(b, shape.kv_heads, multiprocessors(q.device))
    parts = peaks = out
    if splits > 1:
        parts = torch.empty(b, shape.heads, splits, shape.dim, dtype=torch.float32, device=q.device)
        peaks = torch.empty(b, shape.heads, splits, dtype=torch.float32, device=q.device)
    _singles[(b, shape.kv_heads, splits)](
        q, cache[0], cache[1], tables, step.kv_lens, step.cu_q, out, parts, peaks, scale * LOG2E, stride,
        BLOCK_M=max(16, pow2(group)), SPLITS=splits, num_warps=4, num_stages=3 if q.dtype != torch.float32 else 2,
        **common,
    )  # fmt: skip
    if splits > 1:
        _merge[(b, shape.heads)](
            parts, peaks, step.cu_q, out, HEADS=shape.heads, DIM=shape.dim, DIM_PAD=dim_pad, SPLITS=splits, num_warps=2
        )
    return out
