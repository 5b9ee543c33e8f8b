"""The workers of one rank on GPUs, one each: partial results meet by NCCL (or gloo, in tests without GPUs)."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from dpi_engine.config.tensor_parallel import Shard
from dpi_engine.worker.shared_group import MEET_TIMEOUT_S


class NcclGroup:
    """TensorGroup over torch.distributed. One for each process: torch's default group is taken.

    A worker that is gone or frozen is noticed by who watches the processes (launch/tensor_workers.py), and at last by
    NCCL's own time-out, which ends the process.
    """

    def __init__(
        self, shard: Shard, store: str, device: torch.device, *, backend: str = "nccl", timeout: float = MEET_TIMEOUT_S
    ) -> None:
        """`store`: path of a file that is not there yet, the same for all workers. Waits until all have come; raises
        RuntimeError when one does not in time.
        """
        self.shard = shard
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, shard.size),
            rank=shard.index,
            world_size=shard.size,
            timeout=timedelta(seconds=timeout),
            device_id=device if device.type == "cuda" else None,
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        if not x.shape[0]:
            return x.new_empty(0, x.shape[1] * self.shard.size)
        parts = [torch.empty_like(x) for _ in range(self.shard.size)] if not self.shard.index else None
        dist.gather(x.contiguous(), parts, dst=0)
        return x if parts is None else torch.cat(parts, dim=1)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
