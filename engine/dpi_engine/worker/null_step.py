"""Passes without requests: all that they read and write is the null block."""

from __future__ import annotations

import torch

from dpi_engine.ops.interface import PAGE_SIZE, StepTensors


def null_step(n: int, device: torch.device, rows: int = 1) -> StepTensors:
    """One sequence of `n` tokens; the logits of its last `rows` are wanted."""
    positions = torch.arange(n, device=device)
    return StepTensors(
        ids=torch.zeros(n, dtype=torch.int64, device=device),
        positions=positions,
        slots=positions % PAGE_SIZE,
        block_tables=torch.zeros(1, -(-n // PAGE_SIZE), dtype=torch.int32, device=device),
        kv_lens=torch.tensor([n], dtype=torch.int32, device=device),
        cu_q=torch.tensor([0, n], dtype=torch.int32, device=device),
        rows=positions[n - rows :],
        max_q=n,
        max_kv=n,
    )
