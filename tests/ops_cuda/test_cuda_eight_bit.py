"""Weights and caches of eight bits: the kernels against the reference, which rounds the same numbers in torch."""

from __future__ import annotations

import pytest
import torch
from cuda_support import DEVICE, DTYPES, build_step, close, moved, random
from torch import Tensor

from dpi_engine.ops import OpsUnavailable, TorchOps
from dpi_engine.ops.cuda import CudaOps, attention, linear
from dpi_engine.ops.cuda.backend import check_e4m3
from dpi_engine.ops.eight_bit import EightBitTorchOps
from dpi_engine.ops.interface import PAGE_SIZE, HeadShape, RopeTable
from dpi_engine.ops.rope import rope_table

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 48, 40), (3, 200, 130), (17, 128, 64), (40, 300, 17)])
def test_linears(rows: int, inputs: int, outputs: int, bias: bool, quantization: str, dtype: torch.dtype) -> None:
    ops, reference = CudaOps(DEVICE, dtype, quantization), EightBitTorchOps("cpu", torch.float32, quantization)
    weight, x = random(outputs, inputs, seed=1).cpu() / inputs**0.5, random(rows, inputs, seed=2, dtype=dtype)
    extra = random(outputs, seed=3).to(dtype).cpu() if bias else None
    got = ops.linear(x, ops.pack_linear(weight, extra))
    want = reference.linear(x.cpu().float(), reference.pack_linear(weight, None if extra is None else extra.float()))
    assert got.dtype == dtype
    close(got, want, dtype)


def test_a_linear_of_no_rows() -> None:
    ops = CudaOps(DEVICE, torch.bfloat16, "fp8")
    assert ops.linear(
        torch.empty(0, 32, dtype=torch.bfloat16, device=DEVICE), ops.pack_linear(torch.ones(8, 32))
    ).shape == (0, 8)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_outputs_of_zeros_and_of_what_is_not_finite(quantization: str) -> None:
    ops = CudaOps(DEVICE, torch.float32, quantization)
    weight = random(6, 32, seed=1).cpu()
    weight[1], weight[2, 3], weight[4, 0] = 0.0, float("nan"), float("inf")
    got = ops.linear(torch.ones(2, 32, device=DEVICE), ops.pack_linear(weight)).cpu()
    assert (got[:, 1] == 0).all()
    assert got[:, [2, 4]].isnan().all() and got[:, [0, 1, 3, 5]].isfinite().all()


def test_what_packed_linears_save_is_counted() -> None:
    ops = CudaOps(DEVICE, torch.bfloat16, "int8")
    ops.pack_linear(torch.ones(10, 64))
    assert ops.bytes_saved == 640 - 40


def test_wide_programs_only_where_there_is_work_for_all() -> None:
    assert linear.outputs_at_once(1, 128256, 132) == 128
    assert linear.outputs_at_once(1, 4096, 132) == 16
    assert linear.outputs_at_once(1, 14336, 132) == 32
    assert linear.outputs_at_once(16, 4096, 132) == 128


def caches(shape: HeadShape, blocks: int) -> tuple[TorchOps, CudaOps, Tensor, Tensor]:
    reference = TorchOps("cpu", torch.float32, E4M3)
    ops = CudaOps(DEVICE, torch.float32, kv_dtype=E4M3)
    return reference, ops, reference.new_cache(blocks, shape), ops.new_cache(blocks, shape)


def test_a_cache_is_written_with_the_bits_that_torch_rounds_to() -> None:
    """Numbers of every size: too large ones, ties, those below the smallest normal, zeros. Not-a-number is left out:
    the interpreter's cast makes 384 of it, where a GPU's keeps it."""
    shape = HeadShape(2, 2, 64)
    step, blocks = build_step([(40, 40)])
    reference, ops, want, got = caches(shape, blocks)
    qkv = random(40, 6 * 64, seed=3).cpu()
    qkv *= torch.logspace(-5, 3, 40).unsqueeze(1)
    # Values are not rotated, so that these reach the cast as they are: all between two numbers of e4m3, and both.
    every = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    grid = every[every.isfinite()].sort().values
    exact = torch.cat([grid, (grid[1:] + grid[:-1]) / 2, torch.tensor([1e5, -1e5, 449.0, 464.0, -465.0, 1e-30])])
    values = qkv[:, 4 * 64 :].clone().view(-1)
    values[: exact.numel()] = exact
    qkv[:, 4 * 64 :] = values.view(40, -1)
    rope = RopeTable(torch.ones(64, 32), torch.zeros(64, 32))
    reference.rope_write(qkv, moved(step, "cpu"), rope, want, shape)
    ops.rope_write(qkv.to(DEVICE), step, RopeTable(rope.cos.to(DEVICE), rope.sin.to(DEVICE)), got, shape)
    slots = step.slots.cpu()
    for part in (0, 1):
        a = got.cpu()[part].view(torch.uint8).view(-1, 2, 64)[slots]
        b = want[part].view(torch.uint8).view(-1, 2, 64)[slots]
        assert torch.equal(a.view(E4M3).float(), b.view(E4M3).float())
    assert got.dtype == E4M3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [0, 20])
def test_attention_over_a_cache_of_eight_bits(window: int, splits: int, dtype: torch.dtype) -> None:
    shape = HeadShape(6, 2, 64)
    step, blocks = build_step([(1, 30), (9, 25), (1, 1), (16, 16), (5, 100)])
    cache = random(2, blocks, PAGE_SIZE, 2, 64, seed=1).clamp(-448, 448).to(E4M3)
    q = random(step.ids.shape[0], 6 * 64, seed=2, dtype=dtype)
    got = attention.attention(q, step, cache, shape, 0.125, window, splits)
    want = TorchOps("cpu", torch.float32, E4M3).attention(
        q.cpu().float(), moved(step, "cpu"), cache.cpu(), shape, 0.125, window
    )
    assert got.dtype == dtype
    close(got, want, dtype)


@pytest.mark.parametrize("norms", [False, True])
def test_a_layer_of_both(norms: bool) -> None:
    """Write, then attend, on the device and on the reference."""
    shape = HeadShape(4, 2, 64)
    step, blocks = build_step([(20, 20), (1, 1), (7, 7)])
    reference, ops, want_cache, got_cache = caches(shape, blocks)
    rope = rope_table(128, 64, 1e4, None, torch.device("cpu"))
    there = RopeTable(rope.cos.to(DEVICE), rope.sin.to(DEVICE))
    qkv = random(28, 8 * 64, seed=5)
    weights = [random(64, seed=7).abs(), random(64, seed=8).abs()] if norms else [None, None]
    q = ops.rope_write(qkv, step, there, got_cache, shape, *weights)
    got = ops.attention(q, step, got_cache, shape, 0.125)
    here = moved(step, "cpu")
    q = reference.rope_write(
        qkv.cpu(), here, rope, want_cache, shape, *(None if w is None else w.cpu() for w in weights)
    )
    # A number that lies on the edge between two of e4m3 may fall to either side.
    want = reference.attention(q, here, want_cache, shape, 0.125)
    assert float((got.cpu() - want).abs().max()) < 0.03
    assert float((got.cpu() - want).abs().mean()) < 1e-4


def test_a_block_of_eight_bits_is_half_a_block_of_sixteen() -> None:
    shape = HeadShape(4, 2, 64)
    small = CudaOps(DEVICE, torch.bfloat16, kv_dtype=E4M3)
    assert small.cache_bytes_per_block(shape) * 2 == CudaOps(DEVICE, torch.bfloat16).cache_bytes_per_block(shape)


def test_devices_without_e4m3_are_refused_by_flag() -> None:
    check_e4m3("cuda:0", (8, 9), "fp8", E4M3)
    check_e4m3("cuda:0", (8, 0), "int8", torch.bfloat16)
    with pytest.raises(OpsUnavailable, match=r"--quantization fp8: e4m3 needs .* 8.9 .*has 8.0.*int8 works there"):
        check_e4m3("cuda:0", (8, 0), "fp8", torch.bfloat16)
    with pytest.raises(OpsUnavailable, match="--quantization fp8 and --kv-cache-dtype fp8"):
        check_e4m3("cuda:0", (8, 6), "fp8", E4M3)


def test_a_quantization_that_is_not_known_is_refused() -> None:
    with pytest.raises(OpsUnavailable, match="'awq' is not one of int8, fp8"):
        CudaOps(DEVICE, torch.bfloat16, "awq")
