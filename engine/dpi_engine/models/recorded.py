"""Decoding steps as recorded programs, one per number of sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from dpi_engine.ops.interface import Ops, StepTensors

MOST_SEQUENCES = 256
"""Larger steps gain nothing: what a program saves is the same for each, and arithmetic grows."""


class Recorded:
    """Programs of `forward`, made when a number of sequences is first seen."""

    def __init__(self, forward: Callable[[StepTensors, Sequence[Any]], Tensor], ops: Ops) -> None:
        self._forward, self._ops = forward, ops
        self._programs: dict[int, Any] = {}
        self._caches: Sequence[Any] | None = None

    def forward(self, step: StepTensors, caches: Sequence[Any]) -> Tensor | None:
        """The logits; None where the step is none of those that are recorded, or its program failed."""
        n = step.ids.shape[0]
        if step.max_q != 1 or not step.every_row or not 0 < n <= MOST_SEQUENCES:
            return None
        if caches is not self._caches:
            self._programs.clear()
            self._caches = caches
        program = self._programs.get(n)
        if program is None:
            program = self._programs[n] = self._ops.record(step, lambda: self._forward(step, caches))
        return self._ops.replay(program, step)
