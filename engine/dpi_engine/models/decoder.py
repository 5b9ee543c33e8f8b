"""One decoder-only transformer for every supported family; what differs is in ModelSpec and the block factory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dpi_engine.config.errors import ConfigError
from dpi_engine.config.model_spec import ModelSpec
from dpi_engine.config.tensor_parallel import WHOLE, Shard
from dpi_engine.models.attention import GroupedQueryAttention, norm_weight
from dpi_engine.models.mlp import GatedMlp
from dpi_engine.models.recorded import Recorded
from dpi_engine.models.weights import Progress, Weights
from dpi_engine.ops.exchange import ExpertExchange, LocalExperts
from dpi_engine.ops.interface import Ops, RopeTable, StepTensors
from dpi_engine.ops.rope import rope_table
from dpi_engine.ops.tensor_group import Alone, TensorGroup


class Attention(Protocol):
    """Mixes tokens of a sequence; owns the form of its KV cache. Gives its worker's part of a sum.

    `recordable`: it calls nothing but operations, and others by `Ops.outside`.
    """

    @property
    def recordable(self) -> bool: ...

    def new_cache(self, num_blocks: int) -> Any: ...
    def cache_bytes_per_block(self) -> int: ...
    def __call__(self, x: Tensor, step: StepTensors, rope: RopeTable, cache: Any) -> Tensor: ...


class Mlp(Protocol):
    """Works on each token alone; gives its worker's part of a sum. `collective`: all ranks that share the experts call
    it together, tokens or none. `recordable` as for attention.
    """

    collective: bool

    @property
    def recordable(self) -> bool: ...
    def __call__(self, x: Tensor) -> Tensor: ...


class BlockFactory:
    """Makes the two blocks of a layer. Families with other blocks derive from it."""

    def __init__(self, exchange: ExpertExchange | None = None, shard: Shard = WHOLE) -> None:
        """`exchange` reaches the experts of other ranks; without it this rank holds them all. `shard`: this worker's
        part of every layer.
        """
        self.exchange, self.shard = exchange, shard

    def experts_of(self, spec: ModelSpec) -> ExpertExchange:
        """The exchange of all layers, made once. Raises ConfigError when it was made for other experts."""
        assert spec.moe is not None
        if self.exchange is None:
            self.exchange = LocalExperts(spec.moe.num_experts)
        if self.exchange.placement.num_experts != spec.moe.num_experts:
            raise ConfigError(
                f"the expert exchange places {self.exchange.placement.num_experts} experts, "
                f"the model has {spec.moe.num_experts}"
            )
        return self.exchange

    def attention(self, spec: ModelSpec, layer: int, ops: Ops, weights: Weights, prefix: str) -> Attention:
        return GroupedQueryAttention(spec, layer, ops, weights, prefix, self.shard)

    def mlp(self, spec: ModelSpec, layer: int, ops: Ops, weights: Weights, prefix: str) -> Mlp:
        return GatedMlp(spec, ops, weights, prefix, shard=self.shard)


@dataclass(slots=True)
class _Layer:
    input_norm: Tensor
    attention: Attention
    post_norm: Tensor
    mlp: Mlp


class Decoder:
    """A loaded model on one device.

    `spec` is what it was built from, `max_model_len` the number of positions its rotary tables cover, `weight_bytes`
    the size of its weights as the ops hold them: those of this worker, where several share the layers.
    """

    def __init__(
        self,
        spec: ModelSpec,
        ops: Ops,
        weights: Weights,
        factory: BlockFactory,
        max_model_len: int,
        progress: Progress,
        group: TensorGroup | None = None,
    ) -> None:
        """Takes every tensor from `weights`. `group`: the workers that share the layers. Raises WeightError, RopeError.

        The factory must have the shard of the group.
        """
        self.spec, self.ops, self.max_model_len = spec, ops, max_model_len
        self._group: TensorGroup = group or Alone()
        self._vocab = factory.shard.run(spec.vocab_size)
        table = spec.vocab_size, spec.hidden_size
        tied = spec.tie_word_embeddings
        embedding = weights.take_rows("model.embed_tokens.weight", self._vocab, *table)
        saved = ops.bytes_saved
        self._embedding = weights.uploaded(ops, embedding)
        self._layers: list[_Layer] = []
        for i in range(spec.num_layers):
            name = f"model.layers.{i}"
            self._layers.append(
                _Layer(
                    input_norm=norm_weight(weights, f"{name}.input_layernorm.weight", spec.hidden_size, ops),
                    attention=factory.attention(spec, i, ops, weights, f"{name}.self_attn"),
                    post_norm=norm_weight(weights, f"{name}.post_attention_layernorm.weight", spec.hidden_size, ops),
                    mlp=factory.mlp(spec, i, ops, weights, f"{name}.mlp"),
                )
            )
            progress("load", (i + 1) / (spec.num_layers + 1))
        self._norm = norm_weight(weights, "model.norm.weight", spec.hidden_size, ops)

        def head() -> tuple[Tensor, Tensor | None]:
            return embedding if tied else weights.take_rows("lm_head.weight", self._vocab, *table), None

        self._head = weights.linear(ops, ["model.embed_tokens.weight" if tied else "lm_head.weight"], head)
        ops.loaded()
        self._rope = rope_table(max_model_len, spec.rope_dim, spec.rope_theta, spec.rope_scaling, ops.device)
        shared = factory.exchange is not None and factory.exchange.placement.ep_size > 1
        self._collective = [layer.mlp for layer in self._layers if shared and layer.mlp.collective]
        self._recorded = Recorded(self._forward, ops) if ops.can_record and self._only_operations() else None
        head_elements = embedding.numel() if tied else 0
        stored: torch.dtype = getattr(ops, "weight_dtype", ops.dtype)  # kernels may compute wider than they store
        self.weight_bytes = (weights.elements + head_elements) * stored.itemsize - (ops.bytes_saved - saved)
        progress("load", 1.0)

    def new_caches(self, num_blocks: int) -> list[Any]:
        """KV caches of `num_blocks` blocks, one per layer; block 0 is the null page."""
        return [layer.attention.new_cache(num_blocks) for layer in self._layers]

    def cache_bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return sum(layer.attention.cache_bytes_per_block() for layer in self._layers)

    def _only_operations(self) -> bool:
        """Whether a pass with all its rows wanted can be recorded."""
        blocks = (block for layer in self._layers for block in (layer.attention, layer.mlp))
        return isinstance(self._group, Alone) and all(block.recordable for block in blocks)

    @torch.inference_mode()
    def forward(self, step: StepTensors, caches: Sequence[Any]) -> Tensor:
        """Compute the step, write its keys and values into `caches` (of `new_caches`), and return logits.

        Logits are [m, vocab] in `ops.dtype`, row i for token `step.rows[i]`. m may be 0: then only the caches change.
        Positions must be below `max_model_len`. Where workers share the layers, all of them call this with the same
        step, and only the first gets the logits. They may lie where the next pass writes its own.
        """
        logits = self._recorded.forward(step, caches) if self._recorded else None
        return self._forward(step, caches) if logits is None else logits

    def _forward(self, step: StepTensors, caches: Sequence[Any]) -> Tensor:
        ops, eps, group = self.ops, self.spec.rms_norm_eps, self._group
        ops.begin(step)
        residual = self._embed(step.ids)
        last = len(self._layers) - 1
        delta: Tensor | None = None
        for i, layer in enumerate(self._layers):
            if delta is None:
                x = ops.rms_norm(residual, layer.input_norm, eps)
            else:
                x = ops.add_rms_norm(residual, delta, layer.input_norm, eps)
            delta = group.all_reduce(layer.attention(x, step, self._rope, caches[i]))
            if i == last:
                # Nothing looks at the other tokens from here on. Other ranks may wait for this layer all the same.
                if not step.rows.shape[0] and layer.mlp not in self._collective:
                    break
                if not step.every_row:
                    residual, delta = residual[step.rows], delta[step.rows]
            x = ops.add_rms_norm(residual, delta, layer.post_norm, eps)
            delta = group.all_reduce(layer.mlp(x))
        if not step.rows.shape[0]:
            return torch.empty(0, self.spec.vocab_size, dtype=ops.dtype, device=ops.device)
        assert delta is not None
        return group.gather(ops.linear(ops.add_rms_norm(residual, delta, self._norm, eps), self._head))

    def _embed(self, ids: Tensor) -> Tensor:
        """Rows of the embedding; a worker that holds a part of the vocabulary adds zeros for the other tokens."""
        if len(self._vocab) == self.spec.vocab_size:
            return self.ops.embed(ids, self._embedding)
        local = ids - self._vocab.start
        elsewhere = (local < 0) | (local >= len(self._vocab))
        rows = self.ops.embed(local.masked_fill(elsewhere, 0), self._embedding)
        return self._group.all_reduce(rows.masked_fill_(elsewhere.unsqueeze(1), 0.0))

    @property
    def collective(self) -> bool:
        """Whether every forward pass or `idle` of this rank needs one of every other rank of its group."""
        return bool(self._collective)

    @torch.inference_mode()
    def idle(self) -> None:
        """Take part in a step of the group with no token of one's own: compute for the others what they send.

        Does nothing where the experts are not shared. Raises ExchangeError.
        """
        nothing = torch.empty(0, self.spec.hidden_size, dtype=self.ops.dtype, device=self.ops.device)
        for mlp in self._collective:
            mlp(nothing)
