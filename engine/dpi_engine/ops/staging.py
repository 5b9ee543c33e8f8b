"""Weights on their way to a device: from mapped files through two small pinned buffers, one filled while the other is
copied. The host holds no matrix as a whole, and the device's copies need no stop.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

STAGE_BYTES = 16 << 20


class Done(Protocol):
    """A point in what the device was told."""

    def synchronize(self) -> None: ...


class Lane(Protocol):
    """How bytes get to a device."""

    def pinned(self, count: int) -> Tensor:
        """uint8 [count] in host memory that the device copies from by itself."""

    def mark(self) -> Done:
        """The end of what the device was told so far."""


class CudaLane:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pinned(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Done:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event


class Staging:
    """For one device; the buffers are taken at the first copy and given back by `close`."""

    def __init__(self, device: torch.device, lane: Lane | None = None, stage_bytes: int = STAGE_BYTES) -> None:
        self.device = device
        self._lane: Lane = lane or CudaLane(device)
        self._bytes = stage_bytes
        self._buffers: list[Tensor] = []
        self._busy: list[Done | None] = [None, None]
        self._turn = 0

    def put(self, source: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of `source` on the device, in `dtype`."""
        target = torch.empty(source.shape, dtype=dtype or source.dtype, device=self.device)
        self.into(target, source)
        return target

    def into(self, target: Tensor, source: Tensor) -> None:
        """Copy the host's `source` into `target`, of the same shape, contiguous, on the device; numbers become those of
        its dtype on the way. `source` may change when this has returned, the device may still be copying."""
        if target.shape != source.shape or not target.is_contiguous():
            raise ValueError(f"target: expected {list(source.shape)}, contiguous, got {list(target.shape)}")
        if source.numel() == 0:
            return
        flat, rows = target.view(-1), source if source.dim() > 1 else source.view(-1, 1)
        width = rows[0].numel()
        at_once = self._bytes // (width * target.element_size())
        if not at_once:  # one row is more than a buffer: by pieces of the row
            for to, row in zip(flat.view(-1, width), rows, strict=True):
                self.into(to, row.reshape(-1))
            return
        for first in range(0, len(rows), at_once):
            part = rows[first : first + at_once]
            count = part.numel()
            buffer = self._free()[: count * target.element_size()].view(target.dtype)
            buffer.view(part.shape).copy_(part)
            flat[first * width : first * width + count].copy_(buffer, non_blocking=True)
            self._busy[self._turn] = self._lane.mark()
            self._turn ^= 1

    def _free(self) -> Tensor:
        """The buffer whose turn it is, once the device has read it."""
        if not self._buffers:
            self._buffers = [self._lane.pinned(self._bytes) for _ in range(2)]
        busy = self._busy[self._turn]
        if busy is not None:
            busy.synchronize()
        return self._buffers[self._turn]

    def close(self) -> None:
        """Give the buffers back, when the device has read them."""
        for busy in self._busy:
            if busy is not None:
                busy.synchronize()
        self._buffers, self._busy = [], [None, None]
