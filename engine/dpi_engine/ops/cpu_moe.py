"""Routing and experts on the CPU: one kernel call each for a whole layer, weights packed once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpi_engine.config.moe_spec import MoeSpec
from dpi_engine.ops.cpu_program import Calls
from dpi_engine.ops.interface import ExpertLoader, OpsUnavailable

ROWS_AT_ONCE = 1024
"""Tokens of one kernel call: what lies between its two halves grows with them."""

MOST_EXPERTS = 1024
"""That the router's kernel chooses among (native/dpi.h)."""

_PANEL = 16
_BAD_EXPERT = 6


@dataclass(slots=True)
class Router:
    """weight: float32 panels of [experts, hidden] (native/panels.h), bias [experts] float32."""

    weight: Tensor
    bias: Tensor | None
    moe: MoeSpec
    hidden: int


@dataclass(slots=True)
class PackedExperts:
    """Panels of all experts (layout: native/experts.c), flat."""

    gate_up: Tensor
    down: Tensor
    count: int
    hidden: int
    inner: int


class ExpertKernels:
    """`dtype` is that of activations, `weight_dtype` that of weights. Buffers between the halves of a call are kept, so
    it is for one thread.
    """

    def __init__(self, calls: Calls, dtype: torch.dtype, weight_dtype: torch.dtype, threads: int) -> None:
        self._calls, self._dtype, self._weight_dtype, self._threads = calls, dtype, weight_dtype, threads
        self._bf = int(dtype is torch.bfloat16)
        self._weight_bf = int(weight_dtype is torch.bfloat16)
        self._room: dict[str, Tensor] = {}

    def pack_router(self, weight: Tensor, bias: Tensor | None, moe: MoeSpec) -> Router:
        """Raises OpsUnavailable for more experts than the kernel takes."""
        experts, hidden = weight.shape
        if experts > MOST_EXPERTS:
            raise OpsUnavailable(f"routing: the CPU kernels take up to {MOST_EXPERTS} experts, got {experts}")
        packed = torch.empty((experts + _PANEL - 1) // _PANEL * _PANEL * hidden)
        wide = weight.float().contiguous()
        self._calls.c.dpi_pack_panels(wide.data_ptr(), packed.data_ptr(), hidden, experts, 0, self._threads)
        return Router(packed, None if bias is None else bias.to(torch.float32, copy=True), moe, hidden)

    def route(self, x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
        moe, n = router.moe, x.shape[0]
        ids, weights = (
            self._calls.new(n, moe.top_k, dtype=torch.int32),
            self._calls.new(n, moe.top_k, dtype=torch.float32),
        )
        columns = (moe.num_experts + _PANEL - 1) // _PANEL * _PANEL + self._bf * router.hidden
        for first in range(0, n, ROWS_AT_ONCE):
            some = slice(first, min(n, first + ROWS_AT_ONCE))
            rows = some.stop - first
            status = self._calls.c.dpi_route(
                x[some].data_ptr(),
                router.weight.data_ptr(),
                0 if router.bias is None else router.bias.data_ptr(),
                ids[some].data_ptr(),
                weights[some].data_ptr(),
                self._buffer("scores", rows * columns, torch.float32).data_ptr(),
                rows,
                router.hidden,
                moe.num_experts,
                moe.top_k,
                int(moe.scoring == "sigmoid"),
                int(moe.normalize),
                moe.groups,
                moe.kept_groups,
                moe.group_best,
                moe.scaling,
                self._bf,
                self._threads,
            )
            if status:
                raise ValueError(f"routing among {moe.num_experts} experts: status {status}")
        return ids, weights

    def pack_experts(self, count: int, hidden: int, inner: int, load: ExpertLoader) -> PackedExperts:
        def panels(outputs: int, inputs: int) -> int:
            return (outputs + _PANEL - 1) // _PANEL * _PANEL * (inputs + self._weight_bf * (inputs % 2))

        opened, closed = panels(inner, hidden), panels(hidden, inner)
        packed = PackedExperts(
            torch.empty(count * 2 * opened, dtype=self._weight_dtype),
            torch.empty(count * closed, dtype=self._weight_dtype),
            count,
            hidden,
            inner,
        )
        for i in range(count):
            gate, up, down = load(i)
            self._pack(gate, (inner, hidden), packed.gate_up, 2 * i * opened)
            self._pack(up, (inner, hidden), packed.gate_up, (2 * i + 1) * opened)
            self._pack(down, (hidden, inner), packed.down, i * closed)
        return packed

    def _pack(self, weight: Tensor, shape: tuple[int, int], packed: Tensor, at: int) -> None:
        if tuple(weight.shape) != shape:
            raise TypeError(f"expert matrix: expected {list(shape)}, got {list(weight.shape)}")
        weight = weight.to(self._weight_dtype).contiguous()
        to = packed.data_ptr() + at * packed.element_size()
        self._calls.c.dpi_pack_panels(weight.data_ptr(), to, shape[1], shape[0], self._weight_bf, self._threads)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, packed: PackedExperts) -> Tensor:
        """x is checked by the caller. Raises TypeError, IndexError for an id out of range, MemoryError."""
        n, k = x.shape[0], ids.shape[-1]
        for name, given, dtype in (("ids", ids, torch.int32), ("weights", weights, torch.float32)):
            if given.dtype is not dtype or given.shape != (n, k) or not given.is_contiguous():
                raise TypeError(
                    f"{name}: expected a contiguous {dtype} tensor [{n}, {k}], got {given.dtype} {list(given.shape)}"
                )
        out = self._calls.new(*x.shape, dtype=x.dtype)
        for first in range(0, n, ROWS_AT_ONCE):
            some = slice(first, min(n, first + ROWS_AT_ONCE))
            rows = some.stop - first
            status = self._calls.c.dpi_experts(
                x[some].data_ptr(),
                ids[some].data_ptr(),
                weights[some].data_ptr(),
                packed.gate_up.data_ptr(),
                packed.down.data_ptr(),
                self._buffer("inner", rows * k * packed.inner, self._dtype).data_ptr(),
                self._buffer("sums", rows * packed.hidden, torch.float32).data_ptr() if self._bf else 0,
                out[some].data_ptr(),
                rows,
                packed.count,
                packed.hidden,
                packed.inner,
                k,
                self._bf,
                self._weight_bf,
                self._threads,
            )
            if status == _BAD_EXPERT:
                raise IndexError(f"ids: one is outside -1 .. {packed.count - 1}")
            if status:
                raise MemoryError(f"experts of {rows} tokens: out of memory")
        return out

    def _buffer(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """Kept from call to call: fresh memory of this size would be taken from the system each time. A program has its
        own.
        """
        if self._calls.recording:
            recorded: Tensor = self._calls.new(count, dtype=dtype)
            return recorded
        held = self._room.get(name)
        if held is None or held.numel() < count:
            held = self._room[name] = torch.empty(count, dtype=dtype)
        return held
