"""Routing and grouped products of experts of the CUDA backend against the reference."""

from __future__ import annotations

import pytest
import torch
from cuda_support import DEVICE, DTYPES, F32, REFERENCE, close, ops_of, random
from torch import Tensor

from dpi_engine.config.moe_spec import MoeSpec
from dpi_engine.ops.cuda import experts


def moe(**changed: object) -> MoeSpec:
    return MoeSpec(**{"num_experts": 12, "top_k": 3, "intermediate_size": 8, "layers": (0,), **changed})  # type: ignore[arg-type]


ROUTES = {
    "softmax": moe(),
    "not normalized": moe(normalize=False, scaling=2.5),
    "sigmoid, biased": moe(scoring="sigmoid", correction_bias=True, scaling=1.5),
    "many": moe(num_experts=128, top_k=8),
    "one": moe(top_k=1),
    "all": moe(num_experts=5, top_k=5),
    "groups": moe(groups=4, kept_groups=2, group_best=2, scoring="sigmoid"),
}


@pytest.mark.parametrize("spec", ROUTES.values(), ids=ROUTES)
def test_route(spec: MoeSpec) -> None:
    x, weight = random(9, 32), random(spec.num_experts, 32, seed=1) / 5
    bias = random(spec.num_experts, seed=2) / 3 if spec.correction_bias else None
    ids, weights = F32.route(x, F32.pack_router(weight, bias, spec))
    want_ids, want = REFERENCE.route(
        x.cpu(), REFERENCE.pack_router(weight.cpu(), None if bias is None else bias.cpu(), spec)
    )
    assert ids.dtype == torch.int32 and ids.tolist() == want_ids.tolist()
    close(weights, want, torch.float32)


def test_of_equal_scores_the_lower_experts_come_first() -> None:
    spec = moe(num_experts=11, top_k=4)
    ids, weights = F32.route(random(2, 8), F32.pack_router(torch.zeros(11, 8), None, spec))
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert weights.cpu().tolist() == pytest.approx([0.25] * 4) or torch.allclose(
        weights.cpu(), torch.full((2, 4), 0.25)
    )


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_rows_that_are_not_numbers_give_valid_experts(scoring: str) -> None:
    spec = moe(scoring=scoring)
    x = random(3, 8)
    x[1] = float("nan")
    x[2, 3] = float("inf")
    ids, _ = F32.route(x, F32.pack_router(random(12, 8, seed=1), None, spec))
    for row in ids.tolist():
        assert len(set(row)) == 3 and all(0 <= i < 12 for i in row)


def test_no_tokens_are_routed() -> None:
    ids, weights = F32.route(random(0, 8), F32.pack_router(random(12, 8), None, moe()))
    assert ids.shape == weights.shape == (0, 3)


def choices(m: int, k: int, count: int, seed: int, absent: float = 0.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(count, generator=generator)[:k] for _ in range(m)]).to(torch.int32)
    ids[torch.rand(m, k, generator=generator) < absent] = -1
    return ids.to(DEVICE), torch.rand(m, k, generator=generator).to(DEVICE)


def check(m: int, k: int, count: int, hidden: int, inner: int, dtype: torch.dtype, absent: float = 0.0) -> None:
    matrices = [
        (random(inner, hidden, seed=3 * i) / 8, random(inner, hidden, seed=3 * i + 1) / 8,
         random(hidden, inner, seed=3 * i + 2) / 8)
        for i in range(count)
    ]  # fmt: skip
    rounded = [tuple(part.to(dtype).float().cpu() for part in one) for one in matrices]
    ops = ops_of(dtype)
    x = random(m, hidden, seed=99, dtype=dtype)
    ids, weights = choices(m, k, count, 5, absent)
    weights[ids < 0] = float("nan")
    got = ops.experts(x, ids, weights, ops.pack_experts(count, hidden, inner, lambda i: matrices[i]))
    packed = REFERENCE.pack_experts(count, hidden, inner, lambda i: rounded[i])
    close(got, REFERENCE.experts(x.cpu().float(), ids.cpu(), weights.cpu(), packed), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(dtype: torch.dtype) -> None:
    check(9, 2, 5, 48, 40, dtype)
    check(1, 3, 4, 64, 32, dtype)
    check(40, 2, 3, 80, 72, dtype, absent=0.4)


def test_tiles_of_every_size() -> None:
    for m, block in ((3, 16), (40, 32), (70, 64), (150, 128)):
        assert experts.rows_at_once(2 * m, 2) in (block, 2 * block)
        check(m, 2, 2, 32, 16, torch.float32)
    assert experts.rows_at_once(8 * 16384, 128) == 128 and experts.rows_at_once(8, 128) == 16


def test_experts_that_nobody_wants_and_tokens_that_want_none() -> None:
    check(6, 1, 30, 32, 16, torch.float32)
    check(4, 2, 3, 32, 16, torch.float32, absent=1.0)


def test_no_rows() -> None:
    packed = F32.pack_experts(2, 16, 8, lambda i: (random(8, 16), random(8, 16), random(16, 8)))
    ids, weights = choices(1, 2, 2, 0)
    assert F32.experts(random(0, 16), ids[:0], weights[:0], packed).shape == (0, 16)
