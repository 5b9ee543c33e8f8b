"""The choice of experts in one kernel: scores, the best few of each token, their weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpi_engine.ops.cuda.runtime import pow2


@triton.jit
def _choose(logits, bias, ids, weights, scaling, COUNT: tl.constexpr, COUNT_PAD: tl.constexpr, TOP_K: tl.constexpr,
            TOP_PAD: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr, NORMALIZE: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, COUNT_PAD)
    known = at < COUNT
    logit = tl.load(logits + token * COUNT + at, mask=known, other=float("-inf"))
    if SIGMOID:
        scores = tl.sigmoid(logit)
    else:
        spread = tl.where(known, tl.exp(logit - tl.max(logit, 0)), 0.0)
        scores = spread / tl.sum(spread, 0)
    choice = scores
    if BIAS:
        choice = scores + tl.load(bias + at, mask=known, other=0.0)
    # What is not a number comes after all others, but before those that were chosen already.
    choice = tl.where(choice == choice, choice, -3.0e38)
    choice = tl.where(known, choice, float("-inf"))
    taken = tl.zeros([COUNT_PAD], tl.int32)
    slot = tl.arange(0, TOP_PAD)
    found = tl.zeros([TOP_PAD], tl.int32)
    weight = tl.zeros([TOP_PAD], tl.float32)
    for j in range(TOP_K):
        best = tl.max(choice, 0)
        # The lowest of equals, and of what nobody took.
        chosen = tl.min(tl.where((choice == best) & (taken == 0) & known, at, COUNT_PAD), 0)
        mine = at == chosen
        found = tl.where(slot == j, chosen, found)
        weight = tl.where(slot == j, tl.sum(tl.where(mine, scores, 0.0), 0), weight)
        taken = tl.where(mine, 1, taken)
        choice = tl.where(mine, float("-inf"), choice)
    if NORMALIZE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    place = token * TOP_K + slot
    tl.store(ids + place, found, mask=slot < TOP_K)
    tl.store(weights + place, weight * scaling, mask=slot < TOP_K)


def choose(
    logits: Tensor, bias: Tensor | None, top_k: int, sigmoid: bool, normalize: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """logits [n, experts] float32 -> ids [n, top_k] int32, weights [n, top_k] float32: `Ops.route` without groups."""
    n, count = logits.shape
    ids = torch.empty(n, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(n, top_k, dtype=torch.float32, device=logits.device)
    if n:
        _choose[(n,)](
            logits, logits if bias is None else bias, ids, weights, scaling, COUNT=count, COUNT_PAD=pow2(count),
            TOP_K=top_k, TOP_PAD=pow2(top_k), SIGMOID=sigmoid, BIAS=bias is not None, NORMALIZE=normalize, num_warps=1,
        )  # fmt: skip
    return ids, weights
