"""A device that works on its own, made of nothing: what it was told to copy comes only to those who wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from worker_toys import ToyOps

from dpi_engine.ops.interface import Draws
from dpi_engine.worker.transfers import Transfers


class DrawingOps(ToyOps):
    """Draws by inverting the sum of weights in order of ids; cuts by top-k alone."""

    name = "drawing"
    draws = True
    records = True

    def draw(self, logits: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        z = logits.double().nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        best, tokens = z.max(1)
        for row in range(len(z)):
            heat, k = float(draws.temperature[row]), int(draws.top_k[row])
            if heat > 0 and best[row].isfinite():
                kept = z[row] if not k else torch.where(z[row] >= z[row].topk(k).values[-1], z[row], -torch.inf)
                sums = torch.softmax(kept / heat, 0).cumsum(0)
                tokens[row] = min(int((sums <= float(draws.uniform[row]) * sums[-1]).sum()), len(sums) - 1)
        return tokens, best.float()


class CountingTransfers(Transfers):
    """Counts what goes up and what is waited for; numbers that were not waited for cannot be seen."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.ups = self.downs = self.waits = 0
        self.events: list[str] = []

    def up(self, room: torch.Tensor) -> torch.Tensor:
        self.ups += 1
        return super().up(room)

    def down(self, *tensors: torch.Tensor) -> Any:
        self.downs += 1
        self.events.append("launch")
        copies = [t.clone().numpy() for t in tensors]
        outer = self

        class Waited:
            def wait(self) -> list[np.ndarray]:
                outer.waits += 1
                outer.events.append("wait")
                return copies

        return Waited()


class FakeRecorder:
    """Calls what it recorded again."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        self.recorded += 1
        return run
