"""Grouped-query attention of one decoder layer: fused projection, rotation and cache write, attention, output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpi_engine.config.model_spec import ModelSpec
from dpi_engine.config.tensor_parallel import WHOLE, Shard
from dpi_engine.models.weights import Weights
from dpi_engine.ops.interface import HeadShape, Ops, RopeTable, StepTensors


class GroupedQueryAttention:
    """Llama, Mistral, Qwen2 and Qwen3: they differ in biases, per-head norms and the layer's window.

    Holds the heads of `shard`; what they give is then a part of the sum over all workers.
    """

    recordable = True

    def __init__(
        self, spec: ModelSpec, layer: int, ops: Ops, weights: Weights, prefix: str, shard: Shard = WHOLE
    ) -> None:
        self._ops = ops
        self._eps = spec.rms_norm_eps
        self._scale = spec.head_dim**-0.5
        self._window = spec.layer_windows[layer] if spec.layer_windows else 0
        heads, kv_heads, hidden = shard.run(spec.num_heads), shard.kv_run(spec.num_kv_heads), spec.hidden_size
        self.shape = HeadShape(len(heads), len(kv_heads), spec.head_dim)
        q, kv = wide(heads, spec.head_dim), wide(kv_heads, spec.head_dim)
        parts = (("q_proj", q, spec.q_size), ("k_proj", kv, spec.kv_size), ("v_proj", kv, spec.kv_size))

        def qkv() -> tuple[Tensor, Tensor | None]:
            fused = torch.cat([weights.take_rows(f"{prefix}.{p}.weight", rows, n, hidden) for p, rows, n in parts])
            if not spec.attention_bias:
                return fused, None
            return fused, torch.cat([weights.take_rows(f"{prefix}.{p}.bias", rows, n) for p, rows, n in parts])

        def out() -> tuple[Tensor, Tensor | None]:
            bias = sum_bias(weights, f"{prefix}.o_proj.bias", hidden, shard) if spec.attention_out_bias else None
            return weights.take_columns(f"{prefix}.o_proj.weight", q, hidden, spec.q_size), bias

        kinds = ("weight", "bias") if spec.attention_bias else ("weight",)
        self._qkv = weights.linear(ops, [f"{prefix}.{p}.{kind}" for kind in kinds for p, _, _ in parts], qkv)
        kinds = ("weight", "bias") if spec.attention_out_bias else ("weight",)
        self._out = weights.linear(ops, [f"{prefix}.o_proj.{kind}" for kind in kinds], out)
        self._q_norm = self._k_norm = None
        if spec.qk_norm:
            self._q_norm = norm_weight(weights, f"{prefix}.q_norm.weight", spec.head_dim, ops)
            self._k_norm = norm_weight(weights, f"{prefix}.k_norm.weight", spec.head_dim, ops)

    def new_cache(self, num_blocks: int) -> Any:
        """This layer's KV cache."""
        return self._ops.new_cache(num_blocks, self.shape)

    def cache_bytes_per_block(self) -> int:
        """Bytes of one block of this layer."""
        return self._ops.cache_bytes_per_block(self.shape)

    def __call__(self, x: Tensor, step: StepTensors, rope: RopeTable, cache: Any) -> Tensor:
        """x [n, hidden] -> [n, hidden]; writes the step's keys and values into `cache`."""
        ops = self._ops
        qkv = ops.linear(x, self._qkv)
        q = ops.rope_write(qkv, step, rope, cache, self.shape, self._q_norm, self._k_norm, self._eps)
        return ops.linear(ops.attention(q, step, cache, self.shape, self._scale, self._window), self._out)


def wide(heads: range, width: int) -> range:
    """Rows of `heads` that are `width` rows each."""
    return range(heads.start * width, heads.stop * width)


def sum_bias(weights: Weights, name: str, size: int, shard: Shard) -> Tensor | None:
    """The bias [size] of a linear whose outputs all workers add up: the first worker's alone, lest it count often."""
    if shard.index:
        weights.leave(name)
        return None
    return weights.take(name, size)


def norm_weight(weights: Weights, name: str, size: int, ops: Ops) -> Tensor:
    """A norm's weight [size], float32 on the ops' device: it is tiny, and the norm is computed in float32."""
    return weights.take(name, size).to(device=ops.device, dtype=torch.float32, copy=True)
