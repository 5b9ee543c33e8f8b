"""How the workers of one rank put their partial results together."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from dpi_engine.config.tensor_parallel import WHOLE, Shard


class TensorGroup(Protocol):
    """The workers that share one rank's layers. All make the same calls, in the same order, with the same shapes.

    Both calls raise WorkerLost when another worker ended or did not come in time; nothing can be computed then.
    """

    shard: Shard

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every worker's x [n, width], the same bits on each. x may be overwritten and given back."""

    def gather(self, x: Tensor) -> Tensor:
        """On worker 0: every worker's x [m, width] side by side, [m, size * width]. Elsewhere whatever has m rows."""


class Alone:
    """A rank of one worker: nothing is to be put together."""

    shard: Shard = WHOLE

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x
