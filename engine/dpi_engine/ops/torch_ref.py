"""The reference backend: plain torch on any device.

KV cache of a layer: one tensor [2, num_blocks, PAGE_SIZE, kv_heads, dim]; index 0 holds keys, 1 values. For latent
attention [num_blocks, PAGE_SIZE, rank + rope]: keys, whose first `rank` elements are the values.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpi_engine.config.moe_spec import MoeSpec
from dpi_engine.ops import torch_moe
from dpi_engine.ops.allocate import lazy_zeros
from dpi_engine.ops.interface import (
    PAGE_SIZE,
    ExpertLoader,
    HeadShape,
    LatentShape,
    Ops,
    OpsUnavailable,
    RopeTable,
    StepTensors,
)
from dpi_engine.ops.staging import Staging

log = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

GATHERED_TOKENS = 1 << 18
"""Keys that the decodes of one call gather at a time (more only for a single longer sequence): padding to the longest
sequence would else make a copy larger than the cache itself."""


@dataclass(slots=True)
class PackedLinear:
    """weight [out, in] in the backend's dtype; `prepacked` says that it is in oneDNN's blocked layout."""

    weight: Tensor
    bias: Tensor | None
    prepacked: bool


@dataclass(slots=True)
class _Decodes:
    """Sequences of one query each: pages to gather [b * p], keys [b], additive masks [b, 1, 1, p * PAGE] by window."""

    pages: Tensor
    kv_lens: Tensor
    length: int
    masks: dict[int, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _Mixed:
    """A step that is not all decodes: chunks (sequence, first row, rows, keys), and the rows that are decodes."""

    chunks: list[tuple[int, int, int, int]]
    decodes: _Decodes | None
    decode_rows: Tensor


@dataclass(slots=True)
class _Pages:
    """A layer's cache as attention reads it. `latent`: width of the values, which are the front part of the keys."""

    cache: Tensor
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    latent: int = 0

    @property
    def value_dim(self) -> int:
        return self.latent or self.dim

    def take(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [pages, PAGE_SIZE, kv_heads, width]."""
        if self.latent:
            keys = self.cache.index_select(0, pages).unsqueeze(2)
            return keys, keys[..., : self.latent]
        raw = _raw(self.cache)
        keys, values = raw[0].index_select(0, pages), raw[1].index_select(0, pages)
        if raw is self.cache:
            return keys, values
        return keys.view(self.cache.dtype).to(self.dtype), values.view(self.cache.dtype).to(self.dtype)


@dataclass(slots=True)
class _Layout:
    """What every layer needs of one step, computed once."""

    step: StepTensors
    cos: Tensor | None = None
    sin: Tensor | None = None
    fresh: Tensor | None = None
    decodes: _Decodes | None = None
    mixed: _Mixed | None = None


def onednn_linear_works(dtype: torch.dtype) -> bool:
    """True when torch's private prepacked linear exists for `dtype` and agrees with F.linear on a small case."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 48, generator=generator).to(dtype)
    weight = torch.randn(33, 48, generator=generator).to(dtype)
    bias = torch.randn(33, generator=generator).to(dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 0.25
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        for rows in (x, x[:1]):
            for b in (None, bias):
                got = torch.ops.mkldnn._linear_pointwise(rows, packed, b, "none", [], "")
                want = F.linear(rows.float(), weight.float(), None if b is None else b.float())
                if not torch.allclose(got.float(), want, rtol=0.02, atol=tolerance):
                    return False
    except (RuntimeError, AttributeError, NotImplementedError, TypeError) as error:
        log.debug("prepacked linear in %s is not to be had: %s", dtype, error)
        return False
    return True


class TorchOps(Ops):
    """Raises OpsUnavailable for a dtype or device that torch cannot serve here."""

    name = "torch"

    def __init__(self, device: torch.device | str, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> None:
        """`kv_dtype`: float8_e4m3fn, or None for caches in `dtype`."""
        if dtype not in DTYPES:
            raise OpsUnavailable(f"dtype {dtype} is not one of {', '.join(map(str, DTYPES))}")
        self.device = torch.device(device)
        self.dtype = self.weight_dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        try:
            torch.empty(1, device=self.device, dtype=dtype)
        except (RuntimeError, AssertionError) as error:
            raise OpsUnavailable(f"device '{device}' cannot be used: {error}") from error
        if self.device.type == "cuda":
            # cuDNN's attention, torch's first choice on recent GPUs, builds a plan of some 0.4 s for every new shape,
            # and here nearly every step has one.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self._prepack = self.device.type == "cpu" and onednn_linear_works(dtype)
        # On a CPU the loop over experts is the faster one.
        self._grouped = self.device.type == "cuda" and torch_moe.grouped_works(self.device, dtype)
        self._layout: _Layout | None = None
        self._staging = Staging(self.device) if self.device.type == "cuda" else None

    def upload(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return super().upload(x, dtype) if self._staging is None else self._staging.put(x, dtype)

    def loaded(self) -> None:
        if self._staging is not None:
            self._staging.close()

    # Linears and embedding

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        if self._staging is not None:
            weight = self._staging.put(weight, self.dtype)
        weight = weight.to(device=self.device, dtype=self.dtype).contiguous()
        bias = None if bias is None else bias.to(device=self.device, dtype=self.dtype).contiguous()
        if self._prepack:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return PackedLinear(weight, bias, self._prepack)

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        if packed.prepacked and x.shape[0]:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed.weight, packed.bias, "none", [], "")
            return out
        if packed.prepacked:
            return x.new_empty(0, packed.weight.shape[0])
        return F.linear(x, packed.weight, packed.bias)

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(ids, table).to(self.dtype)

    # Norms and activations

    def _norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(self.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, weight, eps)

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual.add_(delta)
        return self._norm(residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def argmax(self, logits: Tensor) -> Tensor:
        if logits.device.type == "cpu" and logits.dtype != torch.float32:
            logits = logits.float()  # torch's half-precision argmax on CPU is scalar code, widening first is faster
        return logits.argmax(dim=-1)

    # KV cache

    def new_cache(self, num_blocks: int, shape: HeadShape) -> Tensor:
        size = (2, num_blocks, PAGE_SIZE, shape.kv_heads, shape.dim)
        held = torch.uint8 if self.kv_dtype.itemsize == 1 else self.kv_dtype  # few operations know eight-bit floats
        if self.device.type == "cpu":
            return lazy_zeros(size, held).view(self.kv_dtype)
        return torch.zeros(size, device=self.device, dtype=held).view(self.kv_dtype)

    def cache_bytes_per_block(self, shape: HeadShape) -> int:
        return 2 * PAGE_SIZE * shape.kv_heads * shape.dim * self.kv_dtype.itemsize

    # Attention

    def begin(self, step: StepTensors) -> None:
        self._layout = _Layout(step)

    def _layout_of(self, step: StepTensors) -> _Layout:
        if self._layout is None or self._layout.step is not step:
            self._layout = _Layout(step)
        return self._layout

    def rope_write(
        self,
        qkv: Tensor,
        step: StepTensors,
        rope: RopeTable,
        cache: Tensor,
        shape: HeadShape,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        heads, kv_heads = shape.heads, shape.kv_heads
        cos, sin, fresh = self._turns(step, rope)
        n = qkv.shape[0]
        q, k, v = qkv.view(n, heads + 2 * kv_heads, shape.dim).split((heads, kv_heads, kv_heads), dim=1)
        if q_norm is not None:
            q = self._norm(q, q_norm, eps)
        if k_norm is not None:
            k = self._norm(k, k_norm, eps)
        # A page's first token clears what an earlier owner left: a masked key that is not a number spoils a softmax.
        raw = _raw(cache)
        raw.index_fill_(1, fresh, 0)
        keys = raw[0].view(-1, kv_heads, shape.dim)
        values = raw[1].view(-1, kv_heads, shape.dim)
        keys.index_copy_(0, step.slots, _stored(_rotate(k, cos, sin), cache))
        values.index_copy_(0, step.slots, _stored(v, cache))
        return _rotate(q, cos, sin).view(n, heads * shape.dim)

    def _turns(self, step: StepTensors, rope: RopeTable) -> tuple[Tensor, Tensor, Tensor]:
        """cos and sin [n, 1, dim / 2] of the step's positions, and the pages that it begins."""
        layout = self._layout_of(step)
        if layout.cos is None or layout.sin is None or layout.fresh is None:
            layout.cos = rope.cos[step.positions].unsqueeze(1)
            layout.sin = rope.sin[step.positions].unsqueeze(1)
            layout.fresh = _fresh_pages(step.slots)
        return layout.cos, layout.sin, layout.fresh

    def attention(
        self, q: Tensor, step: StepTensors, cache: Tensor, shape: HeadShape, scale: float, window: int = 0
    ) -> Tensor:
        return self._attend(q, step, _Pages(cache, shape.heads, shape.kv_heads, shape.dim, self.dtype), scale, window)

    # Latent attention

    def new_latent_cache(self, num_blocks: int, shape: LatentShape) -> Tensor:
        if self.kv_dtype is not self.dtype:
            raise OpsUnavailable(f"caches of latent attention are kept in {self.dtype}: leave --kv-cache-dtype out")
        size = (num_blocks, PAGE_SIZE, shape.dim)
        if self.device.type == "cpu":
            return lazy_zeros(size, self.dtype)
        return torch.zeros(size, device=self.device, dtype=self.dtype)

    def latent_bytes_per_block(self, shape: LatentShape) -> int:
        return PAGE_SIZE * shape.dim * self.dtype.itemsize

    def latent_write(
        self,
        q: Tensor,
        absorbed: Tensor,
        latent: Tensor,
        step: StepTensors,
        rope: RopeTable,
        cache: Tensor,
        shape: LatentShape,
        norm: Tensor,
        eps: float,
    ) -> Tensor:
        cos, sin, fresh = self._turns(step, rope)
        n = q.shape[0]
        content, key = latent.split((shape.rank, shape.rope), dim=-1)
        turned = _rotate(key.unsqueeze(1), cos, sin).squeeze(1)
        cache.index_fill_(0, fresh, 0)
        rows = torch.cat((self._norm(content, norm, eps), turned), dim=-1)
        cache.view(-1, shape.dim).index_copy_(0, step.slots, rows)
        queries = _rotate(q.view(n, shape.heads, -1)[..., -shape.rope :], cos, sin)
        return torch.cat((absorbed.transpose(0, 1), queries), dim=-1).view(n, shape.heads * shape.dim)

    def latent_attention(self, q: Tensor, step: StepTensors, cache: Tensor, shape: LatentShape, scale: float) -> Tensor:
        return self._attend(q, step, _Pages(cache, shape.heads, 1, shape.dim, self.dtype, shape.rank), scale, 0)

    # Experts

    def pack_router(self, weight: Tensor, bias: Tensor | None, moe: MoeSpec) -> torch_moe.Router:
        return torch_moe.pack_router(weight, bias, moe, self.device)

    def route(self, x: Tensor, router: torch_moe.Router) -> tuple[Tensor, Tensor]:
        return torch_moe.choose(F.linear(x.float(), router.weight), router)

    def pack_experts(self, count: int, hidden: int, inner: int, load: ExpertLoader) -> torch_moe.PackedExperts:
        into = None if self._staging is None else self._staging.into
        return torch_moe.pack_experts(count, hidden, inner, load, self.device, self.dtype, into)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, packed: torch_moe.PackedExperts) -> Tensor:
        return torch_moe.experts(x, ids, weights, packed, self._grouped)

    # Attention over pages of either kind

    def _attend(self, q: Tensor, step: StepTensors, paged: _Pages, scale: float, window: int) -> Tensor:
        layout = self._layout_of(step)
        if step.max_q == 1 and q.shape[0] == step.block_tables.shape[0]:
            if layout.decodes is None:
                layout.decodes = _decodes(step.block_tables, step.kv_lens, step.max_kv)
            return self._decode(q, layout.decodes, paged, scale, window)
        if layout.mixed is None:
            layout.mixed = _split(step)
        mixed = layout.mixed
        out = q.new_empty(q.shape[0], paged.heads * paged.value_dim)
        for sequence, first, count, kv_len in mixed.chunks:
            rows = slice(first, first + count)
            out[rows] = self._chunk(q[rows], step.block_tables[sequence], kv_len, paged, scale, window)
        if mixed.decodes is not None:
            at = mixed.decode_rows
            out[at] = self._decode(q[at], mixed.decodes, paged, scale, window)
        return out

    def _decode(self, q: Tensor, decodes: _Decodes, paged: _Pages, scale: float, window: int) -> Tensor:
        """One query per sequence. The group of query heads that share a KV head is folded into the query axis."""
        b, length = q.shape[0], decodes.length
        mask = decodes.masks.get(window)
        if mask is None:
            mask = decodes.masks[window] = _decode_mask(decodes, window).to(self.dtype)
        grouped = q.view(b, paged.kv_heads, paged.heads // paged.kv_heads, paged.dim)
        pages = decodes.pages.view(b, -1)
        parts = []
        most = max(1, GATHERED_TOKENS // length)
        for first in range(0, b, most):
            some = slice(first, first + most)
            k, v = (
                x.unflatten(0, (-1, pages.shape[1])).flatten(1, 2).transpose(1, 2)
                for x in paged.take(pages[some].reshape(-1))
            )
            parts.append(F.scaled_dot_product_attention(grouped[some], k, v, attn_mask=mask[some], scale=scale))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.reshape(b, paged.heads * paged.value_dim)

    def _chunk(self, q: Tensor, table: Tensor, kv_len: int, paged: _Pages, scale: float, window: int) -> Tensor:
        """Causal attention of the last q rows of one sequence of kv_len keys."""
        q_len = q.shape[0]
        before = kv_len - q_len
        first = max(0, before + 1 - window) // PAGE_SIZE if window > 0 else 0
        pages = table[first : (kv_len + PAGE_SIZE - 1) // PAGE_SIZE].long()
        held = kv_len - first * PAGE_SIZE
        group = paged.heads // paged.kv_heads
        k, v = (_for_heads(x.flatten(0, 1)[:held], group) for x in paged.take(pages))
        mask = None
        if before or window > 0:
            rows = torch.arange(before, kv_len, device=q.device).unsqueeze(1)
            columns = torch.arange(first * PAGE_SIZE, kv_len, device=q.device)
            mask = columns <= rows
            if window > 0:
                mask &= columns > rows - window
        out = F.scaled_dot_product_attention(
            q.view(1, q_len, paged.heads, paged.dim).transpose(1, 2),
            k.transpose(0, 1).unsqueeze(0),
            v.transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
        )
        return out.transpose(1, 2).reshape(q_len, paged.heads * paged.value_dim)


def _raw(cache: Tensor) -> Tensor:
    """The cache as numbers that can be moved: bytes, where it holds eight-bit floats."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def _stored(x: Tensor, cache: Tensor) -> Tensor:
    """x as the cache holds it; of eight-bit floats the nearest, and the largest for what is larger."""
    if cache.dtype != torch.float8_e4m3fn:
        return x
    largest = torch.finfo(cache.dtype).max
    return x.float().clamp(-largest, largest).to(cache.dtype).view(torch.uint8)


def _for_heads(x: Tensor, group: int) -> Tensor:
    """[keys, kv heads, dim] -> [keys, heads, dim]; no copy where all heads share one."""
    return x.expand(-1, group, -1) if x.shape[1] == 1 else x.repeat_interleave(group, dim=1)


def _fresh_pages(slots: Tensor) -> Tensor:
    """The pages whose first token is among `slots`; the null page stands for the others where counting is dear."""
    first = slots % PAGE_SIZE == 0
    pages = slots // PAGE_SIZE
    # The size of a selection is known on the host only after a stop of the device, and a CUDA graph cannot hold it.
    return pages[first] if slots.device.type == "cpu" else torch.where(first, pages, 0)


def _decodes(tables: Tensor, kv_lens: Tensor, max_kv: int) -> _Decodes:
    """Pages past a sequence's end stand for its last one: what padding entries point to may hold anything."""
    pages = max(1, (max_kv + PAGE_SIZE - 1) // PAGE_SIZE)
    last = ((kv_lens.long() - 1) // PAGE_SIZE).clamp(min=0).unsqueeze(1)
    at = torch.minimum(torch.arange(pages, device=tables.device), last)
    return _Decodes(tables.long().gather(1, at).reshape(-1), kv_lens, pages * PAGE_SIZE)


def _decode_mask(decodes: _Decodes, window: int) -> Tensor:
    """0 where a key is seen, minus infinity elsewhere; a padding row (no keys) sees one key and stays finite."""
    at = torch.arange(decodes.length, device=decodes.kv_lens.device)
    ends = decodes.kv_lens.long().clamp(min=1).unsqueeze(1)
    seen = at < ends
    if window > 0:
        seen &= at >= ends - window
    mask = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))
    return mask.view(seen.shape[0], 1, 1, decodes.length)


def _split(step: StepTensors) -> _Mixed:
    """Sort the sequences of a step into chunks and decodes. Reads cu_q and kv_lens on the host."""
    starts, kv_lens = step.cu_q.tolist(), step.kv_lens.tolist()
    chunks, single = [], []
    for i, kv_len in enumerate(kv_lens):
        count = starts[i + 1] - starts[i]
        if count == 1:
            single.append(i)
        elif count:
            chunks.append((i, starts[i], count, kv_len))
    device = step.ids.device
    rows = torch.tensor([starts[i] for i in single], dtype=torch.int64, device=device)
    if not single:
        return _Mixed(chunks, None, rows)
    which = torch.tensor(single, device=device)
    longest = max(1, *(kv_lens[i] for i in single))
    return _Mixed(chunks, _decodes(step.block_tables[which], step.kv_lens[which], longest), rows)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, heads, dim], cos and sin [n, 1, dim / 2] float32; the pair of element i is i + dim / 2."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
