"""The CPU backend: C kernels, and for some linears (cpu_linear.py) oneDNN's.

| dtype    | instruction set | weights                 | activations | KV cache |
|----------|-----------------|-------------------------|-------------|----------|
| float32  | any             | float32, oneDNN         | float32     | float32  |
| bfloat16 | amx, avx512bf16 | bfloat16, own panels    | bfloat16    | bfloat16 |
| bfloat16 | avx2            | bfloat16, own panels    | float32     | bfloat16 |
| bfloat16 | amx, avx512bf16 | int8, own panels        | bfloat16    | bfloat16 |

The last line is that of `--quantization int8`.

Without bfloat16 instructions, weights and cache stay bfloat16 in memory, which is what bounds decoding, and are widened
in registers. `Ops.dtype` is the dtype of the activations.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dpi_engine.config.moe_spec import MoeSpec
from dpi_engine.ops import build, native_library
from dpi_engine.ops.allocate import lazy_zeros
from dpi_engine.ops.cpu_linear import PackedLinear, linear_kernels
from dpi_engine.ops.cpu_moe import ExpertKernels, PackedExperts, Router
from dpi_engine.ops.cpu_program import Calls, Memory, Program
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

log = logging.getLogger(__name__)

MAX_HEAD_DIM = 512
MAX_LATENT_RANK, MAX_LATENT_ROPE = 512, 128
_ERRORS = {
    1: "positions: one is negative or past the {positions} rows of the rope table",
    2: "slots: one is outside the {slots} slots of the cache",
    3: "cu_q, kv_lens: they do not cover the query rows, or a length exceeds the block table's {width} pages",
    4: "block_tables: a block is outside the {blocks} blocks of the cache",
    5: "out of memory",
}


@dataclass(slots=True)
class LatentCache:
    """Pages of latents of one layer, flat; the layout is in native/latent.c."""

    pages: Tensor
    num_blocks: int


@dataclass(slots=True)
class Cache:
    """K and V pages of one layer, flat; the layout is in native/rope.c."""

    k: Tensor
    v: Tensor
    num_blocks: int


def make_cpu_ops(
    dtype: torch.dtype | None, threads: int, cache_dir: str | os.PathLike[str], quantization: str | None = None
) -> CpuOps:
    """The CPU backend for `dtype` (None: bfloat16) on `threads` threads; kernels are built under `cache_dir`.

    `quantization`: None, or int8 for linears. DPI_CPU_ISA forces an instruction set. Raises OpsUnavailable when this
    machine cannot run or build the kernels, SettingsError when it cannot run the forced ones.
    """
    if dtype not in (None, torch.float32, torch.bfloat16):
        raise OpsUnavailable(f"the CPU kernels compute in float32 or bfloat16, not in {dtype}")
    if threads < 1:
        raise OpsUnavailable(f"threads: expected at least 1, got {threads}")
    forced = os.environ.get("DPI_CPU_ISA")
    isa = build.choose_isa(build.cpu_features(), forced)
    try:
        library = native_library.load(build.find_library(isa, cache_dir))
    except OpsUnavailable as error:
        if forced or isa != "amx":
            raise
        # An old compiler without AMX, or an operating system that does not grant it: the next best is close.
        isa = "avx512bf16"
        library = native_library.load(build.find_library(isa, cache_dir))
        log.warning("AMX kernels cannot be used, AVX-512 ones are: %s", error)
    torch.set_num_threads(threads)
    return CpuOps(library, isa, dtype or torch.bfloat16, threads, quantization)


class CpuOps(Ops):
    """Attributes beyond the interface: `isa`, `weight_dtype`, `cache_dtype`, `threads`.

    Tensors come in as the interface says; a wrong dtype or shape is a TypeError, an index out of range an IndexError,
    and nothing is read or written out of bounds.
    """

    name = "cpu"

    def __init__(
        self, library: ctypes.CDLL, isa: str, dtype: torch.dtype, threads: int, quantization: str | None = None
    ) -> None:
        self._calls = Calls(library)
        self.isa = isa
        self.threads = threads
        self.device = torch.device("cpu")
        self.weight_dtype = self.cache_dtype = dtype
        self._linears = linear_kernels(self._calls, isa, dtype, threads, quantization)
        self.quantization = quantization
        self.layout = self._linears.layout
        self.dtype = self._linears.dtype
        self._bf = int(self.dtype is torch.bfloat16)
        self._cache_bf = int(self.cache_dtype is torch.bfloat16)
        self._memory = Memory()
        self._step: StepTensors | None = None
        self._rope: RopeTable | None = None
        self._moe = ExpertKernels(self._calls, self.dtype, self.weight_dtype, threads)

    # Recorded passes

    @property
    def can_record(self) -> bool:
        return self._linears.recordable

    def record(self, step: StepTensors, forward: Callable[[], Tensor]) -> Program:
        """`forward` as a program, for steps of the same number of tokens and sequences as `step`.

        Raises NotRecordable when it calls what cannot be recorded; that it computes nothing else is for the caller to
        know.
        """
        with self._calls.recorded() as recorder:
            result = forward()
        return Program(recorder, result, _inputs(step), self._memory)

    def replay(self, program: Program, step: StepTensors) -> Tensor | None:
        """What `forward` would return for `step`, until the next replay; None when a call failed.

        Nothing is written out of bounds then, and the ordinary pass tells what is wrong. Raises ProgramFailed for a
        call that failed after one of `outside`, and what those raise.
        """
        failed = program.run(self._calls.library, _inputs(step), step.block_tables.shape[1], self.threads)
        return None if failed else program.result

    def outside(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return self._calls.outside(function, tensors)

    # Linears

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        return self._packed(self._linears.pack(weight, bias))

    def _packed(self, packed: PackedLinear) -> PackedLinear:
        if self.quantization is not None:
            rows = packed.outputs * (2 if packed.gated else 1)
            self.bytes_saved += rows * packed.inputs * (self.weight_dtype.itemsize - 1)
        return packed

    def linear_tensors(self, packed: PackedLinear) -> tuple[dict[str, Tensor], list[int]]:
        parts = {"weight": packed.weight, "bias": packed.bias, "scale": getattr(packed, "scale", None)}
        tensors = {part: tensor for part, tensor in parts.items() if tensor is not None}
        return tensors, [packed.inputs, packed.outputs, int(packed.gated)]

    def kept_linear(self, tensors: dict[str, Tensor], numbers: list[int]) -> PackedLinear:
        inputs, outputs, gated = numbers
        return self._packed(self._linears.restore(tensors, inputs, outputs, bool(gated)))

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        self._check(x, packed.inputs)
        return self._linears.apply(x, packed)

    def pack_gated(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        return self._packed(self._linears.pack_gated(weight, bias))

    def gated_linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        self._check(x, packed.inputs)
        if packed.gated:
            return self._linears.apply(x, packed)
        return self.silu_mul(self._linears.apply(x, packed))

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        rows, width = table.shape
        if table.dtype not in (torch.float32, torch.bfloat16) or not table.is_contiguous():
            return F.embedding(ids, table).to(self.dtype)
        _check_tensor("ids", ids, torch.int64, ids.shape)
        out = self._calls.new(ids.shape[0], width, dtype=self.dtype)
        wide = int(table.dtype is torch.bfloat16)
        pointers = ids.data_ptr(), table.data_ptr(), out.data_ptr()
        if self._calls.c.dpi_embed(*pointers, ids.shape[0], width, rows, wide, self._bf, self.threads):
            raise IndexError(f"ids: one is outside the {rows} rows of the embedding")
        return out

    # Rows

    def _check(self, x: Tensor, width: int) -> None:
        if x.dtype is not self.dtype or x.shape[-1] != width or not x.is_contiguous():
            raise TypeError(
                f"expected a contiguous {self.dtype} tensor [n, {width}], "
                f"got {x.dtype} {list(x.shape)} with strides {x.stride()}"
            )

    def _norm_weight(self, weight: Tensor, width: int) -> Tensor:
        if weight.numel() != width:
            raise TypeError(f"norm weight: expected {width} values, got {list(weight.shape)}")
        if weight.dtype is torch.float32 or weight.dtype is torch.bfloat16:
            return self._calls.keep(weight.contiguous())
        return self._calls.keep(weight.float())

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._rms(x, None, weight, eps)

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._rms(residual, delta, weight, eps)

    def _rms(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        n, width = x.shape
        self._check(x, width)
        added = 0
        if delta is not None:
            self._check(delta, width)
            if delta.shape[0] != n:
                raise TypeError(f"delta: expected {n} rows, got {delta.shape[0]}")
            added = delta.data_ptr()
        weight = self._norm_weight(weight, width)
        out = self._calls.new(*x.shape, dtype=x.dtype)
        wide = int(weight.dtype is torch.bfloat16)
        self._calls.c.dpi_rms_norm(
            x.data_ptr(), added, weight.data_ptr(), out.data_ptr(), n, width, eps, self._bf, wide, self.threads
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        n, width = gate_up.shape
        self._check(gate_up, width)
        if width % 2:
            raise TypeError(f"gate_up: expected an even number of columns, got {width}")
        out = self._calls.new(n, width // 2, dtype=self.dtype)
        self._calls.c.dpi_silu_mul(gate_up.data_ptr(), out.data_ptr(), n, width // 2, self._bf, self.threads)
        return out

    # KV cache and attention

    def new_cache(self, num_blocks: int, shape: HeadShape) -> Cache:
        self._check_shape(shape)
        tokens = num_blocks * shape.kv_heads * PAGE_SIZE
        padded = (shape.dim + 15) // 16 * 16
        k = lazy_zeros([tokens * shape.dim], self.cache_dtype)
        v = lazy_zeros([tokens * padded], self.cache_dtype)
        return Cache(k, v, num_blocks)

    def cache_bytes_per_block(self, shape: HeadShape) -> int:
        padded = (shape.dim + 15) // 16 * 16
        return PAGE_SIZE * shape.kv_heads * (shape.dim + padded) * self.cache_dtype.itemsize

    def _check_shape(self, shape: HeadShape) -> None:
        if shape.dim % 2 or not 2 <= shape.dim <= MAX_HEAD_DIM:
            raise OpsUnavailable(f"head dim: the CPU kernels take even ones up to {MAX_HEAD_DIM}, got {shape.dim}")
        if shape.kv_heads < 1 or shape.heads % shape.kv_heads:
            raise OpsUnavailable(f"heads: expected a multiple of kv_heads, got {shape.heads} and {shape.kv_heads}")

    def begin(self, step: StepTensors) -> None:
        self._check_step(step, step.ids.shape[0])

    def _check_step(self, step: StepTensors, n: int) -> None:
        if step.slots.shape[0] != n:
            raise TypeError(f"expected rows for the step's {step.slots.shape[0]} tokens, got {n}")
        if step is not self._step:
            b, width = step.block_tables.shape
            _check_tensor("block_tables", step.block_tables, torch.int32, (b, width))
            _check_tensor("kv_lens", step.kv_lens, torch.int32, (b,))
            _check_tensor("cu_q", step.cu_q, torch.int32, (b + 1,))
            _check_tensor("positions", step.positions, torch.int64, (n,))
            _check_tensor("slots", step.slots, torch.int64, (n,))
            self._step = step

    def rope_write(
        self,
        qkv: Tensor,
        step: StepTensors,
        rope: RopeTable,
        cache: Cache,
        shape: HeadShape,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        n, dim = qkv.shape[0], shape.dim
        self._check(qkv, (shape.heads + 2 * shape.kv_heads) * dim)
        self._check_step(step, n)
        self._check_rope(rope, dim)
        q_weight = None if q_norm is None else self._calls.keep(self._norm_weight(q_norm, dim).float())
        k_weight = None if k_norm is None else self._calls.keep(self._norm_weight(k_norm, dim).float())
        out = self._calls.new(n, shape.heads * dim, dtype=self.dtype)
        slots = cache.num_blocks * PAGE_SIZE
        status = self._calls.c.dpi_rope_write(
            qkv.data_ptr(),
            step.positions.data_ptr(),
            step.slots.data_ptr(),
            rope.cos.data_ptr(),
            rope.sin.data_ptr(),
            cache.k.data_ptr(),
            cache.v.data_ptr(),
            out.data_ptr(),
            0 if q_weight is None else q_weight.data_ptr(),
            0 if k_weight is None else k_weight.data_ptr(),
            n,
            rope.cos.shape[0],
            slots,
            shape.heads,
            shape.kv_heads,
            dim,
            eps,
            self._bf,
            self._cache_bf,
            self.threads,
        )
        if status:
            raise IndexError(_ERRORS[status].format(positions=rope.cos.shape[0], slots=slots))
        return out

    def _check_rope(self, rope: RopeTable, dim: int) -> None:
        if rope is not self._rope:
            for name, table in (("cos", rope.cos), ("sin", rope.sin)):
                _check_tensor(f"rope.{name}", table, torch.float32, (rope.cos.shape[0], dim // 2))
            self._rope = rope
        if rope.cos.shape[1] * 2 != dim:
            raise TypeError(f"rope table: expected {dim // 2} columns, got {rope.cos.shape[1]}")

    def attention(
        self, q: Tensor, step: StepTensors, cache: Cache, shape: HeadShape, scale: float, window: int = 0
    ) -> Tensor:
        if not scale > 0:
            raise ValueError(f"scale: expected more than 0, got {scale}")
        n, width = q.shape[0], step.block_tables.shape[1]
        self._check(q, shape.heads * shape.dim)
        self._check_step(step, n)
        out = self._calls.new(*q.shape, dtype=q.dtype)
        if n == 0:
            return out
        status = self._calls.c.dpi_attention(
            q.data_ptr(),
            cache.k.data_ptr(),
            cache.v.data_ptr(),
            step.block_tables.data_ptr(),
            step.kv_lens.data_ptr(),
            step.cu_q.data_ptr(),
            out.data_ptr(),
            n,
            width,
            cache.num_blocks,
            step.kv_lens.shape[0],
            shape.heads,
            shape.kv_heads,
            shape.dim,
            window,
            scale,
            self._bf,
            self._cache_bf,
            self.threads,
        )
        if status:
            raise IndexError(_ERRORS[status].format(width=width, blocks=cache.num_blocks))
        return out

    # Latent attention

    def _check_latent(self, shape: LatentShape) -> None:
        limits = ((shape.rank, MAX_LATENT_RANK, "latent"), (shape.rope, MAX_LATENT_ROPE, "rotated part of a key"))
        for width, most, what in limits:
            if width % 2 or not 2 <= width <= most:
                raise OpsUnavailable(f"{what}: the CPU kernels take even widths up to {most}, got {width}")
        if shape.heads < 1:
            raise OpsUnavailable(f"heads: expected at least 1, got {shape.heads}")

    def new_latent_cache(self, num_blocks: int, shape: LatentShape) -> LatentCache:
        self._check_latent(shape)
        padded = (shape.dim + 15) // 16 * 16
        return LatentCache(lazy_zeros([num_blocks * PAGE_SIZE * padded], self.cache_dtype), num_blocks)

    def latent_bytes_per_block(self, shape: LatentShape) -> int:
        self._check_latent(shape)
        return PAGE_SIZE * ((shape.dim + 15) // 16 * 16) * self.cache_dtype.itemsize

    def latent_write(
        self,
        q: Tensor,
        absorbed: Tensor,
        latent: Tensor,
        step: StepTensors,
        rope: RopeTable,
        cache: LatentCache,
        shape: LatentShape,
        norm: Tensor,
        eps: float,
    ) -> Tensor:
        n, plain = q.shape[0], q.shape[1] // shape.heads - shape.rope
        if plain < 1:
            raise TypeError(f"q: heads of more than the {shape.rope} rotated elements, got {q.shape[1] // shape.heads}")
        self._check(q, shape.heads * (plain + shape.rope))
        self._check(latent, shape.dim)
        _check_tensor("absorbed", absorbed, self.dtype, (shape.heads, n, shape.rank))
        if latent.shape[0] != n:
            raise TypeError(f"latent: expected {n} rows, got {latent.shape[0]}")
        self._check_step(step, n)
        self._check_rope(rope, shape.rope)
        weight = self._norm_weight(norm, shape.rank).float()
        out = torch.empty(n, shape.heads * shape.dim, dtype=self.dtype)
        slots = cache.num_blocks * PAGE_SIZE
        status = self._calls.c.dpi_latent_write(
            q.data_ptr(),
            absorbed.data_ptr(),
            latent.data_ptr(),
            step.positions.data_ptr(),
            step.slots.data_ptr(),
            rope.cos.data_ptr(),
            rope.sin.data_ptr(),
            weight.data_ptr(),
            cache.pages.data_ptr(),
            out.data_ptr(),
            n,
            rope.cos.shape[0],
            slots,
            shape.heads,
            shape.rank,
            shape.rope,
            plain,
            eps,
            self._bf,
            self._cache_bf,
            self.threads,
        )
        if status:
            raise IndexError(_ERRORS[status].format(positions=rope.cos.shape[0], slots=slots))
        return out

    def latent_attention(
        self, q: Tensor, step: StepTensors, cache: LatentCache, shape: LatentShape, scale: float
    ) -> Tensor:
        if not scale > 0:
            raise ValueError(f"scale: expected more than 0, got {scale}")
        n, width = q.shape[0], step.block_tables.shape[1]
        self._check(q, shape.heads * shape.dim)
        self._check_step(step, n)
        out = torch.empty(n, shape.heads * shape.rank, dtype=self.dtype)
        if n == 0:
            return out
        status = self._calls.c.dpi_latent_attention(
            q.data_ptr(),
            cache.pages.data_ptr(),
            step.block_tables.data_ptr(),
            step.kv_lens.data_ptr(),
            step.cu_q.data_ptr(),
            out.data_ptr(),
            n,
            width,
            cache.num_blocks,
            step.kv_lens.shape[0],
            shape.heads,
            shape.rank,
            shape.rope,
            scale,
            self._bf,
            self._cache_bf,
            self.threads,
        )
        if status:
            raise IndexError(_ERRORS[status].format(width=width, blocks=cache.num_blocks))
        return out

    # Experts

    def pack_router(self, weight: Tensor, bias: Tensor | None, moe: MoeSpec) -> Router:
        return self._moe.pack_router(weight, bias, moe)

    def route(self, x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
        self._check(x, router.hidden)
        return self._moe.route(x, router)

    def pack_experts(self, count: int, hidden: int, inner: int, load: ExpertLoader) -> PackedExperts:
        return self._moe.pack_experts(count, hidden, inner, load)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, packed: PackedExperts) -> Tensor:
        self._check(x, packed.hidden)
        return self._moe.experts(x, ids, weights, packed)

    # Vocabulary

    def _logits(self, logits: Tensor) -> tuple[Tensor, int]:
        if logits.dtype is not torch.float32 and logits.dtype is not torch.bfloat16:
            raise TypeError(f"logits: expected float32 or bfloat16, got {logits.dtype}")
        return logits.contiguous(), int(logits.dtype is torch.bfloat16)

    def argmax(self, logits: Tensor) -> Tensor:
        return self.best(logits)[0]

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        logits, bf = self._logits(logits)
        m, vocab = logits.shape
        ids, values = torch.empty(m, dtype=torch.int64), torch.empty(m, dtype=torch.float32)
        self._calls.c.dpi_argmax(logits.data_ptr(), ids.data_ptr(), values.data_ptr(), m, vocab, bf, self.threads)
        return ids, values

    def row_logsumexp(self, logits: Tensor) -> Tensor:
        logits, bf = self._logits(logits)
        m, vocab = logits.shape
        out = torch.empty(m, dtype=torch.float32)
        self._calls.c.dpi_logsumexp(logits.data_ptr(), out.data_ptr(), m, vocab, bf, self.threads)
        return out

    def topk(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        logits, bf = self._logits(logits)
        m, vocab = logits.shape
        k = min(k, vocab)
        values, ids = torch.empty(m, k), torch.empty(m, k, dtype=torch.int64)
        if m and k > 0:
            pointers = logits.data_ptr(), values.data_ptr(), ids.data_ptr()
            if self._calls.c.dpi_topk(*pointers, m, vocab, k, bf, self.threads):
                raise MemoryError(f"top {k} of {vocab} logits: out of memory")
        return values, ids


def _inputs(step: StepTensors) -> tuple[int, ...]:
    """Addresses of what differs from step to step."""
    return (
        step.ids.data_ptr(),
        step.positions.data_ptr(),
        step.slots.data_ptr(),
        step.block_tables.data_ptr(),
        step.kv_lens.data_ptr(),
        step.cu_q.data_ptr(),
    )


def _check_tensor(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if x.dtype is not dtype or x.shape != shape or not x.is_contiguous() or x.device.type != "cpu":
        raise TypeError(
            f"{name}: expected a contiguous {dtype} tensor {list(shape)} on the CPU, "
            f"got {x.dtype} {list(x.shape)} with strides {x.stride()} on {x.device}"
        )
