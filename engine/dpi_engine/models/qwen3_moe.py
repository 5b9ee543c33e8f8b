"""Qwen3-MoE: Qwen3's attention, and experts in the layers that the configuration names."""

from __future__ import annotations

from dpi_engine.config.model_spec import ModelSpec
from dpi_engine.models.decoder import BlockFactory, Mlp
from dpi_engine.models.moe import ExpertNames, MoeMlp
from dpi_engine.models.weights import Weights
from dpi_engine.ops.interface import Ops


class Qwen3MoeBlocks(BlockFactory):
    def mlp(self, spec: ModelSpec, layer: int, ops: Ops, weights: Weights, prefix: str) -> Mlp:
        if spec.moe is None or layer not in spec.moe.layers:
            return super().mlp(spec, layer, ops, weights, prefix)
        experts = self.experts_of(spec)
        return MoeMlp(spec, ops, weights, f"model.layers.{layer}", experts, (ExpertNames(),), self.shard)
