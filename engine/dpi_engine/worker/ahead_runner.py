"""A runner for devices that work on their own: a step is launched, and its tokens are waited for later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpi_engine.core.plan import StepPlan, StepResult
from dpi_engine.worker.ahead_batch import AheadBatch
from dpi_engine.worker.batch import PreparedStep
from dpi_engine.worker.device_sampling import DeviceSampler
from dpi_engine.worker.graphs import (
    CudaRecorder,
    DecodeGraphs,
    Recorder,
    decodes_of,
    graph_sizes,
    graphs_fit,
    padded_size,
)
from dpi_engine.worker.runner import Model, Runner, StepTimes
from dpi_engine.worker.sampling import Sampled, Sampler, judge
from dpi_engine.worker.transfers import Download, Transfers

Longs = NDArray[np.int64]

log = logging.getLogger(__name__)

Progress = Callable[[str, float | None], None]


class Ticket:
    """A step on the device. `wait` once, in the order of launches."""

    def __init__(
        self,
        runner: AheadRunner,
        plan: StepPlan,
        step: PreparedStep | None = None,
        logits: Tensor | None = None,
        download: Download | None = None,
        at: Longs | None = None,
    ) -> None:
        self.plan = plan
        self._runner, self._step, self._logits, self._download, self._at = runner, step, logits, download, at

    def wait(self) -> StepResult:
        """The step's result. Raises what the device does."""
        result = StepResult(step=self.plan.step, token_ids=[])
        if self._step is not None:
            began = time.perf_counter()
            self._runner._finish(self._step, self._logits, self._download, self._at, result)
            self._runner.times.sample = time.perf_counter() - began
        return result


class AheadRunner(Runner):
    """As Runner, on ops that draw on the device. A second step may be launched before the first is waited for, if all
    that it computes is one more token of sequences that the first one samples; see core/ahead.py.
    """

    _batch: AheadBatch

    def __init__(self, model: Model, ops: Any, *, transfers: Transfers | None = None, **limits: Any) -> None:
        """`limits` and the rest: see Runner."""
        super().__init__(model, ops, **limits)
        self._batch = AheadBatch(
            max_num_seqs=limits["max_num_seqs"],
            max_model_len=limits["max_model_len"],
            max_num_batched_tokens=limits["max_num_batched_tokens"],
            device=ops.device,
        )
        self._sampler = Sampler(ops, self._batch, self._params)
        self._draws = DeviceSampler(ops, self._params, self._sampler, transfers or Transfers(ops.device))
        self._batch.last = self._draws.last
        self.graphs: DecodeGraphs | None = None
        self._recorder: Recorder | None = None
        self._max_model_len: int = limits["max_model_len"]

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step and wait for it; see Runner."""
        return self.launch(plan).wait()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Ticket:
        """Have the device compute one step. Raises RunnerAsleep, PlanError, and what the backend raises."""
        t0 = time.perf_counter()
        model = self._awake()
        if plan is not self._begun:
            self._enter(plan)
        if not plan.work:
            return Ticket(self, plan)
        step = self._batch.prepare(plan.work)
        t1 = time.perf_counter()
        logits: Tensor | None = None
        if self._meeting is not None:
            logits = self._together(model, step)
        elif self.graphs is not None and not step.prompt_rows:
            logits = self.graphs.run(step.tensors)
        if logits is None:
            logits = model.forward(step.tensors, self._caches)
        m = len(step.sample_slots)
        download = at = None
        if m:
            download = self._draws.launch(logits[:m], step.sample_slots, step.output_index)
            at = self._batch.expect(step.sample_slots)
        self._begun = None
        self.times = StepTimes(t1 - t0, time.perf_counter() - t1)
        return Ticket(self, plan, step, logits, download, at)

    @torch.inference_mode()
    def _finish(
        self, step: PreparedStep, logits: Tensor | None, download: Download | None, at: Longs | None, result: StepResult
    ) -> None:
        slots = step.sample_slots
        m = len(slots)
        if download is not None and at is not None and logits is not None:
            tokens, best = download.wait()
            out = Sampled(tokens)
            judge(best, out.errors)
            self._sampler.add_logprobs(out, logits[:m], slots)
            self._batch.resolve(slots, at, tokens)
            result.token_ids = [[] if i in out.errors else [t] for i, t in enumerate(tokens.tolist())]
            result.errors, result.logprobs = out.errors, out.logprobs
            self._see(slots, tokens, out.errors)
        row = m
        for slot, start, rows in step.prompt_rows:
            assert logits is not None
            result.prompt_logprobs[slot] = self._sampler.prompt_logprobs(logits[row : row + rows], slot, start)
            row += rows

    # -- steps together with other ranks --

    def _together(self, model: Model, step: PreparedStep) -> Tensor:
        """The logits of a step that all ranks compute at once, by graphs of one size or kernel by kernel on all."""
        meeting, tensors = self._meeting, step.tensors
        assert meeting is not None
        decodes = None if step.prompt_rows else decodes_of(tensors)
        size = self._settle_on(tensors.ids.shape[0], decodes)
        if size is not None and self.graphs is not None:
            logits = self.graphs.replay(tensors, size)
        else:
            logits = model.forward(tensors, self._caches)
        meeting.settle()
        return logits

    def idle(self) -> None:
        """See Runner."""
        model, meeting = self._awake(), self._meeting
        if meeting is None:
            model.idle()
            return
        size = self._settle_on(0, 0)
        if size is not None and self.graphs is not None:
            with torch.inference_mode():
                self.graphs.replay(None, size)
        else:
            model.idle()
        meeting.settle()

    def _settle_on(self, tokens: int, decodes: int | None) -> int | None:
        """The size of the graph that all ranks replay in this step; None where they launch kernel by kernel."""
        meeting = self._meeting
        assert meeting is not None
        able = self._recorder is not None
        step = meeting.begin(tokens, eager=decodes is None or not able, unrecorded=able and self.graphs is None)
        if step.unrecorded and not step.eager:  # on all: a recording begins with a real pass, and these meet
            self._capture(lambda stage, done: None)
        sizes = graph_sizes(self._batch.max_num_seqs)
        size = None if step.eager else padded_size(sizes, [step.tokens])
        if size is not None:
            meeting.pad(size)
        return size

    def left(self) -> None:
        """See Runner."""
        self.graphs = None

    def reset(self) -> None:
        super().reset()
        self._draws.last.zero_()

    # -- graphs --

    @property
    def graph_bytes(self) -> int:
        """What `record` will take beside a decode step's own memory."""
        largest = graph_sizes(self._batch.max_num_seqs)[-1]
        return largest * self._params.vocab * self._ops.dtype.itemsize

    def record(self, progress: Progress, recorder: Recorder | None = None) -> None:
        """Record decode steps, where the device, the ops and the model allow it; else say why not. Where ranks settle
        their steps together that waits until they have come together."""
        why = graphs_fit(self._ops, self._awake().spec)
        if recorder is None and self._ops.device.type == "cuda" and why is None:
            recorder = CudaRecorder(self._ops.device, None if self._meeting is None else self._meeting.settle)
        if recorder is None:
            log.info("decode steps are not recorded as CUDA graphs: %s", why or f"device {self._ops.device} has none")
            return
        self._recorder = recorder
        if self._meeting is None:
            self._capture(progress)

    def _capture(self, progress: Progress) -> None:
        model, caches = self._awake(), self._caches
        assert self._recorder is not None
        self.graphs = None  # their memory first
        graphs = DecodeGraphs(
            self._ops,
            lambda step: model.forward(step, caches),
            self._params.vocab,
            self._batch.max_num_seqs,
            self._max_model_len,
            *(() if self._meeting is None else (self._meeting.pad,)),
        )
        seconds = graphs.capture(self._recorder, progress)
        self.graphs = graphs
        log.info("recorded decode steps of %s sequences in %.1f s", ", ".join(map(str, graphs.sizes)), seconds)

    def sleep(self, level: int = 1) -> None:
        """See Runner. Graphs read and write the caches that go, so they go too, and `wake` records them anew."""
        self.graphs = None
        super().sleep(level)

    def wake(self) -> None:
        """See Runner."""
        asleep = self.asleep
        super().wake()
        if asleep and self._recorder is not None:
            self.record(lambda stage, done: None, self._recorder)
