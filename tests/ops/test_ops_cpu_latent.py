"""Latent attention of the C kernels against plain torch expressions, on every instruction set there is here."""

from __future__ import annotations

import pytest
import torch
from ops_cpu_support import KINDS, attend, close, kind_name, make_step, norm, ops_for, prefix_of, rope_table, rotate
from torch import Tensor

from dpi_engine.ops.interface import PAGE_SIZE, LatentShape, Ops, OpsUnavailable
from dpi_engine.ops.torch_ref import TorchOps

BLOCKS = 96
BACKENDS = [*KINDS, ("torch", torch.float32), ("torch", torch.bfloat16)]
CHUNKS = [(37, 1), (0, 21), (16, 5), (130, 1), (300, 2)]


def backend(isa: str, dtype: torch.dtype) -> Ops:
    return TorchOps("cpu", dtype) if isa == "torch" else ops_for(isa, dtype)


def inputs(n: int, shape: LatentShape, plain: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def made(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    absorbed = made(shape.heads, n, shape.rank) / shape.rank**0.25
    return made(n, shape.heads * (plain + shape.rope)), absorbed.to(dtype), made(n, shape.dim)


def check(
    isa: str, dtype: torch.dtype, shape: LatentShape, chunks: list[tuple[int, int]], poison: bool = False
) -> None:
    ops, plain = backend(isa, dtype), 6
    step, rope = make_step(chunks, BLOCKS, seed=len(chunks)), rope_table(shape.rope)
    weight = 1 + 0.2 * torch.randn(shape.rank, generator=torch.Generator().manual_seed(8))
    cache = ops.new_latent_cache(BLOCKS, shape)
    if poison:
        (cache if isinstance(cache, Tensor) else cache.pages).fill_(float("nan"))
    before = prefix_of(step, chunks)
    earlier = None
    if before is not None:
        earlier = inputs(before.slots.shape[0], shape, plain, ops.dtype, seed=1)
        ops.latent_write(*earlier, before, rope, cache, shape, weight, 1e-6)
    q, absorbed, latent = inputs(step.slots.shape[0], shape, plain, ops.dtype, seed=2)
    kept = q.clone(), absorbed.clone(), latent.clone()
    queries = ops.latent_write(q, absorbed, latent, step, rope, cache, shape, weight, 1e-6)
    scale = (plain + shape.rope) ** -0.5
    got = ops.latent_attention(queries, step, cache, shape, scale)
    assert all(torch.equal(a, b) for a, b in zip(kept, (q, absorbed, latent), strict=True))
    assert queries.dtype == got.dtype == ops.dtype

    n = q.shape[0]
    turned = rotate(q.view(n, shape.heads, -1)[..., plain:], rope, step.positions)
    want = torch.cat((absorbed.float().transpose(0, 1), turned), -1)
    rounding = dtype if ops.dtype is torch.bfloat16 else torch.float32
    close(queries.view_as(want), want, rounding)

    def keys(x: Tensor, positions: Tensor) -> Tensor:
        x = x.float()
        part = rotate(x[:, None, shape.rank :], rope, positions)
        return torch.cat((norm(x[:, None, : shape.rank], weight, 1e-6), part), -1)

    new, at = keys(latent, step.positions), 0
    for i, (old, m) in enumerate(chunks):
        rows = slice(int(step.cu_q[i]), int(step.cu_q[i + 1]))
        k = new[rows]
        if old:
            assert before is not None and earlier is not None
            k = torch.cat((keys(earlier[2][at : at + old], before.positions[at : at + old]), k))
            at += old
        ours = queries[rows].float().view(m, shape.heads, shape.dim)
        answer = attend(ours, k, k[..., : shape.rank], scale, 0)
        close(got[rows].view_as(answer), answer, dtype, bf16=0.05)


@pytest.mark.parametrize(("isa", "dtype"), BACKENDS, ids=kind_name)
@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (64, 16), (48, 16), (100, 10), (2, 2), (34, 128)])
def test_every_width(isa, dtype, rank, rope):
    check(isa, dtype, LatentShape(5, rank, rope), CHUNKS)


@pytest.mark.parametrize(("isa", "dtype"), BACKENDS, ids=kind_name)
@pytest.mark.parametrize("heads", [1, 3, 8, 16, 20])
def test_every_number_of_heads(isa, dtype, heads):
    check(isa, dtype, LatentShape(heads, 32, 8), CHUNKS)


@pytest.mark.parametrize(("isa", "dtype"), KINDS, ids=kind_name)
def test_what_an_earlier_owner_left_does_not_matter(isa, dtype):
    """Pages hold not-a-number from before everywhere but where the step writes, the padding included."""
    check(isa, dtype, LatentShape(4, 32, 8), [(0, 21), (16, 5), (31, 1)], poison=True)


@pytest.mark.parametrize(("isa", "dtype"), KINDS, ids=kind_name)
def test_bad_arguments_are_named(isa, dtype):
    ops, shape = ops_for(isa, dtype), LatentShape(2, 32, 8)
    cache, step = ops.new_latent_cache(BLOCKS, shape), make_step([(0, 5)], BLOCKS)
    q, absorbed, latent = inputs(5, shape, 4, ops.dtype, 1)
    weight = torch.ones(32)
    rest = (step, rope_table(8), cache, shape, weight, 1e-6)
    with pytest.raises(TypeError, match="absorbed: expected"):
        ops.latent_write(q, absorbed.transpose(0, 1).contiguous(), latent, *rest)
    with pytest.raises(TypeError, match=r"\[n, 40\]"):
        ops.latent_write(q, absorbed, latent[:, :32].contiguous(), *rest)
    with pytest.raises(TypeError, match="more than the 8 rotated elements, got 8"):
        ops.latent_write(q[:, :16].contiguous(), absorbed, latent, *rest)
    with pytest.raises(TypeError, match=r"rope.cos: expected .* \[600, 4\]"):
        ops.latent_write(q, absorbed, latent, step, rope_table(16), cache, shape, weight, 1e-6)
    step.slots[3] = BLOCKS * PAGE_SIZE
    with pytest.raises(IndexError, match="slots"):
        ops.latent_write(q, absorbed, latent, *rest)
    step.slots[3] = 1
    step.positions[3] = 600
    with pytest.raises(IndexError, match="600 rows"):
        ops.latent_write(q, absorbed, latent, *rest)
    queries = torch.zeros(5, 80, dtype=ops.dtype)
    step.block_tables[0, 0] = BLOCKS
    with pytest.raises(IndexError, match="block_tables"):
        ops.latent_attention(queries, step, cache, shape, 0.1)
    with pytest.raises(ValueError, match="scale"):
        ops.latent_attention(queries, step, cache, shape, 0.0)


@pytest.mark.parametrize(("isa", "dtype"), KINDS, ids=kind_name)
def test_widths_beyond_the_kernels_are_refused_by_name(isa, dtype):
    ops = ops_for(isa, dtype)
    for shape, word in (
        (LatentShape(4, 514, 64), "latent: .*up to 512, got 514"),
        (LatentShape(4, 33, 64), "latent: .*even.*got 33"),
        (LatentShape(4, 512, 130), "rotated part.*up to 128, got 130"),
        (LatentShape(0, 512, 64), "heads: expected at least 1, got 0"),
    ):
        with pytest.raises(OpsUnavailable, match=word):
            ops.new_latent_cache(4, shape)


@pytest.mark.parametrize(("isa", "dtype"), BACKENDS, ids=kind_name)
def test_the_size_of_a_block_is_told(isa, dtype):
    ops = backend(isa, dtype)
    for shape in (LatentShape(4, 32, 8), LatentShape(128, 512, 64)):
        cache = ops.new_latent_cache(10, shape)
        held = cache if isinstance(cache, Tensor) else cache.pages
        assert held.nbytes == 10 * ops.latent_bytes_per_block(shape)
