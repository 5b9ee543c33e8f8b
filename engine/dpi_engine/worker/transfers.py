"""Numbers between host and device without stops: up from pinned memory, down into it with an event to wait for."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor


class Download(Protocol):
    """Copies of device tensors on their way to the host."""

    def wait(self) -> list[NDArray[Any]]:
        """Their numbers, once all that the device was told before the copy is done. The only stop of a step."""
        ...


class Transfers:
    """Of one device, on its current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pinned = device.type == "cuda"

    def room(self, count: int, dtype: torch.dtype) -> Tensor:
        """Host memory to fill and send up, new each time: torch keeps it until the device has read it."""
        return torch.empty(count, dtype=dtype, pin_memory=self._pinned)

    def up(self, room: Tensor) -> Tensor:
        """What was put into `room`, on the device; returns before it is there."""
        return room.to(self.device, non_blocking=True)

    def down(self, *tensors: Tensor) -> Download:
        """Copies of `tensors` as they will be when the device has done what it was told so far."""
        if not self._pinned:
            return _Here([tensor.clone() for tensor in tensors])
        copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return _OnItsWay(copies, event)


class _Here:
    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> list[NDArray[Any]]:
        return [tensor.numpy() for tensor in self._tensors]


class _OnItsWay(_Here):
    def __init__(self, tensors: list[Tensor], event: torch.cuda.Event) -> None:
        super().__init__(tensors)
        self._event = event

    def wait(self) -> list[NDArray[Any]]:
        self._event.synchronize()
        return super().wait()
