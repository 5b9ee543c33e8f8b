"""Weights and caches of eight bits in the reference, and which backend is chosen for them."""

from __future__ import annotations

import pytest
import torch

from dpi_engine.ops import OpsUnavailable, TorchOps, select_ops
from dpi_engine.ops.eight_bit import FORMATS, EightBitTorchOps, eight_bit_weight
from dpi_engine.ops.interface import LatentShape
from dpi_engine.ops.torch_int8 import Int8TorchOps

E4M3 = torch.float8_e4m3fn


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("quantization", "step"), [("int8", 1 / 254), ("fp8", 1 / 16)])
def test_no_weight_is_farther_off_than_half_a_step(quantization: str, step: float) -> None:
    """int8: half of a 127th of the output's largest weight; e4m3: a 16th of the weight itself, or of the smallest
    normal number for what is below."""
    weight = random(20, 300) * torch.logspace(-3, 3, 20).unsqueeze(1)
    numbers, scale = eight_bit_weight(weight, quantization)
    assert numbers.dtype == FORMATS[quantization]
    off = (numbers.float() * scale.unsqueeze(1) - weight).abs()
    most = weight.abs().amax(1, keepdim=True)
    bound = most * step if quantization == "int8" else torch.maximum(weight.abs(), most * 2**-6 / 448) * step
    assert (off <= bound * 1.0001).all()
    assert torch.equal((numbers.float().abs().amax(1) * scale).round(decimals=4), most.flatten().round(decimals=4))


@pytest.mark.parametrize("quantization", FORMATS)
def test_outputs_without_a_usable_weight(quantization: str) -> None:
    weight = torch.zeros(3, 8)
    weight[1, 2], weight[2, 2] = float("nan"), float("-inf")
    ops = EightBitTorchOps("cpu", torch.float32, quantization)
    out = ops.linear(torch.ones(1, 8), ops.pack_linear(weight))[0]
    assert out[0] == 0 and out[1:].isnan().all()


@pytest.mark.parametrize("quantization", FORMATS)
def test_linears_are_near_those_of_16_bits_and_smaller(quantization: str) -> None:
    ops, plain = EightBitTorchOps("cpu", torch.bfloat16, quantization), TorchOps("cpu", torch.bfloat16)
    weight, bias, x = random(64, 256) / 16, random(64, seed=1), random(5, 256, seed=2).bfloat16()
    got = ops.linear(x, ops.pack_linear(weight, bias)).float()
    want = plain.linear(x, plain.pack_linear(weight, bias)).float()
    error = (got - want).square().mean().sqrt() / want.square().mean().sqrt()
    assert 0 < error < (0.01 if quantization == "int8" else 0.03)
    assert ops.bytes_saved == 64 * 256 - 64 * 4


def test_backends_that_are_chosen() -> None:
    chosen = select_ops("cpu", "bfloat16", "torch", quantization="int8")
    assert isinstance(chosen, Int8TorchOps)  # as the kernels for CPUs have it
    fp8 = select_ops("cpu", "bfloat16", "torch", quantization="fp8", kv_cache="fp8")
    assert isinstance(fp8, EightBitTorchOps) and fp8.quantization == "fp8" and fp8.kv_dtype == E4M3
    plain = select_ops("cpu", "bfloat16", "torch", kv_cache="fp8")
    assert type(plain) is TorchOps and plain.kv_dtype == E4M3


@pytest.mark.parametrize("name", ["auto", "cpu"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"quantization": "fp8"}, "--quantization fp8: "),
        ({"kv_cache": "fp8"}, "--kv-cache-dtype fp8: "),
        ({"quantization": "int8", "kv_cache": "fp8"}, "--quantization int8 and --kv-cache-dtype fp8: "),
    ],
)
def test_cpu_kernels_refuse_what_they_do_not_have(name: str, arguments: dict[str, str], words: str) -> None:
    with pytest.raises(OpsUnavailable, match=f"^{words}.*int8 linears alone; --ops torch"):
        select_ops("cpu", "bfloat16", name, **arguments)  # type: ignore[arg-type]


def test_kinds_that_are_not_known() -> None:
    with pytest.raises(ValueError, match="expected int8, fp8 or none, got 'awq'"):
        select_ops("cpu", None, "torch", quantization="awq")
    with pytest.raises(ValueError, match="KV cache: expected auto or fp8, got 'fp4'"):
        select_ops("cpu", None, "torch", kv_cache="fp4")


def test_latents_are_not_kept_in_eight_bits() -> None:
    with pytest.raises(OpsUnavailable, match="leave --kv-cache-dtype out"):
        TorchOps("cpu", torch.float32, E4M3).new_latent_cache(4, LatentShape(2, 32, 16))
