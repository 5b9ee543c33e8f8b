"""Linears of `--quantization int8` in plain torch: what the kernels compute (native/linear_int8.c), on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpi_engine.ops.torch_ref import PackedLinear, TorchOps

LEAST = 2.0**-110
"""Nothing larger: a row, or the weights of an output, count as zero."""

APART = 4
"""Inputs of a row that may exceed 8 bits."""

MOST_STEEP = 64
"""By how much they may."""


def quantized_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> integers -127 .. 127 as float32 [out, in], and what they count, float32 [out].

    An output with a weight that is not finite counts in NaN.
    """
    weight = weight.float()
    return _steps(weight, weight.abs().amax(1), weight.abs().amax(1))


def quantized_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, in] -> integers as float32 [n, in], and what they count, float32 [n].

    At most APART integers of a row exceed 127, and none 127 MOST_STEEP. A row with a value that is not finite counts in
    NaN.
    """
    x = x.float()
    largest = x.abs().topk(min(APART + 1, x.shape[1]), dim=1).values
    most, limit = largest[:, 0], largest[:, 0] / MOST_STEEP
    if largest.shape[1] > APART:
        limit = torch.maximum(limit, largest[:, APART])
    return _steps(x, most, limit)


def _steps(x: Tensor, most: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """`limit` of each row in 127 steps; none of what `most` makes zero, or not a number."""
    usable = most.isfinite() & (most >= LEAST)
    limit = torch.where(usable, limit, 127.0)
    steps = torch.full_like(limit, 127.0) / limit
    integers = torch.where(usable.unsqueeze(1), (x * steps.unsqueeze(1)).round(), 0.0)
    scale = torch.where(usable, limit / 127.0, torch.where(most.isfinite(), 0.0, torch.nan))
    return integers, scale


@dataclass(slots=True, kw_only=True)
class Int8TorchLinear(PackedLinear):
    """`weight` [out, in] integers as float32, `scale` [out] what they count, `bias` [out] float32."""

    scale: Tensor


class Int8TorchOps(TorchOps):
    """TorchOps with linears of int8. Weights are kept as float32, so it saves nothing: it is there to compare with."""

    quantization = "int8"

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Int8TorchLinear:
        integers, scale = quantized_weight(weight)
        if bias is not None:
            bias = bias.to(self.dtype).float().to(self.device)
        return Int8TorchLinear(integers.to(self.device), bias, False, scale=scale.to(self.device))

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        assert isinstance(packed, Int8TorchLinear)
        integers, scale = quantized_rows(x)
        y = (integers @ packed.weight.T) * (scale.unsqueeze(1) * packed.scale)
        return (y if packed.bias is None else y + packed.bias).to(self.dtype)
