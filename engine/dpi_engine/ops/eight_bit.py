"""Weights of linears in 8 bits beside activations of 16, and KV caches of 8 bits: what GPUs compute, in plain torch.

Each output of a linear has a scale of its own. Both forms of a weight go into bfloat16 without loss, so products are
those of 16 bits, added in float32; the scale comes last. `fp8` is e4m3 (Micikevicius et al., "FP8 formats for deep
learning", 2022) without infinities, whose largest number is 448.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpi_engine.ops.interface import OpsUnavailable
from dpi_engine.ops.torch_int8 import LEAST, quantized_weight
from dpi_engine.ops.torch_ref import TorchOps

FORMATS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Of weights, by the name that `--quantization` has for it."""

KV_FORMATS = {"auto": None, "fp8": torch.float8_e4m3fn}
"""Of KV caches, by the name that `--kv-cache-dtype` has for it; None is the type of activations."""

E4M3_LARGEST = 448.0


def eight_bit_weight(weight: Tensor, quantization: str) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> [out, in] in FORMATS[quantization], and what its numbers count, float32 [out].

    An output with a weight that is not finite counts in NaN.
    """
    if quantization == "int8":
        integers, scale = quantized_weight(weight)
        return integers.to(torch.int8), scale
    weight = weight.float()
    most = weight.abs().amax(1)
    usable = most.isfinite() & (most >= LEAST)
    limit = torch.where(usable, most, E4M3_LARGEST)
    numbers = torch.where(usable.unsqueeze(1), weight * (E4M3_LARGEST / limit).unsqueeze(1), 0.0)
    scale = torch.where(usable, limit / E4M3_LARGEST, torch.where(most.isfinite(), 0.0, torch.nan))
    return numbers.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn), scale


@dataclass(slots=True)
class EightBitLinear:
    """`weight` [out, in] of one of FORMATS, contiguous; `scale` [out] float32; `bias` [out] in the ops' dtype."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None


def pack_eight_bit(weight: Tensor, bias: Tensor | None, ops: TorchOps, quantization: str) -> EightBitLinear:
    """Quantized where the ops are. Counts in `ops.bytes_saved`."""
    numbers, scale = eight_bit_weight(ops.upload(weight), quantization)
    ops.bytes_saved += numbers.numel() * (ops.weight_dtype.itemsize - 1) - scale.numel() * scale.element_size()
    bias = None if bias is None else bias.to(device=ops.device, dtype=ops.dtype).contiguous()
    return EightBitLinear(numbers.contiguous(), scale, bias)


class EightBitTorchOps(TorchOps):
    """TorchOps whose linears have weights of 8 bits: what the kernels of ops/cuda/linear.py compute, on any device."""

    def __init__(
        self, device: torch.device | str, dtype: torch.dtype, quantization: str, kv_dtype: torch.dtype | None = None
    ) -> None:
        if quantization not in FORMATS:
            raise OpsUnavailable(f"quantization '{quantization}' is not one of {', '.join(FORMATS)}")
        super().__init__(device, dtype, kv_dtype)
        self.quantization = quantization

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> EightBitLinear:
        assert self.quantization is not None
        return pack_eight_bit(weight, bias, self, self.quantization)

    def linear(self, x: Tensor, packed: EightBitLinear) -> Tensor:
        y = (x.float() @ packed.weight.float().T) * packed.scale
        return (y if packed.bias is None else y + packed.bias.float()).to(self.dtype)
