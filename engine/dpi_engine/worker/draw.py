"""Drawing one token per row from softmax(logits / temperature) cut by min-p, top-k and top-p, with one uniform each.

What a row draws depends on that row alone: cuts and sums run over the row's own tokens in a fixed order (by falling
logit, equals by rising id; from whole rows by rising id), on the host in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpi_engine.worker.rows import GROUP, Floats, Rows, to_device, to_host

Doubles = NDArray[np.float64]
Longs = NDArray[np.int64]

FIRST_TRY = 256
"""Groups looked at first for a top-p nucleus; flat rows are drawn whole, through a histogram."""

WIDE = 4096
"""Rows with more candidates than this are drawn one by one, lest the table of all rows grow to their width."""

_BINS = 2048


@dataclass(slots=True)
class Draws:
    """Parameters [n] of n draws. top_k 0 is no limit; uniform is in [0, 1)."""

    temperature: Doubles
    top_k: Longs
    top_p: Doubles
    min_p: Doubles
    uniform: Doubles

    def at(self, i: Longs) -> Draws:
        return Draws(self.temperature[i], self.top_k[i], self.top_p[i], self.min_p[i], self.uniform[i])


def draw(rows: Rows, which: Longs, draws: Draws) -> Longs:
    """Tokens [n] for the rows `which` [n] of `rows`, whose logits are finite or -inf with a finite maximum.

    min_p applies before top-k, top-k before top-p; ties with the k-th logit stay in.
    """
    tokens = np.zeros(len(which), np.int64)
    by_k = draws.top_k > 0
    by_min = ~by_k & (draws.min_p > 0)
    by_p = ~by_k & ~by_min & (draws.top_p < 1)
    for kind, how in ((by_k, _top_k), (by_min, _min_p), (by_p, _top_p), (~by_k & ~by_min & ~by_p, _uncut)):
        if kind.any():
            at = np.flatnonzero(kind)
            tokens[at] = how(rows, which[at], draws.at(at))
    return tokens


def _top_k(rows: Rows, which: Longs, draws: Draws) -> Longs:
    return _from_candidates(rows, which, draws, rows.bound(which, draws.top_k))


def _min_p(rows: Rows, which: Longs, draws: Draws) -> Longs:
    # A little below the cut, which is then made exactly.
    low = rows.max()[which] + draws.temperature * (np.log(draws.min_p) - 1e-3) - 1e-3
    return _from_candidates(rows, which, draws, low.astype(np.float32))


def _from_candidates(rows: Rows, which: Longs, draws: Draws, bound: Floats) -> Longs:
    """Draw where all that may come out reaches `bound`."""
    peaks = rows.peaks()[which]
    wide = ((peaks >= bound[:, None]) & (peaks > -np.inf)).sum(axis=1) * GROUP > WIDE
    tokens = np.zeros(len(which), np.int64)
    for part in [np.flatnonzero(~wide), *np.flatnonzero(wide)[:, None]]:
        if len(part):
            ids, values = rows.sorted_at_least(which[part], bound[part])
            tokens[part] = _pick(ids, values, rows.max()[which[part]], draws.at(part))[0]
    return tokens


def _top_p(rows: Rows, which: Longs, draws: Draws) -> Longs:
    """Draw from nuclei. Most lie among the few largest; the others are drawn from the whole row."""
    weights, sums = _weights(rows, which, draws.temperature)
    total = np.cumsum(sums, axis=1)[:, -1]
    groups = rows.peaks().shape[1]
    ids, values = rows.sorted_at_least(which, rows.bound(which, np.full(len(which), min(FIRST_TRY, groups))))
    tokens, whole = _pick(ids, values, rows.max()[which], draws, total)
    for i in np.flatnonzero(~whole).tolist():
        # Only this row's own numbers decide which way it goes, so it goes the same way in every batch.
        w = to_host(weights[i]).reshape(-1)
        tokens[i] = _from_wide_nucleus(w, draws.top_p[i] * total[i], draws.uniform[i])
    return tokens


def _from_wide_nucleus(w: Floats, mass: float, uniform: float) -> int:
    """Draw by rising id from the nucleus of one row of weights [tokens], the fewest that together reach `mass`.

    A histogram tells which tokens are in without sorting: only those of the bin where the mass is reached are sorted.
    """
    # The bits of a positive float32 rise with it: 8 of exponent and 3 of fraction make 2048 bins, the heaviest first.
    bins = _BINS - 1 - (w.view(np.int32) >> 20)
    sums = np.cumsum(np.bincount(bins, w, minlength=_BINS))
    edge = min(int(np.searchsorted(sums, mass)), int(bins.max()))
    inside = bins < edge
    border = np.flatnonzero(bins == edge)
    border = border[np.argsort(-w[border], kind="stable")]
    before = (sums[edge - 1] if edge else 0.0) + np.cumsum(w[border], dtype=np.float64) - w[border]
    inside[border[before < mass]] = True
    inside[border[:1]] |= not inside.any()
    ends = np.cumsum(np.where(inside, w, 0), dtype=np.float64)
    target = min(uniform * ends[-1], np.nextafter(ends[-1], 0))
    return int(np.searchsorted(ends, target, side="right"))


def _pick(
    ids: Longs, values: Floats, peak: Floats, draws: Draws, total: Doubles | None = None
) -> tuple[Longs, NDArray[np.bool_]]:
    """Cut and draw from sorted candidates ids, values [n, c]. Also says of each row whether the nucleus lies within
    them (it may not only where `total`, the weight of the whole row, is given)."""
    n, width = values.shape
    scaled = (values.astype(np.float64) - peak[:, None]) / draws.temperature[:, None]
    keep = np.ones((n, width), bool)
    if draws.min_p.any():
        with np.errstate(divide="ignore"):
            keep &= scaled >= np.log(draws.min_p)[:, None]
    top_k = draws.top_k
    if top_k.any():
        kth = values[np.arange(n), np.clip(top_k - 1, 0, width - 1)]
        keep &= (values >= kth[:, None]) | ((top_k == 0) | (top_k > width))[:, None]
    weights = np.exp(scaled) * keep
    sums = np.cumsum(weights, axis=1)
    mass = draws.top_p * (sums[:, -1] if total is None else total)
    keep &= (sums - weights < mass[:, None]) | (draws.top_p >= 1)[:, None]
    keep[:, 0] = True  # top_p so small that not even the first fits
    # Each cut keeps a head of the sorted row, so the kept are the first `size`; what weighs nothing is never drawn.
    size = (keep & (weights > 0)).sum(axis=1)
    end = sums[np.arange(n), size - 1]
    index = (sums <= (draws.uniform * end)[:, None]).sum(axis=1)
    whole = np.ones(n, bool) if total is None else sums[:, -1] >= mass
    return ids[np.arange(n), np.minimum(index, size - 1)], whole


def _weights(rows: Rows, which: Longs, temperature: Doubles) -> tuple[Tensor, Doubles]:
    """exp((z - peak) / temperature) of whole rows [n, groups, GROUP] on the device; the sums of groups [n, groups].

    The weights lie in the buffer's spare table: valid until the next call.
    """
    spare = rows.buffer.spare(len(which))
    if len(which) == len(rows.z):
        z = torch.sub(rows.z, to_device(rows.max(), rows.device)[:, None], out=spare)
    else:
        z = torch.index_select(rows.z, 0, to_device(which, rows.device), out=spare)
        z -= to_device(rows.max()[which], rows.device)[:, None]
    if (temperature != 1).any():
        z *= to_device((1 / temperature).astype(np.float32), rows.device)[:, None]
    weights = z.exp_().view(len(which), -1, GROUP)
    return weights, to_host(weights.sum(2)).astype(np.float64)


def _uncut(rows: Rows, which: Longs, draws: Draws) -> Longs:
    """Draw from whole rows: first the group, then the token in it."""
    weights, sums = _weights(rows, which, draws.temperature)
    n = np.arange(len(which))
    ends = np.cumsum(sums, axis=1)
    target = draws.uniform * ends[:, -1]
    last = sums.shape[1] - 1 - (sums[:, ::-1] > 0).argmax(axis=1)
    group = np.minimum((ends <= target[:, None]).sum(axis=1), last)
    rest = target - np.where(group > 0, ends[n, group - 1], 0.0)
    w = to_host(weights[to_device(n, rows.device), to_device(group, rows.device)]).astype(np.float64)
    within = (np.cumsum(w, axis=1) <= rest[:, None]).sum(axis=1)
    # The group's sum was rounded to float32, so the rest may pass its last token by a hair.
    last = GROUP - 1 - (w[:, ::-1] > 0).argmax(axis=1)
    return group * GROUP + np.minimum(within, last)
