"""The model of a rank whose layers several workers share, as the runner of the first worker sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dpi_engine.ops.interface import StepTensors
from dpi_engine.wire.errors import WorkerLost
from dpi_engine.worker.plan_region import PlanRegion
from dpi_engine.worker.runner import Model


class ShardedModel:
    """Has the others do what this worker's part `model` does. `others(call, value)` asks for what is no step, and
    returns when all have done it.
    """

    def __init__(self, model: Model, plans: PlanRegion, others: Callable[[str, int], None]) -> None:
        self._model, self._plans, self._others = model, plans, others
        self.spec = model.spec

    def forward(self, step: StepTensors, caches: Any) -> Tensor:
        """See Model. Raises WorkerLost, also where this worker fails: the others wait in the middle of the step."""
        self._plans.order_step(step)
        try:
            return self._model.forward(step, caches)
        except WorkerLost:
            raise
        except Exception as error:
            raise WorkerLost(
                f"the first worker failed in a step that the others compute too: {type(error).__name__}: {error}"
            ) from error

    def new_caches(self, num_blocks: int) -> Any:
        self._others("caches", num_blocks)
        return self._model.new_caches(num_blocks)

    def cache_bytes_per_block(self) -> int:
        """Of this worker; the others hold as much."""
        return self._model.cache_bytes_per_block()

    def idle(self) -> None:
        """Nothing: workers share layers, and no experts with other ranks."""
