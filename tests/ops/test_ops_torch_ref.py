"""The reference ops against plain formulas in double precision, and the choice of the backend."""

from __future__ import annotations

import logging
import math
import os
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import dpi_engine.ops as ops_module
from dpi_engine.config.rope import LinearRope, Llama3Rope, YarnRope
from dpi_engine.ops import OpsUnavailable, TorchOps, parse_dtype, select_ops, torch_ref
from dpi_engine.ops.interface import PAGE_SIZE, HeadShape, StepTensors
from dpi_engine.ops.rope import RopeError, inverse_frequencies, rope_table

DEVICE = os.environ.get("DPI_TEST_DEVICE", "cpu")
"""Where the ops under test run; what they are compared with is computed on the CPU."""

F32 = TorchOps(DEVICE, torch.float32)
# GPUs sum in other orders, and emulate float32 by three products of TF32; TF32 alone would be off by 1e-3.
FLOAT32 = 1e-5 if DEVICE == "cpu" else 5e-5
TOLERANCE = {torch.float32: (FLOAT32, FLOAT32), torch.bfloat16: (0.02, 0.02), torch.float16: (0.004, 0.004)}
DTYPES = list(TOLERANCE)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    rtol, atol = TOLERANCE[dtype]
    assert got.dtype == dtype
    assert got.device.type == DEVICE.partition(":")[0]
    assert_close(got.cpu().double(), want.cpu(), rtol=rtol, atol=atol)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def build_step(pieces: list[tuple[int, int]], seed: int = 0, spare: int = 3) -> tuple[StepTensors, int]:
    """A step of sequences (queries, keys) with shuffled pages; also the number of blocks of the cache."""
    pages = [-(-kv // PAGE_SIZE) for _, kv in pieces]
    blocks = 1 + sum(pages) + spare
    order = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
    tables = torch.zeros(len(pieces), max(1, *pages), dtype=torch.int32)
    at, positions, slots, cu_q = 0, [], [], [0]
    for i, (q, kv) in enumerate(pieces):
        tables[i, : pages[i]] = order[at : at + pages[i]]
        at += pages[i]
        own = torch.arange(kv - q, kv)
        positions.append(own)
        slots.append(tables[i].long()[own // PAGE_SIZE] * PAGE_SIZE + own % PAGE_SIZE)
        cu_q.append(cu_q[-1] + q)
    step = StepTensors(
        ids=torch.zeros(cu_q[-1], dtype=torch.int64),
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        block_tables=tables,
        kv_lens=torch.tensor([kv for _, kv in pieces], dtype=torch.int32),
        cu_q=torch.tensor(cu_q, dtype=torch.int32),
        rows=torch.arange(cu_q[-1]),
        max_q=max(q for q, _ in pieces),
        max_kv=max(kv for _, kv in pieces),
    )
    for name in ("ids", "positions", "slots", "block_tables", "kv_lens", "cu_q", "rows"):
        setattr(step, name, getattr(step, name).to(DEVICE))
    return step, blocks


def naive_attention(q: Tensor, step: StepTensors, cache: Tensor, shape: HeadShape, scale: float, window: int) -> Tensor:
    """One query, one head, one key at a time in double precision."""
    out = torch.zeros(q.shape[0], shape.heads, shape.dim, dtype=torch.float64)
    rows = q.cpu().double().view(-1, shape.heads, shape.dim)
    cache, tables = cache.cpu(), step.block_tables.cpu()
    for i, kv in enumerate(step.kv_lens.tolist()):
        first, end = step.cu_q[i : i + 2].tolist()
        pages = tables[i].long()
        at = torch.arange(kv)
        keys = cache[0, pages[at // PAGE_SIZE], at % PAGE_SIZE].double()
        values = cache[1, pages[at // PAGE_SIZE], at % PAGE_SIZE].double()
        for row in range(first, end):
            position = kv - (end - row)
            low = max(0, position + 1 - window) if window else 0
            for head in range(shape.heads):
                group = head // (shape.heads // shape.kv_heads)
                scores = keys[low : position + 1, group] @ rows[row, head] * scale
                out[row, head] = scores.softmax(0) @ values[low : position + 1, group]
    return out.view(q.shape[0], -1)


STEPS = {
    "decodes": [(1, 1), (1, 16), (1, 17), (1, 50)],
    "one decode": [(1, 33)],
    "prompts": [(20, 20), (16, 16), (1, 1), (37, 37)],
    "chunk of one prompt": [(7, 40)],
    "mixed": [(1, 30), (9, 25), (1, 1), (16, 16), (5, 64), (1, 80)],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 7, 16, 40])
@pytest.mark.parametrize("pieces", STEPS.values(), ids=STEPS)
def test_attention(pieces: list[tuple[int, int]], window: int, dtype: torch.dtype) -> None:
    ops = TorchOps(DEVICE, dtype)
    shape = HeadShape(6, 2, 64)
    step, blocks = build_step(pieces)
    cache = random(2, blocks, PAGE_SIZE, 2, 64, seed=1, dtype=dtype)
    q = random(step.ids.shape[0], 6 * 64, seed=2, dtype=dtype)
    got = ops.attention(q, step, cache, shape, 0.125, window)
    close(got, naive_attention(q, step, cache, shape, 0.125, window), dtype)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 3, 80), (4, 1, 96), (8, 4, 128), (2, 2, 256), (9, 3, 64)])
def test_attention_of_every_head_shape(heads: int, kv_heads: int, dim: int) -> None:
    shape = HeadShape(heads, kv_heads, dim)
    for pieces in (STEPS["decodes"], STEPS["mixed"]):
        step, blocks = build_step(pieces)
        cache = random(2, blocks, PAGE_SIZE, kv_heads, dim, seed=1)
        q = random(step.ids.shape[0], heads * dim, seed=2)
        got = F32.attention(q, step, cache, shape, dim**-0.5)
        close(got, naive_attention(q, step, cache, shape, dim**-0.5, 0), torch.float32)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), min_size=1, max_size=6),
    st.integers(0, 30),
    st.integers(0, 1000),
)
def test_attention_of_any_step(lengths: list[tuple[int, int]], window: int, seed: int) -> None:
    step, blocks = build_step([(q, q + before) for q, before in lengths], seed)
    shape = HeadShape(2, 1, 16)
    cache = random(2, blocks, PAGE_SIZE, 1, 16, seed=seed)
    q = random(step.ids.shape[0], 32, seed=seed + 1)
    got = F32.attention(q, step, cache, shape, 0.3, window)
    close(got, naive_attention(q, step, cache, shape, 0.3, window), torch.float32)


@pytest.mark.parametrize("window", [0, 20])
def test_decodes_gathered_in_parts_equal_those_gathered_at_once(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """So that one long sequence among many short ones does not cost a copy of all, padded to its length."""
    shape = HeadShape(4, 2, 32)
    pieces = [(1, kv) for kv in (5, 200, 16, 33, 1, 90, 64)]
    step, blocks = build_step(pieces)
    cache, q = random(2, blocks, PAGE_SIZE, 2, 32), random(len(pieces), 4 * 32, seed=1)
    whole = F32.attention(q, step, cache, shape, 0.2, window)
    sizes = []
    gather = F.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, *rest: object, **named: object) -> Tensor:
        sizes.append(key.shape[0] * key.shape[2])
        return gather(query, key, *rest, **named)

    monkeypatch.setattr(torch_ref, "GATHERED_TOKENS", 450)
    monkeypatch.setattr(torch_ref.F, "scaled_dot_product_attention", watched)
    F32.begin(step)
    parts = F32.attention(q, step, cache, shape, 0.2, window)
    assert len(sizes) == 4 and max(sizes) <= 450
    assert_close(parts, whole, rtol=FLOAT32, atol=FLOAT32)


def test_padding_rows_of_a_decode_step_stay_finite_and_change_nothing() -> None:
    shape = HeadShape(2, 1, 32)
    step, blocks = build_step([(1, 20), (1, 5)])
    cache = random(2, blocks, PAGE_SIZE, 1, 32)
    q = random(4, 64)
    alone = F32.attention(q[:2], step, cache, shape, 0.2)
    step.block_tables = torch.cat([step.block_tables, step.block_tables.new_zeros(2, 2)])
    step.kv_lens = torch.cat([step.kv_lens, step.kv_lens.new_zeros(2)])
    step.cu_q = torch.arange(5, dtype=torch.int32, device=DEVICE)
    F32.begin(step)
    padded = F32.attention(q, step, cache, shape, 0.2)
    assert padded.isfinite().all()
    assert_close(padded[:2], alone)


def test_a_changed_step_object_is_noticed_by_begin() -> None:
    """A step whose tensors were replaced in place (persistent buffers) is right after `begin`."""
    shape = HeadShape(2, 1, 32)
    step, _ = build_step([(1, 20)])
    other, blocks = build_step([(1, 36)], seed=9)
    cache = random(2, blocks, PAGE_SIZE, 1, 32)
    q = random(1, 64)
    F32.attention(q, step, cache, shape, 0.2)
    step.block_tables, step.kv_lens, step.max_kv = other.block_tables, other.kv_lens, other.max_kv
    F32.begin(step)
    assert_close(F32.attention(q, step, cache, shape, 0.2), F32.attention(q, other, cache, shape, 0.2))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_write(dtype: torch.dtype, normed: bool) -> None:
    ops = TorchOps(DEVICE, dtype)
    shape = HeadShape(4, 2, 32)
    step, blocks = build_step([(5, 21), (1, 40), (18, 18)])
    n = step.ids.shape[0]
    rope = rope_table(64, 32, 10000.0, device=DEVICE)
    cache = ops.new_cache(blocks, shape)
    qkv = random(n, 8 * 32, seed=3, dtype=dtype)
    q_norm, k_norm = (random(32, seed=4), random(32, seed=5)) if normed else (None, None)
    got = ops.rope_write(qkv, step, rope, cache, shape, q_norm, k_norm, 1e-6)

    heads = qkv.cpu().double().view(n, 8, 32)
    q, k, v = heads[:, :4], heads[:, 4:6], heads[:, 6:]
    if normed:
        q = (q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt() * q_norm.cpu().double()).to(dtype).double()
        k = (k / (k.square().mean(-1, keepdim=True) + 1e-6).sqrt() * k_norm.cpu().double()).to(dtype).double()

    def rotated(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for row, position in enumerate(step.positions.tolist()):
            for i in range(16):
                angle = position * 10000.0 ** (-2 * i / 32)
                a, b = x[row, :, i], x[row, :, i + 16]
                out[row, :, i] = a * math.cos(angle) - b * math.sin(angle)
                out[row, :, i + 16] = b * math.cos(angle) + a * math.sin(angle)
        return out

    close(got, rotated(q).reshape(n, -1), dtype)
    written = cache.view(2, -1, 2, 32)
    close(written[0, step.slots], rotated(k), dtype)
    close(written[1, step.slots], v, dtype)
    untouched = torch.ones(blocks * PAGE_SIZE, dtype=torch.bool, device=DEVICE)
    untouched[step.slots] = False
    assert not written[:, untouched].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3, 64])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(dtype: torch.dtype, rows: int, biased: bool) -> None:
    ops = TorchOps(DEVICE, dtype)
    x, weight = random(rows, 48, dtype=dtype), random(40, 48, seed=1) / 7
    bias = random(40, seed=2) if biased else None
    got = ops.linear(x, ops.pack_linear(weight, bias))
    want = x.double() @ weight.to(dtype).double().T + (0 if bias is None else bias.to(dtype).double())
    close(got, want, dtype)


def test_linear_without_the_prepacked_form(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = random(5, 48).cpu(), random(40, 48, seed=1).cpu(), random(40, seed=2).cpu()
    usual = TorchOps("cpu", torch.float32)
    want = usual.linear(x, usual.pack_linear(weight, bias))
    monkeypatch.setattr(torch_ref, "onednn_linear_works", lambda dtype: False)
    plain = TorchOps("cpu", torch.float32)
    packed = plain.pack_linear(weight, bias)
    assert not packed.prepacked
    assert_close(plain.linear(x, packed), want, rtol=1e-5, atol=1e-5)


def test_prepacked_form_is_not_taken_when_it_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = types.SimpleNamespace(
        _reorder_linear_weight=lambda w, m: w,
        _linear_pointwise=lambda x, w, b, *rest: torch.zeros(x.shape[0], w.shape[0]),
    )
    monkeypatch.setattr(torch.ops, "mkldnn", wrong, raising=False)
    assert not torch_ref.onednn_linear_works(torch.float32)


def test_prepacked_form_is_not_taken_when_torch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", types.SimpleNamespace(), raising=False)
    assert not torch_ref.onednn_linear_works(torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_activation(dtype: torch.dtype) -> None:
    ops = TorchOps(DEVICE, dtype)
    x, delta, weight = random(7, 96, dtype=dtype), random(7, 96, seed=1, dtype=dtype), random(96, seed=2)

    def norm(v: Tensor) -> Tensor:
        return v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    close(ops.rms_norm(x, weight, 1e-5), norm(x.double()), dtype)
    residual = x.clone()
    got = ops.add_rms_norm(residual, delta, weight, 1e-5)
    close(residual, x.double() + delta.double(), dtype)
    close(got, norm(residual.double()), dtype)
    gate, up = x.double().chunk(2, -1)
    close(ops.silu_mul(x), gate * torch.sigmoid(gate) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_takes_the_lowest_of_equals(dtype: torch.dtype) -> None:
    logits = torch.zeros(4, 1000, dtype=dtype, device=DEVICE)
    logits[1, [700, 30, 999]] = 2.0
    logits[2, 999] = 1.0
    logits[3] = float("-inf")
    ops = TorchOps(DEVICE, dtype)
    got = ops.argmax(logits)
    assert got.tolist() == [0, 30, 999, 0] and got.dtype == torch.int64
    logits[0, 999] = torch.nan
    values = ops.best(logits)[1]
    assert values.dtype == torch.float32 and values[0].isnan() and values[1:].tolist() == [2.0, 1.0, float("-inf")]


@pytest.mark.parametrize("rows", [0, 5, 64, 130])
def test_rows_of_logits_are_reduced_in_parts(rows: int) -> None:
    logits = random(rows, 300, dtype=torch.bfloat16)
    close(F32.row_logsumexp(logits), logits.double().logsumexp(-1), torch.float32)
    values, ids = F32.topk(logits, 7)
    assert values.shape == ids.shape == (rows, 7) and ids.dtype == torch.int64
    # Rows of 300 bfloat16 numbers have equals: the lower id comes first.
    for row, (got_values, got) in zip(logits.tolist(), zip(values.tolist(), ids.tolist(), strict=True), strict=True):
        want = sorted(range(300), key=lambda i, row=row: (-row[i], i))[:7]
        assert got == want and got_values == [row[i] for i in want]


def test_embed_widens_the_rows_of_a_narrower_table() -> None:
    table = random(10, 8, dtype=torch.bfloat16)
    got = F32.embed(torch.tensor([3, 3, 9], device=DEVICE), table)
    assert got.dtype == torch.float32
    assert_close(got, table[[3, 3, 9]].float())


def test_cache_size_is_what_it_takes() -> None:
    ops = TorchOps(DEVICE, torch.bfloat16)
    shape = HeadShape(8, 2, 64)
    cache = ops.new_cache(7, shape)
    assert cache.numel() * cache.element_size() == 7 * ops.cache_bytes_per_block(shape)


# Rotary tables. The decoder's oracle tests compare whole models; these hold the formulas' limits.


def test_plain_table() -> None:
    table = rope_table(50, 8, 100.0)
    assert table.cos.shape == (50, 4) and table.cos.dtype == torch.float32
    for position in (0, 1, 49):
        for i in range(4):
            angle = position * 100.0 ** (-i / 4)
            assert table.cos[position, i].item() == pytest.approx(math.cos(angle), abs=1e-5)
            assert table.sin[position, i].item() == pytest.approx(math.sin(angle), abs=1e-5)


def test_linear_stretches_all_and_llama3_only_the_slow() -> None:
    plain, _ = inverse_frequencies(64, 10000.0)
    linear, _ = inverse_frequencies(64, 10000.0, LinearRope(4.0))
    assert_close(linear, plain / 4)
    llama3, attention = inverse_frequencies(64, 10000.0, Llama3Rope(8.0, 1.0, 4.0, 128))
    assert attention == 1.0
    assert_close(llama3[0], plain[0])
    assert_close(llama3[-1], plain[-1] / 8)
    assert ((llama3 <= plain) & (llama3 >= plain / 8 * 0.999)).all()


def test_yarn_attention_factor() -> None:
    _, standard = inverse_frequencies(64, 10000.0, YarnRope(4.0, 128))
    assert standard == pytest.approx(0.1 * math.log(4) + 1)
    _, given_one = inverse_frequencies(64, 10000.0, YarnRope(4.0, 128, attention_factor=0.5))
    assert given_one == 0.5
    _, same = inverse_frequencies(64, 10000.0, YarnRope(4.0, 128, mscale=1.0, mscale_all_dim=1.0))
    assert same == 1.0
    _, shrunk = inverse_frequencies(64, 10000.0, YarnRope(0.5, 128))
    assert shrunk == 1.0
    table = rope_table(4, 64, 10000.0, YarnRope(4.0, 128))
    assert table.cos[0, 0].item() == pytest.approx(standard)


@pytest.mark.parametrize(
    ("dim", "theta", "scaling", "message"),
    [
        (7, 10000.0, None, "even"),
        (0, 10000.0, None, "even"),
        (64, 0.0, None, "rope_theta"),
        (64, 1.0, YarnRope(2.0, 64), "rope_theta"),
        (64, 10000.0, Llama3Rope(8.0, 4.0, 4.0, 64), "high_freq_factor 4.0 must exceed low_freq_factor 4.0"),
    ],
)
def test_impossible_tables_are_refused(dim: int, theta: float, scaling: object, message: str) -> None:
    with pytest.raises(RopeError, match=message):
        rope_table(8, dim, theta, scaling)


# The choice of the backend


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("dpi_engine.ops.cpu")

    def make_cpu_ops(dtype: object, threads: int, cache_dir: object, quantization: object) -> object:
        raise OpsUnavailable("no compiler was found")

    module.make_cpu_ops = make_cpu_ops  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dpi_engine.ops.cpu", module)
    monkeypatch.setattr(ops_module, "torch_dtype_here", lambda device: torch.float32)


def test_auto_falls_back_with_the_reason(no_kernels: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ops = select_ops("cpu", "auto", "auto", 1)
    assert isinstance(ops, TorchOps) and ops.dtype == torch.float32
    assert "no compiler was found" in caplog.text and "slower" in caplog.text


def test_cpu_ops_asked_for_and_absent_is_an_error(no_kernels: None) -> None:
    with pytest.raises(OpsUnavailable, match="no compiler was found"):
        select_ops("cpu", "auto", "cpu", 1)


def test_torch_ops_are_chosen_without_a_word(no_kernels: None, caplog: pytest.LogCaptureFixture) -> None:
    ops = select_ops("cpu", "bfloat16", "torch", 1)
    assert isinstance(ops, TorchOps) and ops.dtype == torch.bfloat16
    assert not caplog.records


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("cpu", "auto", "fast"), ValueError, "ops: expected auto, torch, cpu or cuda; got 'fast'"),
        (("cpu", "int8", "torch"), ValueError, "dtype: expected auto, float32, .* got 'int8'"),
        (("warp", "auto", "torch"), OpsUnavailable, "device 'warp'"),
        (("cpu", "auto", "cuda"), OpsUnavailable, "ops 'cuda' runs on device cuda, not on 'cpu'"),
        (("meta", "auto", "cpu"), OpsUnavailable, "ops 'cpu' runs on device cpu, not on 'meta'"),
    ],
)
def test_unknown_choices_are_named(arguments: tuple[str, str, str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        select_ops(*arguments)


@pytest.fixture
def seeming_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA device as far as the choice of the backend goes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda place: None)
    monkeypatch.setattr(ops_module, "torch_dtype_here", lambda device: torch.bfloat16)
    monkeypatch.setattr(ops_module, "TorchOps", lambda place, dtype, kv_dtype: ("torch", place, dtype))


def test_a_gpu_takes_the_triton_kernels(seeming_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("dpi_engine.ops.cuda")
    asked: list[tuple[object, ...]] = []

    def cuda_ops(place: torch.device, dtype: torch.dtype, *more: object) -> tuple[object, ...]:
        asked.append(more)
        return ("cuda", place, dtype)

    module.CudaOps = cuda_ops  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dpi_engine.ops.cuda", module)
    place = torch.device("cuda:1")
    assert select_ops("cuda:1", "auto", "auto") == ("cuda", place, torch.bfloat16)  # type: ignore[comparison-overlap]
    assert select_ops("cuda:1", "float16", "cuda") == ("cuda", place, torch.float16)  # type: ignore[comparison-overlap]
    assert asked.pop() == (None, None, "auto", None)
    select_ops("cuda:1", "auto", "auto", 1, None, "fp8", "fp8", "triton", 128)
    assert asked.pop() == ("fp8", torch.float8_e4m3fn, "triton", 128)
    with pytest.raises(OpsUnavailable, match="--attention-backend triton chooses among kernels for GPUs"):
        select_ops("cuda:1", "auto", "torch", attention="triton")
    assert select_ops("cuda:1", "auto", "torch") == ("torch", place, torch.bfloat16)  # type: ignore[comparison-overlap]
    with pytest.raises(OpsUnavailable, match="ops 'cpu' runs on device cpu, not on 'cuda:1'"):
        select_ops("cuda:1", "auto", "cpu")
    with pytest.raises(OpsUnavailable, match=r"this machine has 2 CUDA device\(s\)"):
        select_ops("cuda:2", "auto", "auto")


def test_a_gpu_without_triton_falls_back_with_the_reason(
    seeming_gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "dpi_engine.ops.cuda", None)  # its import fails
    with caplog.at_level(logging.WARNING):
        assert select_ops("cuda", "auto", "auto")[0] == "torch"  # type: ignore[index]
    assert "Triton does not import" in caplog.text and "--ops cuda makes it an error" in caplog.text
    with pytest.raises(OpsUnavailable, match=r"Triton does not import: .*extra 'cuda'"):
        select_ops("cuda", "auto", "cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="here CUDA can be had")
def test_cuda_where_there_is_none_is_named() -> None:
    with pytest.raises(OpsUnavailable, match="sees no CUDA device"):
        select_ops("cuda", "auto", "auto")


def test_unsupported_dtype_is_named() -> None:
    with pytest.raises(OpsUnavailable, match="float64 is not one of"):
        TorchOps("cpu", torch.float64)
    assert parse_dtype("auto") is None and parse_dtype("float16") is torch.float16
