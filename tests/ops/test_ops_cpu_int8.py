"""Linears of int8 against exact integer arithmetic, on every instruction set of this machine that has them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_cpu_support import INT8_ISAS, ISAS, KERNELS, ops_for

from dpi_engine.ops import build, select_ops
from dpi_engine.ops.cpu import make_cpu_ops
from dpi_engine.ops.interface import OpsUnavailable
from dpi_engine.ops.torch_int8 import APART, LEAST, MOST_STEEP, Int8TorchOps, quantized_rows, quantized_weight

isas = pytest.mark.parametrize("isa", INT8_ISAS)
needs_int8 = pytest.mark.skipif(not INT8_ISAS, reason="no instruction set of this machine has int8 linears")


def int8_ops(isa, threads=2):
    return ops_for(isa, torch.bfloat16, threads, "int8")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def activations(n, inputs, seed=0, steep=30.0):
    """Rows like those of models: a few inputs many times larger than the others."""
    x = randn(n, inputs, seed=seed)
    x[:, torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))[:3]] *= steep
    return x.bfloat16()


def exact(x, weight, bias):
    """The integers' products in float64, where they are exact."""
    (n, by), (q, scale) = quantized_rows(x), quantized_weight(weight)
    y = (n.double() @ q.double().T) * (by.double().unsqueeze(1) * scale.double())
    return y if bias is None else y + bias.bfloat16().double()


def within_a_rounding(got, want):
    """bfloat16 of a float32 that is within a few units of its last place of `want`."""
    error = (got.double() - want).abs()
    assert (error <= want.abs() * 2.0**-8 + want.abs().max() * 2.0**-20).all(), error.max()


def check(isa, n, inputs, outputs, with_bias, gated=False, steep=30.0):
    ops = int8_ops(isa)
    x, rows = activations(n, inputs, steep=steep), 2 * outputs if gated else outputs
    weight, bias = randn(rows, inputs, seed=1) / math.sqrt(inputs), randn(rows, seed=2) if with_bias else None
    if not gated:
        got = ops.linear(x, ops.pack_linear(weight, bias))
        if n:
            within_a_rounding(got, exact(x, weight, bias))
    else:
        got = ops.gated_linear(x, ops.pack_gated(weight, bias))
        gate, up = exact(x, weight, bias).chunk(2, -1)
        torch.testing.assert_close(got.double(), torch.nn.functional.silu(gate) * up, rtol=2.0**-7, atol=1e-5)
    assert got.dtype is torch.bfloat16 and got.shape == (n, outputs)


@isas
@pytest.mark.parametrize("n", [0, 1, 2, 5, 6, 7, 13, 16, 17, 33, 97, 200])
@pytest.mark.parametrize(
    "shape", [(576, 192), (1, 1), (4, 3), (7, 33), (100, 80), (81, 15), (1536, 50), (4097, 24), (9000, 70)]
)
@pytest.mark.parametrize("gated", [False, True])
def test_integers_of_8_bits_are_multiplied_exactly(isa, n, shape, gated):
    """Odd widths, tiles of every height, and sums that are put away between two parts of the inputs."""
    check(isa, n, *shape, with_bias=n % 2 == 1, gated=gated)


@needs_int8
@given(
    n=st.integers(1, 30),
    inputs=st.integers(1, 200),
    outputs=st.integers(1, 70),
    bias=st.booleans(),
    gated=st.booleans(),
    steep=st.sampled_from([1.0, 30.0, 1e4]),
)
@settings(max_examples=80, deadline=None)
def test_any_shape(n, inputs, outputs, bias, gated, steep):
    check(INT8_ISAS[0], n, inputs, outputs, bias, gated, steep)


@isas
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_weights_of_every_dtype_are_quantized_as_they_are(isa, dtype):
    """float32 weights are not rounded to bfloat16 first."""
    ops, x = int8_ops(isa), activations(9, 130)
    weight = randn(50, 130, seed=1).to(dtype)
    within_a_rounding(ops.linear(x, ops.pack_linear(weight)), exact(x, weight, None))


@isas
def test_the_integers_of_a_row(isa):
    """Read out by weights that pick one input each: the fifth largest magnitude is 127 steps, larger ones have more."""
    inputs = 70
    x = torch.zeros(3, inputs)
    x[0, :7] = torch.tensor([1000.0, -900, 260, 128, -127, 126.4, 1])
    x[1, 20:30] = 127.0  # more of the largest than are multiplied apart
    x[1, 40:43] = torch.tensor([0.5, 1.5, 2.5])  # ties go to the even one
    x[2, 5] = -127.0 * MOST_STEEP  # all others are far below it
    x[2, 6] = 3.0
    weight = torch.eye(inputs)
    weight[:, -1] = 127.0  # so that an integer counts one, as it does in rows of 127
    got = int8_ops(isa).linear(x.bfloat16(), int8_ops(isa).pack_linear(weight))[:, :-1]
    want = x.bfloat16().float().round()[:, :-1]
    assert torch.equal(got.float(), want.bfloat16().float())
    assert [(quantized_rows(x.bfloat16())[0][i].abs() > 127).sum() for i in range(3)] == [APART, 0, 1]


@isas
@pytest.mark.parametrize("gated", [False, True])
def test_rows_without_anything_give_the_bias(isa, gated):
    ops = int8_ops(isa)
    pack, apply = (ops.pack_gated, ops.gated_linear) if gated else (ops.pack_linear, ops.linear)
    bias = randn(40, seed=2).bfloat16().float()
    packed = pack(randn(40, 100, seed=1), bias)
    x = activations(3, 100)
    x[0], x[1] = 0, LEAST / 2
    got = apply(x, packed)
    gate, up = bias.chunk(2)
    want = torch.nn.functional.silu(gate) * up if gated else bias
    torch.testing.assert_close(got[:2].float(), want.expand(2, -1), rtol=2.0**-7, atol=0)
    assert not torch.equal(got[2].float(), want)


@isas
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("gated", [False, True])
def test_what_is_not_finite_makes_its_row_nan_and_no_other(isa, value, gated):
    ops = int8_ops(isa)
    pack, apply = (ops.pack_gated, ops.gated_linear) if gated else (ops.pack_linear, ops.linear)
    packed = pack(randn(48, 100, seed=1))
    x = activations(20, 100)
    want = apply(x, packed)
    for row, column in ((3, 0), (11, 99), (12, 50)):
        x[row, column] = value
    got = apply(x, packed)
    hurt = torch.zeros(20, dtype=torch.bool)
    hurt[[3, 11, 12]] = True
    assert got[hurt].isnan().all()
    assert torch.equal(got[~hurt], want[~hurt])


@isas
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_makes_its_output_nan_and_no_other(isa, value):
    ops, x, weight = int8_ops(isa), activations(5, 100), randn(40, 100, seed=1)
    want = ops.linear(x, ops.pack_linear(weight))
    weight[7, 33] = value
    weight[8] = 0
    got = ops.linear(x, ops.pack_linear(weight))
    others = [i for i in range(40) if i not in (7, 8)]
    assert got[:, 7].isnan().all() and (got[:, 8] == 0).all()
    assert torch.equal(got[:, others], want[:, others])


@isas
def test_extreme_magnitudes_do_not_overflow(isa):
    ops, weight = int8_ops(isa), randn(20, 100, seed=1)
    packed = ops.pack_linear(weight)
    for size in (1e-30, 1e30):
        x = (activations(4, 100).float() * size).bfloat16()
        within_a_rounding(ops.linear(x, packed), exact(x, weight, None))


@isas
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_is_the_same_alone_among_others_and_on_any_threads(isa, gated):
    weight, x = randn(130, 200, seed=1), activations(23, 200)
    results = []
    for threads in (1, 2, 5):
        ops = int8_ops(isa, threads)
        pack, apply = (ops.pack_gated, ops.gated_linear) if gated else (ops.pack_linear, ops.linear)
        packed = pack(weight)
        results.append(apply(x, packed))
        results.append(torch.cat([apply(row.unsqueeze(0), packed) for row in x]))
    for other in results[1:]:
        assert torch.equal(other, results[0])


@isas
def test_the_reference_on_plain_torch_agrees(isa):
    reference, ops = Int8TorchOps("cpu", torch.bfloat16), int8_ops(isa)
    x, weight, bias = activations(30, 300), randn(96, 300, seed=1) / 17, randn(96, seed=2)
    for name in ("linear", "gated"):
        pack, apply = ("pack_linear", "linear") if name == "linear" else ("pack_gated", "gated_linear")
        got = getattr(ops, apply)(x, getattr(ops, pack)(weight, bias)).float()
        want = getattr(reference, apply)(x, getattr(reference, pack)(weight, bias)).float()
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


@isas
def test_what_it_saves_is_counted(isa):
    ops = make_cpu_ops(torch.bfloat16, 1, KERNELS, "int8")
    ops.pack_linear(torch.ones(30, 50))
    ops.pack_gated(torch.ones(60, 50))
    assert ops.bytes_saved == 90 * 50


@isas
def test_more_inputs_than_a_sum_holds_are_refused_by_name(isa):
    with pytest.raises(OpsUnavailable, match="int8 linears take up to 131072 inputs, got 131073"):
        int8_ops(isa).pack_linear(torch.zeros(1, 131073, dtype=torch.bfloat16))


@isas
def test_the_widest_sums_hold(isa):
    ops = int8_ops(isa)
    x = torch.full((1, 131072), -1.0, dtype=torch.bfloat16)
    got = ops.linear(x, ops.pack_linear(torch.ones(2, 131072, dtype=torch.bfloat16)))
    assert got.tolist() == [[-131072.0, -131072.0]]


def test_other_kinds_are_refused_by_name():
    with pytest.raises(OpsUnavailable, match=r"int8 linears have .* bfloat16, not of torch\.float32: leave"):
        make_cpu_ops(torch.float32, 1, KERNELS, "int8")
    with pytest.raises(ValueError, match="quantization: expected int8, fp8 or none, got 'int4'"):
        select_ops("cpu", quantization="int4")


@pytest.mark.skipif("avx2" not in ISAS, reason="this machine has no AVX2")
@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_a_processor_without_the_instructions_is_an_error_and_no_silent_other_kind(name, monkeypatch):
    monkeypatch.setattr(build, "cpu_features", lambda: frozenset(build.ISA_FEATURES["avx2"]))
    monkeypatch.delenv("DPI_CPU_ISA", raising=False)
    with pytest.raises(OpsUnavailable, match=r"need avx512_vnni and avx512_bf16, .* avx2: leave .* --ops torch"):
        select_ops("cpu", "bfloat16", name, 1, KERNELS, "int8")
    reference = select_ops("cpu", "bfloat16", "torch", 1, KERNELS, "int8")
    assert isinstance(reference, Int8TorchOps) and reference.quantization == "int8"


def test_bfloat16_without_vnni_is_the_next_set():
    """Every known processor with the first has the second; a virtual machine may hide it."""
    features = frozenset(build.ISA_FEATURES["avx512bf16"]) - {"avx512_vnni"}
    assert build.choose_isa(features) == "avx2"
