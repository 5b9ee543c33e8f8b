"""Scheduler and runner as one: requests in, one step at a time, outputs out. No sockets, no torch, no threads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from dpi_engine.core.outputs import CoreStats, StepOutputs
from dpi_engine.core.plan import StepPlan, StepResult
from dpi_engine.core.scheduler import Scheduler
from dpi_engine.wire.errors import ExchangeError, WorkerLost
from dpi_engine.wire.messages import EngineCoreRequest

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Steps in a row that may fail before the engine counts as broken."""

FIRST_STEP_S = 0.25
"""Seconds for which the first answer to a burst of prompts may wait for others that are computed with it."""

RATED_TOKENS = 64
"""A step of fewer tokens says nothing about what one of a prompt takes."""


class Executor(Protocol):
    """What runs the steps (worker.runner.Runner)."""

    @property
    def times(self) -> Any:
        """Seconds of the last step's `prepare`, `forward` and `sample`."""
        ...

    @property
    def asleep(self) -> int: ...
    def execute(self, plan: StepPlan) -> StepResult: ...
    def idle(self) -> None: ...
    def sleep(self, level: int) -> None: ...
    def wake(self) -> None: ...


class EngineFailed(RuntimeError):
    """Step after step fails: the process must end, so that the rank is replaced."""


@dataclass(slots=True)
class CoreTimes:
    """Seconds of the last step that ran, by part."""

    schedule: float = 0.0
    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    apply: float = 0.0


class EngineCore:
    """One rank's core. `now` arguments are monotonic seconds, and may only grow."""

    def __init__(self, scheduler: Scheduler, runner: Executor) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.times = CoreTimes()
        self.step_tokens = 0
        """Tokens of the last step."""
        self.computed = False
        """The last call of `step` computed a step."""
        self.failed = False
        """The last step failed, its requests with it."""
        self._abandoned: StepPlan | None = None  # could not be finished with the other ranks; is computed again
        self._failed_in_a_row = 0
        self._token_s = 0.0  # what a token of a prompt takes; 0: not known yet

    def add(self, request: EngineCoreRequest, now: float) -> None:
        """Queue a request. Raises RequestRefused (validation.py), and is then as before."""
        self.scheduler.add(request, now)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests without output; returns the ids that were there."""
        return self.scheduler.abort(request_ids)

    def has_work(self) -> bool:
        """Would `step` compute something?"""
        return not self.runner.asleep and (self._abandoned is not None or self.scheduler.has_work())

    def stats(self) -> CoreStats:
        return self.scheduler.stats()

    def step(self, now: float, before_apply: Callable[[], None] | None = None) -> StepOutputs:
        """Schedule, compute and apply one step; with nothing to do, report only what ended.

        `before_apply` runs between computing and applying: requests aborted there get no output of this step. A step
        that cannot be computed ends its requests with an error; after MAX_FAILED_STEPS in a row, raises EngineFailed.
        Raises WorkerLost when a process that shares the layers is gone: nothing can be computed any more.
        Raises ExchangeError when the ranks that step together came apart: nothing has happened then but time, and the
        same step is computed by the next call.
        """
        start = time.perf_counter()
        self.computed = self.failed = False
        plan = self._abandoned
        if plan is None and self.has_work():
            plan = self.scheduler.schedule(now, self._first_tokens())
        if plan is None:
            return StepOutputs(finished=self.scheduler.take_finished())
        scheduled = time.perf_counter()
        self.step_tokens = plan.num_tokens
        try:
            result = self.runner.execute(plan)
        except ExchangeError:
            self._abandoned = plan
            raise
        except WorkerLost:
            raise
        except Exception as error:
            self._abandoned = None
            return self._failed(plan, error, now)
        self._abandoned = None
        self.computed = True
        self._failed_in_a_row = 0
        if before_apply is not None:
            before_apply()
        computed = time.perf_counter()
        out = self.scheduler.apply(plan, result, now)
        parts = self.runner.times
        if plan.num_tokens >= RATED_TOKENS:
            took = parts.forward / plan.num_tokens
            self._token_s = (self._token_s + took) / 2 if self._token_s else took
        self.times = CoreTimes(
            scheduled - start, parts.prepare, parts.forward, parts.sample, time.perf_counter() - computed
        )
        return out

    def _first_tokens(self) -> int | None:
        """How many tokens of prompts this rank computes within FIRST_STEP_S."""
        return int(FIRST_STEP_S / self._token_s) if self._token_s else None

    def settle(self, now: float) -> None:
        """Have no step on the device when this returns; here there never is (see core/ahead.py)."""

    def idle(self) -> None:
        """Take part in a step of the other ranks without one of one's own. Raises ExchangeError."""
        self.runner.idle()

    def _failed(self, plan: StepPlan, error: Exception, now: float) -> StepOutputs:
        self.failed = True
        self._failed_in_a_row += 1
        what = f"step {plan.step} ({len(plan.work)} sequences, {plan.num_tokens} tokens) failed: {_describe(error)}"
        log.error("%s", what, exc_info=error)
        if self._failed_in_a_row >= MAX_FAILED_STEPS:
            raise EngineFailed(
                f"{self._failed_in_a_row} steps in a row could not be computed; the last: {what}"
            ) from error
        return self.scheduler.fail_step(plan, what, now)

    def sleep(self, level: int, now: float) -> None:
        """Give memory back (see Runner.sleep). Requests wait meanwhile; running ones are computed anew after `wake`.

        Raises ValueError for a level the runner does not do, and is then as before.
        """
        self.runner.sleep(level)
        self.scheduler.reset_prefix_cache(now, preempt_running=True)

    def wake(self) -> None:
        """Bring back what `sleep` gave up."""
        self.runner.wake()


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
