"""A core that is one step ahead: while the device computes a step, the next one is planned and launched.

What a step draws is not known then, but that it draws one token for each of its sequences is. So the step after it can
be planned where nothing else may change: see Scheduler.schedule_ahead. A sequence that turns out to have ended is
computed once for nothing, and what comes out is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from dpi_engine.core.engine import CoreTimes, EngineCore, Executor
from dpi_engine.core.outputs import StepOutputs
from dpi_engine.core.plan import StepPlan, StepResult
from dpi_engine.core.scheduler import Scheduler


class Flying(Protocol):
    """A step that the device was told to compute."""

    plan: StepPlan

    def wait(self) -> StepResult: ...


class Launcher(Executor, Protocol):
    """What runs the steps (worker.ahead_runner.AheadRunner)."""

    def launch(self, plan: StepPlan) -> Flying: ...


class _Failed:
    """A step that could not be launched."""

    def __init__(self, plan: StepPlan, error: Exception) -> None:
        self.plan, self._error = plan, error

    def wait(self) -> StepResult:
        raise self._error


class AheadCore(EngineCore):
    """As EngineCore. Between two calls of `step` one step may be on the device already; `settle` takes its result."""

    runner: Launcher

    def __init__(self, scheduler: Scheduler, runner: Launcher) -> None:
        super().__init__(scheduler, runner)
        self._flying: Flying | None = None
        self._settled = StepOutputs()
        self.ahead = 0
        """Steps that were launched before the result of the one before them."""

    def has_work(self) -> bool:
        return self._flying is not None or bool(self._settled) or super().has_work()

    def step(self, now: float, before_apply: Callable[[], None] | None = None) -> StepOutputs:
        """As EngineCore.step, for the step that is on the device, or else the next one."""
        began = time.perf_counter()
        self.computed = self.failed = False
        out, self._settled = self._settled, StepOutputs()
        first = self._flying or self._launch(self.scheduler.schedule(now) if super().has_work() else None)
        if first is None:
            return out.merged(StepOutputs(finished=self.scheduler.take_finished()))
        scheduled = time.perf_counter()
        self._flying = None
        self._flying = self._launch(self.scheduler.schedule_ahead(now))
        self.ahead += self._flying is not None
        return out.merged(self._apply(first, now, before_apply, began, scheduled))

    def _launch(self, plan: StepPlan | None) -> Flying | None:
        if plan is None:
            return None
        try:
            return self.runner.launch(plan)
        except Exception as error:
            return _Failed(plan, error)

    def _apply(
        self, flying: Flying, now: float, before_apply: Callable[[], None] | None, began: float, scheduled: float
    ) -> StepOutputs:
        plan = flying.plan
        self.step_tokens = plan.num_tokens
        launched = time.perf_counter()
        try:
            result = flying.wait()
        except Exception as error:
            return self._failed(plan, error, now)
        self.computed = True
        self._failed_in_a_row = 0
        if before_apply is not None:
            before_apply()
        computed = time.perf_counter()
        out = self.scheduler.apply(plan, result, now)
        self.times = CoreTimes(
            scheduled - began, launched - scheduled, computed - launched, 0.0, time.perf_counter() - computed
        )
        return out

    def settle(self, now: float) -> None:
        """Wait for the step on the device. The next `step` reports what came of it; there is work until then."""
        flying, self._flying = self._flying, None
        if flying is not None:
            at = time.perf_counter()
            self._settled = self._settled.merged(self._apply(flying, now, None, at, at))

    def sleep(self, level: int, now: float) -> None:
        self.settle(now)
        super().sleep(level, now)
