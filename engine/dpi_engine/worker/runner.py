"""Runs step plans on one device: batch arrays, forward pass, sampling. Knows no sockets and no scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dpi_engine.core.plan import StepPlan, StepResult
from dpi_engine.ops.exchange import StepMeeting
from dpi_engine.ops.interface import Ops, StepTensors
from dpi_engine.worker.batch import Batch
from dpi_engine.worker.null_step import null_step
from dpi_engine.worker.sampling import Sampler
from dpi_engine.worker.slot_params import SlotParams

CPU_WARM_UP_TOKENS = 32
"""Enough for the kernels of many rows."""


class Model(Protocol):
    """What the runner asks of a model."""

    @property
    def spec(self) -> Any:
        """Its ModelSpec; `vocab_size` is read here."""
        ...

    def forward(self, step: StepTensors, caches: Any) -> Tensor:
        """Logits [len(step.rows), vocab] of one pass, which also fills the caches."""
        ...

    def new_caches(self, num_blocks: int) -> Any:
        """KV caches of all layers, num_blocks pages each; block 0 is the null page."""
        ...

    def cache_bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        ...

    def idle(self) -> None:
        """Compute what other ranks' tokens want of this rank's experts in one of their steps."""
        ...


class RunnerAsleep(RuntimeError):
    """A step was asked of a runner whose cache or weights are put away."""


@dataclass(slots=True)
class StepTimes:
    """Seconds of the last step by part."""

    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0


class Runner:
    """One rank's model, KV cache and batch.

    num_blocks counts the null block. `reload` brings the model back after sleep level 2. `on_sleep(level)` is told when
    memory is given back, so that who shares the model's layers does the same. `meeting`: where the ranks that share the
    experts settle the shape of each step, for exchanges that need that; a step that they cannot finish raises
    ExchangeError before anything is sampled.
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_blocks: int,
        max_num_batched_tokens: int,
        reload: Callable[[], Model] | None = None,
        on_sleep: Callable[[int], None] | None = None,
        meeting: StepMeeting | None = None,
    ) -> None:
        self._model: Model | None = model
        self._ops = ops
        self._reload, self._on_sleep, self._meeting = reload, on_sleep, meeting
        self.num_blocks = num_blocks
        self._params = SlotParams(max_num_seqs, int(model.spec.vocab_size))
        self._batch = Batch(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            device=ops.device,
        )
        self._sampler = Sampler(ops, self._batch, self._params)
        self._caches: Any = model.new_caches(num_blocks)
        self._begun: StepPlan | None = None
        self._asleep = 0
        self.times = StepTimes()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step. Raises RunnerAsleep, PlanError (batch.py), and what the backend raises.

        A plan whose computation raised may be given once more, the same object, before any other.
        """
        t0 = time.perf_counter()
        model = self._awake()
        if plan is not self._begun:
            self._enter(plan)
        if not plan.work:
            return StepResult(step=plan.step, token_ids=[])
        step = self._batch.prepare(plan.work)
        t1 = time.perf_counter()
        logits = self._forward(model, step.tensors)
        t2 = time.perf_counter()
        result = StepResult(step=plan.step, token_ids=[])
        m = len(step.sample_slots)
        if m:
            sampled = self._sampler.sample(logits[:m], step.sample_slots, step.output_index)
            self._take(step.sample_slots, sampled.tokens, sampled.errors, result)
            result.logprobs = sampled.logprobs
        at = m
        for slot, start, rows in step.prompt_rows:
            result.prompt_logprobs[slot] = self._sampler.prompt_logprobs(logits[at : at + rows], slot, start)
            at += rows
        self.times = StepTimes(t1 - t0, t2 - t1, time.perf_counter() - t2)
        self._begun = None
        return result

    def _forward(self, model: Model, step: StepTensors) -> Tensor:
        if self._meeting is None:
            return model.forward(step, self._caches)
        self._settle_on(step.ids.shape[0], None)
        logits = model.forward(step, self._caches)
        self._meeting.settle()
        return logits

    def _enter(self, plan: StepPlan) -> None:
        """Take the plan's sequences and blocks into the batch."""
        for slot in plan.released:
            self._params.clear(slot)
        self._batch.apply(plan)
        for new in plan.new:
            self._params.set(new)
        self._begun = plan

    def _take(self, slots: np.ndarray, tokens: np.ndarray, errors: dict[int, str], result: StepResult) -> None:
        """Append the sampled tokens to the batch and put them into the result."""
        result.token_ids = [[t] for t in tokens.tolist()]
        result.errors = errors
        if errors:
            for i in errors:
                result.token_ids[i] = []
            good = np.array([i for i in range(len(slots)) if i not in errors], np.int64)
            slots, tokens = slots[good], tokens[good]
        self._batch.append(slots, tokens)
        self._see(slots, tokens)

    def _see(self, slots: np.ndarray, tokens: np.ndarray, errors: Collection[int] = ()) -> None:
        """Count sampled tokens for penalties, but those of the rows `errors`."""
        if not self._params.seen:
            return
        for i, (slot, token) in enumerate(zip(slots.tolist(), tokens.tolist(), strict=True)):
            seen = self._params.seen.get(slot)
            if seen is not None and i not in errors:
                seen.add(token)

    def idle(self) -> None:
        """Take part in a step of the ranks that share the experts, without tokens. Raises ExchangeError."""
        model = self._awake()
        if self._meeting is None:
            model.idle()
            return
        self._settle_on(0, None)
        model.idle()
        self._meeting.settle()

    def _settle_on(self, tokens: int, decodes: int | None) -> int | None:
        """Begin a step of all ranks, with `tokens` of this one; here every rank launches kernel by kernel."""
        assert self._meeting is not None
        self._meeting.begin(tokens, eager=True, unrecorded=False)
        return None

    def joined(self) -> None:
        """The devices of the ranks that share the experts are linked anew. Where all can, they record steps now, lest
        the first request wait for it. Raises ExchangeError."""
        if self._meeting is not None and not any(self._meeting.agree([int(self._asleep > 0)])):
            self._settle_on(0, 0)

    def left(self) -> None:
        """They are no longer linked: nothing that was recorded can be used."""

    def reset(self) -> None:
        """Forget all sequences; the scheduler must have given up their slots."""
        self._begun = None
        self._params.flags[:] = 0
        self._params.edits.clear()
        self._params.seen.clear()
        self._batch.lengths[:] = 0
        self._batch.num_blocks[:] = 0

    # -- passes without requests --

    @torch.inference_mode()
    def dummy(self, tokens: int = 1) -> None:
        """One pass of `tokens` tokens that reads and writes the null block alone and leaves the batch as it is."""
        logits = self._awake().forward(null_step(tokens, self._ops.device), self._caches)
        self._ops.argmax(logits)
        if self._ops.device.type == "cuda":
            torch.cuda.synchronize(self._ops.device)

    def warm_up(self) -> float:
        """A prefill and a decode over the null block, lest the first request wait for set-up. Seconds taken.

        The largest prefill where a device chooses kernels by size; a CPU sets up the same for any, and has it to pay
        for before it is ready.
        """
        start = time.perf_counter()
        prefill = self._batch.max_tokens
        if self._ops.device.type == "cpu":
            prefill = min(prefill, CPU_WARM_UP_TOKENS)
        for tokens in (prefill, 1):
            self.dummy(min(tokens, self._batch.tokens.shape[1] - 1))
        return time.perf_counter() - start

    # -- sleep --

    @property
    def asleep(self) -> int:
        """0 awake, 1 without cache, 2 without cache and weights."""
        return self._asleep

    def sleep(self, level: int = 1) -> None:
        """Give memory back: the KV cache (level 1), the weights too (level 2). All sequences are forgotten, and cached
        prefixes are void; the scheduler must drop both. Raises ValueError on an unknown level or a level 2 that nobody
        could undo."""
        if level not in (1, 2):
            raise ValueError(f"sleep level {level}: expected 1 (drop the KV cache) or 2 (drop the weights too)")
        if level == 2 and self._reload is None:
            raise ValueError("sleep level 2 drops the weights, but this runner has no loader to bring them back; use 1")
        self.reset()
        self._caches = None
        if level == 2:
            self._model = None
        self._asleep = max(self._asleep, level)
        if self._on_sleep is not None:
            self._on_sleep(level)
        if self._ops.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Bring back what sleep gave up; the cache comes back empty. Awake already: nothing happens."""
        if not self._asleep:
            return
        if self._model is None:
            assert self._reload is not None
            self._model = self._reload()
        self._caches = self._model.new_caches(self.num_blocks)
        self._asleep = 0

    def _awake(self) -> Model:
        if self._asleep or self._model is None:
            raise RunnerAsleep(f"the runner sleeps (level {self._asleep}); call wake first")
        return self._model
