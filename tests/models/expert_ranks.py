"""Ranks of an expert-parallel group as threads of one process: the exchange is a table behind a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from dpi_engine.config.experts import ExpertPlacement
from dpi_engine.ops.exchange import NOT_HERE, ExpertBatch, ExpertExchange

DEADLINE_S = 60.0


class Table:
    """What all ranks put down at one meeting. A rank that does not come breaks the meeting for all."""

    def __init__(self, size: int) -> None:
        self._slots: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=DEADLINE_S)

    def meet(self, rank: int, value: Any) -> list[Any]:
        self._slots[rank] = value
        self._barrier.wait()
        everything = list(self._slots)
        self._barrier.wait()
        return everything

    def leave(self) -> None:
        self._barrier.abort()


class AllGather:
    """Every rank sees all tokens and computes what its experts make of them."""

    def __init__(self, table: Table, placement: ExpertPlacement) -> None:
        self.placement, self._table = placement, table
        self.calls = 0

    def dispatch(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> ExpertBatch:
        self.calls += 1
        parts = self._table.meet(self.placement.ep_rank, (hidden.clone(), ids.clone(), weights.clone()))
        all_hidden, all_ids, all_weights = (torch.cat(column) for column in zip(*parts, strict=True))
        local = self.placement.local
        here = (all_ids >= local.start) & (all_ids < local.stop)
        counts = [part[0].shape[0] for part in parts]
        return ExpertBatch(all_hidden, torch.where(here, all_ids - local.start, NOT_HERE).int(), all_weights, counts)

    def combine(self, partial: Tensor, batch: ExpertBatch) -> Tensor:
        pieces = self._table.meet(self.placement.ep_rank, partial.clone().split(batch.handle))
        mine = torch.stack([piece[self.placement.ep_rank].float() for piece in pieces])
        return mine.sum(0).to(partial.dtype)


class AllToAll(AllGather):
    """A rank gets only the tokens that want one of its experts."""

    def dispatch(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> ExpertBatch:
        batch = super().dispatch(hidden, ids, weights)
        rows = (batch.ids != NOT_HERE).any(1).nonzero().flatten()
        return ExpertBatch(batch.hidden[rows], batch.ids[rows], batch.weights[rows], (batch.handle, rows))

    def combine(self, partial: Tensor, batch: ExpertBatch) -> Tensor:
        counts, rows = batch.handle
        spread = partial.new_zeros(sum(counts), partial.shape[1])
        spread[rows] = partial
        return super().combine(spread, ExpertBatch(batch.hidden, batch.ids, batch.weights, counts))


def exchanges(kind: type[AllGather], experts: int, size: int) -> list[ExpertExchange]:
    table = Table(size)
    return [kind(table, ExpertPlacement(experts, size, rank)) for rank in range(size)]


def together(jobs: Sequence[Callable[[], Any]], table: Table) -> list[Any]:
    """Run one job for each rank; the first error of any ends all."""

    def run(job: Callable[[], Any]) -> Any:
        try:
            return job()
        except BaseException:
            table.leave()
            raise

    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(run, job) for job in jobs]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
