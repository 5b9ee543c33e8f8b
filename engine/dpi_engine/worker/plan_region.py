"""The inputs of a step in shared memory: the first worker of a rank writes them, the others read."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from dpi_engine.ops.interface import PAGE_SIZE, StepTensors
from dpi_engine.wire.errors import WorkerLost
from dpi_engine.worker.shared_region import SEMAPHORE_BYTES, SharedRegion

_HEAD = 16  # int64 words

TAKE_TIMEOUT_S = 60.0
"""A worker that has not begun with an order for this long is frozen."""


class Order(IntEnum):
    """What the first worker wants of the others."""

    STEP = 1
    """Compute the step that lies in the memory."""

    CALL = 2
    """Read a message from the channel, do what it says, and answer there."""


class PlanRegion:
    """At the start of `region`: two semaphores for each worker, a count of beats for each, a head of 16 words, and the
    arrays of a step.

    One semaphore says that there is an order, the other that it was taken: only then may the next one be written.
    `check` raises WorkerLost when another worker is gone.
    """

    def __init__(self, region: SharedRegion, size: int, check: Callable[[], None], *, create: bool) -> None:
        self._check = check
        self._go = [region.semaphore(2 * i * SEMAPHORE_BYTES, create=create) for i in range(size)]
        self._took = [region.semaphore((2 * i + 1) * SEMAPHORE_BYTES, create=create) for i in range(size)]
        self._pending = False
        first = 2 * size * SEMAPHORE_BYTES
        self._beats = np.frombuffer(region.memory, np.int64, size, first)
        first += 8 * size
        self._head = np.frombuffer(region.memory, np.int64, _HEAD, first)
        self._body = memoryview(region.memory)[first + 8 * _HEAD :]

    @staticmethod
    def bytes_needed(size: int, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> int:
        """Bytes, a multiple of SEMAPHORE_BYTES, for the steps of a runner with these limits."""
        width = -(-(max_model_len + 1) // PAGE_SIZE)
        longs = 4 * max_num_batched_tokens + max_num_seqs
        ints = max_num_seqs * (width + 2) + 1
        # A warm-up pass has one sequence as long as a step.
        ints = max(ints, -(-max_num_batched_tokens // PAGE_SIZE) + 3)
        total = 2 * size * SEMAPHORE_BYTES + 8 * (size + _HEAD + longs) + 4 * ints
        return -(-total // SEMAPHORE_BYTES) * SEMAPHORE_BYTES

    def order_step(self, step: StepTensors) -> None:
        """Have all other workers compute `step`. Raises WorkerLost."""
        self._until_taken()
        n, m = step.ids.shape[0], step.rows.shape[0]
        b, width = step.block_tables.shape
        at = 0
        for tensor in (step.ids, step.positions, step.slots, step.rows, step.cu_q, step.kv_lens, step.block_tables):
            array = (tensor if tensor.device.type == "cpu" else tensor.cpu()).numpy()
            room = np.frombuffer(self._body, array.dtype, array.size, at)
            room[:] = array.reshape(-1)
            at += array.nbytes
        self._order(Order.STEP, n, m, b, width, step.max_q, step.max_kv)

    def order_call(self) -> None:
        """Have all other workers read their channel. Raises WorkerLost."""
        self._until_taken()
        self._order(Order.CALL)

    def _order(self, order: Order, *values: int) -> None:
        self._head[0] = order
        self._head[1 : 1 + len(values)] = values
        for semaphore in self._go[1:]:
            semaphore.post()
        self._pending = True

    def _until_taken(self) -> None:
        if not self._pending:
            return
        for index, semaphore in enumerate(self._took[1:], 1):
            if not semaphore.wait(self._check, TAKE_TIMEOUT_S):
                raise WorkerLost(
                    f"worker {index} has not taken its last order for {TAKE_TIMEOUT_S:.0f} s: it is frozen"
                )
        self._pending = False

    def beat(self, index: int) -> None:
        """Worker `index` shows that it is not frozen."""
        self._beats[index] += 1

    def beats(self) -> list[int]:
        """Of all workers; who is alive counts up."""
        return self._beats.tolist()

    def wait(self, index: int) -> Order:
        """The next order for worker `index`, however long it takes. Raises WorkerLost."""
        self._go[index].wait(self._check, None)
        order = Order(int(self._head[0]))
        if order is Order.CALL:
            self._took[index].post()
        return order

    def read_step(self, index: int, device: torch.device) -> StepTensors:
        """Worker `index`'s copy of the step that was ordered, on `device`. Must follow an order for a step, once."""
        n, m, b, width, max_q, max_kv = (int(v) for v in self._head[1:7])
        longs = np.frombuffer(self._body, np.int64, 3 * n + m, 0).copy()
        ints = np.frombuffer(self._body, np.int32, 2 * b + 1 + b * width, longs.nbytes).copy()
        self._took[index].post()
        long, small = _on(longs, device), _on(ints, device)
        return StepTensors(
            ids=long[:n],
            positions=long[n : 2 * n],
            slots=long[2 * n : 3 * n],
            rows=long[3 * n :],
            cu_q=small[: b + 1],
            kv_lens=small[b + 1 : 2 * b + 1],
            block_tables=small[2 * b + 1 :].view(b, width),
            max_q=max_q,
            max_kv=max_kv,
        )


def _on(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device)
