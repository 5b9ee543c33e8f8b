"""The exchange of experts over a Mesh, for ranks whose tensors live on the CPU.

Two ways with the same result up to the order of rows:

* all-gather: every rank gets all tokens of all ranks. One copy is made for all receivers.
* all-to-all: a rank gets the tokens that want its experts.

Frames carry how many rows follow, so nothing is padded on the way: a rank without tokens sends a header. What a rank
sends is its own choice in each exchange; the receiver sees rows either way.
"""

from __future__ import annotations

import contextlib
import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpi_engine.config.experts import ExpertPlacement
from dpi_engine.ops.exchange import NOT_HERE, ExpertBatch
from dpi_engine.wire.errors import ExchangeError
from dpi_engine.wire.exchange.frames import Kind
from dpi_engine.wire.exchange.mesh import Buffer, Mesh

ByteRows = NDArray[np.uint8]
IntRows = NDArray[np.int32]
FloatRows = NDArray[np.float32]
Chosen = NDArray[np.int64]

_ROWS = struct.Struct("<IIII")  # rows, hidden size, choices per token, bytes per element


SMALL_BYTES = 1 << 18
"""Of hidden states: less is sent to all ranks sooner than it is picked apart for each."""


class Way(enum.StrEnum):
    """`auto`: all-gather where nearly every token goes to every rank anyway, or most do and they are few; all-to-all
    else.
    """

    AUTO = "auto"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"


@dataclass(slots=True)
class _Handle:
    """Where rows of a batch came from. rows[r]: of rank r, in order; sent[r]: which of mine went to rank r (None: all).

    Row numbers of this rank's own tokens stand in sent[rank].
    """

    rows: list[int]
    sent: list[Chosen | None]
    tokens: int


class MeshExperts:
    """ExpertExchange (ops/exchange.py) over the links of `mesh`; sums come back in float32, added in order of ranks."""

    def __init__(self, mesh: Mesh, placement: ExpertPlacement, way: Way = Way.AUTO) -> None:
        if placement.ep_size != mesh.size or placement.ep_rank != mesh.rank:
            raise ValueError(
                f"experts are placed for rank {placement.ep_rank} of {placement.ep_size}, "
                f"the links are those of rank {mesh.rank} of {mesh.size}"
            )
        self.placement = placement
        self.mesh = mesh
        self._way = way
        self._alone = False
        self._owners = np.array(placement.owners, np.int64)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, nothing is exchanged and other ranks' experts count as zero: for passes that only warm up."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def dispatch(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> ExpertBatch:
        """See ExpertExchange. Raises ExchangeError."""
        n, width = hidden.shape
        if self._alone:
            return ExpertBatch(hidden, torch.from_numpy(self._local(ids.numpy())), weights, _Handle([n], [None], n))
        size, rank, k = self.mesh.size, self.mesh.rank, ids.shape[1]
        # Rows as bytes: numpy knows no bfloat16, and its calls cost a fraction of torch's for the few rows of a step.
        rows_of, chosen, shares = _rows(hidden), ids.numpy(), weights.numpy()
        sent = self._choose(chosen, rows_of.nbytes)
        head = (width, k, hidden.element_size())
        parts: list[list[Buffer]] = []
        whole: list[Buffer] | None = None
        for r in range(size):
            rows = sent[r]
            if r == rank:
                parts.append([])
            elif rows is None:
                whole = whole or _frame(head, rows_of, chosen, shares)
                parts.append(whole)
            else:
                parts.append(_frame(head, rows_of[rows], chosen[rows], shares[rows]))
        found = self.mesh.swap(Kind.TOKENS, parts)
        mine = sent[rank]
        own = (rows_of, chosen, shares) if mine is None else (rows_of[mine], chosen[mine], shares[mine])
        pieces = [own if r == rank else self._parse(payload, r, head) for r, payload in enumerate(found)]
        flat = torch.from_numpy(np.concatenate([p[0] for p in pieces]).reshape(-1))
        gathered = flat.view(hidden.dtype).view(-1, width) if flat.numel() else hidden.new_empty(0, width)
        local = torch.from_numpy(self._local(np.concatenate([p[1] for p in pieces])))
        handle = _Handle([len(p[0]) for p in pieces], sent, n)
        return ExpertBatch(gathered, local, torch.from_numpy(np.concatenate([p[2] for p in pieces])), handle)

    def _local(self, ids: IntRows) -> IntRows:
        """Local indices of experts; NOT_HERE for those of other ranks."""
        local = ids - np.int32(self.placement.local.start)
        # As unsigned numbers, those below the first are above the last.
        local[local.view(np.uint32) >= len(self.placement.local)] = NOT_HERE
        return local

    def combine(self, partial: Tensor, batch: ExpertBatch) -> Tensor:
        """See ExpertExchange. Raises ExchangeError."""
        if self._alone:
            return partial
        handle: _Handle = batch.handle
        rank = self.mesh.rank
        width, dtype = partial.shape[1], partial.dtype
        as_bytes, at = _rows(partial), 0
        parts: list[list[Buffer]] = []
        own = partial
        for r, count in enumerate(handle.rows):
            parts.append([] if r == rank else [as_bytes[at : at + count].data])
            if r == rank:
                own = partial[at : at + count]
            at += count
        found = self.mesh.swap(Kind.SUMS, parts)
        total: Tensor | None = None
        for r, payload in enumerate(found):
            rows = handle.sent[r]
            count = handle.tokens if rows is None else len(rows)
            if r == rank:
                sums = own
            elif payload.nbytes != count * width * dtype.itemsize:
                self._malformed(r, f"{payload.nbytes} bytes of sums for {count} tokens")
            elif count:
                sums = torch.frombuffer(payload, dtype=dtype).view(count, width)
            if not count:
                continue
            if rows is not None:
                total = torch.zeros(handle.tokens, width) if total is None else total
                total.index_add_(0, torch.from_numpy(rows), sums.float())  # no row twice
            elif total is None:
                total = sums.to(torch.float32, copy=True)
            else:
                total += sums
        return torch.zeros(handle.tokens, width, dtype=dtype) if total is None else total.to(dtype)

    def _choose(self, ids: IntRows, nbytes: int) -> list[Chosen | None]:
        """Per rank which rows it gets; None is all of them. `nbytes`: of all rows."""
        size, k = self.mesh.size, ids.shape[1]
        way = self._way
        if way is Way.AUTO:
            # With k choices among `size` ranks, few tokens pass a rank by once k is a multiple of their number; with
            # as many choices as ranks a third does.
            most = k >= 2 * size or (k >= size and nbytes <= SMALL_BYTES)
            way = Way.ALL_GATHER if most else Way.ALL_TO_ALL
        if way is Way.ALL_GATHER:
            return [None] * size
        wanted = np.zeros((len(ids), size), bool)
        wanted[np.arange(len(ids))[:, None], self._owners[ids]] = True
        return [np.flatnonzero(wanted[:, r]) for r in range(size)]

    def _parse(self, payload: memoryview, rank: int, head: tuple[int, int, int]) -> tuple[ByteRows, IntRows, FloatRows]:
        """Hidden states [rows, bytes], ids [rows, k] and weights [rows, k] that `rank` sent; views of the payload."""
        width, k, item = head
        if payload.nbytes < _ROWS.size:
            self._malformed(rank, f"{payload.nbytes} bytes of tokens")
        rows, *theirs = _ROWS.unpack(payload[: _ROWS.size])
        if tuple(theirs) != head:
            self._malformed(
                rank,
                f"tokens of {theirs[0]} values of {theirs[2]} bytes with {theirs[1]} choices, expected {width}, "
                f"{item} and {k}",
            )
        a = _ROWS.size + rows * width * item
        b = a + rows * k * 4
        if payload.nbytes != b + rows * k * 4:
            self._malformed(rank, f"{payload.nbytes} bytes for {rows} tokens")
        ids = np.frombuffer(payload[a:b], np.int32).reshape(rows, k)
        if rows and ids.view(np.uint32).max() >= self.placement.num_experts:
            self._malformed(rank, f"an expert outside 0..{self.placement.num_experts - 1}")
        hidden = np.frombuffer(payload[_ROWS.size : a], np.uint8).reshape(rows, width * item)
        return hidden, ids, np.frombuffer(payload[b:], np.float32).reshape(rows, k)

    def _malformed(self, rank: int, what: str) -> NoReturn:
        self.mesh.counters.count("exchange", "malformed")
        raise ExchangeError(f"rank {rank} sent {what}: it does not run the same model and release")


def _rows(tensor: Tensor) -> ByteRows:
    """The values of a CPU tensor [n, width] as bytes [n, width * itemsize], without a copy where it is contiguous."""
    n, width = tensor.shape
    if not n:
        return np.empty((0, width * tensor.element_size()), np.uint8)
    return tensor.detach().contiguous().view(torch.uint8).numpy()


def _frame(head: tuple[int, int, int], hidden: ByteRows, ids: IntRows, weights: FloatRows) -> list[Buffer]:
    """Pieces of a frame of kind TOKENS."""
    start = _ROWS.pack(len(ids), *head)
    return [start, *(np.ascontiguousarray(part).data for part in (hidden, ids, weights) if len(ids))]
