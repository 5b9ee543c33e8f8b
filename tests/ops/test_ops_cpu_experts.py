"""Routing and experts, by the C kernels of every instruction set there is here and by plain torch, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_cpu_support import KINDS, close, kind_name, ops_for
from torch import Tensor

from dpi_engine.config.moe_spec import MoeSpec, checked_moe
from dpi_engine.ops import build, torch_moe
from dpi_engine.ops.interface import Ops, OpsUnavailable
from dpi_engine.ops.torch_ref import TorchOps

BACKENDS = [*KINDS, ("torch", torch.float32), ("torch", torch.bfloat16)]


def backend(isa: str, dtype: torch.dtype, threads: int = 2) -> Ops:
    return TorchOps("cpu", dtype) if isa == "torch" else ops_for(isa, dtype, threads)


def made(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrices(count: int, hidden: int, inner: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
    def one(seed: int, rows: int, columns: int) -> Tensor:
        return (made(rows, columns, seed=seed) / columns**0.5).to(dtype)

    return [
        (one(10 * e, inner, hidden), one(10 * e + 1, inner, hidden), one(10 * e + 2, hidden, inner))
        for e in range(count)
    ]


def truth(x: Tensor, ids: Tensor, weights: Tensor, experts: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(x.shape[0]):
        for choice in range(ids.shape[1]):
            if ids[row, choice] < 0:
                continue
            gate, up, down = (m.double() for m in experts[int(ids[row, choice])])
            inner = F.silu(gate @ x[row].double()) * (up @ x[row].double())
            out[row] += weights[row, choice].double() * (down @ inner)
    return out


def choices(n: int, k: int, count: int, seed: int = 0, absent: float = 0.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(count, generator=generator)[:k] for _ in range(n)]) if n else torch.zeros(0, k)
    ids = ids.to(torch.int32)
    ids[torch.rand(n, k, generator=generator) < absent] = -1
    return ids.contiguous(), torch.rand(n, k, generator=generator)


def check(
    isa: str, dtype: torch.dtype, n: int, hidden: int, inner: int, count: int, k: int, absent: float = 0.0
) -> None:
    ops = backend(isa, dtype)
    experts = matrices(count, hidden, inner, dtype)
    packed = ops.pack_experts(count, hidden, inner, experts.__getitem__)
    x = made(n, hidden, seed=5).to(ops.dtype)
    ids, weights = choices(n, k, count, absent=absent)
    kept = x.clone(), ids.clone(), weights.clone()
    got = ops.experts(x, ids, weights, packed)
    assert got.dtype == ops.dtype and got.shape == x.shape
    assert all(torch.equal(a, b) for a, b in zip(kept, (x, ids, weights), strict=True))
    close(got, truth(x, ids, weights, experts), dtype, bf16=0.03)


@pytest.mark.parametrize(("isa", "dtype"), KINDS, ids=kind_name)
@pytest.mark.parametrize("hidden", [64, 101, 1])
def test_a_row_has_the_same_answer_alone_and_among_others(isa, dtype, hidden):
    """Bit for bit, with experts that have one row and many: else tokens depend on the batch that a request is in."""
    ops = backend(isa, dtype)
    experts = matrices(5, hidden, 49, dtype)
    packed = ops.pack_experts(5, hidden, 49, experts.__getitem__)
    x, (ids, weights) = made(40, hidden, seed=5).to(ops.dtype), choices(40, 3, 5)
    alone = torch.cat([ops.experts(*(t[i : i + 1].contiguous() for t in (x, ids, weights)), packed) for i in range(40)])
    for n in (2, 3, 5, 7, 40):
        got = ops.experts(*(t[:n].contiguous() for t in (x, ids, weights)), packed)
        assert torch.equal(got, alone[:n]), n


@pytest.mark.parametrize(("isa", "dtype"), BACKENDS, ids=kind_name)
@pytest.mark.parametrize(
    ("hidden", "inner"), [(64, 48), (96, 80), (33, 7), (16, 16), (130, 17), (2, 2), (1, 1), (200, 129)]
)
def test_every_width(isa, dtype, hidden, inner):
    check(isa, dtype, 9, hidden, inner, 5, 3)


@pytest.mark.parametrize(("isa", "dtype"), BACKENDS, ids=kind_name)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 6, 7, 13, 40])
def test_every_number_of_tokens(isa, dtype, n):
    """One expert for all tokens makes blocks of every height."""
    check(isa, dtype, n, 40, 24, 1, 1)
    check(isa, dtype, n, 40, 24, 6, 2, absent=0.5)


@pytest.mark.parametrize(("isa", "dtype"), BACKENDS, ids=kind_name)
@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(0, 30),
    hidden=st.integers(1, 70),
    inner=st.integers(1, 70),
    count=st.integers(1, 9),
    k=st.integers(1, 9),
    absent=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_any_shape(isa, dtype, n, hidden, inner, count, k, absent):
    check(isa, dtype, n, hidden, inner, count, min(k, count), absent)


@pytest.mark.parametrize(("isa", "dtype"), KINDS, ids=kind_name)
def test_more_tokens_than_one_call_takes(isa, dtype):
    ops = ops_for(isa, dtype)
    experts = matrices(3, 8, 8, dtype)
    packed = ops.pack_experts(3, 8, 8, experts.__getitem__)
    x = made(1500, 8, seed=5).to(ops.dtype)
    ids, weights = choices(1500, 2, 3)
    got = ops.experts(x, ids, weights, packed)
    close(got, truth(x, ids, weights, experts), dtype, bf16=0.03)


@pytest.mark.parametrize(("isa", "dtype"), KINDS, ids=kind_name)
def test_any_number_of_threads_and_any_company_give_the_same_bits(isa, dtype):
    experts = matrices(8, 128, 96, dtype)
    ids, weights = choices(50, 4, 8)
    results = []
    for threads in (1, 2, 5):
        ops = ops_for(isa, dtype, threads)
        packed = ops.pack_experts(8, 128, 96, experts.__getitem__)
        x = made(50, 128, seed=5).to(ops.dtype)
        results.append(ops.experts(x, ids, weights, packed))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize(("isa", "dtype"), BACKENDS, ids=kind_name)
def test_a_token_that_is_not_a_number_spoils_no_other(isa, dtype):
    ops = backend(isa, dtype)
    experts = matrices(4, 32, 16, dtype)
    packed = ops.pack_experts(4, 32, 16, experts.__getitem__)
    x = made(12, 32, seed=5).to(ops.dtype)
    x[5] = float("nan")
    ids, weights = choices(12, 2, 4)
    weights[5] = float("nan")
    got = ops.experts(x, ids, weights, packed)
    assert got[5].isnan().all()
    others = [i for i in range(12) if i != 5]
    close(got[others], truth(x, ids, weights, experts)[others], dtype, bf16=0.03)


@pytest.mark.parametrize(("isa", "dtype"), KINDS, ids=kind_name)
def test_bad_arguments_are_named(isa, dtype):
    ops = ops_for(isa, dtype)
    experts = matrices(4, 32, 16, dtype)
    packed = ops.pack_experts(4, 32, 16, experts.__getitem__)
    x = torch.zeros(3, 32, dtype=ops.dtype)
    ids, weights = choices(3, 2, 4)
    for bad in (4, -2, 2**31 - 1):
        wrong = ids.clone()
        wrong[1, 1] = bad
        with pytest.raises(IndexError, match=r"outside -1 \.\. 3"):
            ops.experts(x, wrong, weights, packed)
    with pytest.raises(TypeError, match=r"ids: expected a contiguous torch\.int32"):
        ops.experts(x, ids.long(), weights, packed)
    with pytest.raises(TypeError, match="weights: expected"):
        ops.experts(x, ids, weights[:, :1], packed)
    with pytest.raises(TypeError, match=r"\[n, 32\]"):
        ops.experts(x[:, :16].contiguous(), ids, weights, packed)
    with pytest.raises(TypeError, match=r"expected \[16, 32\], got \[16, 30\]"):
        ops.pack_experts(1, 32, 16, lambda e: (experts[e][0][:, :30], experts[e][1], experts[e][2]))


def test_the_grouped_product_gives_what_the_loop_gives():
    if not torch_moe.grouped_works(torch.device("cpu"), torch.bfloat16):
        pytest.skip("this torch has no grouped product on CPUs")
    experts = matrices(6, 64, 48, torch.bfloat16)
    packed = torch_moe.pack_experts(6, 64, 48, experts.__getitem__, torch.device("cpu"), torch.bfloat16)
    x = made(40, 64, seed=5).bfloat16()
    for absent in (0.0, 0.4, 1.0):
        ids, weights = choices(40, 3, 6, absent=absent)
        got, want = (torch_moe.experts(x, ids, weights, packed, grouped) for grouped in (True, False))
        close(got, want, torch.bfloat16)


# Routing


def spec(**changes: object) -> MoeSpec:
    known = {"num_experts": 16, "top_k": 4, "intermediate_size": 8, "layers": (0,)}
    return checked_moe(MoeSpec(**{**known, **changes}), "test")


SPECS = {
    "softmax": spec(),
    "softmax-raw": spec(normalize=False, scaling=2.5),
    "all": spec(num_experts=5, top_k=5),
    "one": spec(num_experts=1, top_k=1),
    "groups": spec(groups=4, kept_groups=2, normalize=False),
    "deepseek": spec(scoring="sigmoid", correction_bias=True, groups=4, kept_groups=2, group_best=2, scaling=2.5),
    "deepseek-raw": spec(scoring="sigmoid", correction_bias=True, normalize=False),
    "wide": spec(
        num_experts=256, top_k=8, scoring="sigmoid", correction_bias=True, groups=8, kept_groups=4, group_best=2
    ),
}


def routed(moe: MoeSpec, logits: Tensor, bias: Tensor | None) -> list[dict[int, float]]:
    """Expert -> weight for each row, by the definition, one row at a time in float64."""
    found = []
    size = moe.num_experts // moe.groups
    for row in logits.double():
        scores = row.sigmoid() if moe.scoring == "sigmoid" else row.softmax(0)
        choice = (scores if bias is None else scores + bias.double()).tolist()
        worth = [sum(sorted(choice[g * size : (g + 1) * size])[-moe.group_best :]) for g in range(moe.groups)]
        kept = sorted(range(moe.groups), key=lambda g: (-worth[g], g))[: moe.kept_groups]
        members = [e for e in range(moe.num_experts) if e // size in kept]
        best = sorted(members, key=lambda e: (-choice[e], e))[: moe.top_k]
        total = sum(float(scores[e]) for e in best) if moe.normalize else 1.0
        found.append({e: float(scores[e]) / total * moe.scaling for e in best})
    return found


@pytest.mark.parametrize(("isa", "dtype"), BACKENDS, ids=kind_name)
@pytest.mark.parametrize("name", SPECS)
def test_routing_is_what_its_definition_says(isa, dtype, name):
    ops, moe = backend(isa, dtype), SPECS[name]
    weight = made(moe.num_experts, 32, seed=3)
    bias = 0.2 * made(moe.num_experts, seed=4) if moe.correction_bias else None
    x = made(300, 32, seed=6).to(ops.dtype)
    ids, weights = ops.route(x, ops.pack_router(weight, bias, moe))
    assert (ids.dtype, weights.dtype, ids.shape) == (torch.int32, torch.float32, (300, moe.top_k))
    want = routed(moe, x.double() @ weight.double().T, bias)
    different = 0
    for row in range(300):
        got = dict(zip(ids[row].tolist(), weights[row].tolist(), strict=True))
        assert len(got) == moe.top_k
        if got.keys() != want[row].keys():
            different += 1  # a near tie, which rounding decides
            continue
        assert got == pytest.approx(want[row], rel=1e-4, abs=1e-6)
    assert different <= 3


def test_more_experts_than_the_kernel_takes_are_named():
    with pytest.raises(OpsUnavailable, match="up to 1024 experts, got 1025"):
        ops_for(KINDS[0][0], torch.float32).pack_router(torch.zeros(1025, 4), None, spec(num_experts=1025))
    assert "#define MAX_EXPERTS 1024 " in (build.SOURCES / "dpi.h").read_text()


@pytest.mark.parametrize(("isa", "dtype"), KINDS, ids=kind_name)
def test_many_tokens_among_many_experts(isa, dtype):
    """More rows than one call of the kernel takes, as many experts as it takes, several threads."""
    ops, moe = ops_for(isa, dtype), spec(num_experts=1024, top_k=3)
    x, weight = made(1100, 24, seed=3).to(ops.dtype), made(1024, 24)
    ids, _ = ops.route(x, ops.pack_router(weight, None, moe))
    want = (x.double() @ weight.double().T).topk(3).indices
    assert (ids.long() == want).all(1).double().mean() > 0.99  # rounding decides near ties


@pytest.mark.parametrize(("isa", "dtype"), BACKENDS, ids=kind_name)
def test_among_equals_the_lower_ones_come_first(isa, dtype):
    ops = backend(isa, dtype)
    flat = torch.zeros(2, 8, dtype=ops.dtype)
    for moe in (SPECS["softmax"], SPECS["groups"], spec(scoring="sigmoid", groups=4, kept_groups=2, group_best=2)):
        ids, weights = ops.route(flat, ops.pack_router(torch.ones(16, 8), None, moe))
        assert ids.tolist() == [[0, 1, 2, 3]] * 2
        assert bool((weights == weights[0, 0]).all())


@pytest.mark.parametrize(("isa", "dtype"), BACKENDS, ids=kind_name)
@pytest.mark.parametrize("name", ["softmax", "groups", "deepseek", "one"])
def test_a_row_that_is_not_a_number_gets_valid_experts(isa, dtype, name):
    ops, moe = backend(isa, dtype), SPECS[name]
    x = made(5, 8, seed=6).to(ops.dtype)
    x[2] = float("nan")
    x[3, 1] = float("inf")
    ids, _ = ops.route(x, ops.pack_router(made(moe.num_experts, 8), None, moe))
    for row in ids.tolist():
        assert len(set(row)) == moe.top_k and all(0 <= e < moe.num_experts for e in row)
    assert ops.route(x[:0], ops.pack_router(made(moe.num_experts, 8), None, moe))[0].shape == (0, moe.top_k)


@pytest.mark.parametrize(("isa", "dtype"), KINDS, ids=kind_name)
@settings(max_examples=20, deadline=None)
@given(
    groups=st.integers(1, 6), size=st.integers(1, 9), data=st.data(), scoring=st.sampled_from(["softmax", "sigmoid"]),
    normalize=st.booleans(),
)  # fmt: skip
def test_kernels_route_as_plain_torch_does(isa, dtype, groups, size, data, scoring, normalize):
    kept = data.draw(st.integers(1, groups))
    moe = spec(
        num_experts=groups * size, top_k=data.draw(st.integers(1, kept * size)), scoring=scoring, normalize=normalize,
        groups=groups, kept_groups=kept, group_best=data.draw(st.integers(1, min(2, size))),
    )  # fmt: skip
    # Few different logits make many ties; both sides get them exactly.
    logits = torch.randint(-2, 3, (20, moe.num_experts), generator=torch.Generator().manual_seed(size)).float()
    eye = torch.eye(moe.num_experts)
    ops = ops_for(isa, dtype)
    ids, weights = ops.route(logits.to(ops.dtype), ops.pack_router(eye, None, moe))
    other = TorchOps("cpu", torch.float32)
    want_ids, want_weights = other.route(logits, other.pack_router(eye, None, moe))
    torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-6)
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    torch.testing.assert_close(scores.gather(1, ids.long()), scores.gather(1, want_ids.long()), rtol=1e-5, atol=1e-6)
