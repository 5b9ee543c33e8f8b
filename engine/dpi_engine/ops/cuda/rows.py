"""Kernels over rows of activations: root mean square norm, the same after an addition, SiLU times up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpi_engine.ops.cuda.runtime import pow2, warps_for

SILU_BLOCK = 1024


@triton.jit
def _rms_norm(x, delta, weight, out, stride, delta_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
              ADD: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    value = tl.load(x + row * stride + at, mask=inside, other=0.0)
    if ADD:
        added = value.to(tl.float32) + tl.load(delta + row * delta_stride + at, mask=inside, other=0.0).to(tl.float32)
        # The residual is kept rounded, and its norm is that of what is kept.
        value = added.to(x.dtype.element_ty)
        tl.store(x + row * stride + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    scaled = wide * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + at, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul(x, out, INNER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < INNER
    gate = tl.load(x + row * 2 * INNER + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * INNER + INNER + at, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row * INNER + at, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [n, width], rows contiguous -> [n, width] of the same dtype, computed in float32."""
    return _norm(x, None, weight, eps)


def add_rms_norm(residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += delta in place (both [n, width]), then the norm of residual."""
    return _norm(residual, delta, weight, eps)


def _norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    n, width = x.shape
    out = torch.empty(n, width, dtype=x.dtype, device=x.device)
    if n:
        block = pow2(width)
        other = x if delta is None else delta
        _rms_norm[(n,)](
            x, other, weight, out, x.stride(0), other.stride(0), eps,
            WIDTH=width, BLOCK=block, ADD=delta is not None, num_warps=warps_for(width),
        )  # fmt: skip
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [n, 2 inner] contiguous -> silu(gate) * up [n, inner]."""
    n, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(n, inner, dtype=gate_up.dtype, device=gate_up.device)
    if n:
        block = min(SILU_BLOCK, pow2(inner))
        grid = (n, triton.cdiv(inner, block))
        _silu_mul[grid](gate_up, out, INNER=inner, BLOCK=block, num_warps=4)
    return out
