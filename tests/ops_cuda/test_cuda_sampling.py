"""Choosing tokens on the device: which tokens a draw may give, and how often, against sorting the whole row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cuda_support import DEVICE, DTYPES, F32, ops_of, random
from torch import Tensor

from dpi_engine.ops.interface import Draws


def draws_of(m: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
             uniform: list[float] | None = None) -> Draws:  # fmt: skip
    def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((m,), value, dtype=dtype, device=DEVICE)

    spread = torch.tensor(uniform, device=DEVICE) if uniform else (torch.arange(m, device=DEVICE) + 0.5) / m
    return Draws(full(temperature), full(top_k, torch.int32), full(top_p), full(min_p), spread.float())


def allowed(row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """Token -> probability, by sorting: min-p and top-k (with equals) look at the row, top-p at what they leave."""
    z = row.cpu().double().numpy()
    order = np.lexsort((np.arange(len(z)), -z))
    weight = np.exp((z[order] - z[order[0]]) / temperature)
    keep = weight > 0
    if min_p:
        keep &= weight >= min_p
    if top_k and top_k < len(z):
        keep &= z[order] >= z[order[top_k - 1]]
    weight *= keep
    if top_p < 1:
        sums = np.cumsum(weight)
        keep &= sums - weight < top_p * sums[-1]
        keep[0] = True
        weight *= keep
    return {int(t): float(w / weight.sum()) for t, w in zip(order, weight, strict=True) if w > 0}


ROWS = 400 if DEVICE != "cpu" else 24
"""The interpreter takes some 100 ms for a row that is cut."""

CUTS = {
    "whole": {},
    "hot": {"temperature": 3.0},
    "cold": {"temperature": 0.3},
    "top-k": {"top_k": 7},
    "top-k past the row": {"top_k": 400},
    "top-p": {"top_p": 0.6},
    "small top-p": {"top_p": 1e-6},
    "min-p": {"min_p": 0.2},
    "all": {"temperature": 1.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
}


@pytest.mark.parametrize(
    ("cut", "dtype"),
    [(cut, torch.float32) for cut in CUTS.values()] + [(CUTS["all"], torch.bfloat16), (CUTS["all"], torch.float16)],
    ids=[*CUTS, "bfloat16", "float16"],
)
def test_uniforms_over_their_range_give_each_token_its_share(cut: dict[str, float], dtype: torch.dtype) -> None:
    m = 4 if cut is CUTS["small top-p"] else ROWS  # one token is left there
    row = random(1, 333, seed=4, dtype=dtype) * 2
    want = allowed(row[0], **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **cut})  # type: ignore[arg-type]
    tokens, best = ops_of(dtype).draw(row.expand(m, -1).contiguous(), draws_of(m, **cut))  # type: ignore[arg-type]
    assert best.cpu().tolist() == [float(row.float().max())] * m
    drawn = np.bincount(tokens.cpu().numpy(), minlength=333) / m
    assert set(np.flatnonzero(drawn).tolist()) <= set(want)
    # Even uniforms meet every token whose share is wider than their distance, and no share is off by more than two.
    for token, share in want.items():
        assert abs(drawn[token] - share) <= 2 / m
    assert tokens.cpu().tolist() == sorted(tokens.cpu().tolist())  # by rising id, as the uniforms rise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_at_the_edges(dtype: torch.dtype) -> None:
    """Equals of the k-th logit stay in; of equals at the edge of the mass, the low ids that it takes."""
    row = torch.full((1, 100), -3.0)
    row[0, 10], row[0, [20, 30, 40, 50]] = 2.0, 1.0
    row = row.to(DEVICE, dtype)
    # Seven even uniforms meet the smallest share here, 0.149; where one token is left, its share is whole.
    for cut, tokens in (
        ({"top_k": 2}, {10, 20, 30, 40, 50}),
        ({"top_k": 1}, {10}),
        ({"top_k": 5, "top_p": 0.55}, {10, 20}),
        ({"top_k": 5, "top_p": 0.7}, {10, 20, 30}),
        ({"min_p": 0.36}, {10, 20, 30, 40, 50}),
        ({"min_p": 0.38}, {10}),
    ):
        m = 2 if len(tokens) == 1 else 7
        got, _ = ops_of(dtype).draw(row.expand(m, -1).contiguous(), draws_of(m, **cut))  # type: ignore[arg-type]
        assert set(got.cpu().tolist()) == tokens, cut


def test_zeros_of_both_signs_are_equals() -> None:
    row = torch.full((1, 40), -5.0)
    row[0, 3], row[0, 7], row[0, 9] = 0.0, -0.0, -1.0
    got, _ = F32.draw(row.to(DEVICE).expand(4, -1).contiguous(), draws_of(4, top_k=1))
    assert set(got.cpu().tolist()) == {3, 7}


def test_rows_differ_in_parameters_and_do_not_see_each_other() -> None:
    logits = random(6, 500, seed=8) * 3
    draws = draws_of(6)
    draws.temperature[:] = torch.tensor([0.0, 1.0, 0.5, 2.0, 1.0, 1.0])
    draws.top_k[:] = torch.tensor([0, 3, 0, 0, 50, 0], dtype=torch.int32)
    draws.top_p[:] = torch.tensor([1.0, 1.0, 0.4, 1.0, 0.9, 1.0])
    draws.min_p[:] = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0, 0.0])
    together, best = F32.draw(logits, draws)
    assert together[0].item() == logits[0].argmax().item()
    for i in range(6):
        one = Draws(*(getattr(draws, f)[i : i + 1] for f in ("temperature", "top_k", "top_p", "min_p", "uniform")))
        alone, top = F32.draw(logits[i : i + 1], one)
        assert alone.item() == together[i].item() and top.item() == best[i].item()


def test_masked_tokens_never_come_out() -> None:
    logits = torch.full((4, 300), float("-inf"), device=DEVICE)
    logits[:, [5, 250]] = 1.0
    for cut in ({}, {"top_k": 10}, {"top_p": 0.99}, {"min_p": 0.01}, {"top_k": 3, "top_p": 0.999}):
        got, _ = F32.draw(logits, draws_of(4, **cut))  # type: ignore[arg-type]
        assert set(got.cpu().tolist()) == {5, 250}, cut


def test_the_ends_of_the_uniforms() -> None:
    logits = random(2, 1000, seed=3)
    for cut in ({}, {"top_p": 0.5}, {"top_k": 20}):
        got, _ = F32.draw(logits, draws_of(2, uniform=[0.0, float(np.nextafter(np.float32(1), np.float32(0)))], **cut))  # type: ignore[arg-type]
        for row, token in zip(logits, got.tolist(), strict=True):
            assert token in allowed(row, **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **cut})  # type: ignore[arg-type]


def test_rows_that_are_not_finite_tell_so() -> None:
    logits = random(4, 100)
    logits[0, 60] = float("nan")
    logits[1, 70] = float("inf")
    logits[2] = float("-inf")
    tokens, best = F32.draw(logits, draws_of(4))
    assert best.cpu().tolist()[:3] == [float("inf"), float("inf"), float("-inf")] and best[3].isfinite()
    assert tokens[0].item() == 60 and tokens[1].item() == 70 and all(0 <= t < 100 for t in tokens.tolist())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [5, 1000, 20_000])
def test_argmax_takes_the_lowest_of_equals(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.zeros(5, vocab, dtype=dtype, device=DEVICE)
    logits[1, [vocab - 2, 3, vocab - 1]] = 2.0
    logits[2, vocab - 1] = 1.0
    logits[3] = float("-inf")
    logits[4, vocab // 2] = float("nan")
    got = ops_of(dtype).argmax(logits)
    assert got.dtype == torch.int64
    assert got.tolist() == [0, 3, vocab - 1, 0, vocab // 2]


def test_logits_of_a_part_of_a_wider_table() -> None:
    table = random(6, 700)
    assert torch.equal(F32.argmax(table[:, :650]), table[:, :650].argmax(-1))


def test_nothing_to_draw() -> None:
    tokens, best = F32.draw(random(0, 50), draws_of(0, uniform=[]))
    assert tokens.shape == best.shape == (0,)
