"""What a step takes of a GPU beside weights and cache, found by computing the largest one."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from dpi_engine.ops.interface import Ops
from dpi_engine.worker.null_step import null_step
from dpi_engine.worker.runner import Model

EDITED_COPIES = 2
"""Float32 tables of all logits that masks and penalties of requests may need."""


class Meter(Protocol):
    """Memory of the device, in bytes."""

    def begin(self) -> None:
        """Count from here."""
        ...

    def most(self) -> int:
        """The most that was taken at any time since `begin`, beyond what was taken then."""
        ...


class CudaMeter:
    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, 0

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def most(self) -> int:
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_allocated(self._device)) - self._before


@torch.inference_mode()
def step_bytes(model: Model, ops: Ops, *, tokens: int, sequences: int, meter: Meter | None = None) -> int:
    """The most bytes of a step of `tokens` tokens that samples `sequences` of them, and of a step of `sequences`
    decodes recorded as a CUDA graph beside it. 0 where memory is not counted: on a CPU.
    """
    if meter is None:
        if ops.device.type != "cuda":
            return 0
        meter = CudaMeter(ops.device)
    caches: Any = model.new_caches(2)
    rows = min(tokens, sequences)

    def measured(n: int) -> int:
        meter.begin()
        logits = model.forward(null_step(n, ops.device, min(n, rows)), caches)
        ops.argmax(logits)
        return meter.most()

    vocab = int(model.spec.vocab_size)
    measured(tokens)  # what libraries take once is no part of a step
    largest, recorded = measured(tokens), 0
    if ops.records:
        recorded = measured(rows) + sequences * vocab * ops.dtype.itemsize
    return largest + recorded + EDITED_COPIES * 4 * sequences * vocab
