"""The exchange of experts between devices, for ranks whose tensors live on GPUs (or, in tests, on CPUs by gloo).

The two ways of experts.py, of equal result up to the order of rows:

* all-gather: every rank gets all tokens of all ranks, each rank's padded to the same number. No length is read on the
  host, so a step can be recorded as a graph. Sums come back as a reduce-scatter whose additions have an order: parts
  are exchanged and added where they belong, in float32 in order of ranks. That moves as many bytes.
* all-to-all: a rank gets the tokens that want its experts. The host must know how many; so each layer stops it once.

Which way and how much padding is settled for a whole step before it begins, by `begin`, from numbers that all ranks
share. Hidden states, choices and weights of a token travel as one row of bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dpi_engine.config.experts import ExpertPlacement
from dpi_engine.ops.exchange import NOT_HERE, ExpertBatch, StepOfAll
from dpi_engine.wire.exchange.device_links import DeviceLinks
from dpi_engine.wire.exchange.experts import Way

WORTH_A_STOP = 256
"""Tokens of a rank from which all-to-all is worth that the host stops in every layer."""


@dataclass(slots=True)
class _Handle:
    """How the rows of a batch came. `send`, `receive`: rows to and from each rank; `rows`: which of mine went, in order
    of ranks; all three are empty for an all-gather."""

    tokens: int
    send: list[int]
    receive: list[int]
    rows: Tensor | None = None


class DeviceExperts:
    """ExpertExchange and StepMeeting (ops/exchange.py) over the process groups of `links`."""

    def __init__(self, links: DeviceLinks, placement: ExpertPlacement, way: Way = Way.AUTO) -> None:
        mesh = links.mesh
        if placement.ep_size != mesh.size or placement.ep_rank != mesh.rank:
            raise ValueError(
                f"experts are placed for rank {placement.ep_rank} of {placement.ep_size}, "
                f"the links are those of rank {mesh.rank} of {mesh.size}"
            )
        self.placement, self.links = placement, links
        self._way, self._chosen = way, Way.ALL_GATHER
        self._pad = 0
        self._alone = False
        self._owners = torch.tensor(placement.owners, device=links.device)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, nothing is exchanged and other ranks' experts count as zero: for passes that only warm up. They take
        the memory of a step in which every rank has as many tokens as this one."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    # -- the step ----------------------------------------------------------------------------------------------------

    def agree(self, values: list[int]) -> list[int]:
        """See StepMeeting."""
        return self.links.mesh.all_reduce_max(values)

    def begin(self, tokens: int, eager: bool, unrecorded: bool) -> StepOfAll:
        """See StepMeeting. Raises ExchangeError."""
        most, any_eager, any_unrecorded = self.agree([tokens, int(eager), int(unrecorded)])
        self._pad, self._chosen = most, self._way
        return StepOfAll(most, bool(any_eager), bool(any_unrecorded))

    def pad(self, tokens: int) -> None:
        """See StepMeeting."""
        self._pad, self._chosen = tokens, Way.ALL_GATHER
        self.links.told()  # a replay's collectives do not pass `dispatch`

    def settle(self) -> None:
        """See StepMeeting."""
        self.links.settle()

    def _all_to_all(self, choices: int) -> bool:
        if self._chosen is not Way.AUTO:
            return self._chosen is Way.ALL_TO_ALL
        return self._pad >= WORTH_A_STOP and choices < self.placement.ep_size

    # -- a layer -----------------------------------------------------------------------------------------------------

    def dispatch(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> ExpertBatch:
        """See ExpertExchange. Raises ExchangeError."""
        n, width = hidden.shape
        k = ids.shape[1]
        if self._alone:
            size = self.placement.ep_size
            wide = (hidden.repeat(size, 1), self._local(ids).repeat(size, 1), weights.repeat(size, 1))
            return ExpertBatch(*wide, _Handle(n, [], []))
        if n > self._pad:
            raise ValueError(f"{n} tokens in a step that was begun for {self._pad} of each rank")
        if self._all_to_all(k):
            return self._send(hidden, ids, weights)
        rows = self.links.all_gather(_as_rows(hidden, ids, weights, self._pad))
        return self._batch(rows, width, k, hidden.dtype, _Handle(n, [], []))

    def _send(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> ExpertBatch:
        n, width = hidden.shape
        size = self.placement.ep_size
        wanted = torch.zeros(n, size, dtype=torch.bool, device=hidden.device)
        wanted.scatter_(1, self._owners[ids.long()], True)
        send = wanted.sum(0, dtype=torch.int32)
        ones = [1] * size
        both = torch.stack([send, self.links.all_to_all(send, ones, ones)])
        self.links.settle()
        to, come = both.tolist()
        # The wanted ones first, those for rank 0 before those for rank 1; how many there are is known.
        order = (~wanted.t()).flatten().to(torch.uint8).argsort(stable=True)[: sum(to)]
        rows = order % n if n else order
        sent = _as_rows(hidden, ids, weights, n)[rows]
        return self._batch(
            self.links.all_to_all(sent, come, to), width, ids.shape[1], hidden.dtype, _Handle(n, to, come, rows)
        )

    def _batch(self, rows: Tensor, width: int, k: int, dtype: torch.dtype, handle: _Handle) -> ExpertBatch:
        """The opposite of `_as_rows`, with local indices."""
        a = width * dtype.itemsize
        b = a + 4 * k
        hidden = rows[:, :a].contiguous().view(dtype)
        ids = rows[:, a:b].contiguous().view(torch.int32)
        return ExpertBatch(hidden, self._local(ids), rows[:, b:].contiguous().view(torch.float32), handle)

    def _local(self, ids: Tensor) -> Tensor:
        """Local indices of experts; NOT_HERE for those of other ranks, and for padding."""
        local = ids - self.placement.local.start
        return local.masked_fill((local < 0) | (local >= len(self.placement.local)), NOT_HERE)

    def combine(self, partial: Tensor, batch: ExpertBatch) -> Tensor:
        """See ExpertExchange. Raises ExchangeError."""
        handle: _Handle = batch.handle
        if self._alone:
            return partial[: handle.tokens].clone()
        size, n = self.placement.ep_size, handle.tokens
        if handle.rows is None:
            equal = [self._pad] * size
            back = self.links.all_to_all(partial, equal, equal).view(size, self._pad, partial.shape[1])[:, :n]
            total = back[0].float()
            for part in back[1:]:
                total += part
            return total.to(partial.dtype)
        back = self.links.all_to_all(partial, handle.send, handle.receive)
        total = torch.zeros(n, partial.shape[1], dtype=torch.float32, device=partial.device)
        for rows, part in zip(handle.rows.split(handle.send), back.split(handle.send), strict=True):
            total.index_add_(0, rows, part.float())  # no row twice
        return total.to(partial.dtype)


def _as_rows(hidden: Tensor, ids: Tensor, weights: Tensor, length: int) -> Tensor:
    """uint8 [length, bytes of a token]; what lies beyond the tokens wants no expert."""
    n, width = hidden.shape
    a = width * hidden.element_size()
    b = a + 4 * ids.shape[1]
    rows = torch.empty(length, b + 4 * ids.shape[1], dtype=torch.uint8, device=hidden.device)
    if n:
        rows[:n, :a] = hidden.contiguous().view(torch.uint8)
        rows[:n, a:b] = ids.contiguous().view(torch.uint8)
        rows[:n, b:] = weights.contiguous().view(torch.uint8)
    if n < length:
        rows[n:].zero_()
        rows[n:, a:b] = 0xFF  # NOT_HERE
    return rows
