"""Decode steps recorded once and replayed: the device gets a step's kernels as one, so the host is never too slow.

A graph has a fixed number of sequences. A step with fewer is padded: the lanes left over have no keys, and write to the
null block. Prompts and mixed steps are not recorded.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dpi_engine.ops.interface import PAGE_SIZE, Ops, StepTensors

SMALL = (1, 2, 4, 8, 16, 24, 32, 48, 64)
STRIDE, LARGEST = 32, 512
"""Beyond the small ones there is a graph for every STRIDE sequences up to LARGEST."""


class Recorder(Protocol):
    """Records what a function has the device do."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Call `run`, and return what has the device do the same again."""
        ...


class CudaRecorder:
    """CUDA graphs that share one pool of memory: only one of them runs at a time.

    `settle` waits for the pass before a recording where it may hold exchanges that never end, see StepMeeting.
    """

    def __init__(self, device: torch.device, settle: Callable[[], None] | None = None) -> None:
        self._settle = settle
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()  # compiles kernels and makes libraries' workspaces, which a recording cannot
            if self._settle is not None:
                self._settle()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            run()
        replay: Callable[[], None] = graph.replay
        return replay


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences to record for, rising; the last is `max_num_seqs` or LARGEST."""
    most = min(max_num_seqs, LARGEST)
    sizes = {n for n in (*SMALL, *range(SMALL[-1] + STRIDE, LARGEST + 1, STRIDE)) if n < most}
    return sorted(sizes | {most})


def padded_size(sizes: Sequence[int], decodes: Sequence[int | None]) -> int | None:
    """The size of the graph for a step, given the decodes of every rank that steps together: None for a rank whose step
    is no pure decode, 0 for one without work. All ranks find the same: the smallest size that holds the largest of
    them, or None when one of them fits no graph.
    """
    if any(n is None for n in decodes):
        return None
    most = max(max(n for n in decodes if n is not None), 1)
    return next((size for size in sizes if size >= most), None)


def decodes_of(step: StepTensors) -> int | None:
    """The sequences of a step in which each of them decodes; None for another kind of step."""
    b = step.kv_lens.shape[0]
    return b if step.max_q == 1 and step.ids.shape[0] == b == step.rows.shape[0] else None


@dataclass(slots=True)
class _Recorded:
    step: StepTensors
    replay: Callable[[], None]
    used: int  # lanes that the last replay filled


class DecodeGraphs:
    """Graphs of one model over one set of caches. `pad` is told the size of a pass that is about to be recorded or
    replayed: what else depends on it has that shape then."""

    def __init__(
        self,
        ops: Ops,
        forward: Callable[[StepTensors], Tensor],
        vocab: int,
        max_num_seqs: int,
        max_model_len: int,
        pad: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._ops, self._forward, self._pad = ops, forward, pad
        self.sizes = graph_sizes(max_num_seqs)
        self._width = -(-(max_model_len + 1) // PAGE_SIZE)
        self._max_kv = max_model_len + 1
        self._recorded: dict[int, _Recorded] = {}
        # One for all: were each graph to keep its own, many of them would take gigabytes.
        self._logits = torch.empty(self.sizes[-1], vocab, dtype=ops.dtype, device=ops.device)
        self.replays = 0

    def capture(self, recorder: Recorder, progress: Callable[[str, float | None], None]) -> float:
        """Record all sizes, the largest first, so that the others find its memory big enough. Seconds taken."""
        began = time.perf_counter()
        for done, size in enumerate(reversed(self.sizes)):
            progress("recording decode steps", done / len(self.sizes))
            step = self._null_step(size)
            self._pad(size)
            with torch.inference_mode():
                replay = recorder.record(functools.partial(self._pass, step))
            self._recorded[size] = _Recorded(step, replay, 0)
        progress("recording decode steps", 1.0)
        return time.perf_counter() - began

    def _pass(self, step: StepTensors) -> None:
        self._logits[: step.ids.shape[0]].copy_(self._forward(step))

    def _null_step(self, size: int) -> StepTensors:
        device = self._ops.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return StepTensors(
            ids=zeros(size),
            positions=zeros(size),
            slots=zeros(size),
            block_tables=zeros(size, self._width, dtype=torch.int32),
            kv_lens=zeros(size, dtype=torch.int32),
            cu_q=torch.arange(size + 1, dtype=torch.int32, device=device),
            rows=torch.arange(size, device=device),
            max_q=1,
            max_kv=self._max_kv,
        )

    def run(self, step: StepTensors) -> Tensor | None:
        """Logits [sequences, vocab] of a step in which every sequence decodes, valid until the next replay; None where
        it is another kind, or too large."""
        size = padded_size(self.sizes, [decodes_of(step)])
        return None if size is None else self.replay(step, size)

    def replay(self, step: StepTensors | None, size: int) -> Tensor:
        """Logits [sequences, vocab] of `step`, in which every sequence decodes, by the graph of `size`, one of `sizes`
        that is large enough; None is a step of no sequence."""
        recorded = self._recorded[size]
        fixed, b = recorded.step, 0
        if step is not None:
            b, width = step.block_tables.shape
            fixed.ids[:b].copy_(step.ids)
            fixed.positions[:b].copy_(step.positions)
            fixed.slots[:b].copy_(step.slots)
            fixed.kv_lens[:b].copy_(step.kv_lens)
            fixed.block_tables[:b, :width].copy_(step.block_tables)
        if recorded.used > b:
            # What a longer step left there must not be written to, nor read.
            fixed.slots[b : recorded.used].zero_()
            fixed.kv_lens[b : recorded.used].zero_()
        recorded.used = b
        self._pad(size)
        recorded.replay()
        self.replays += 1
        return self._logits[:b]


def graphs_fit(ops: Ops, spec: Any) -> str | None:
    """Why decode steps of this model on these ops cannot be recorded; None where they can."""
    if not ops.records:
        return f"ops '{ops.name}' read lengths on the host"
    if spec.mla is not None:
        return "attention over latents reads lengths on the host"
    if spec.moe is not None and spec.moe.groups > 1:
        return "grouped routing has not been tried in a recording"
    return None
