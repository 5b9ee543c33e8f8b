"""Rotation, cache pages and attention of the C kernels against plain torch, on every instruction set there is here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_cpu_support import (
    KINDS,
    attend,
    close,
    kind_name,
    make_step,
    norm,
    ops_for,
    prefix_of,
    random_qkv,
    rope_table,
    rotate,
)

from dpi_engine.ops.interface import PAGE_SIZE, HeadShape, OpsUnavailable

BLOCKS = 96


def check(isa, dtype, shape, chunks, window=0, q_norm=None, k_norm=None, poison=False):
    """Fill the cache by one prefill, run `chunks` as one step on top, compare q and the attention with plain torch."""
    ops = ops_for(isa, dtype)
    step = make_step(chunks, BLOCKS, seed=len(chunks))
    rope = rope_table(shape.dim)
    cache = ops.new_cache(BLOCKS, shape)
    if poison:
        cache.k.fill_(float("nan"))
        cache.v.fill_(float("nan"))
    before = prefix_of(step, chunks)
    earlier = None
    if before is not None:
        earlier = random_qkv(before.slots.shape[0], shape, ops.dtype, seed=1)
        ops.rope_write(earlier, before, rope, cache, shape, q_norm, k_norm, 1e-6)
    qkv = random_qkv(step.slots.shape[0], shape, ops.dtype, seed=2)
    kept = qkv.clone()
    q = ops.rope_write(qkv, step, rope, cache, shape, q_norm, k_norm, 1e-6)
    got = ops.attention(q, step, cache, shape, shape.dim**-0.5, window)
    assert torch.equal(qkv, kept)
    assert q.dtype == got.dtype == ops.dtype

    def parts(x, positions):
        x = x.float().view(x.shape[0], shape.heads + 2 * shape.kv_heads, shape.dim)
        a, b, v = x.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
        a = a if q_norm is None else norm(a, q_norm, 1e-6)
        b = b if k_norm is None else norm(b, k_norm, 1e-6)
        return rotate(a, rope, positions), rotate(b, rope, positions), v

    want_q, new_k, new_v = parts(qkv, step.positions)
    close(q.view_as(want_q), want_q, dtype if ops.dtype is torch.bfloat16 else torch.float32)
    n_old = 0
    for i, (old, m) in enumerate(chunks):
        rows = slice(int(step.cu_q[i]), int(step.cu_q[i + 1]))
        k, v = new_k[rows], new_v[rows]
        if old:
            _, old_k, old_v = parts(earlier[n_old : n_old + old], before.positions[n_old : n_old + old])
            k, v = torch.cat((old_k, k)), torch.cat((old_v, v))
            n_old += old
        want = attend(q[rows].float().view(m, shape.heads, shape.dim), k, v, shape.dim**-0.5, window)
        # K, V, the weights and the result are each rounded to bfloat16 once: absolute errors add up to about 0.02.
        close(got[rows].view_as(want), want, dtype, bf16=0.03)


@pytest.mark.parametrize(("isa", "dtype"), KINDS, ids=kind_name)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256, 100, 48, 2])
def test_every_head_dim(isa, dtype, dim):
    check(isa, dtype, HeadShape(6, 2, dim), [(37, 1), (0, 21), (16, 5), (130, 1)])


@pytest.mark.parametrize(("isa", "dtype"), KINDS, ids=kind_name)
@pytest.mark.parametrize("group", [1, 3, 4, 5, 8, 17])
def test_every_group_of_query_heads(isa, dtype, group):
    check(isa, dtype, HeadShape(2 * group, 2, 64), [(0, 40), (63, 1), (7, 3)])


@pytest.mark.parametrize(("isa", "dtype"), KINDS, ids=kind_name)
@pytest.mark.parametrize("window", [1, 15, 16, 17, 40, 1000])
def test_sliding_window(isa, dtype, window):
    check(isa, dtype, HeadShape(4, 2, 64), [(0, 150), (200, 1), (31, 18), (5, 1)], window=window)


@pytest.mark.parametrize(("isa", "dtype"), KINDS, ids=kind_name)
def test_mixed_batch_of_long_chunks(isa, dtype):
    check(isa, dtype, HeadShape(9, 3, 64), [(0, 300), (255, 1), (127, 130), (0, 1), (128, 128), (15, 2)])


@pytest.mark.parametrize(("isa", "dtype"), KINDS, ids=kind_name)
@pytest.mark.parametrize("dim", [64, 80, 100])
def test_query_and_key_norm(isa, dtype, dim):
    generator = torch.Generator().manual_seed(9)
    q_norm, k_norm = (torch.rand(dim, generator=generator) + 0.5 for _ in range(2))
    check(isa, dtype, HeadShape(4, 2, dim), [(20, 9), (0, 33)], q_norm=q_norm, k_norm=k_norm)


@pytest.mark.parametrize(("isa", "dtype"), KINDS, ids=kind_name)
@pytest.mark.parametrize("window", [0, 20])
def test_what_an_earlier_owner_left_in_a_page_is_never_used(isa, dtype, window):
    """Pages full of not-a-number: only the slots that this batch wrote may count, odd lengths included."""
    check(isa, dtype, HeadShape(6, 2, 64), [(0, 1), (0, 18), (32, 5), (150, 1)], window=window, poison=True)


@given(
    chunks=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=6),
    group=st.integers(1, 6),
    kv_heads=st.integers(1, 3),
    half_dim=st.integers(1, 70),
    window=st.sampled_from([0, 0, 3, 33]),
    kind=st.sampled_from(KINDS),
)
@settings(max_examples=60, deadline=None)
def test_any_shape(chunks, group, kv_heads, half_dim, window, kind):
    check(*kind, HeadShape(group * kv_heads, kv_heads, 2 * half_dim), chunks, window)


@pytest.mark.parametrize(("isa", "dtype"), KINDS, ids=kind_name)
def test_a_row_does_not_depend_on_its_batch(isa, dtype):
    """The same sequence alone and among others: bit for bit the same (needed for identical answers under batching)."""
    ops, shape, rope = ops_for(isa, dtype), HeadShape(6, 2, 64), rope_table(64)
    results = []
    for chunks in ([(0, 50)], [(0, 50), (0, 7), (0, 90)]):
        step = make_step(chunks, BLOCKS)
        cache = ops.new_cache(BLOCKS, shape)
        q = ops.rope_write(random_qkv(sum(m for _, m in chunks), shape, ops.dtype, 3), step, rope, cache, shape)
        results.append(ops.attention(q, step, cache, shape, 0.125)[:50])
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize(("isa", "dtype"), KINDS, ids=kind_name)
def test_not_a_number_goes_through_and_stays_in_its_sequence(isa, dtype):
    ops, shape, rope = ops_for(isa, dtype), HeadShape(4, 2, 64), rope_table(64)
    step = make_step([(0, 20), (0, 20)], BLOCKS)
    for at in (0, 4 * 64, 6 * 64):  # in q, k, v
        cache = ops.new_cache(BLOCKS, shape)
        qkv = random_qkv(40, shape, ops.dtype, 4)
        qkv[5, at] = float("nan")
        out = ops.attention(ops.rope_write(qkv, step, rope, cache, shape), step, cache, shape, 0.125)
        assert out[5].isnan().any()
        assert not out[20:].isnan().any()


@pytest.mark.parametrize(("isa", "dtype"), KINDS, ids=kind_name)
def test_a_padding_row_without_keys_is_zero(isa, dtype):
    ops, shape = ops_for(isa, dtype), HeadShape(4, 2, 64)
    step = make_step([(0, 3), (0, 1)], BLOCKS)
    step.kv_lens[1] = 0
    cache = ops.new_cache(BLOCKS, shape)
    q = ops.rope_write(random_qkv(4, shape, ops.dtype, 5), step, rope_table(64), cache, shape)
    out = ops.attention(q, step, cache, shape, 0.125)
    assert out[:3].abs().sum() > 0
    assert torch.equal(out[3], torch.zeros_like(out[3]))


@pytest.mark.parametrize(("isa", "dtype"), KINDS, ids=kind_name)
@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("positions", 600, "positions"),
        ("positions", -1, "positions"),
        ("slots", BLOCKS * PAGE_SIZE, "slots"),
        ("slots", -1, "slots"),
        ("block_tables", BLOCKS, "block_tables"),
        ("block_tables", -1, "block_tables"),
        ("kv_lens", 500, "kv_lens"),
        ("cu_q", 7, "cu_q"),
    ],
)
def test_an_index_out_of_range_is_an_error_not_a_crash(isa, dtype, field, value, named):
    ops, shape = ops_for(isa, dtype), HeadShape(4, 2, 64)
    step = make_step([(0, 20)], BLOCKS)
    getattr(step, field).view(-1)[-1] = value
    cache = ops.new_cache(BLOCKS, shape)
    with pytest.raises(IndexError, match=named):
        q = ops.rope_write(random_qkv(20, shape, ops.dtype, 6), step, rope_table(64), cache, shape)
        ops.attention(q, step, cache, shape, 0.125)
    if field in ("positions", "slots"):
        assert not cache.k.any()


@pytest.mark.parametrize(("isa", "dtype"), KINDS, ids=kind_name)
def test_wrong_dtypes_and_shapes_are_named(isa, dtype):
    ops, shape = ops_for(isa, dtype), HeadShape(4, 2, 64)
    cache = ops.new_cache(BLOCKS, shape)
    step = make_step([(0, 20)], BLOCKS)
    with pytest.raises(TypeError, match=r"\[n, 512\].*float64"):
        ops.rope_write(torch.zeros(20, 512, dtype=torch.float64), step, rope_table(64), cache, shape)
    with pytest.raises(TypeError, match="20 tokens"):
        ops.attention(torch.zeros(19, 256, dtype=ops.dtype), step, cache, shape, 0.125)
    with pytest.raises(TypeError, match=r"rope.*32"):
        ops.rope_write(random_qkv(20, shape, ops.dtype, 6), step, rope_table(32), cache, shape)
    bad = make_step([(0, 20)], BLOCKS)
    bad.block_tables = bad.block_tables.long()
    with pytest.raises(TypeError, match="block_tables"):
        ops.begin(bad)
    for impossible in (HeadShape(4, 2, 63), HeadShape(4, 2, 514), HeadShape(5, 2, 64), HeadShape(4, 0, 64)):
        with pytest.raises(OpsUnavailable, match="head"):
            ops.new_cache(BLOCKS, impossible)


@pytest.mark.parametrize(("isa", "dtype"), KINDS, ids=kind_name)
@pytest.mark.parametrize("dim", [64, 100])
def test_bytes_of_a_block_are_what_a_cache_takes(isa, dtype, dim):
    ops, shape = ops_for(isa, dtype), HeadShape(4, 2, dim)
    cache = ops.new_cache(10, shape)
    assert cache.k.nbytes + cache.v.nbytes == 10 * ops.cache_bytes_per_block(shape)
