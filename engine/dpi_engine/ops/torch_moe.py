"""Routing and experts in plain torch, on any device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dpi_engine.config.moe_spec import MoeSpec
from dpi_engine.ops.interface import ExpertLoader

log = logging.getLogger(__name__)

ROWS_AT_ONCE = 1024
"""Tokens whose results of all their experts are held together, in float32."""


@dataclass(slots=True)
class Router:
    """weight [experts, hidden] and bias [experts], float32: rounding would change which experts are chosen."""

    weight: Tensor
    bias: Tensor | None
    moe: MoeSpec


@dataclass(slots=True)
class PackedExperts:
    """gate_up [experts, 2 inner, hidden], down [experts, hidden, inner]."""

    gate_up: Tensor
    down: Tensor


def pack_router(weight: Tensor, bias: Tensor | None, moe: MoeSpec, device: torch.device) -> Router:
    def wide(x: Tensor) -> Tensor:
        return x.to(device=device, dtype=torch.float32, copy=True).contiguous()

    return Router(wide(weight), None if bias is None else wide(bias), moe)


def choose(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """logits [n, experts] float32 -> ids [n, k] int32, weights [n, k] float32."""
    moe = router.moe
    scores = logits.sigmoid() if moe.scoring == "sigmoid" else logits.softmax(-1)
    choice = scores if router.bias is None else scores + router.bias
    if moe.groups > 1:
        by_group = choice.view(-1, moe.groups, moe.num_experts // moe.groups)
        worth = by_group.sort(-1, descending=True).values[..., : moe.group_best].sum(-1)
        kept = worth.sort(dim=-1, descending=True, stable=True).indices[:, : moe.kept_groups]
        out = torch.ones_like(worth, dtype=torch.bool).scatter_(1, kept, False)
        choice = by_group.masked_fill(out.unsqueeze(-1), -torch.inf).view_as(choice)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : moe.top_k]
    weights = scores.gather(1, ids)
    if moe.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.to(torch.int32), weights * moe.scaling


def pack_experts(
    count: int,
    hidden: int,
    inner: int,
    load: ExpertLoader,
    device: torch.device,
    dtype: torch.dtype,
    into: Callable[[Tensor, Tensor], None] | None = None,
) -> PackedExperts:
    """`into(target, source)` copies a matrix to the device (None: torch does)."""
    put = into or _copy
    packed = PackedExperts(
        torch.empty(count, 2 * inner, hidden, device=device, dtype=dtype),
        torch.empty(count, hidden, inner, device=device, dtype=dtype),
    )
    for i in range(count):
        gate, up, down = load(i)
        put(packed.gate_up[i, :inner], gate)
        put(packed.gate_up[i, inner:], up)
        put(packed.down[i], down)
    return packed


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def experts(x: Tensor, ids: Tensor, weights: Tensor, packed: PackedExperts, grouped: bool) -> Tensor:
    """As `Ops.experts`. `grouped`: one grouped product for all experts, nothing is read on the host."""
    if not x.shape[0]:
        return torch.empty_like(x)
    parts = []
    for first in range(0, x.shape[0], ROWS_AT_ONCE):
        some = slice(first, first + ROWS_AT_ONCE)
        parts.append(_some_rows(x[some], ids[some], weights[some], packed, grouped))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _some_rows(x: Tensor, ids: Tensor, weights: Tensor, packed: PackedExperts, grouped: bool) -> Tensor:
    k, count = ids.shape[1], packed.gate_up.shape[0]
    wanted = torch.where(ids < 0, count, ids).flatten()  # what is not computed here comes last
    ordered, order = wanted.sort(stable=True)
    rows = x[order // k]
    ends = torch.searchsorted(ordered, torch.arange(count, device=x.device, dtype=ordered.dtype), right=True)
    if grouped:
        offsets = ends.to(torch.int32)
        inner = F.grouped_mm(rows, packed.gate_up.transpose(1, 2), offs=offsets)
        results = F.grouped_mm(_silu_mul(inner), packed.down.transpose(1, 2), offs=offsets)
    else:
        results = torch.empty_like(rows)
        first = 0
        for expert, end in enumerate(ends.tolist()):
            if end > first:
                inner = F.linear(rows[first:end], packed.gate_up[expert])
                results[first:end] = F.linear(_silu_mul(inner), packed.down[expert])
            first = end
    weighted = results.float() * weights.flatten()[order].unsqueeze(1)
    # Rows past the last expert were never written.
    weighted = torch.where((ordered < count).unsqueeze(1), weighted, 0.0)
    back = torch.empty_like(weighted)
    back[order] = weighted
    return back.view(-1, k, x.shape[1]).sum(1).to(x.dtype)


def _silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def grouped_works(device: torch.device, dtype: torch.dtype) -> bool:
    """True when torch has a grouped product for `dtype` on `device` that agrees with single ones on a small case."""
    if not hasattr(F, "grouped_mm"):
        return False
    try:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(24, 32, generator=generator).to(device=device, dtype=dtype)
        weight = torch.randn(3, 16, 32, generator=generator).to(device=device, dtype=dtype)
        got = F.grouped_mm(x, weight.transpose(1, 2), offs=torch.tensor([5, 5, 20], dtype=torch.int32, device=device))
        want = torch.cat((F.linear(x[:5], weight[0]), F.linear(x[5:20], weight[2])))
        return torch.allclose(got[:20].float(), want.float(), rtol=0.02, atol=0.1)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        log.debug("grouped product in %s on %s is not to be had: %s", dtype, device, error)
        return False
