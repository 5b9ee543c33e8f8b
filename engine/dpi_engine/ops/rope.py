"""Rotary position tables: plain, linear, llama3 and yarn scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dpi_engine.config.errors import ConfigError
from dpi_engine.config.rope import LinearRope, Llama3Rope, RopeScaling, YarnRope
from dpi_engine.ops.interface import RopeTable


class RopeError(ConfigError):
    """Rotary parameters that describe no table; the text names the field."""


def _llama3(inv_freq: Tensor, scaling: Llama3Rope) -> Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if high <= low:
        raise RopeError(f"rope scaling llama3: high_freq_factor {high} must exceed low_freq_factor {low}")
    # How many whole turns a frequency makes over the trained length: many -> keep, few -> stretch, between -> blend.
    turns = scaling.original_max_position * inv_freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * inv_freq + (1 - keep) * inv_freq / scaling.factor


def _yarn(inv_freq: Tensor, scaling: YarnRope, theta: float) -> Tensor:
    half = inv_freq.shape[0]

    def index_of(turns: float) -> float:
        """The (real) index of the frequency that makes `turns` whole turns over the trained length."""
        return half * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / math.log(theta)

    first, last = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    span = last - first if last != first else 0.001
    stretch = ((torch.arange(half, dtype=torch.float32) - first) / span).clamp(0.0, 1.0)
    return stretch * inv_freq / scaling.factor + (1 - stretch) * inv_freq


def _yarn_attention(scaling: YarnRope) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)


def inverse_frequencies(dim: int, theta: float, scaling: RopeScaling | None = None) -> tuple[Tensor, float]:
    """Radians per position of each rotated pair ([dim / 2] float32), and the factor on cos and sin.

    Raises RopeError.
    """
    if dim % 2 or dim <= 0:
        raise RopeError(f"the rotated width must be even and above 0, got {dim}")
    if theta <= 0 or (isinstance(scaling, YarnRope) and theta == 1):
        raise RopeError(f"rope_theta must be above 0 (and not 1 for yarn), got {theta}")
    inv_freq = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    match scaling:
        case None:
            return inv_freq, 1.0
        case LinearRope():
            return inv_freq / scaling.factor, 1.0
        case Llama3Rope():
            return _llama3(inv_freq, scaling), 1.0
        case YarnRope():
            return _yarn(inv_freq, scaling, theta), _yarn_attention(scaling)
    raise RopeError(f"rope scaling {type(scaling).__name__} has no table")


def rope_table(
    positions: int,
    dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
    device: torch.device | str = "cpu",
) -> RopeTable:
    """cos and sin [positions, dim / 2] float32 on `device`, for positions 0 .. positions - 1. Raises RopeError."""
    inv_freq, attention = inverse_frequencies(dim, theta, scaling)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inv_freq)
    return RopeTable(cos=(angles.cos() * attention).to(device), sin=(angles.sin() * attention).to(device))
