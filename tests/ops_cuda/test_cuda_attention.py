"""Paged attention of the CUDA backend against the reference: chunks, single queries, both; windows, splits, garbage."""

from __future__ import annotations

import pytest
import torch
from cuda_support import DTYPES, F32, REFERENCE, build_step, close, moved, ops_of, random

from dpi_engine.ops import OpsUnavailable
from dpi_engine.ops.cuda import attention
from dpi_engine.ops.interface import PAGE_SIZE, HeadShape

STEPS = {
    "decodes": [(1, 1), (1, 16), (1, 17), (1, 50), (1, 150)],
    "one decode": [(1, 133)],
    "prompts": [(20, 20), (16, 16), (1, 1), (77, 77)],
    "chunk of one prompt": [(7, 140)],
    "mixed": [(1, 30), (9, 25), (1, 1), (16, 16), (5, 164), (1, 80)],
}


def check(
    pieces: list[tuple[int, int]], shape: HeadShape, dtype: torch.dtype, window: int = 0, splits: int = 0
) -> None:
    step, blocks = build_step(pieces)
    cache = random(2, blocks, PAGE_SIZE, shape.kv_heads, shape.dim, seed=1, dtype=dtype)
    q = random(step.ids.shape[0], shape.heads * shape.dim, seed=2, dtype=dtype)
    scale = shape.dim**-0.5
    got = attention.attention(q, step, cache, shape, scale, window, splits)
    want = REFERENCE.attention(q.cpu().float(), moved(step, "cpu"), cache.cpu().float(), shape, scale, window)
    assert got.dtype == dtype
    close(got, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 16, 40])
@pytest.mark.parametrize("pieces", STEPS.values(), ids=STEPS)
def test_attention(pieces: list[tuple[int, int]], window: int, dtype: torch.dtype) -> None:
    check(pieces, HeadShape(6, 2, 64), dtype, window)


@pytest.mark.parametrize("splits", [1, 2, 4, 32])
@pytest.mark.parametrize("window", [0, 70])
def test_single_queries_split_over_programs(window: int, splits: int) -> None:
    check([(1, 1), (1, 64), (1, 65), (1, 300), (3, 90)], HeadShape(4, 2, 64), torch.float32, window, splits)


@pytest.mark.parametrize(
    "shape", [(3, 3, 80), (4, 1, 96), (8, 4, 128), (2, 2, 256), (9, 3, 64), (14, 2, 64), (20, 1, 64), (2, 1, 192)]
)
def test_every_head_shape(shape: tuple[int, int, int]) -> None:
    for pieces in (STEPS["decodes"], STEPS["mixed"]):
        check(pieces, HeadShape(*shape), torch.float32)
        check(pieces, HeadShape(*shape), torch.float16)


def test_more_queries_than_a_tile() -> None:
    check([(150, 150), (1, 9), (40, 70)], HeadShape(4, 2, 64), torch.float32)


def test_what_earlier_owners_left_in_pages_is_not_seen() -> None:
    shape = HeadShape(4, 2, 64)
    step, blocks = build_step([(1, 20), (3, 37), (1, 1)])
    cache = random(2, blocks, PAGE_SIZE, 2, 64, seed=1)
    clean = cache.clone()
    used = torch.zeros(blocks * PAGE_SIZE, dtype=torch.bool)
    for table, kv in zip(step.block_tables.tolist(), step.kv_lens.tolist(), strict=True):
        for at in range(kv):
            used[table[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE] = True
    cache.view(2, -1, 2, 64)[:, ~used.to(cache.device)] = float("nan")
    q = random(5, 4 * 64, seed=2)
    for splits in (1, 4):
        got = attention.attention(q, step, cache, shape, 0.125, 0, splits)
        assert torch.equal(got, attention.attention(q, step, clean, shape, 0.125, 0, splits))
        assert got.isfinite().all()


@pytest.mark.parametrize("splits", [1, 4])
def test_padding_rows_give_zeros_and_change_nothing(splits: int) -> None:
    shape = HeadShape(2, 1, 64)
    step, blocks = build_step([(1, 20), (1, 5)])
    cache, q = random(2, blocks, PAGE_SIZE, 1, 64), random(4, 128)
    alone = attention.attention(q[:2], step, cache, shape, 0.2, 0, splits)
    width = step.block_tables.shape[1]
    step.block_tables = torch.cat([step.block_tables, step.block_tables.new_zeros(2, width)])
    step.kv_lens = torch.cat([step.kv_lens, step.kv_lens.new_zeros(2)])
    step.cu_q = torch.arange(5, dtype=torch.int32, device=q.device)
    padded = attention.attention(q, step, cache, shape, 0.2, 0, splits)
    assert torch.equal(padded[:2], alone)
    assert not padded[2:].any()


def test_a_sequence_without_queries_is_left_alone() -> None:
    shape = HeadShape(4, 2, 64)
    step, blocks = build_step([(5, 21), (0, 12), (1, 30), (2, 2)])
    cache, q = random(2, blocks, PAGE_SIZE, 2, 64, seed=1), random(8, 256, seed=2)
    got = attention.attention(q, step, cache, shape, 0.125, 0)
    close(got, REFERENCE.attention(q.cpu(), moved(step, "cpu"), cache.cpu(), shape, 0.125))


def test_no_queries() -> None:
    step, blocks = build_step([(1, 1)])
    cache = random(2, blocks, PAGE_SIZE, 1, 64)
    assert F32.attention(random(0, 64), step, cache, HeadShape(1, 1, 64), 1.0).shape == (0, 64)


def test_a_head_too_wide_is_refused_by_name() -> None:
    with pytest.raises(OpsUnavailable, match=r"up to 256, the model has 512: use --ops torch"):
        F32.new_cache(2, HeadShape(1, 1, 512))


@pytest.mark.parametrize(
    ("sequences", "kv_heads", "processors", "splits"),
    [
        (1, 8, 132, 32),
        (8, 8, 132, 8),
        (64, 8, 132, 1),
        (256, 8, 132, 1),
        (1, 1, 4, 8),
        (33, 8, 132, 1),
        (16, 8, 132, 4),
    ],
)
def test_splits_fill_the_gpu_and_no_more(sequences: int, kv_heads: int, processors: int, splits: int) -> None:
    assert attention.splits_for(sequences, kv_heads, processors) == splits
    assert splits <= attention.MAX_SPLITS


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_at_once_fit_shared_memory(dtype: torch.dtype) -> None:
    for dim in (64, 80, 96, 128, 192, 256):
        stages, keys = 3 if dtype != torch.float32 else 2, attention.keys_at_once(dim, dtype)
        tile = 256 if dim > 128 else 128 if dim > 64 else 64
        assert 2 * stages * keys * tile * dtype.itemsize <= 100_000


def test_attention_is_the_same_through_the_backend() -> None:
    ops, shape = ops_of(torch.float32), HeadShape(4, 2, 64)
    step, blocks = build_step(STEPS["mixed"])
    cache, q = random(2, blocks, PAGE_SIZE, 2, 64), random(step.ids.shape[0], 256, seed=1)
    got = ops.attention(q, step, cache, shape, 0.125, 7)
    assert torch.equal(got, attention.attention(q, step, cache, shape, 0.125, 7))
