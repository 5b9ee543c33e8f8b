"""Recorded forward passes: the kernel calls of one pass, made again in a single call (native/program.c).

While a `Recorder` stands in for the library nothing is computed: calls are noted, and results are buffers that nobody
touches. Then every buffer gets a place in memory that all programs share, as no two of them run at a time and what one
left there is done with when the next begins.

What else a pass does, as meeting other ranks, is noted as a Python function of some of those buffers. It cuts the
program in parts, between which it is called.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpi_engine.ops.native_library import SIGNATURES

FUNCTIONS = (
    "dpi_embed", "dpi_rms_norm", "dpi_linear", "dpi_linear_dot", "dpi_linear_int8", "dpi_silu_mul", "dpi_rope_write",
    "dpi_attention", "dpi_route", "dpi_experts",
)  # fmt: skip
"""In the order of the enumeration in native/program.c."""

OUTSIDE = -1
"""In place of a function's number: what is no function of the library. Its arguments are tensors and the result."""

Outside: TypeAlias = list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]]
"""Such functions in the order of their calls, with their tensors and then the result."""

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
        self.outside: Outside = []
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

    def note_outside(self, function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Tensor:
        """What `function` gives of `tensors` is like the first of them."""
        out = self.new(*tensors[0].shape, dtype=tensors[0].dtype)
        every = (*tensors, out)
        self.outside.append((function, every))
        self.calls.append((OUTSIDE, tuple(t.data_ptr() for t in every)))
        return out


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

    def outside(self, function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Tensor:
        """What `function` gives of `tensors`, like the first of them; when recorded, later."""
        if self.c is self.library:
            return function(*tensors)
        result: Tensor = self.c.note_outside(function, tensors)
        return result

    @property
    def recording(self) -> bool:
        return self.c is not self.library

    def keep(self, x: Tensor) -> Tensor:
        """What a recorded call reads must live as long as its program."""
        if self.recording:
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


@dataclass(frozen=True, slots=True)
class Part:
    """Calls of the library in a row (`address` of the first, `count`), then a function of tensors that they filled."""

    address: int
    count: int
    function: Callable[..., Tensor] | None = None
    tensors: tuple[Tensor, ...] = ()
    out: Tensor | None = None


class ProgramFailed(RuntimeError):
    """A call failed after the program had met others: it cannot be made again from the start."""


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
            kinds = [ctypes.c_void_p] * len(arguments) if function == OUTSIDE else _PARAMETERS[function]
            for kind, value in zip(kinds, arguments, strict=True):
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
        places = self._settle(recorder.buffers, result, memory)
        self.result = places[id(result)]
        self._parts = list(self._cut(recorder.outside, places))

    def _settle(self, buffers: list[Tensor], result: Tensor, memory: Memory) -> dict[int, Tensor]:
        """Give every buffer its place; returns, by identity of buffers, what lies there."""
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
        return {
            id(b): room[at : at + b.nbytes].view(b.dtype).view(b.shape) for b, at in zip(order, offsets, strict=True)
        }

    def _cut(self, outside: Outside, places: dict[int, Tensor]) -> Iterator[Part]:
        base, first = self._commands.ctypes.data, 0
        cuts = np.flatnonzero(self._commands["function"] == OUTSIDE).tolist()
        for at, (function, tensors) in zip(cuts, outside, strict=True):
            *given, out = (places.get(id(t), t) for t in tensors)
            yield Part(base + first * _COMMAND.itemsize, at - first, function, tuple(given), out)
            first = at + 1
        yield Part(base + first * _COMMAND.itemsize, len(self._commands) - first)

    def run(self, library: ctypes.CDLL, inputs: Sequence[int], width: int, threads: int) -> int:
        """0, or the status of dpi_run where the first part failed.

        `inputs` as when recorded, where they are now; `width`: pages of a block table. Raises ProgramFailed, and what
        functions outside of the library raise.
        """
        if tuple(inputs) != self._inputs:
            self._move(tuple(inputs))
        if width != self._width:
            self._commands["a"][self._attention, 8] = self._width = width
        for i, part in enumerate(self._parts):
            status: int = library.dpi_run(part.address, part.count, threads)
            if status:
                if i:
                    raise ProgramFailed(f"part {i} of {len(self._parts)} of a recorded step: status {status:#x}")
                return status
            if part.function is not None:
                assert part.out is not None
                part.out.copy_(part.function(*part.tensors))
        return 0

    def _move(self, inputs: tuple[int, ...]) -> None:
        rows: NDArray[np.int64] = self._pointers
        values = self._commands["a"][rows[:, 0], rows[:, 1]]
        moved = values.copy()
        for old, new in zip(self._inputs, inputs, strict=True):
            moved[values == old] = new
        self._commands["a"][rows[:, 0], rows[:, 1]] = moved
        self._inputs = inputs
