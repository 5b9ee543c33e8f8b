"""Linears of the CPU backend: which kernel multiplies, and the layout it keeps weights in."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dpi_engine.ops.cpu_program import Calls
from dpi_engine.ops.interface import OpsUnavailable

log = logging.getLogger(__name__)

PANEL = 16
"""Outputs that lie beside one another in our own layout (native/linear.c)."""

INT8_MOST_INPUTS = 131072
"""Products of that many integers up to 127 add up to less than 2^31."""

_INSTEAD = "leave --quantization out"


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """`weight` in the layout of its kernel, `bias` with it. `outputs`: columns of the result. `gated`: the result is
    silu(gate) * up already.
    """

    weight: Tensor
    bias: Tensor | None
    inputs: int
    outputs: int
    gated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Linear(PackedLinear):
    """`scale` [outputs as packed] float32: what a weight's integer counts. `row_room`: bytes that a row of activations
    takes while it is multiplied.
    """

    scale: Tensor
    row_room: int


class LinearKernels(ABC):
    """`dtype` is that of activations. Weights come as [out, in], of any float dtype; biases as [out]."""

    dtype: torch.dtype
    recordable = False
    """Whether `apply` calls nothing but the library."""
    layout: str | None = None
    """Tells what `pack` gives from what other kernels make; None where that is for this process alone."""

    @abstractmethod
    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedLinear: ...

    @abstractmethod
    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """x [n, inputs] contiguous in `dtype` -> [n, outputs] in `dtype`."""

    def pack_gated(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """weight [2 inner, in]: the gate's rows, then those it is multiplied with."""
        return self.pack(weight, bias)

    def restore(self, tensors: dict[str, Tensor], inputs: int, outputs: int, gated: bool) -> PackedLinear:
        """What `pack` gave, from its tensors by field."""
        return PackedLinear(tensors["weight"], tensors.get("bias"), inputs, outputs, gated)


class OneDnn(LinearKernels):
    """oneDNN's prepacked linears in float32, through operators of torch; its ordinary ones where those do not work."""

    dtype = torch.float32

    def __init__(self) -> None:
        self._prepack = prepacked_work()
        if not self._prepack:
            log.warning("torch %s has no prepacked linears that work: they will be slower", torch.__version__)

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        outputs, inputs = weight.shape
        weight = weight.to(self.dtype).contiguous()
        if bias is not None:
            bias = bias.to(self.dtype).contiguous()
        if self._prepack:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return PackedLinear(weight, bias, inputs, outputs)

    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        if x.shape[0] == 0:
            return x.new_empty(0, packed.outputs)
        if self._prepack:
            out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed.weight, packed.bias, "none", [], "")
            return out
        return F.linear(x, packed.weight, packed.bias)


class _Panels(LinearKernels):
    """Weights in our own panels of bfloat16, biases in float32."""

    recordable = True

    def __init__(self, calls: Calls, threads: int) -> None:
        self._calls, self._threads = calls, threads

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        outputs, inputs = weight.shape
        weight = weight.to(torch.bfloat16).contiguous()
        packed = torch.empty(_round_up(outputs, PANEL) * _round_up(inputs, 2), dtype=torch.bfloat16)
        self._calls.c.dpi_pack_linear(weight.data_ptr(), packed.data_ptr(), inputs, outputs, self._threads)
        # As much of the bias as activations hold, so that all kernels of a dtype add the same.
        return PackedLinear(packed, None if bias is None else bias.to(self.dtype).float(), inputs, outputs)


class Widened(_Panels):
    """float32 activations; weights are widened in registers (native/linear.c)."""

    dtype = torch.float32
    layout = "panels"

    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        n, y = x.shape[0], self._calls.new(x.shape[0], packed.outputs, dtype=torch.float32)
        bias = 0 if packed.bias is None else packed.bias.data_ptr()
        pointers = x.data_ptr(), packed.weight.data_ptr(), bias, y.data_ptr()
        self._calls.c.dpi_linear(*pointers, n, packed.inputs, packed.outputs, self._threads)
        return y


class DotProducts(_Panels):
    """bfloat16 activations, multiplied by the processor as such (native/linear_dot.c, linear_tiles.c)."""

    dtype = torch.bfloat16
    layout = "panels by turns"

    def pack_gated(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        inner = weight.shape[0] // 2
        by_turns = self.pack(_take_turns(weight), None if bias is None else _take_turns(bias))
        return PackedLinear(by_turns.weight, by_turns.bias, by_turns.inputs, inner, gated=True)

    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        n, y = x.shape[0], self._calls.new(x.shape[0], packed.outputs, dtype=torch.bfloat16)
        bias = 0 if packed.bias is None else packed.bias.data_ptr()
        pointers = x.data_ptr(), packed.weight.data_ptr(), bias, y.data_ptr()
        status = self._calls.c.dpi_linear_dot(
            *pointers, n, packed.inputs, packed.outputs, int(packed.gated), self._threads
        )
        _check_instructions(status)
        return y


class Int8(LinearKernels):
    """bfloat16 activations and weights, multiplied as integers of 8 bits (native/linear_int8.c)."""

    dtype = torch.bfloat16
    recordable = True
    layout = "int8 panels"

    def __init__(self, calls: Calls, threads: int) -> None:
        self._calls, self._threads = calls, threads

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Raises OpsUnavailable for more inputs than sums of 32 bits hold."""
        return self._pack(weight, bias, weight.shape[0], gated=False)

    def pack_gated(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        by_turns = None if bias is None else _take_turns(bias)
        return self._pack(_take_turns(weight), by_turns, weight.shape[0] // 2, gated=True)

    def _pack(self, weight: Tensor, bias: Tensor | None, outputs: int, gated: bool) -> PackedLinear:
        rows, inputs = weight.shape
        if inputs > INT8_MOST_INPUTS:
            raise OpsUnavailable(f"int8 linears take up to {INT8_MOST_INPUTS} inputs, got {inputs}")
        if weight.dtype is not torch.bfloat16:
            weight = weight.float()
        weight = weight.contiguous()
        packed = torch.empty(_round_up(rows, PANEL) * _round_up(inputs, 16), dtype=torch.uint8)
        scale = torch.empty(rows)
        pointers = weight.data_ptr(), packed.data_ptr(), scale.data_ptr()
        wide = int(weight.dtype is torch.bfloat16)
        _check_instructions(self._calls.c.dpi_pack_int8(*pointers, inputs, rows, wide, self._threads))
        room = self._calls.c.dpi_int8_room(inputs)
        bias = None if bias is None else bias.to(self.dtype).float()
        return Int8Linear(packed, bias, inputs, outputs, gated, scale=scale, row_room=room)

    def restore(self, tensors: dict[str, Tensor], inputs: int, outputs: int, gated: bool) -> PackedLinear:
        room = self._calls.c.dpi_int8_room(inputs)
        scale = tensors["scale"]
        return Int8Linear(tensors["weight"], tensors.get("bias"), inputs, outputs, gated, scale=scale, row_room=room)

    def apply(self, x: Tensor, packed: PackedLinear) -> Tensor:
        assert isinstance(packed, Int8Linear)
        n = x.shape[0]
        y = self._calls.new(n, packed.outputs, dtype=torch.bfloat16)
        room = self._calls.new(n * packed.row_room, dtype=torch.uint8)
        bias = 0 if packed.bias is None else packed.bias.data_ptr()
        weight = packed.weight.data_ptr(), packed.scale.data_ptr(), bias
        status = self._calls.c.dpi_linear_int8(
            x.data_ptr(), *weight, y.data_ptr(), room.data_ptr(),
            n, packed.inputs, packed.outputs, int(packed.gated), self._threads,
        )  # fmt: skip
        _check_instructions(status)
        return y


def _check_instructions(status: int) -> None:
    if status:
        raise RuntimeError("these kernels were compiled without the instructions for bfloat16 and int8")


def linear_kernels(
    calls: Calls, isa: str, dtype: torch.dtype, threads: int, quantization: str | None = None
) -> LinearKernels:
    """Those for weights of `dtype` on instruction set `isa`. `quantization`: None or int8. Raises OpsUnavailable."""
    if quantization is not None:
        if dtype is not torch.bfloat16:
            raise OpsUnavailable(f"{quantization} linears have activations of bfloat16, not of {dtype}: {_INSTEAD}")
        if isa == "avx2":
            raise OpsUnavailable(
                f"{quantization} linears need avx512_vnni and avx512_bf16, these kernels are for {isa}: {_INSTEAD}"
            )
        return Int8(calls, threads)
    if dtype is torch.float32:
        return OneDnn()
    return Widened(calls, threads) if isa == "avx2" else DotProducts(calls, threads)


def _round_up(n: int, to: int) -> int:
    return (n + to - 1) // to * to


def _take_turns(rows: Tensor) -> Tensor:
    """[2 inner, ...] -> PANEL rows of the first half, PANEL of the second and so on; each half filled up with zeros."""
    inner = rows.shape[0] // 2
    out = rows.new_zeros(2, _round_up(inner, PANEL), *rows.shape[1:])
    out[:, :inner] = rows.unflatten(0, (2, inner))
    return out.unflatten(1, (-1, PANEL)).transpose(0, 1).flatten(0, 2).contiguous()


def prepacked_work() -> bool:
    """These operators of torch are private, so they are tried before they are trusted."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 72, generator=generator)
    bias = torch.randn(40, generator=generator)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        for n in (1, 5):
            x = torch.randn(n, 72, generator=generator)
            got = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
            want = F.linear(x, weight, bias)
            if got.shape != want.shape or not torch.allclose(got, want, rtol=0.01, atol=1e-4):
                return False
    except (RuntimeError, AttributeError, TypeError) as error:
        log.debug("prepacked linear: %s", error)
        return False
    return True
