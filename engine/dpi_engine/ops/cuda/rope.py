"""One kernel for all that lies between the fused projection and attention: norms of heads, rotation, cache write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpi_engine.ops.cuda.runtime import pow2
from dpi_engine.ops.interface import HeadShape, RopeTable, StepTensors

HEADS_AT_ONCE = 8


@triton.jit
def to_e4m3(x, kind: tl.constexpr):
    """float32 x as kind (e4m3), rounded to nearest even here: then the cast, whose rounding differs between Triton's
    back ends, has nothing to round. What is too large becomes the largest, and not-a-number stays."""
    x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # three bits of the fraction stay
    # Below 2^-6 numbers are multiples of 2^-9, the unit in the last place of what is added.
    small = (x + 24576.0) - 24576.0
    return tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True)).to(kind)


@triton.jit
def _rope_write(
    qkv, positions, slots, cos, sin, q_weight, k_weight, q_out, keys, values, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, BLOCK: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK of the heads + 2 kv_heads rows of one token; a block may hold rows of all three kinds."""
    DIM: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.arange(0, HALF_PAD)
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    columns = (at < HALF)[None, :]
    there = (head < HEADS + 2 * KV_HEADS)[:, None] & columns
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head)[:, None] * DIM + at[None, :]
    kind = q_out.dtype.element_ty
    first = tl.load(source, mask=there, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=there, other=0.0).to(tl.float32)
    if Q_NORM or K_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        if Q_NORM:
            normed = is_q[:, None]
            low = tl.load(q_weight + at, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
            high = tl.load(q_weight + HALF + at, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
            first = tl.where(normed, (first * scale * low).to(kind).to(tl.float32), first)
            second = tl.where(normed, (second * scale * high).to(kind).to(tl.float32), second)
        if K_NORM:
            normed = is_k[:, None]
            low = tl.load(k_weight + at, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
            high = tl.load(k_weight + HALF + at, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
            first = tl.where(normed, (first * scale * low).to(kind).to(tl.float32), first)
            second = tl.where(normed, (second * scale * high).to(kind).to(tl.float32), second)
    position = tl.load(positions + token)
    c = tl.load(cos + position * HALF + at, mask=at < HALF, other=0.0)[None, :]
    s = tl.load(sin + position * HALF + at, mask=at < HALF, other=0.0)[None, :]
    turned = is_v[:, None]
    low_out = tl.where(turned, first, first * c - second * s).to(kind)
    high_out = tl.where(turned, second, second * c + first * s).to(kind)

    q_at = q_out + (token * HEADS + head)[:, None] * DIM + at[None, :]
    q_mask = is_q[:, None] & columns
    tl.store(q_at, low_out, mask=q_mask)
    tl.store(q_at + HALF, high_out, mask=q_mask)
    slot = tl.load(slots + token) * KV_HEADS
    k_at = keys + (slot + head - HEADS)[:, None] * DIM + at[None, :]
    k_mask = is_k[:, None] & columns
    if EIGHT:
        low_kept = to_e4m3(low_out.to(tl.float32), keys.dtype.element_ty)
        high_kept = to_e4m3(high_out.to(tl.float32), keys.dtype.element_ty)
    else:
        low_kept = low_out
        high_kept = high_out
    tl.store(k_at, low_kept, mask=k_mask)
    tl.store(k_at + HALF, high_kept, mask=k_mask)
    v_at = values + (slot + head - HEADS - KV_HEADS)[:, None] * DIM + at[None, :]
    v_mask = is_v[:, None] & columns
    tl.store(v_at, low_kept, mask=v_mask)
    tl.store(v_at + HALF, high_kept, mask=v_mask)


def rope_write(
    qkv: Tensor,
    step: StepTensors,
    rope: RopeTable,
    cache: Tensor,
    shape: HeadShape,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """As `Ops.rope_write`; cache [2, blocks, PAGE_SIZE, kv_heads, dim] of the dtype of qkv or in e4m3, contiguous."""
    n, total = qkv.shape[0], shape.heads + 2 * shape.kv_heads
    q = torch.empty(n, shape.heads * shape.dim, dtype=qkv.dtype, device=qkv.device)
    if n:
        block = min(HEADS_AT_ONCE, pow2(total))
        _rope_write[(n, triton.cdiv(total, block))](
            qkv, step.positions, step.slots, rope.cos, rope.sin,
            rope.cos if q_norm is None else q_norm, rope.cos if k_norm is None else k_norm,
            q, cache[0], cache[1], eps,
            HEADS=shape.heads, KV_HEADS=shape.kv_heads, HALF=shape.dim // 2, HALF_PAD=pow2(shape.dim // 2),
            BLOCK=block, Q_NORM=q_norm is not None, K_NORM=k_norm is not None, EIGHT=cache.dtype == torch.float8_e4m3fn,
            num_warps=2,
        )  # fmt: skip
    return q
