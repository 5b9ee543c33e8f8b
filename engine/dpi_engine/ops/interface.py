"""The operations a model is made of.

Backends: `torch_ref` (any device, the reference), `cpu` (our C kernels) and `cuda` (our Triton kernels).

A backend owns the layout of its packed weights and of its KV cache; models never look inside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dpi_engine.config.moe_spec import MoeSpec

PAGE_SIZE = 16
"""Tokens in a KV cache block."""

WIDENED_ROWS = 64
"""Rows of logits that are widened or sorted at a time: all rows of a long prompt together would need gigabytes."""


@dataclass(slots=True)
class StepTensors:
    """The inputs of one forward pass over n tokens of b sequences; all on the model's device.

    ids [n] int64; positions [n] int64; slots [n] int64 (block * PAGE_SIZE + offset where each token's K and V go);
    block_tables [b, w] int32; kv_lens [b] int32 (keys visible to the last query, this step's included);
    cu_q [b + 1] int32 (sequence i has query rows cu_q[i]:cu_q[i+1]); rows [m] int64 (rows whose logits are wanted).
    max_q and max_kv are plain ints, the largest query and KV length. every_row: `rows` is 0 .. n - 1.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    kv_lens: Tensor
    cu_q: Tensor
    rows: Tensor
    max_q: int
    max_kv: int
    every_row: bool = False


@dataclass(slots=True)
class RopeTable:
    """cos and sin [max positions, head_dim / 2] float32, attention scaling (yarn) included; halves layout (NeoX)."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Attention heads of one rank: `heads` query heads in `kv_heads` groups, `dim` wide."""

    heads: int
    kv_heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Latent attention (MLA) of one rank: `heads` query heads over one cached latent of `rank` elements and a rotated
    key part of `rope` elements that all heads share. `rank` + `rope` is the width of keys, `rank` that of values.
    """

    heads: int
    rank: int
    rope: int

    @property
    def dim(self) -> int:
        return self.rank + self.rope


ExpertLoader: TypeAlias = Callable[[int], tuple[Tensor, Tensor, Tensor]]
"""Local index of an expert -> its gate and up matrices [inner, hidden] and its down matrix [hidden, inner]."""


@dataclass(slots=True)
class Draws:
    """Parameters of m draws, on the device: temperature (0: greedy), top_p, min_p and uniform (in [0, 1)) [m] float32;
    top_k [m] int32, 0 for no limit.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor


class OpsUnavailable(RuntimeError):
    """A backend that cannot run here: no compiler, an unknown processor, a failed self-test. The text says which."""


class Ops(ABC):
    """One backend on one device. Activations are 2-D [tokens, features] contiguous in `dtype`.

    `weight_dtype` is what weights are kept in: what `--dtype` means, and what all ranks of a group must share.
    `quantization`: `int8` where linears are packed as integers of 8 bits; experts, the parts of heads in latent
    attention, embeddings and norms are not. `bytes_saved`: by what all packed linears are smaller for it.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    weight_dtype: torch.dtype
    draws: bool = False
    """Whether `draw` is there."""
    records: bool = False
    """Whether a decode step runs without the host looking at numbers of it, so that a CUDA graph can hold it."""
    quantization: str | None = None
    bytes_saved: int = 0
    layout: str | None = None
    """Names the layout of packed linears, where they can be kept on disk: `linear_tensors`, `kept_linear`."""

    def begin(self, step: StepTensors) -> None:  # noqa: B027 - optional by design
        """Called once per forward pass, before the layers: prepare here what every layer needs of `step`."""

    @property
    def can_record(self) -> bool:
        """Whether passes that call nothing but operations (`outside` too) can be recorded: `record`, `replay`."""
        return False

    def record(self, step: StepTensors, forward: Callable[[], Tensor]) -> Any:
        """`forward` over `step` as a program, to be replayed with steps of as many tokens and sequences."""
        raise NotImplementedError(f"ops '{self.name}' do not record")

    def replay(self, program: Any, step: StepTensors) -> Tensor | None:
        """What the recorded pass returns for `step`, valid until the next replay; None when a call of it failed before
        any of `outside`.
        """
        raise NotImplementedError(f"ops '{self.name}' do not record")

    def linear_tensors(self, packed: Any) -> tuple[dict[str, Tensor], list[int]]:
        """What a packed linear consists of, to be kept: tensors by part, and numbers."""
        raise NotImplementedError(f"linears of ops '{self.name}' cannot be kept")

    def kept_linear(self, tensors: dict[str, Tensor], numbers: list[int]) -> Any:
        """The packed linear of which `linear_tensors` gave these."""
        raise NotImplementedError(f"linears of ops '{self.name}' cannot be kept")

    def upload(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of x (CPU), contiguous on the ops' device, in `dtype` (None: its own)."""
        return x.to(device=self.device, dtype=dtype or x.dtype, copy=True).contiguous()

    def loaded(self) -> None:  # noqa: B027 - optional by design
        """All weights are packed: what was only there for them can go."""

    def outside(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """function(*tensors), of the shape and dtype of the first of them, where it calls more than operations.

        In a recorded pass it is called in every replay, and not while it is recorded.
        """
        return function(*tensors)

    @abstractmethod
    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Take weight [out, in] (any float dtype, CPU) and bias [out]; return an opaque packed linear."""

    @abstractmethod
    def linear(self, x: Tensor, packed: Any) -> Tensor:
        """x [n, in] -> [n, out] in `dtype`."""

    def pack_gated(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Take weight [2 i, in], the rows of a gate and then those it is multiplied with, and bias [2 i]."""
        return self.pack_linear(weight, bias)

    def gated_linear(self, x: Tensor, packed: Any) -> Tensor:
        """x [n, in] -> silu(gate) * other, [n, i]; `packed` is of `pack_gated`."""
        return self.silu_mul(self.linear(x, packed))

    @abstractmethod
    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """ids [n] -> rows of table [vocab, hidden], in `dtype`."""

    @abstractmethod
    def new_cache(self, num_blocks: int, shape: HeadShape) -> Any:
        """KV cache of one layer: num_blocks pages of PAGE_SIZE tokens. Block 0 is the null page."""

    @abstractmethod
    def cache_bytes_per_block(self, shape: HeadShape) -> int:
        """Bytes of one layer's block."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm over the last axis."""

    @abstractmethod
    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += delta in place, then the norm of residual."""

    @abstractmethod
    def rope_write(
        self,
        qkv: Tensor,
        step: StepTensors,
        rope: RopeTable,
        cache: Any,
        shape: HeadShape,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        """Split qkv [n, (heads + 2 kv_heads) dim], norm q and k per head (Qwen3), rotate, write K and V to the cache.

        Returns q [n, heads * dim].
        """

    @abstractmethod
    def attention(
        self, q: Tensor, step: StepTensors, cache: Any, shape: HeadShape, scale: float, window: int = 0
    ) -> Tensor:
        """Causal attention of q [n, heads * dim] over the paged cache.

        `window` > 0: only the last `window` keys, self included.
        """

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[n, 2 i] -> silu(first half) * second half, [n, i]."""

    # Latent attention

    @abstractmethod
    def new_latent_cache(self, num_blocks: int, shape: LatentShape) -> Any:
        """KV cache of one layer of latent attention; keys and values are one latent, so it is held once.

        Raises OpsUnavailable for widths that the backend cannot compute, as `latent_bytes_per_block` does.
        """

    @abstractmethod
    def latent_bytes_per_block(self, shape: LatentShape) -> int:
        """Bytes of one layer's block of latents."""

    @abstractmethod
    def latent_write(
        self,
        q: Tensor,
        absorbed: Tensor,
        latent: Tensor,
        step: StepTensors,
        rope: RopeTable,
        cache: Any,
        shape: LatentShape,
        norm: Tensor,
        eps: float,
    ) -> Tensor:
        """Norm the latent and rotate the shared key part, write both to the cache, and put the queries together.

        q [n, heads (nope + rope)], of which the last `rope` of each head are rotated; absorbed [heads, n, rank], the
        rest of each head as a query over latents; latent [n, rank + rope]; norm [rank]. `rope` tables have rope / 2
        columns. Returns queries [n, heads (rank + rope)] for `latent_attention`.
        """

    @abstractmethod
    def latent_attention(self, q: Tensor, step: StepTensors, cache: Any, shape: LatentShape, scale: float) -> Tensor:
        """Causal attention of q [n, heads (rank + rope)] over the paged latents -> [n, heads rank]."""

    def pack_heads(self, weight: Tensor) -> Any:
        """Take weight [heads, in, out] (any float dtype, CPU); return an opaque packed linear of each head."""
        return weight.to(device=self.device, dtype=self.dtype).contiguous()

    def head_linear(self, x: Tensor, packed: Any) -> Tensor:
        """x [heads, n, in], of any strides -> [heads, n, out] contiguous in `dtype`."""
        return torch.bmm(x, packed)

    # Experts

    @abstractmethod
    def pack_router(self, weight: Tensor, bias: Tensor | None, moe: MoeSpec) -> Any:
        """Take the router's weight [experts, hidden] and the correction bias [experts] of `moe` (None: it has none)."""

    @abstractmethod
    def route(self, x: Tensor, router: Any) -> tuple[Tensor, Tensor]:
        """x [n, hidden] -> ids [n, k] int32, best first, none twice; weights [n, k] float32. Computed in float32.

        Of equal scores, and of equal groups, the lower comes first, so that backends agree. A row with a value that is
        not a number gives valid ids as well.
        """

    @abstractmethod
    def pack_experts(self, count: int, hidden: int, inner: int, load: ExpertLoader) -> Any:
        """Take the experts 0 .. count - 1 of one layer from `load`, one after the other."""

    @abstractmethod
    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, packed: Any) -> Tensor:
        """x [m, hidden], ids [m, k] int32 (-1: nothing), weights [m, k] float32 -> [m, hidden].

        Row i is the sum over j of weights[i, j] * down(silu(gate(x[i])) * up(x[i])) of expert ids[i, j], zero where
        there is none.
        """

    @abstractmethod
    def argmax(self, logits: Tensor) -> Tensor:
        """[m, vocab] -> [m] int64, the lowest index among equals."""

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """`argmax`, and the largest logit of each row, [m] float32: NaN where the row holds one, wherever it stands."""
        return self.argmax(logits), logits.amax(-1).float()

    def row_logsumexp(self, logits: Tensor) -> Tensor:
        """[m, vocab] -> [m] float32: log of the sum of exponentials of each row; NaN where the row holds one."""
        found = [torch.logsumexp(part.float(), dim=-1) for part in logits.split(WIDENED_ROWS)]
        return torch.cat(found)

    def topk(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """[m, vocab] -> values [m, k] float32 and ids [m, k] int64, largest first; k is cut to the vocabulary.

        Which of equal logits come first is the lower ids here as well, so that backends agree.
        """
        k = max(0, min(k, logits.shape[-1]))
        found = []
        for part in logits.split(WIDENED_ROWS):
            values, ids = torch.sort(part.float(), dim=-1, descending=True, stable=True)
            found.append((values[:, :k].contiguous(), ids[:, :k].contiguous()))
        return torch.cat([values for values, _ in found]), torch.cat([ids for _, ids in found])

    def draw(self, logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """[m, vocab] -> tokens [m] int64 and the largest logit of each row [m] float32, without a stop of the device.

        One draw per row from softmax(logits / temperature) cut by min-p, top-k (equals of the k-th stay in) and top-p,
        a function of the row and its uniform alone. The largest is +inf where a row holds a value that is not a number;
        rows whose largest is not finite give any valid token. Only where `draws` is true.
        """
        raise NotImplementedError(f"ops '{self.name}' draws on the host")
