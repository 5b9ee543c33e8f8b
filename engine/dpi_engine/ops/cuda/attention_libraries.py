"""Attention over our paged cache by libraries, where they are installed: their calls, and nothing of our own.

The cache of a layer is [2, blocks, PAGE_SIZE, kv_heads, dim], so that keys and values are each in the layout that both
libraries call NHD, pages of PAGE_SIZE tokens. **No GPU has run these calls yet**: tests show their shapes, by modules
that stand in for the libraries.

FlashInfer (Ye et al., "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving", 2025).
flash-attn 3 (Shah et al., "FlashAttention-3", 2024), by its module flash_attn_interface.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from dpi_engine.ops.cuda import attention as kernels
from dpi_engine.ops.interface import PAGE_SIZE, HeadShape, StepTensors

WORKSPACE_BYTES = 128 << 20


class Attention(Protocol):
    """One for all layers of a model."""

    name: str

    def __call__(
        self, q: Tensor, step: StepTensors, cache: Tensor, shape: HeadShape, scale: float, window: int
    ) -> Tensor:
        """As `Ops.attention`."""


class TritonAttention:
    """The project's kernels (attention.py)."""

    name = "triton"

    def __call__(
        self, q: Tensor, step: StepTensors, cache: Tensor, shape: HeadShape, scale: float, window: int
    ) -> Tensor:
        return kernels.attention(q, step, cache, shape, scale, window)


class FlashAttention:
    """flash-attn 3. Lengths stay on the device, so a CUDA graph can hold it."""

    name = "flash-attn"

    def __init__(self, module: ModuleType) -> None:
        self._call: Any = module.flash_attn_with_kvcache

    def __call__(
        self, q: Tensor, step: StepTensors, cache: Tensor, shape: HeadShape, scale: float, window: int
    ) -> Tensor:
        n = q.shape[0]
        if not n:
            return torch.empty_like(q)
        out: Tensor = self._call(
            q.view(n, shape.heads, shape.dim),
            cache[0],
            cache[1],
            cache_seqlens=step.kv_lens,
            page_table=step.block_tables,
            cu_seqlens_q=step.cu_q,
            max_seqlen_q=step.max_q,
            softmax_scale=scale,
            causal=True,
            window_size=(window - 1 if window else -1, 0 if window else -1),
        )
        return out.reshape(n, shape.heads * shape.dim)


class FlashInferAttention:
    """FlashInfer for steps that hold a prompt. It plans each step on the host, which recorded steps cannot have: pure
    decode steps are those of our kernels.
    """

    name = "flashinfer"

    def __init__(self, module: ModuleType, device: torch.device) -> None:
        room = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper: Any = module.BatchPrefillWithPagedKVCacheWrapper(room, "NHD")
        self._singles = TritonAttention()
        self._planned: tuple[StepTensors, HeadShape, float, int] | None = None

    def __call__(
        self, q: Tensor, step: StepTensors, cache: Tensor, shape: HeadShape, scale: float, window: int
    ) -> Tensor:
        n = q.shape[0]
        if step.max_q == 1 or not n:
            return self._singles(q, step, cache, shape, scale, window)
        planned = self._planned
        if planned is None or planned[0] is not step or planned[1:] != (shape, scale, window):
            self._plan(q, step, cache, shape, scale, window)
            self._planned = (step, shape, scale, window)
        out: Tensor = self._wrapper.run(q.view(n, shape.heads, shape.dim), (cache[0], cache[1]))
        return out.reshape(n, shape.heads * shape.dim)

    def _plan(self, q: Tensor, step: StepTensors, cache: Tensor, shape: HeadShape, scale: float, window: int) -> None:
        lens = step.kv_lens.to("cpu", torch.int64).clamp(min=1)  # the stop of the device
        pages = (lens + PAGE_SIZE - 1) // PAGE_SIZE
        starts = torch.zeros(len(pages) + 1, dtype=torch.int32)
        starts[1:] = pages.cumsum(0)
        columns = torch.arange(step.block_tables.shape[1], device=step.block_tables.device)
        held = columns.unsqueeze(0) < pages.to(columns.device).unsqueeze(1)
        self._wrapper.plan(
            step.cu_q,
            starts.to(q.device),
            step.block_tables[held],
            ((lens - 1) % PAGE_SIZE + 1).to(q.device, torch.int32),
            shape.heads,
            shape.kv_heads,
            shape.dim,
            PAGE_SIZE,
            causal=True,
            sm_scale=scale,
            window_left=window - 1 if window else -1,
            q_data_type=q.dtype,
            kv_data_type=cache.dtype,
        )
