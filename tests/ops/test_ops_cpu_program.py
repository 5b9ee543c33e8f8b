"""Recorded passes: where buffers are put, and loops of a team of threads."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_cpu_support import ops_for

from dpi_engine.ops import build
from dpi_engine.ops.cpu_program import ALIGNMENT, FUNCTIONS, MOST_ARGUMENTS, NotRecordable, ProgramFailed, Span, place
from dpi_engine.ops.interface import StepTensors
from dpi_engine.ops.native_library import SIGNATURES

SPAN = st.tuples(st.integers(0, 500), st.integers(0, 20), st.integers(0, 9)).map(
    lambda t: Span(t[0], t[1], t[1] + t[2])
)
SPANS = st.lists(SPAN, max_size=30)


@given(SPANS)
def test_buffers_in_use_together_do_not_overlap(spans):
    offsets, total = place(spans)
    for i, a in enumerate(spans):
        assert offsets[i] % ALIGNMENT == 0
        assert offsets[i] + a.size <= total
        for j, b in enumerate(spans[:i]):
            if a.size and b.size and a.first <= b.last and b.first <= a.last:
                assert offsets[i] + a.size <= offsets[j] or offsets[j] + b.size <= offsets[i]


def test_buffers_that_follow_one_another_share_memory():
    chain = [Span(100, i, i + 1) for i in range(50)]
    assert place(chain)[1] == 2 * 128


def test_functions_are_those_of_the_library_in_its_order():
    source = (build.SOURCES / "program.c").read_text()
    listed = re.search(r"enum \{ (.*?) \};", source).group(1).split(", ")
    assert [f"dpi_{name.lower()}" for name in listed] == list(FUNCTIONS)
    assert f"#define MOST_ARGUMENTS {MOST_ARGUMENTS}\n" in source
    assert max(len(SIGNATURES[name][0]) for name in FUNCTIONS) <= MOST_ARGUMENTS


def step_of(n):
    zeros = torch.zeros(n, dtype=torch.int64)
    lengths = torch.ones(n, dtype=torch.int32)
    return StepTensors(
        ids=torch.arange(n),
        positions=zeros,
        slots=zeros,
        block_tables=torch.zeros(n, 1, dtype=torch.int32),
        kv_lens=lengths,
        cu_q=torch.arange(n + 1, dtype=torch.int32),
        rows=zeros,
        max_q=1,
        max_kv=1,
    )


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("n", [1, 3, 40])
def test_a_long_program_gives_what_its_calls_give(threads, n):
    """400 loops, shared out evenly, one member alone or item by item, on more threads than processors as well."""
    ops = ops_for("avx2", torch.bfloat16, threads)
    torch.manual_seed(n)
    table, norm = torch.randn(50, 96), torch.rand(96) + 0.5
    packed = [ops.pack_gated(torch.randn(192, 96) / 8) for _ in range(4)]
    step = step_of(n)

    def forward():
        x = ops.embed(step.ids, table)
        for i in range(100):
            x = ops.rms_norm(ops.gated_linear(x, packed[i % 4]), norm, 1e-5)
        return x

    want = forward()
    program = ops.record(step, forward)
    for _ in range(3):
        assert torch.equal(ops.replay(program, step), want)
    moved = step_of(n)
    moved.ids += 3
    got = ops.replay(program, moved)
    assert got is not None and not torch.equal(got, want)
    step = moved
    assert torch.equal(got, forward())


def test_what_is_outside_of_the_library_is_called_in_each_replay():
    ops = ops_for("avx2", torch.bfloat16)
    table, norm, seen = torch.randn(50, 24), torch.ones(24), []

    def shifted(x, y):
        seen.append((x.clone(), y.clone()))
        return x + y.flip(0)

    def forward():
        x = ops.embed(step.ids, table)
        y = ops.rms_norm(x, norm, 1e-5)
        return ops.rms_norm(ops.outside(shifted, x, y), norm, 1e-5)

    step = step_of(3)
    want = forward()
    program = ops.record(step, forward)
    assert len(seen) == 1
    for count in (2, 3):
        assert torch.equal(ops.replay(program, step), want)
        assert len(seen) == count
        assert all(torch.equal(a, b) for a, b in zip(seen[0], seen[-1], strict=True))
    step.ids[0] = 50
    assert ops.replay(program, step) is None
    assert len(seen) == 3


def test_a_call_that_fails_after_others_were_met_ends_the_step():
    ops = ops_for("avx2", torch.bfloat16)
    table, step = torch.randn(50, 24), step_of(3)

    def forward():
        return ops.embed(step.ids, ops.outside(lambda _: table, table))

    program = ops.record(step, forward)
    assert torch.equal(ops.replay(program, step), table[step.ids])
    step.ids[0] = 50
    with pytest.raises(ProgramFailed, match="part 1 of 2"):
        ops.replay(program, step)


def test_what_cannot_be_recorded_is_named_and_the_backend_computes_on():
    ops = ops_for("avx2", torch.bfloat16)
    logits = torch.randn(2, 30)
    with pytest.raises(NotRecordable, match="dpi_argmax"):
        ops.record(step_of(2), lambda: ops.argmax(logits))
    assert torch.equal(ops.argmax(logits), logits.argmax(-1))
