"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), computed on the latents themselves.

Keys and values of all heads are linear in one latent per token, and only that is cached. The key projection is applied
to the queries and the value projection to the results, so a step never expands the latents of earlier tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dpi_engine.config.model_spec import ModelSpec
from dpi_engine.config.rope import YarnRope
from dpi_engine.config.tensor_parallel import WHOLE, Shard
from dpi_engine.models.attention import norm_weight, wide
from dpi_engine.models.weights import Weights
from dpi_engine.ops.interface import LatentShape, Ops, RopeTable, StepTensors

LATENT_EPS = 1e-6
"""Of the norms of the latents: the published model code does not take the configuration's."""


class LatentAttention:
    """One layer, its heads those of `shard`; every worker computes and caches the latents, which all heads share."""

    recordable = False

    def __init__(self, spec: ModelSpec, ops: Ops, weights: Weights, prefix: str, shard: Shard = WHOLE) -> None:
        mla = spec.mla
        assert mla is not None
        self._ops = ops
        self._nope, self._value = mla.nope_dim, mla.value_dim
        local = shard.run(spec.num_heads)
        self.shape = LatentShape(len(local), mla.kv_rank, mla.rope_dim)
        self.cache_bytes_per_block()  # refuses what the ops cannot compute, before weights are read
        self._scale = softmax_scale(spec)
        heads, hidden, total = len(local), spec.hidden_size, spec.num_heads
        down = weights.take(f"{prefix}.kv_a_proj_with_mqa.weight", mla.kv_rank + mla.rope_dim, hidden)
        if mla.interleaved:
            down = torch.cat((down[: mla.kv_rank], halves(down[mla.kv_rank :].unsqueeze(0)).squeeze(0)))
        self._kv_norm = norm_weight(weights, f"{prefix}.kv_a_layernorm.weight", mla.kv_rank, ops)
        source = "q_proj" if mla.q_rank is None else "q_b_proj"
        width = hidden if mla.q_rank is None else mla.q_rank
        queries = weights.take_rows(f"{prefix}.{source}.weight", wide(local, spec.head_dim), spec.q_size, width)
        if mla.interleaved:
            by_head = queries.view(heads, spec.head_dim, width)
            turned = halves(by_head[:, mla.nope_dim :])
            queries = torch.cat((by_head[:, : mla.nope_dim], turned), dim=1).view(-1, width)
        self._queries = ops.pack_linear(queries)
        self._q_rank = mla.q_rank
        if mla.q_rank is None:
            self._down = ops.pack_linear(down)
        else:
            compress = weights.take(f"{prefix}.q_a_proj.weight", mla.q_rank, hidden)
            self._down = ops.pack_linear(torch.cat((compress, down)))
            self._q_norm = norm_weight(weights, f"{prefix}.q_a_layernorm.weight", mla.q_rank, ops)
        both = mla.nope_dim + mla.value_dim
        up = weights.take_rows(f"{prefix}.kv_b_proj.weight", wide(local, both), total * both, mla.kv_rank)
        up = up.view(heads, both, mla.kv_rank)
        self._absorb = ops.pack_heads(up[:, : mla.nope_dim])
        self._expand = ops.pack_heads(up[:, mla.nope_dim :].transpose(1, 2))
        values = wide(local, mla.value_dim)
        out = weights.take_columns(f"{prefix}.o_proj.weight", values, hidden, total * mla.value_dim)
        self._out = ops.pack_linear(out)

    def new_cache(self, num_blocks: int) -> Any:
        """This layer's cache of latents."""
        return self._ops.new_latent_cache(num_blocks, self.shape)

    def cache_bytes_per_block(self) -> int:
        """Bytes of one block of this layer."""
        return self._ops.latent_bytes_per_block(self.shape)

    def __call__(self, x: Tensor, step: StepTensors, rope: RopeTable, cache: Any) -> Tensor:
        """x [n, hidden] -> [n, hidden]; writes the step's latents into `cache`."""
        ops, shape, n = self._ops, self.shape, x.shape[0]
        latent = ops.linear(x, self._down)
        if self._q_rank is None:
            q = ops.linear(x, self._queries)
        else:
            compressed, latent = (part.contiguous() for part in latent.split((self._q_rank, shape.dim), dim=-1))
            q = ops.linear(ops.rms_norm(compressed, self._q_norm, LATENT_EPS), self._queries)
        plain = q.view(n, shape.heads, -1)[..., : self._nope].transpose(0, 1)
        absorbed = ops.head_linear(plain, self._absorb)
        q = ops.latent_write(q, absorbed, latent, step, rope, cache, shape, self._kv_norm, LATENT_EPS)
        mixed = ops.latent_attention(q, step, cache, shape, self._scale)
        values = ops.head_linear(mixed.view(n, shape.heads, shape.rank).transpose(0, 1), self._expand)
        return ops.linear(values.transpose(0, 1).reshape(n, shape.heads * self._value), self._out)


def softmax_scale(spec: ModelSpec) -> float:
    """1 / sqrt(width of a query head), times the square of yarn's mscale for all dimensions where it is set."""
    scale = spec.head_dim**-0.5
    rope = spec.rope_scaling
    if isinstance(rope, YarnRope) and rope.mscale_all_dim and rope.factor > 1:
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
    return scale


def halves(rows: Tensor) -> Tensor:
    """[heads, rope, in]: rows of rotated pairs side by side (a0 b0 a1 b1 ...) -> in halves (a0 a1 ... b0 b1 ...).

    Queries and keys are reordered alike, so their products stay the same.
    """
    heads, width, inner = rows.shape
    return rows.view(heads, width // 2, 2, inner).transpose(1, 2).reshape(heads, width, inner)
