"""Linears, norms, activations and vocabulary kernels against plain torch, on every instruction set of this machine."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_cpu_support import KINDS, close, kind_name, norm, ops_for

kinds = pytest.mark.parametrize(("isa", "dtype"), KINDS, ids=kind_name)
WIDTHS = [1, 7, 8, 15, 16, 17, 80, 100, 576]


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@kinds
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=kind_name)
def test_rms_norm(isa, dtype, width, weight_dtype):
    ops = ops_for(isa, dtype)
    x, weight = randn(33, width).to(ops.dtype), (randn(width, seed=1) + 1).to(weight_dtype)
    kept = x.clone()
    close(ops.rms_norm(x, weight, 1e-5), norm(x, weight, 1e-5), ops.dtype)
    assert torch.equal(x, kept)


@kinds
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("n", [0, 1, 40])
def test_add_rms_norm_adds_in_place_and_norms_the_rounded_sum(isa, dtype, width, n):
    ops = ops_for(isa, dtype)
    x, delta, weight = randn(n, width).to(ops.dtype), randn(n, width, seed=1).to(ops.dtype), randn(width, seed=2)
    total = (x.float() + delta.float()).to(ops.dtype)
    got = ops.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(x, total)
    close(got, norm(total, weight, 1e-5), ops.dtype)


@kinds
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("n", [0, 1, 40])
def test_silu_mul(isa, dtype, width, n):
    ops = ops_for(isa, dtype)
    x = (randn(n, 2 * width) * 4).to(ops.dtype)
    a, b = x.float().chunk(2, -1)
    close(ops.silu_mul(x), torch.nn.functional.silu(a) * b, ops.dtype)


@kinds
def test_silu_of_extreme_values(isa, dtype):
    ops = ops_for(isa, dtype)
    x = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 1e30] + [1.0] * 6]).to(ops.dtype)
    got = ops.silu_mul(x)[0].float()
    assert got[3:].tolist() == x[0, 3:6].float().tolist()
    assert got[1:3].abs().max() < 1e-30
    assert not got.isnan().any()


def check_linear(isa, dtype, n, inputs, outputs, with_bias):
    ops = ops_for(isa, dtype)
    weight, bias = randn(outputs, inputs, seed=1) / math.sqrt(inputs), randn(outputs, seed=2) if with_bias else None
    x = randn(n, inputs).to(ops.dtype)
    got = ops.linear(x, ops.pack_linear(weight, bias))
    want = x.float() @ weight.to(dtype).float().T
    if bias is not None:
        want = want + bias.to(ops.dtype).float()
    assert got.dtype == ops.dtype
    # float32 activations times widened bfloat16 weights are as exact as float32.
    close(got, want, ops.dtype)


@kinds
@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 6, 7, 13, 16, 17, 32, 33, 97, 200])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 192), (1, 1), (7, 33), (100, 80), (81, 15)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(isa, dtype, n, inputs, outputs, with_bias):
    check_linear(isa, dtype, n, inputs, outputs, with_bias)


@kinds
@pytest.mark.parametrize("n", [1, 5, 40])
def test_linear_deeper_than_one_part(isa, dtype, n):
    """Sums that are put away between two parts of the inputs."""
    check_linear(isa, dtype, n, 8225, 81, with_bias=True)


@kinds
def test_linear_of_more_rows_than_stay_in_a_cache(isa, dtype):
    check_linear(isa, dtype, 1050, 80, 40, with_bias=True)


@pytest.mark.parametrize("outputs", [192, 81, 33])
@pytest.mark.parametrize("inputs", [576, 101, 1])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_of_widened_weights_is_the_same_alone_and_among_others(inputs, outputs, threads):
    """Bit for bit: else tokens depend on the batch that a request happens to be in."""
    ops = ops_for("avx2", torch.bfloat16, threads)
    packed = ops.pack_linear(randn(outputs, inputs, seed=1), randn(outputs, seed=2))
    x = randn(100, inputs)
    alone = torch.cat([ops.linear(row.unsqueeze(0), packed) for row in x])
    for n in (2, 3, 4, 5, 6, 7, 13, 97, 98, 100):
        assert torch.equal(ops.linear(x[:n], packed), alone[:n]), n


def check_gated(isa, dtype, n, inputs, inner, with_bias):
    ops = ops_for(isa, dtype)
    weight, bias = randn(2 * inner, inputs, seed=1) / math.sqrt(inputs), randn(2 * inner, seed=2) if with_bias else None
    x = randn(n, inputs).to(ops.dtype)
    got = ops.gated_linear(x, ops.pack_gated(weight, bias))
    both = x.float() @ weight.to(dtype).float().T
    if bias is not None:
        both = both + bias.to(ops.dtype).float()
    gate, up = both.chunk(2, -1)
    assert got.dtype == ops.dtype
    close(got, torch.nn.functional.silu(gate) * up, ops.dtype, bf16=0.03)


@kinds
@pytest.mark.parametrize("n", [0, 1, 4, 6, 7, 97, 200])
@pytest.mark.parametrize(("inputs", "inner"), [(576, 96), (1, 1), (7, 33), (100, 80), (81, 15), (4097, 24)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gated_linear(isa, dtype, n, inputs, inner, with_bias):
    check_gated(isa, dtype, n, inputs, inner, with_bias)


@kinds
def test_gated_linear_of_extreme_values(isa, dtype):
    ops = ops_for(isa, dtype)
    packed = ops.pack_gated(torch.cat((torch.eye(4), torch.eye(4))))
    got = ops.gated_linear(torch.tensor([[-1e3, -200.0, 0.0, 1e18], [1.0, math.nan, 1.0, 1.0]]).to(ops.dtype), packed)
    if dtype is torch.float32 or ops.dtype is torch.float32:
        assert got[0, 3] == pytest.approx(1e36, rel=0.01)
    assert got[0, :3].float().abs().max() < 1e-30
    assert got[1].isnan().all() and not got[0].isnan().any()  # 0 * NaN is NaN: the whole row, and that row alone


@given(
    n=st.integers(1, 30),
    inputs=st.integers(1, 90),
    outputs=st.integers(1, 70),
    bias=st.booleans(),
    kind=st.sampled_from(KINDS),
)
@settings(max_examples=60, deadline=None)
def test_linear_of_any_shape(n, inputs, outputs, bias, kind):
    check_linear(*kind, n, inputs, outputs, bias)


@kinds
def test_not_a_number_goes_through_every_row_kernel(isa, dtype):
    ops = ops_for(isa, dtype)
    weight = torch.ones(100)
    packed = ops.pack_linear(torch.ones(20, 100))
    for at in (0, 37, 99):
        x = torch.ones(3, 100, dtype=ops.dtype)
        x[1, at] = math.nan
        for out in (
            ops.rms_norm(x, weight, 1e-5),
            ops.add_rms_norm(torch.ones_like(x), x, weight, 1e-5),
            ops.linear(x, packed),
        ):
            assert out[1].isnan().all()
            assert not out[[0, 2]].isnan().any()
        gated = ops.silu_mul(x)
        assert gated[1].isnan().sum() == 1
        assert not gated[[0, 2]].isnan().any()


@kinds
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16], ids=kind_name)
def test_embed(isa, dtype, table_dtype):
    ops = ops_for(isa, dtype)
    table = randn(50, 36).to(table_dtype)
    ids = torch.tensor([3, 49, 0, 3])
    assert torch.equal(ops.embed(ids, table), table[ids].to(ops.dtype))
    with pytest.raises(IndexError):
        ops.embed(torch.tensor([50]), table)


logit_dtypes = pytest.mark.parametrize("logit_dtype", [torch.float32, torch.bfloat16], ids=kind_name)


@kinds
@logit_dtypes
@pytest.mark.parametrize("vocab", [1, 5, 16, 33, 4096, 4097, 49152])
def test_argmax_is_the_lowest_index_of_the_largest(isa, dtype, logit_dtype, vocab):
    ops = ops_for(isa, dtype)
    logits = randn(7, vocab).to(logit_dtype)
    logits[1] = 0.0  # all equal
    logits[2] = -math.inf
    logits[3, vocab // 2] = logits[3, vocab - 1] = 100.0
    want = [row.tolist().index(max(row.tolist())) for row in logits]
    assert ops.argmax(logits).tolist() == want
    ids, values = ops.best(logits)
    assert ids.tolist() == want and torch.equal(values, logits.amax(-1).float())


@kinds
@logit_dtypes
def test_argmax_finds_the_first_not_a_number(isa, dtype, logit_dtype):
    ops = ops_for(isa, dtype)
    logits = randn(4, 101).to(logit_dtype)
    logits[1, 100] = logits[2, 40] = logits[2, 90] = math.nan
    logits[3] = math.nan
    ids, values = ops.best(logits)
    assert ids[1:].tolist() == [100, 40, 0] and values.isnan().tolist() == [False, True, True, True]


@kinds
@logit_dtypes
@pytest.mark.parametrize("vocab", [1, 7, 33, 5000, 49152])
def test_row_logsumexp(isa, dtype, logit_dtype, vocab):
    ops = ops_for(isa, dtype)
    logits = (randn(6, vocab) * 5).to(logit_dtype)
    logits[1] = -math.inf
    logits[2, 0] = math.inf
    logits[3, vocab - 1] = math.nan
    logits[4, 1:] = -math.inf
    got, want = ops.row_logsumexp(logits), torch.logsumexp(logits.double(), -1).float()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-5, equal_nan=True)


@kinds
@logit_dtypes
@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (9, 9), (40, 3), (5000, 1), (5000, 64), (49152, 20), (49152, 4000)])
def test_topk_is_a_stable_descending_sort(isa, dtype, logit_dtype, vocab, k):
    ops = ops_for(isa, dtype)
    logits = (randn(5, vocab) * 3).to(logit_dtype)
    logits[1] = 0.0
    logits[2, ::3] = -math.inf
    logits[3] = torch.arange(vocab).to(logit_dtype)  # each better than the last
    logits[4] = -torch.arange(vocab).to(logit_dtype)
    values, ids = ops.topk(logits, k)
    want_values, want_ids = torch.sort(logits.float(), dim=-1, descending=True, stable=True)
    assert torch.equal(values, want_values[:, :k])
    assert torch.equal(ids, want_ids[:, :k])


@given(data=st.data(), kind=st.sampled_from(KINDS))
@settings(max_examples=80, deadline=None)
def test_topk_of_any_row(data, kind):
    ops = ops_for(*kind)
    values = st.sampled_from([0.0, -0.0, 1.0, 2.0, -3.5, math.inf, -math.inf, 1e-20])
    row = data.draw(st.lists(values, min_size=1, max_size=400))
    k = data.draw(st.integers(1, len(row) + 5))
    logits = torch.tensor([row, row[::-1]])
    values, ids = ops.topk(logits, k)
    want_values, want_ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    assert torch.equal(values, want_values[:, :k])
    assert torch.equal(ids, want_ids[:, :k])


@kinds
def test_topk_puts_not_a_number_first(isa, dtype):
    ops = ops_for(isa, dtype)
    logits = randn(2, 3000)
    logits[0, [5, 2999, 700]] = math.nan
    logits[1] = math.nan
    values, ids = ops.topk(logits, 4)
    assert ids[0, :3].tolist() == [5, 700, 2999]
    assert values[0, :3].isnan().all()
    assert values[0, 3] == logits[0].nan_to_num(-math.inf).max()
    assert ids[1].tolist() == [0, 1, 2, 3]


@kinds
def test_the_defaults_of_the_interface_agree(isa, dtype):
    """A backend without kernels for it answers the same."""
    from dpi_engine.ops.interface import Ops

    ops = ops_for(isa, dtype)
    logits = randn(3, 500).bfloat16()
    for got, want in zip(ops.topk(logits, 9), Ops.topk(ops, logits, 9), strict=True):
        assert torch.equal(got, want)
    torch.testing.assert_close(ops.row_logsumexp(logits), Ops.row_logsumexp(ops, logits), rtol=1e-6, atol=1e-5)


@kinds
def test_wrong_dtypes_and_widths_are_named(isa, dtype):
    ops = ops_for(isa, dtype)
    x = torch.zeros(2, 32, dtype=ops.dtype)
    for call in (
        lambda: ops.rms_norm(x.double(), torch.ones(32), 1e-5),
        lambda: ops.rms_norm(x[:, ::2], torch.ones(16), 1e-5),
        lambda: ops.rms_norm(x, torch.ones(31), 1e-5),
        lambda: ops.add_rms_norm(x, x[:1], torch.ones(32), 1e-5),
        lambda: ops.silu_mul(x[:, :31].contiguous()),
        lambda: ops.silu_mul(x.double()),
        lambda: ops.argmax(x.double()),
        lambda: ops.linear(x, ops.pack_linear(torch.ones(4, 33))),
    ):
        with pytest.raises(TypeError, match="expected"):
            call()
