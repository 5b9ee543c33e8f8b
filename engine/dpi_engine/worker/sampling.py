"""Logits to tokens. The steps and their order are vLLM's: allowed tokens, bad words, min tokens, logit bias, penalties
(repetition, frequency, presence); then argmax, or temperature, min-p, top-k, top-p and one draw. Log probabilities are
those of the model's own logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpi_engine.ops.interface import Ops
from dpi_engine.wire.messages import LogprobsLists
from dpi_engine.worker.batch import Batch
from dpi_engine.worker.draw import Draws, draw
from dpi_engine.worker.logprobs import joined, token_logprobs
from dpi_engine.worker.random import uniforms
from dpi_engine.worker.rows import RowBuffer, Rows, to_device, to_host
from dpi_engine.worker.slot_params import EDITS, LOGPROBS, PENALTIES, RANDOM, SlotParams

Longs = NDArray[np.int64]

NOT_A_NUMBER = "the model's logits are not finite (NaN or +inf); the weights or the numeric type are at fault"
NO_LEGAL_TOKEN = (
    "invalid_sampling: no token may follow: allowed_token_ids, bad_words, logit_bias and min_tokens together rule out "
    "every token that the model gives a chance; loosen one of them"
)
"""The request is at fault, which its first word tells front ends."""


@dataclass(slots=True)
class Sampled:
    """tokens [m] int64 (meaningless where `errors` has the row), log probabilities by row where asked for."""

    tokens: Longs
    errors: dict[int, str] = field(default_factory=dict)
    logprobs: list[LogprobsLists | None] | None = None


class Sampler:
    """Samples for the sequences of one Batch."""

    def __init__(self, ops: Ops, batch: Batch, params: SlotParams) -> None:
        self._ops, self._batch, self._params = ops, batch, params
        self._buffer = RowBuffer(params.vocab, ops.device)

    def sample(self, logits: Tensor, slots: Longs, output_index: Longs) -> Sampled:
        """Next tokens for logits [m, vocab] of the sequences in `slots` [m], which have output_index [m] outputs."""
        flags = self._params.flags[slots]
        any_flag = int(np.bitwise_or.reduce(flags, initial=0))
        if not any_flag & (RANDOM | EDITS | PENALTIES):
            out = self._greedy(logits)
        else:
            out = self._mixed(logits, slots, output_index, flags)
        self.add_logprobs(out, logits, slots)
        return out

    def add_logprobs(self, out: Sampled, logits: Tensor, slots: Longs) -> None:
        """Log probabilities of the tokens of `out` [m] for the sequences in `slots` [m] that ask for them."""
        wanted = np.flatnonzero(self._params.flags[slots] & LOGPROBS)
        if not len(wanted):
            return
        chosen, k = out.tokens[wanted], self._params.logprobs[slots[wanted]]
        picked = logits if len(wanted) == len(slots) else logits.index_select(0, to_device(wanted, logits.device))
        out.logprobs = [None] * len(slots)
        found = token_logprobs(picked, chosen, k, self._ops, self._buffer)
        for row, one in zip(wanted.tolist(), found, strict=True):
            out.logprobs[row] = None if row in out.errors else one

    def prompt_logprobs(self, logits: Tensor, slot: int, start: int) -> LogprobsLists:
        """Log probabilities of prompt tokens start+1 .. start+t, from the rows [t, vocab] at start .. start+t-1."""
        t = logits.shape[0]
        tokens = self._batch.tokens[slot, start + 1 : start + 1 + t].astype(np.int64)
        k = np.full(t, self._params.prompt_logprobs[slot])
        return joined(token_logprobs(logits, tokens, k, self._ops, self._buffer))

    def _greedy(self, logits: Tensor) -> Sampled:
        tokens, largest = self._ops.best(logits)
        out = Sampled(to_host(tokens))
        judge(to_host(largest), out.errors)
        return out

    def _mixed(self, logits: Tensor, slots: Longs, output_index: Longs, flags: NDArray[np.uint8]) -> Sampled:
        special = np.flatnonzero(flags & (RANDOM | EDITS | PENALTIES))
        out = self._greedy(logits) if len(special) < len(slots) else Sampled(np.zeros(len(slots), np.int64))
        for row in special.tolist():
            out.errors.pop(row, None)  # judged below, after the masks
        rows = self.edited(logits, special, slots)
        flags, slots = flags[special], slots[special]
        wrong: dict[int, str] = {}
        judge(rows.max(), wrong)
        out.errors.update((int(special[i]), why) for i, why in wrong.items())
        fine = np.ones(len(special), bool)
        fine[list(wrong)] = False
        random = (flags & RANDOM) != 0
        greedy = np.flatnonzero(fine & ~random)
        if len(greedy):
            out.tokens[special[greedy]] = rows.argmax(greedy)
        drawn = np.flatnonzero(fine & random)
        if len(drawn):
            p, at = self._params, slots[drawn]
            u = uniforms(p.seed[at], output_index[special[drawn]])
            draws = Draws(p.temperature[at], p.top_k[at], p.top_p[at], p.min_p[at], u)
            out.tokens[special[drawn]] = draw(rows, drawn, draws)
        return out

    def edited(self, logits: Tensor, which: Longs, slots: Longs) -> Rows:
        """Rows `which` of logits [m, vocab] of the sequences in `slots` [m], with masks, biases and penalties done."""
        rows = self._buffer.load(logits, which)
        slots = slots[which]
        flags = self._params.flags[slots]
        for flag, change in ((EDITS, self._edit), (PENALTIES, self._penalize)):
            wanted = np.flatnonzero(flags & flag)
            if len(wanted):
                change(rows, wanted, slots)
        return rows

    def _edit(self, rows: Rows, which: Longs, slots: Longs) -> None:
        masked_rows: list[Longs] = []
        masked_ids: list[Longs] = []
        bias_rows: list[Longs] = []
        bias_ids: list[Longs] = []
        bias: list[NDArray[np.float32]] = []
        for row in which.tolist():
            slot = int(slots[row])
            edits = self._params.edits[slot]
            if edits.allowed is not None:
                allowed = to_device(edits.allowed, rows.device)
                kept = rows.z[row, allowed]
                rows.z[row] = -torch.inf
                rows.z[row, allowed] = kept
            for ids in edits.masked(self._batch.outputs(slot)):
                masked_rows.append(np.full(len(ids), row))
                masked_ids.append(ids)
            if edits.bias_ids is not None and edits.bias is not None:
                bias_rows.append(np.full(len(edits.bias_ids), row))
                bias_ids.append(edits.bias_ids)
                bias.append(edits.bias)
        if masked_ids:
            rows.z[_index(masked_rows, masked_ids, rows.device)] = -torch.inf
        if bias_ids:
            rows.z[_index(bias_rows, bias_ids, rows.device)] += to_device(np.concatenate(bias), rows.device)

    def _penalize(self, rows: Rows, which: Longs, slots: Longs) -> None:
        p = self._params
        seen = [p.seen[int(slots[row])] for row in which.tolist()]
        sizes = [s.size for s in seen]
        at = _index([np.repeat(which, sizes)], [s.ids[: s.size] for s in seen], rows.device)
        counts = to_device(np.concatenate([s.counts[: s.size] for s in seen]), rows.device)

        def per_token(values: NDArray[np.float32]) -> Tensor:
            return to_device(np.repeat(values[slots[which]], sizes), rows.device)

        z = rows.z[at]
        repetition = per_token(p.repetition)
        z = torch.where(z > 0, z / repetition, z * repetition)
        z -= per_token(p.frequency) * counts
        z -= per_token(p.presence) * (counts > 0)
        rows.z[at] = z


def _index(rows: list[Longs], ids: list[Longs], device: torch.device) -> tuple[Tensor, Tensor]:
    return to_device(np.concatenate(rows), device), to_device(np.concatenate(ids), device)


def judge(best: NDArray[np.float32], errors: dict[int, str]) -> None:
    """Add an error for each row whose largest logit is not finite."""
    if np.isfinite(best).all():
        return
    for row in np.flatnonzero(~np.isfinite(best)).tolist():
        errors[row] = NO_LEGAL_TOKEN if best[row] == -np.inf else NOT_A_NUMBER
