"""Norms, activation, rotation and cache write of the CUDA backend against the reference."""

from __future__ import annotations

import pytest
import torch
from cuda_support import DEVICE, DTYPES, F32, REFERENCE, build_step, close, moved, ops_of, random

from dpi_engine.ops.interface import PAGE_SIZE, HeadShape
from dpi_engine.ops.rope import rope_table


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (7, 96), (3, 576), (2, 5000)])
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[1], seed=1)
    close(ops_of(dtype).rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x.cpu().float(), weight.cpu(), 1e-5), dtype)


def test_rms_norm_of_rows_that_lie_apart() -> None:
    x, weight = random(5, 200)[:, 30:94], random(64, seed=1)
    close(F32.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x.cpu(), weight.cpu(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_changes_the_residual_in_place(dtype: torch.dtype) -> None:
    residual, delta, weight = random(9, 96, dtype=dtype), random(9, 96, seed=1, dtype=dtype), random(96, seed=2)
    summed = (residual.float() + delta.float()).to(dtype).cpu()
    got = ops_of(dtype).add_rms_norm(residual, delta, weight, 1e-5)
    if dtype == torch.bfloat16 and DEVICE == "cpu":  # the interpreter cuts where a GPU rounds
        close(residual, summed, dtype)
    else:
        assert torch.equal(residual.cpu(), summed)
    close(got, REFERENCE.rms_norm(summed.float(), weight.cpu(), 1e-5), dtype)


def test_norms_of_rows_too_wide_for_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpi_engine.ops.cuda.backend.MAX_ROW", 32)
    x, delta, weight = random(3, 48), random(3, 48, seed=1), random(48, seed=2)
    close(F32.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x.cpu(), weight.cpu(), 1e-5))
    want = REFERENCE.rms_norm((x + delta).cpu(), weight.cpu(), 1e-5)
    close(F32.add_rms_norm(x, delta, weight, 1e-5), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 32), (1, 2 * 40), (5, 2 * 1500)])
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = random(*shape, dtype=dtype)
    close(ops_of(dtype).silu_mul(x), REFERENCE.silu_mul(x.cpu().float()), dtype)


SHAPES = [(4, 2, 32), (14, 2, 64), (3, 3, 80), (9, 3, 96), (4, 1, 128), (2, 2, 256)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("norms", ["none", "both", "q", "k"])
def test_rope_write(norms: str, shape: tuple[int, int, int]) -> None:
    heads = HeadShape(*shape)
    step, blocks = build_step([(5, 21), (1, 40), (18, 18)])
    rope = rope_table(64, heads.dim, 10000.0)
    on_device = rope_table(64, heads.dim, 10000.0, device=DEVICE)
    qkv = random(step.ids.shape[0], (heads.heads + 2 * heads.kv_heads) * heads.dim, seed=3)
    q_norm = random(heads.dim, seed=4) if norms in ("both", "q") else None
    k_norm = random(heads.dim, seed=5) if norms in ("both", "k") else None
    cache, want_cache = F32.new_cache(blocks, heads), REFERENCE.new_cache(blocks, heads)
    got = F32.rope_write(qkv, step, on_device, cache, heads, q_norm, k_norm, 1e-6)
    want = REFERENCE.rope_write(
        qkv.cpu(), moved(step, "cpu"), rope, want_cache, heads,
        None if q_norm is None else q_norm.cpu(), None if k_norm is None else k_norm.cpu(), 1e-6,
    )  # fmt: skip
    close(got, want)
    close(cache, want_cache)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rope_write_rounds_as_the_reference_does(dtype: torch.dtype) -> None:
    heads = HeadShape(4, 2, 64)
    step, blocks = build_step([(3, 19), (1, 33)])
    rope, on_device = rope_table(64, 64, 10000.0), rope_table(64, 64, 10000.0, device=DEVICE)
    qkv, norm = random(4, 8 * 64, seed=3, dtype=dtype), random(64, seed=4)
    ops, cache, want_cache = ops_of(dtype), ops_of(dtype).new_cache(blocks, heads), REFERENCE.new_cache(blocks, heads)
    got = ops.rope_write(qkv, step, on_device, cache, heads, norm, norm, 1e-6)
    want = REFERENCE.rope_write(
        qkv.cpu().float(), moved(step, "cpu"), rope, want_cache, heads, norm.cpu(), norm.cpu(), 1e-6
    )
    close(got, want, dtype)
    close(cache, want_cache, dtype)
    values = cache[1].view(-1, 2, 64)[step.slots]
    assert torch.equal(values, qkv.view(4, 8, 64)[:, 6:])


def test_rope_write_of_no_tokens() -> None:
    heads = HeadShape(4, 2, 32)
    step, blocks = build_step([(1, 1)])
    step.positions, step.slots = step.positions[:0], step.slots[:0]
    cache = F32.new_cache(blocks, heads)
    out = F32.rope_write(random(0, 8 * 32), step, rope_table(8, 32, 1e4, device=DEVICE), cache, heads)
    assert out.shape == (0, 4 * 32) and not cache.any()


def test_slots_of_the_null_page_are_written_by_many_without_harm() -> None:
    heads = HeadShape(2, 1, 32)
    step, blocks = build_step([(1, 20), (1, 5), (1, 9)])
    step.slots[1:] = 0
    cache = F32.new_cache(blocks, heads)
    F32.rope_write(random(3, 4 * 32), step, rope_table(64, 32, 1e4, device=DEVICE), cache, heads)
    written = cache[0].view(-1, 32).abs().sum(-1).nonzero().flatten().tolist()
    assert written == sorted([0, int(step.slots[0])]) and int(step.slots[0]) >= PAGE_SIZE
