"""DeepSeek-V2 and V3: latent attention, dense layers first, then routed experts beside shared ones."""

from __future__ import annotations

from dpi_engine.config.model_spec import ModelSpec
from dpi_engine.models.decoder import Attention
from dpi_engine.models.mla import LatentAttention
from dpi_engine.models.qwen3_moe import Qwen3MoeBlocks
from dpi_engine.models.weights import Weights
from dpi_engine.ops.interface import Ops


class DeepseekBlocks(Qwen3MoeBlocks):
    """The names of the experts are Qwen3's."""

    def attention(self, spec: ModelSpec, layer: int, ops: Ops, weights: Weights, prefix: str) -> Attention:
        return LatentAttention(spec, ops, weights, prefix, self.shard)
