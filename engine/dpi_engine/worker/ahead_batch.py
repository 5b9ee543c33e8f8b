"""A batch whose newest tokens may still be on the device: steps are prepared before the one before them is known."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from dpi_engine.core.plan import SequenceWork
from dpi_engine.worker.batch import Batch, PreparedStep

Longs = NDArray[np.int64]


class AheadBatch(Batch):
    """`last` [max_num_seqs] int64 on the device: the token that each slot drew last (DeviceSampler's).

    A token that is not known yet stands in `tokens` as -1 - slot.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        device: torch.device,
    ) -> None:
        super().__init__(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            device=device,
        )
        self.last = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        # While the device reads the inputs of one step from here, the next ones are written there.
        self._other = self._long_host, self._int_host, self._copied
        self._swap()
        pinned = device.type == "cuda"
        self._long_host = torch.zeros(len(self._long), dtype=torch.int64, pin_memory=pinned)
        self._int_host = torch.zeros(len(self._int), dtype=torch.int32, pin_memory=pinned)
        self._long, self._int = self._long_host.numpy(), self._int_host.numpy()

    def _swap(self) -> None:
        mine = self._long_host, self._int_host, self._copied
        self._long_host, self._int_host, self._copied = self._other
        self._long, self._int = self._long_host.numpy(), self._int_host.numpy()
        self._other = mine

    def expect(self, slots: Longs) -> Longs:
        """One more token for each of `slots` [m], not known yet; returns where they will stand [m]."""
        at: Longs = self.lengths[slots]
        self.tokens[slots, at] = -1 - slots
        self.lengths[slots] = at + 1
        return at

    def resolve(self, slots: Longs, at: Longs, tokens: Longs) -> None:
        """The tokens that `expect` put off."""
        self.tokens[slots, at] = tokens

    def prepare(self, work: list[SequenceWork]) -> PreparedStep:
        """As Batch has it; tokens that are not known here are filled in on the device."""
        self._swap()
        step = super().prepare(work)
        ids = self._long[: step.tensors.ids.shape[0]]
        if (ids < 0).any():
            there = step.tensors.ids
            step.tensors.ids = torch.where(there < 0, self.last[(-1 - there).clamp_(min=0)], there)
        return step
