"""What the tests of the CUDA backend share: steps over shuffled pages, and the comparison with the reference."""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.testing import assert_close

from dpi_engine.ops import TorchOps
from dpi_engine.ops.cuda import CudaOps
from dpi_engine.ops.interface import PAGE_SIZE, StepTensors

DEVICE = os.environ.get("DPI_TEST_DEVICE", "cpu")
REFERENCE = TorchOps("cpu", torch.float32)
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 0.02, torch.float16: 0.004}
DTYPES = list(TOLERANCE)
F32 = CudaOps(DEVICE, torch.float32)

_FIELDS = ("ids", "positions", "slots", "block_tables", "kv_lens", "cu_q", "rows")


def ops_of(dtype: torch.dtype) -> CudaOps:
    return CudaOps(DEVICE, dtype)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(got: Tensor, want: Tensor, dtype: torch.dtype | None = None) -> None:
    """`want` lies on the CPU in float32."""
    dtype = dtype or got.dtype
    assert got.device.type == DEVICE.partition(":")[0]
    assert_close(got.cpu().float(), want.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def build_step(pieces: list[tuple[int, int]], seed: int = 0, spare: int = 3) -> tuple[StepTensors, int]:
    """A step of sequences (queries, keys) with shuffled pages; also the number of blocks of the cache."""
    pages = [-(-kv // PAGE_SIZE) for _, kv in pieces]
    blocks = 1 + sum(pages) + spare
    order = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
    # Wider than any sequence needs, and past its end it points at pages that are not its own.
    tables = torch.full((len(pieces), max(1, *pages) + 2), blocks - 1, dtype=torch.int32)
    at, positions, slots, cu_q = 0, [], [], [0]
    for i, (q, kv) in enumerate(pieces):
        tables[i, : pages[i]] = order[at : at + pages[i]]
        at += pages[i]
        own = torch.arange(kv - q, kv)
        positions.append(own)
        slots.append(tables[i].long()[own // PAGE_SIZE] * PAGE_SIZE + own % PAGE_SIZE)
        cu_q.append(cu_q[-1] + q)
    step = StepTensors(
        ids=torch.zeros(cu_q[-1], dtype=torch.int64),
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        block_tables=tables,
        kv_lens=torch.tensor([kv for _, kv in pieces], dtype=torch.int32),
        cu_q=torch.tensor(cu_q, dtype=torch.int32),
        rows=torch.arange(cu_q[-1]),
        max_q=max(q for q, _ in pieces),
        max_kv=max(1, *(kv for _, kv in pieces)),
    )
    return moved(step, DEVICE), blocks


def moved(step: StepTensors, device: str) -> StepTensors:
    return StepTensors(**{f: getattr(step, f).to(device) for f in _FIELDS}, max_q=step.max_q, max_kv=step.max_kv)
