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
        kinds = ("weight", "bias") if spec.mlp_bias else ("weight",)

        def gate_up() -> tuple[Tensor, Tensor | None]:
            fused = torch.cat([weights.take_rows(f"{prefix}.{p}.weight", part, inner, hidden) for p in pair])
            if not spec.mlp_bias:
                return fused, None
            return fused, torch.cat([weights.take_rows(f"{prefix}.{p}.bias", part, inner) for p in pair])

        def down() -> tuple[Tensor, Tensor | None]:
            bias = sum_bias(weights, f"{prefix}.down_proj.bias", hidden, shard) if spec.mlp_bias else None
            return weights.take_columns(f"{prefix}.down_proj.weight", part, hidden, inner), bias

        names = [f"{prefix}.{p}.{kind}" for kind in kinds for p in pair]
        self._gate_up = weights.linear(ops, names, gate_up, gated=True)
        self._down = weights.linear(ops, [f"{prefix}.down_proj.{kind}" for kind in kinds], down)

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, hidden] -> [n, hidden]."""
        ops = self._ops
        return ops.linear(ops.gated_linear(x, self._gate_up), self._down)
