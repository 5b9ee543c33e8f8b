"""Calls that a front end may make on a rank: an allow-list, each one a function of this file. No name is looked up."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from dpi_engine.config.errors import ConfigError
from dpi_engine.core.engine import EngineCore
from dpi_engine.core.limits import PauseMode
from dpi_engine.core.outputs import StepOutputs
from dpi_engine.wire.errors import WorkerLost

log = logging.getLogger(__name__)

SLEEP_MODES = (PauseMode.ABORT, PauseMode.KEEP)
"""What may become of requests when memory is given up."""


class UtilityError(Exception):
    """The call cannot be done; the message goes to the caller."""


class Utilities:
    """The calls of one rank. `call` returns the value and the outputs that the call caused (aborted requests)."""

    def __init__(self, core: EngineCore, clock: Callable[[], float], profile_dir: str) -> None:
        self._core, self._clock, self._profile_dir = core, clock, profile_dir
        self._profiler: Any = None
        self.methods: dict[str, Callable[..., tuple[Any, StepOutputs]]] = {
            "get_supported_tasks": lambda: (["generate"], StepOutputs()),
            "reset_mm_cache": lambda: (None, StepOutputs()),  # no multi-modal models, so nothing is cached
            "reset_encoder_cache": lambda: (None, StepOutputs()),
            "reset_prefix_cache": self._reset_prefix_cache,
            "pause_scheduler": self._pause,
            "resume_scheduler": self._resume,
            "is_scheduler_paused": lambda: (self._core.scheduler.is_paused, StepOutputs()),
            "sleep": self._sleep,
            "wake_up": self._wake_up,
            "is_sleeping": lambda: (self._core.runner.asleep > 0, StepOutputs()),
            "profile": self._profile,
        }

    def call(self, method: str, args: list[Any]) -> tuple[Any, StepOutputs]:
        """Raises UtilityError for an unknown method, wrong arguments, or a failure of the call itself."""
        function = self.methods.get(method)
        if function is None:
            known = ", ".join(sorted(self.methods))
            hint = " (LoRA adapters are not in this version)" if "lora" in method else ""
            raise UtilityError(f"unknown method {method[:64]!r}{hint}; known: {known}")
        parameters = inspect.signature(function).parameters
        if len(args) > len(parameters):
            expected = f"at most {', '.join(parameters)}" if parameters else "none"
            raise UtilityError(f"{method}: wrong arguments {args!r}: expected {expected}")
        try:
            return function(*args)
        except UtilityError:
            raise
        except TypeError as e:
            raise UtilityError(f"{method}: wrong arguments {args!r}: {e}") from None
        except WorkerLost:
            raise  # the process must end
        except Exception as e:
            log.exception("%s failed", method)
            raise UtilityError(f"{method} failed: {type(e).__name__}: {e}") from None

    def _reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> tuple[bool, StepOutputs]:
        self._core.settle(self._clock())
        done = self._core.scheduler.reset_prefix_cache(self._clock(), preempt_running=reset_running_requests)
        return done, StepOutputs()

    def _pause(self, mode: str = "abort", clear_cache: bool = True) -> tuple[None, StepOutputs]:
        try:
            wanted = PauseMode(mode)
        except ValueError:
            raise UtilityError(f"pause mode {mode!r}: expected one of {', '.join(PauseMode)}") from None
        self._core.settle(self._clock())
        outputs = self._core.scheduler.pause(wanted)
        if clear_cache:
            self._core.scheduler.reset_prefix_cache(self._clock())
        return None, outputs

    def _resume(self) -> tuple[None, StepOutputs]:
        if self._core.runner.asleep:
            raise UtilityError("this rank sleeps: wake_up first")
        self._core.scheduler.resume()
        return None, StepOutputs()

    def _sleep(self, level: int = 1, mode: str = "abort") -> tuple[None, StepOutputs]:
        """0 pauses, 1 drops the KV cache too, 2 the weights as well. Requests that are kept are computed anew later."""
        if level not in (0, 1, 2):
            raise UtilityError(f"sleep level {level!r}: expected 0, 1 or 2")
        if mode not in SLEEP_MODES and level > 0:
            raise UtilityError(f"sleep mode {mode!r}: expected {' or '.join(SLEEP_MODES)} (nothing is waited for)")
        _, outputs = self._pause(mode)
        if level > 0:
            self._core.sleep(level, self._clock())
        return None, outputs

    def _wake_up(self, tags: list[str] | None = None) -> tuple[bool, StepOutputs]:
        if self._core.runner.asleep:
            try:
                self._core.wake()
            except (ConfigError, OSError) as e:
                raise UtilityError(f"the rank sleeps on, its weights cannot be read: {e}") from None
        self._core.scheduler.resume()
        return True, StepOutputs()

    def _profile(self, is_start: bool = True, prefix: str | None = None) -> tuple[str | None, StepOutputs]:
        """Start, or stop and write, a cProfile of the step loop; returns the file."""
        import cProfile
        import os

        if is_start:
            if self._profiler is not None:
                raise UtilityError("a profile is being taken already")
            self._profiler = cProfile.Profile()
            self._profiler.enable()
            return None, StepOutputs()
        if self._profiler is None:
            raise UtilityError("no profile is being taken: call profile(true) first")
        self._profiler.disable()
        os.makedirs(self._profile_dir, exist_ok=True)
        path = os.path.join(self._profile_dir, f"dpi-profile-{os.getpid()}-{int(self._clock())}.prof")
        self._profiler.dump_stats(path)
        self._profiler = None
        return path, StepOutputs()
