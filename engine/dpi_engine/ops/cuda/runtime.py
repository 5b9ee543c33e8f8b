"""What the kernels need to know of where they run: Triton itself, its interpreter, and the size of the GPU."""

from __future__ import annotations

import functools

import torch
import triton
from triton import knobs


def interpreted() -> bool:
    """Kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1 before Triton was imported)."""
    return bool(knobs.runtime.interpret)


def widen_dots(dtype: torch.dtype) -> bool:
    """Operands of matrix products must be float32: the interpreter holds bfloat16 as integers and multiplies those."""
    return interpreted() and dtype == torch.bfloat16


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of `device`; what a grid should fill."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def pow2(n: int) -> int:
    """The lowest power of two that is at least `n`: the size of a Triton block."""
    return int(triton.next_power_of_2(max(1, n)))


def warps_for(width: int) -> int:
    """Warps of a program that works on rows of `width` elements: 16 for each thread or fewer."""
    return min(32, max(1, pow2(width) // 512))
