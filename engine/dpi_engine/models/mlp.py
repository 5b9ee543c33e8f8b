"""The feed-forward block of one decoder layer."""

from __future__ import annotations

import torch
from torch import Tensor

from dpi_engine.config.model_spec import ModelSpec
from dpi_engine.config.tensor_parallel import WHOLE, Shard
from dpi_engine.models.attention import sum_bias
from dpi_engine.models.weights import Weights
from dpi_engine.ops.interface import Ops


class GatedMlp:
    """silu(gate(x)) * up(x), projected down; gate and up are one fused linear.

    Holds the inner columns of `shard`; what they give is then a part of the sum over all workers.
    """

    collective, recordable = False, True

    def __init__(
        self,
        spec: ModelSpec,
        ops: Ops,
        weights: Weights,
        prefix: str,
        inner: int | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        """`inner` differs from the spec's intermediate size for shared experts."""
        self._ops = ops
        hidden, inner = spec.hidden_size, inner or spec.intermediate_size
        pair, part = ("gate_proj", "up_proj"), shard.run(inner)
        fused = torch.cat([weights.take_rows(f"{prefix}.{p}.weight", part, inner, hidden) for p in pair])
        bias = None
        if spec.mlp_bias:
            bias = torch.cat([weights.take_rows(f"{prefix}.{p}.bias", part, inner) for p in pair])
        self._gate_up = ops.pack_gated(fused, bias)
        down_bias = sum_bias(weights, f"{prefix}.down_proj.bias", hidden, shard) if spec.mlp_bias else None
        down = weights.take_columns(f"{prefix}.down_proj.weight", part, hidden, inner)
        self._down = ops.pack_linear(down, down_bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, hidden] -> [n, hidden]."""
        ops = self._ops
        return ops.linear(ops.gated_linear(x, self._gate_up), self._down)
