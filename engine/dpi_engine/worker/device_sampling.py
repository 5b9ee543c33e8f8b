"""Sampling where the logits are: what is drawn stays on the device for the next step, and goes to the host as well."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpi_engine.ops.interface import Draws, Ops
from dpi_engine.worker.random import uniforms
from dpi_engine.worker.sampling import Sampler
from dpi_engine.worker.slot_params import EDITS, PENALTIES, RANDOM, SlotParams
from dpi_engine.worker.transfers import Download, Transfers

Longs = NDArray[np.int64]

_BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
_COLUMNS = 6


class DeviceSampler:
    """`last` [max_num_seqs] int64 on the device: the token that each slot drew last.

    `host` edits logits (allowed tokens, bad words, biases, penalties); for that it needs the tokens before, so rows
    that want it must not be sampled ahead.
    """

    def __init__(self, ops: Ops, params: SlotParams, host: Sampler, transfers: Transfers) -> None:
        self._ops, self._params, self._host, self._transfers = ops, params, host, transfers
        self.last = torch.zeros(len(params.flags), dtype=torch.int64, device=ops.device)

    def launch(self, logits: Tensor, slots: Longs, output_index: Longs) -> Download:
        """Sample logits [m, vocab] for the sequences in `slots` [m], which have output_index [m] outputs.

        On their way to the host then are the tokens [m] int64 and the largest logit of each row [m] float32.
        """
        flags = self._params.flags[slots]
        where, draws = self._upload(slots, output_index, flags)
        tokens, best = self._ops.draw(logits, draws)
        edited = np.flatnonzero(flags & (EDITS | PENALTIES))
        if len(edited):
            rows = self._host.edited(logits, edited, slots)
            at = self._transfers.room(len(edited), torch.int64)
            at.numpy()[:] = edited
            chosen = self._transfers.up(at)
            parts = (draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.uniform)
            own_tokens, own_best = self._ops.draw(rows.z[:, : self._params.vocab], Draws(*(p[chosen] for p in parts)))
            tokens[chosen], best[chosen] = own_tokens, own_best
        self.last[where] = tokens
        return self._transfers.down(tokens, best)

    def _upload(self, slots: Longs, output_index: Longs, flags: NDArray[np.uint8]) -> tuple[Tensor, Draws]:
        """Slots [m] int64 and the parameters of the draws, sent as one."""
        p, m = self._params, len(slots)
        random = (flags & RANDOM) != 0
        room = self._transfers.room((_COLUMNS + 1) * m, torch.int32)
        table = room.numpy()
        # The two words of each slot come first, where they are aligned.
        table[: 2 * m].view(np.int64)[:] = slots
        floats = table[2 * m :].view(np.float32).reshape(_COLUMNS - 1, m)
        floats[0] = np.where(random, p.temperature[slots], 0.0)
        floats[1] = p.top_p[slots]
        floats[2] = p.min_p[slots]
        floats[3] = np.minimum(uniforms(p.seed[slots], output_index), _BELOW_ONE)
        table[6 * m :] = np.where(random, p.top_k[slots], 0)
        there = self._transfers.up(room)
        wide = there[2 * m : 6 * m].view(torch.float32).view(4, m)
        draws = Draws(temperature=wide[0], top_p=wide[1], min_p=wide[2], uniform=wide[3], top_k=there[6 * m :])
        return there[: 2 * m].view(torch.int64), draws
