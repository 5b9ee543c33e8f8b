"""Weights through two pinned buffers: what arrives, and that no buffer is filled while the device reads it.

The device here is one that copies only when it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dpi_engine.ops.staging import Staging
from dpi_engine.ops.torch_moe import pack_experts

CPU = torch.device("cpu")


class SlowLane:
    """A device that reads a buffer only at the point that is waited for: what was put there meanwhile would show."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.waits: list[int] = []
        self.marks = 0
        self._told: list[Callable[[], None]] = []
        self._done = 0

    def pinned(self, count: int) -> Tensor:
        self.buffers.append(torch.empty(count, dtype=torch.uint8))
        return self.buffers[-1]

    def tell(self, call: Callable[[], None]) -> None:
        self._told.append(call)

    def mark(self) -> SlowMark:
        self.marks += 1
        return SlowMark(self, self.marks)

    def reach(self, number: int) -> None:
        self.waits.append(number)
        while self._done < min(number, len(self._told)):
            self._told[self._done]()
            self._done += 1


class SlowMark:
    def __init__(self, lane: SlowLane, number: int) -> None:
        self._lane, self._number = lane, number

    def synchronize(self) -> None:
        self._lane.reach(self._number)


def staging(stage_bytes: int) -> tuple[Staging, SlowLane]:
    lane = SlowLane()
    return Staging(CPU, lane, stage_bytes), lane


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("stage_bytes", [64, 100, 1 << 20])
@pytest.mark.parametrize("shape", [(7, 9), (50,), (3, 4, 5), (2, 300), (1, 1)])
def test_what_arrives_is_what_was_sent(shape: tuple[int, ...], stage_bytes: int, dtype: torch.dtype | None) -> None:
    stage, lane = staging(stage_bytes)
    source = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    got = stage.put(source, dtype)
    assert got.dtype == (dtype or torch.float32)
    assert torch.equal(got, source.to(got.dtype))
    assert len(lane.buffers) == 2 and all(b.numel() == stage_bytes for b in lane.buffers)


def test_parts_of_larger_matrices() -> None:
    stage, _ = staging(256)
    table = torch.randn(20, 40, generator=torch.Generator().manual_seed(2))
    assert torch.equal(stage.put(table[:, 8:24]), table[:, 8:24])
    assert torch.equal(stage.put(table.t()), table.t())
    target = torch.zeros(3, 10, 40)
    stage.into(target[1], table[5:15])
    assert torch.equal(target[1], table[5:15]) and not target[[0, 2]].any()


def test_nothing_is_nothing() -> None:
    stage, lane = staging(64)
    assert stage.put(torch.empty(0, 5)).shape == (0, 5)
    assert lane.buffers == []


@pytest.mark.parametrize("target", [torch.zeros(4, 6).t(), torch.zeros(6, 5)])
def test_a_target_that_does_not_fit_is_named(target: Tensor) -> None:
    stage, _ = staging(64)
    with pytest.raises(ValueError, match=r"target: expected \[6, 4\], contiguous, got"):
        stage.into(target, torch.zeros(6, 4))


def test_a_buffer_is_filled_again_only_when_the_device_has_read_it() -> None:
    stage, lane = staging(32)  # two rows of four floats
    stage.put(torch.ones(10, 4))
    assert lane.marks == 5
    # The third copy is the first that finds its buffer in use, by the first copy; and so on.
    assert lane.waits == [1, 2, 3]
    stage.close()
    assert sorted(lane.waits[3:]) == [4, 5]
    stage.put(torch.ones(2, 4))
    assert len(lane.buffers) == 4  # new ones: the first two were given back


def test_a_device_that_is_late_still_gets_the_right_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, lane = staging(32)
    real = Tensor.copy_

    def copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not non_blocking:
            return real(self, source)

        def later() -> None:
            real(self, source)

        lane.tell(later)
        return self

    monkeypatch.setattr(Tensor, "copy_", copy_)
    source = torch.arange(40.0).view(10, 4)
    got = stage.put(source)
    stage.close()
    assert torch.equal(got, source)


def test_experts_take_the_same_way() -> None:
    stage, lane = staging(64)
    made = [torch.randn(6, 8) for _ in range(4)]

    def load(index: int) -> tuple[Tensor, Tensor, Tensor]:
        return made[index], made[index] + 1, made[index].t()

    got = pack_experts(2, 8, 6, load, CPU, torch.float32, stage.into)
    want = pack_experts(2, 8, 6, load, CPU, torch.float32)
    assert torch.equal(got.gate_up, want.gate_up) and torch.equal(got.down, want.down)
    assert lane.marks > 6
