"""Recorded forward passes: the kernel calls of one pass, made again in a single call (native/program.c).

While a `Recorder` stands in for the library nothing is computed: calls are noted, and results are buffers that nobody
touches. Then every buffer gets a place in memory that all programs share, as no two of them run at a time and what one
left there is done with when the next begins.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpi_engine.ops.native_library import SIGNATURES

FUNCTIONS = (
    "dpi_embed", "dpi_rms_norm", "dpi_linear", "dpi_linear_dot", "dpi_linear_int8", "dpi_silu_mul", "dpi_rope_write",
    "dpi_attention",
)  # fmt: skip
"""In the order of the enumeration in native/program.c."""

MOST_ARGUMENTS = 20
ALIGNMENT = 64

_COMMAND = np.dtype([("function", np.int64), ("a", np.int64, (MOST_ARGUMENTS,)), ("f", np.float64)])
_PARAMETERS = [SIGNATURES[name][0] for name in FUNCTIONS]


class NotRecordable(RuntimeError):
    """A forward pass makes a call that programs do not know."""


class Recorder:
    """Has the functions of the library, and notes the calls of them."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[Any, ...]]] = []
        self.buffers: list[Tensor] = []
        self.kept: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        if name not in FUNCTIONS:
            raise NotRecordable(f"{name} cannot be recorded")
        function = FUNCTIONS.index(name)

        def note(*arguments: Any) -> int:
            self.calls.append((function, arguments))
            return 0

        return note

    def new(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A result. Its memory only serves to tell it from others."""
        buffer = torch.empty(*shape, dtype=dtype)
        self.buffers.append(buffer)
        return buffer


class Calls:
    """Where the backend calls the library and gets memory for results: for real, or to be recorded."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.c: Any = library
        self.new: Any = torch.empty

    @contextlib.contextmanager
    def recorded(self) -> Iterator[Recorder]:
        """In the block nothing is computed, and results hold nothing."""
        recorder = Recorder()
        self.c, self.new = recorder, recorder.new
        try:
            yield recorder
        finally:
            self.c, self.new = self.library, torch.empty

    def keep(self, x: Tensor) -> Tensor:
        """What a recorded call reads must live as long as its program."""
        if self.c is not self.library:
            self.c.kept.append(x)
        return x


@dataclass(frozen=True, slots=True)
class Span:
    """A buffer of `size` bytes that calls `first` to `last` use."""

    size: int
    first: int
    last: int


def place(spans: Sequence[Span]) -> tuple[list[int], int]:
    """Offsets so that no two buffers in use at a time overlap, and the bytes it takes in all.

    Each span, in the order of their first use, goes to the lowest gap that holds it.
    """
    offsets = [0] * len(spans)
    live: list[tuple[int, int, int]] = []  # offset, end, last use
    total = 0
    for i in sorted(range(len(spans)), key=lambda i: spans[i].first):
        size = -(-max(spans[i].size, 1) // ALIGNMENT) * ALIGNMENT
        live = sorted(used for used in live if used[2] >= spans[i].first)
        at = 0
        for offset, end, _ in live:
            if offset - at >= size:
                break
            at = max(at, end)
        offsets[i] = at
        live.append((at, at + size, spans[i].last))
        total = max(total, at + size)
    return offsets, total


class Memory:
    """What all programs of a model compute in. Grows to the next power of two; older programs keep the smaller one."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def of(self, size: int) -> Tensor:
        """[>= size] bytes, aligned as kernels like it."""
        if self._room.numel() < size:
            room = torch.empty((1 << max(size - 1, 1).bit_length()) + ALIGNMENT, dtype=torch.uint8)
            self._room = room[-room.data_ptr() % ALIGNMENT :]
        return self._room


class Program:
    """The calls of `recorder`, of which `result` is the last buffer that anyone reads."""

    def __init__(self, recorder: Recorder, result: Tensor, inputs: Sequence[int], memory: Memory) -> None:
        """`inputs`: addresses that the caller may change from run to run (see `run`)."""
        self._kept = recorder.kept
        self._commands = np.zeros(len(recorder.calls), _COMMAND)
        pointers: list[tuple[int, int]] = []  # call, argument
        for i, (function, arguments) in enumerate(recorder.calls):
            self._commands[i]["function"] = function
            at = 0
            for kind, value in zip(_PARAMETERS[function], arguments, strict=True):
                if kind is ctypes.c_float:
                    self._commands[i]["f"] = value
                    continue
                if kind is ctypes.c_void_p and value:
                    pointers.append((i, at))
                self._commands[i]["a"][at] = value or 0
                at += 1
        self._pointers = np.array(pointers, np.int64).reshape(-1, 2)
        self._inputs = tuple(inputs)
        self._width = 0
        self._attention = np.flatnonzero(self._commands["function"] == FUNCTIONS.index("dpi_attention"))
        self.result = self._settle(recorder.buffers, result, memory)

    def _settle(self, buffers: list[Tensor], result: Tensor, memory: Memory) -> Tensor:
        """Give every buffer its place; returns the result there."""
        order = sorted((b for b in buffers if b.numel()), key=lambda b: b.data_ptr())
        starts = [b.data_ptr() for b in order]
        uses: list[list[int]] = [[] for _ in order]
        found: list[tuple[int, int, int]] = []  # row of _pointers, buffer, offset in it
        for row, (call, argument) in enumerate(self._pointers.tolist()):
            value = int(self._commands["a"][call, argument])
            i = bisect.bisect_right(starts, value) - 1
            if i >= 0 and value < starts[i] + order[i].nbytes:
                uses[i].append(call)
                found.append((row, i, value - starts[i]))
        last = len(self._commands)
        spans = [
            Span(b.nbytes, min(used, default=last), last if b is result else max(used, default=last))
            for b, used in zip(order, uses, strict=True)
        ]
        offsets, size = place(spans)
        room = memory.of(size)
        base = room.data_ptr()
        for row, i, inside in found:
            call, argument = self._pointers[row]
            self._commands["a"][call, argument] = base + offsets[i] + inside
        self._room = room
        at = offsets[next(i for i, b in enumerate(order) if b is result)]
        return room[at : at + result.nbytes].view(result.dtype).view(result.shape)

    def run(self, library: ctypes.CDLL, inputs: Sequence[int], width: int, threads: int) -> int:
        """The status of dpi_run. `inputs` as when recorded, where they are now; `width`: pages of a block table."""
        if tuple(inputs) != self._inputs:
            self._move(tuple(inputs))
        if width != self._width:
            self._commands["a"][self._attention, 8] = self._width = width
        status: int = library.dpi_run(self._commands.ctypes.data, len(self._commands), threads)
        return status

    def _move(self, inputs: tuple[int, ...]) -> None:
        rows: NDArray[np.int64] = self._pointers
        values = self._commands["a"][rows[:, 0], rows[:, 1]]
        moved = values.copy()
        for old, new in zip(self._inputs, inputs, strict=True):
            moved[values == old] = new
        self._commands["a"][rows[:, 0], rows[:, 1]] = moved
        self._inputs = inputs
