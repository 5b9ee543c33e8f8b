"""Mixtral: Mistral's attention, and experts in every layer."""

from __future__ import annotations

from dpi_engine.config.model_spec import ModelSpec
from dpi_engine.models.decoder import BlockFactory, Mlp
from dpi_engine.models.moe import ExpertNames, MoeMlp
from dpi_engine.models.weights import Weights
from dpi_engine.ops.interface import Ops

NAMES = (ExpertNames("block_sparse_moe", "w1", "w3", "w2"), ExpertNames())
"""Of the published checkpoints, and of those written in the names that other families use."""


class MixtralBlocks(BlockFactory):
    def mlp(self, spec: ModelSpec, layer: int, ops: Ops, weights: Weights, prefix: str) -> Mlp:
        return MoeMlp(spec, ops, weights, f"model.layers.{layer}", self.experts_of(spec), NAMES, self.shard)
