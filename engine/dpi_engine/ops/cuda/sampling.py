"""Choosing tokens on the GPU: the largest logit, or one draw from what temperature, min-p, top-k and top-p leave.

No row is sorted. A float's bits, read as an integer, rise with it; so the smallest logit that a cut keeps is found bit
by bit, from the highest on, each by one pass over the row that counts (top-k) or weighs (top-p) what lies above. One
program has a row, so what it draws depends on that row alone, and on one uniform number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpi_engine.ops.cuda.runtime import pow2

MAX_BLOCK = 4096
ARGMAX_PART = 16384
"""Logits that one program looks through for the largest."""

_LOW_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Bits of a float32 that are always zero in what was widened from this dtype: they need not be searched."""


@triton.jit
def _load(logits, row, stride, at, VOCAB: tl.constexpr):
    """Logits as float32, -inf past the end; what is not a number is +inf, so that it is found."""
    z = tl.load(logits + row * stride + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.where(z == z, z, float("inf"))


@triton.jit
def _key(z, LOW: tl.constexpr):
    """An unsigned integer that rises with z."""
    z = tl.where(z == 0.0, 0.0, z)  # one zero, not two
    bits = z.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, ~bits, bits ^ -2147483648)
    return key.to(tl.uint32, bitcast=True) >> LOW


@triton.jit
def _argmax_parts(logits, stride, best, where, VOCAB: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    index = part * PART + lane
    for first in range(0, PART, BLOCK):
        at = part * PART + first + lane
        z = _load(logits, row, stride, at, VOCAB)
        index = tl.where(z > high, at, index)
        high = tl.maximum(high, z)
    top = tl.max(high, 0)
    tl.store(best + row * PARTS + part, top)
    tl.store(where + row * PARTS + part, tl.min(tl.where(high == top, index, VOCAB), 0))


@triton.jit
def _argmax(best, where, out, top_out, VOCAB: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_PAD)
    high = tl.load(best + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    index = tl.load(where + row * PARTS + part, mask=part < PARTS, other=VOCAB)
    top = tl.max(high, 0)
    tl.store(out + row, tl.minimum(tl.min(tl.where(high == top, index, VOCAB), 0), VOCAB - 1).to(tl.int64))
    tl.store(top_out + row, top)


@triton.jit
def _draw(logits, stride, temperatures, top_ks, top_ps, min_ps, uniforms, best, tokens, VOCAB: tl.constexpr,
          BLOCK: tl.constexpr, LOW: tl.constexpr):  # fmt: skip
    """tokens [rows] int64 holds the largest logit's and best [rows] its value; rows that are not drawn keep theirs."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    peak = tl.load(best + row)
    if (temperature <= 0) | (peak == float("inf")) | (peak == float("-inf")):
        return
    lane = tl.arange(0, BLOCK)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    sharp = 1.0 / temperature
    least = float("-inf")
    if min_p > 0:
        least = tl.log(min_p)
    # Unsigned keys from `floor` on are kept; where `ties` is not negative, only so many of those at `floor`, low ids
    # first.
    floor = tl.full([], 0, tl.uint32)
    if (top_k > 0) & (top_k < VOCAB):
        for step in range(32 - LOW):
            trial = floor | (tl.full([], 1, tl.uint32) << (31 - LOW - step))
            count = tl.zeros([BLOCK], tl.int32)
            for first in range(0, VOCAB, BLOCK):
                at = first + lane
                key = _key(_load(logits, row, stride, at, VOCAB), LOW)
                count += ((key >= trial) & (at < VOCAB)).to(tl.int32)
            floor = tl.where(tl.sum(count, 0) >= top_k, trial, floor)
    by_k = floor
    whole = tl.zeros([BLOCK], tl.float32)
    for first in range(0, VOCAB, BLOCK):
        z = _load(logits, row, stride, first + lane, VOCAB)
        scaled = (z - peak) * sharp
        whole += tl.where((_key(z, LOW) >= by_k) & (scaled >= least), tl.exp(scaled), 0.0)
    mass = tl.sum(whole, 0)
    ties = -1
    if top_p < 1:
        wanted = top_p * mass
        floor = tl.full([], 0, tl.uint32)
        for step in range(32 - LOW):
            trial = floor | (tl.full([], 1, tl.uint32) << (31 - LOW - step))
            above = tl.zeros([BLOCK], tl.float32)
            for first in range(0, VOCAB, BLOCK):
                z = _load(logits, row, stride, first + lane, VOCAB)
                key = _key(z, LOW)
                scaled = (z - peak) * sharp
                above += tl.where((key >= trial) & (key >= by_k) & (scaled >= least), tl.exp(scaled), 0.0)
            floor = tl.where(tl.sum(above, 0) >= wanted, trial, floor)
        # Among equals at the edge, those with low ids, as many as it takes to reach the mass.
        more = tl.zeros([BLOCK], tl.float32)
        edge = tl.zeros([BLOCK], tl.float32)
        for first in range(0, VOCAB, BLOCK):
            z = _load(logits, row, stride, first + lane, VOCAB)
            key = _key(z, LOW)
            scaled = (z - peak) * sharp
            kept = (key >= by_k) & (scaled >= least)
            more += tl.where(kept & (key > floor), tl.exp(scaled), 0.0)
            edge = tl.maximum(edge, tl.where(kept & (key == floor), tl.exp(scaled), 0.0))
        heavier = tl.sum(more, 0)
        each = tl.max(edge, 0)
        missing = tl.where(each > 0, tl.ceil((wanted - heavier) / tl.where(each > 0, each, 1.0)), 0.0)
        ties = tl.maximum(tl.minimum(missing, 1.0 * VOCAB).to(tl.int32), tl.where(heavier > 0, 0, 1))
        mass = heavier + each * ties
    target = tl.load(uniforms + row) * mass
    # The first token, by rising id, at which the running sum passes the target.
    passed = 0.0
    met = 0
    chosen = VOCAB
    last = -1
    for first in range(0, VOCAB, BLOCK):
        at = first + lane
        z = _load(logits, row, stride, at, VOCAB)
        key = _key(z, LOW)
        scaled = (z - peak) * sharp
        kept = (key >= by_k) & (key >= floor) & (scaled >= least)
        if ties >= 0:
            equal = (kept & (key == floor)).to(tl.int32)
            kept = kept & ((equal == 0) | (met + tl.cumsum(equal, 0) <= ties))
            met += tl.sum(equal, 0)
        weight = tl.where(kept, tl.exp(scaled), 0.0)
        sums = passed + tl.cumsum(weight, 0)
        heavy = weight > 0
        chosen = tl.minimum(chosen, tl.min(tl.where(heavy & (sums > target), at, VOCAB), 0))
        last = tl.maximum(last, tl.max(tl.where(heavy, at, -1), 0))
        passed = tl.max(sums, 0)
    # Sums are rounded, so the last one may miss the target by a hair.
    tl.store(tokens + row, tl.where(chosen < VOCAB, chosen, last).to(tl.int64))


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [m, vocab], rows contiguous -> index of the largest [m] int64, the lowest of equals, and its value [m]
    float32: +inf where a row holds a not-a-number, whose index is given."""
    m, vocab = logits.shape
    out = torch.empty(m, dtype=torch.int64, device=logits.device)
    top = torch.empty(m, dtype=torch.float32, device=logits.device)
    if m:
        parts = triton.cdiv(vocab, ARGMAX_PART)
        best = torch.empty(m, parts, dtype=torch.float32, device=logits.device)
        where = torch.empty(m, parts, dtype=torch.int32, device=logits.device)
        part = min(ARGMAX_PART, pow2(vocab))
        _argmax_parts[(m, parts)](
            logits, logits.stride(0), best, where, VOCAB=vocab, PART=part, PARTS=parts, BLOCK=min(part, MAX_BLOCK),
            num_warps=8,
        )  # fmt: skip
        _argmax[(m,)](best, where, out, top, VOCAB=vocab, PARTS=parts, PARTS_PAD=pow2(parts), num_warps=1)
    return out, top


def draw(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """logits [m, vocab] -> tokens [m] int64 and the largest logit of each row [m] float32, as `largest` gives it.

    temperature, top_p, min_p, uniform [m] float32, top_k [m] int32, on the device of `logits`. Temperature 0 is greedy,
    top_k 0 no limit; uniform is in [0, 1). min-p and top-k look at the whole row, top-p at what they leave; equals of
    the k-th stay in. Rows whose largest logit is not finite give that one's index.
    """
    tokens, best = largest(logits)
    if tokens.shape[0]:
        vocab = logits.shape[1]
        _draw[(tokens.shape[0],)](
            logits, logits.stride(0), temperature, top_k, top_p, min_p, uniform, best, tokens, VOCAB=vocab,
            BLOCK=min(MAX_BLOCK, pow2(vocab)), LOW=_LOW_BITS[logits.dtype], num_warps=16,
        )  # fmt: skip
    return tokens, best
