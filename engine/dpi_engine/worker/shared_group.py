"""The workers of one rank on a CPU: partial results meet in shared memory.

Every worker has two slots, used in turn. It writes into one, tells all others, waits for theirs, and reads. Who has
heard of round s from all has finished reading round s - 1, and knows that the others have finished s - 2: so the slot
of s - 2 is free for s, and one meeting per round is enough.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dpi_engine.config.tensor_parallel import Shard
from dpi_engine.wire.errors import WorkerLost
from dpi_engine.worker.shared_region import SEMAPHORE_BYTES, SharedRegion

SLOT_BYTES = 1 << 20
"""What a worker shows at a time; more goes in several rounds, and stays in the processor's cache."""

MEET_TIMEOUT_S = 60.0
"""A worker that has not come for this long is frozen: between two meetings lies a part of one layer."""


def group_bytes(size: int) -> int:
    """Bytes that the meetings of `size` workers need."""
    return size * size * SEMAPHORE_BYTES + 2 * size * SLOT_BYTES


class SharedGroup:
    """TensorGroup over the memory at `offset` of `region`. `check` raises WorkerLost when another worker is gone."""

    def __init__(
        self,
        shard: Shard,
        region: SharedRegion,
        offset: int,
        check: Callable[[], None],
        *,
        create: bool,
        timeout: float = MEET_TIMEOUT_S,
    ) -> None:
        """`create`: this process made the region, so that the semaphores are not there yet."""
        self.shard, self._check, self._timeout = shard, check, timeout
        size, me = shard.size, shard.index
        told = [
            [region.semaphore(offset + (i * size + j) * SEMAPHORE_BYTES, create=create) for j in range(size)]
            for i in range(size)
        ]
        others = [i for i in range(size) if i != me]
        self._tell = [told[me][i] for i in others]
        self._hear = [(i, told[i][me]) for i in others]
        self._memory, self._offset = region.memory, offset + size * size * SEMAPHORE_BYTES
        self._slots: dict[torch.dtype, list[list[Tensor]]] = {}
        self._turn = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """See TensorGroup. Added in float32 in order of workers, rounded once. x must be contiguous."""
        flat = x.view(-1)
        slots = self._views(x.dtype)
        room = slots[0][0].shape[0]
        for first in range(0, flat.shape[0], room):
            part = flat[first : first + room]
            _add(self._meet(slots, part), part)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """See TensorGroup."""
        m, width = x.shape
        slots = self._views(x.dtype)
        room = slots[0][0].shape[0]
        out = None if self.shard.index else torch.empty(m, self.shard.size, width, dtype=x.dtype)
        for left in range(0, width, room):
            columns = slice(left, min(left + room, width))
            across = columns.stop - left
            for first in range(0, m, room // across):
                rows = slice(first, first + room // across)
                found = self._meet(slots, x[rows, columns].reshape(-1))
                if out is not None:
                    for i, other in enumerate(found):
                        out[rows, i, columns] = other.view(-1, across)
        return x if out is None else out.view(m, self.shard.size * width)

    def _views(self, dtype: torch.dtype) -> list[list[Tensor]]:
        """slots[turn][worker] as vectors of `dtype`."""
        found = self._slots.get(dtype)
        if found is None:
            count = SLOT_BYTES // dtype.itemsize
            found = self._slots[dtype] = [
                [
                    torch.frombuffer(
                        self._memory,
                        dtype=dtype,
                        count=count,
                        offset=self._offset + (turn * self.shard.size + i) * SLOT_BYTES,
                    )
                    for i in range(self.shard.size)
                ]
                for turn in range(2)
            ]
        return found

    def _meet(self, slots: list[list[Tensor]], mine: Tensor) -> list[Tensor]:
        """Show `mine` and give back what all show, in order of workers; to be read before the next meeting."""
        count, now = mine.shape[0], slots[self._turn]
        now[self.shard.index][:count].copy_(mine)
        for semaphore in self._tell:
            semaphore.post()
        for i, semaphore in self._hear:
            if not semaphore.wait(self._check, self._timeout):
                raise WorkerLost(
                    f"worker {i} did not bring its part of a layer within {self._timeout:.0f} s: it is frozen, or the "
                    "machine has far too little time for it"
                )
        self._turn ^= 1
        return [slot[:count] for slot in now]


def _add(parts: list[Tensor], out: Tensor) -> None:
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=out)  # rounds once in any type
        return
    total = parts[0].float()
    if total is parts[0]:
        total = torch.add(parts[0], parts[1])
        parts = parts[1:]
    for part in parts[1:]:
        total.add_(part)
    out.copy_(total)
