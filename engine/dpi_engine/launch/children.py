"""One supervised child process: start, watch, restart with a bounded back-off, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from dpi_engine.launch.exit_codes import EXIT_LOST_HEAD, EXIT_REFUSED
from dpi_engine.launch.spec import ChildKind, ChildSpec

log = logging.getLogger(__name__)

BEGIN = "dpi_engine.launch.begin"
"""Runs the `main` of one of these modules."""

MODULES = {
    ChildKind.ENGINE: "dpi_engine.launch.engine_process",
    ChildKind.API: "dpi_engine.launch.api_process",
    ChildKind.COORDINATOR: "dpi_engine.launch.coordinator_process",
}

FINAL = {
    EXIT_REFUSED: "was refused, see its last message",
    EXIT_LOST_HEAD: "found no head in time, see its last message",
}
"""Exit codes after which a child is not started again."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """At most `limit` restarts within `window_s`; the n-th waits base * 2^(n-1), `max_delay_s` at most."""

    limit: int = 5
    window_s: float = 600.0
    base_s: float = 0.5
    max_delay_s: float = 30.0

    def delay(self, recent: int) -> float | None:
        """Seconds to wait before the next restart after `recent` ones in the window, or None when used up."""
        if recent >= self.limit:
            return None
        return min(self.base_s * 2**recent, self.max_delay_s)


def describe_exit(code: int) -> str:
    """`exit code 3` or `killed by SIGKILL`."""
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exit code {code}"


@dataclass
class Child:
    """A child and its restarts.

    `on_exit(child, code)` runs at each exit, `on_give_up(child, why)` when no restart follows.
    """

    spec: ChildSpec
    environment: Mapping[str, str]
    on_exit: Callable[[Child, int], None]
    on_give_up: Callable[[Child, str], None]
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0
    stopping: bool = False
    finished: bool = False
    _recent: list[float] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._supervise())
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A process that cannot even be started is given up, and says so."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.finished = True
            self.on_give_up(self, f"{self.spec.name} cannot be started: {type(error).__name__}: {error}")

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    async def _spawn(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            BEGIN,
            MODULES[self.spec.kind],
            stdin=asyncio.subprocess.PIPE,
            env={**os.environ, **self.environment},
            start_new_session=True,  # a Ctrl-C in the terminal reaches the launcher alone, which drains
        )
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(msgspec.json.encode(msgspec.structs.replace(self.spec, parent=os.getpid())))
            await process.stdin.drain()
        process.stdin.close()
        return process

    async def _supervise(self) -> None:
        while not self.stopping:
            self.process = await self._spawn()
            code = await self.process.wait()
            if self.stopping:
                break
            self.on_exit(self, code)
            if code in FINAL:
                self.finished = True
                self.on_give_up(self, f"{self.spec.name} {FINAL[code]}")
                return
            now = time.monotonic()
            self._recent = [t for t in self._recent if now - t < self.policy.window_s]
            delay = self.policy.delay(len(self._recent))
            if delay is None:
                self.finished = True
                many = f"{len(self._recent) + 1} times within {self.policy.window_s:.0f} s, last by "
                how = f"ended ({describe_exit(code)})" if not self._recent else f"ended {many}{describe_exit(code)}"
                self.on_give_up(self, f"{self.spec.name} {how}")
                return
            self._recent.append(now)
            self.restarts += 1
            self.spec.incarnation += 1
            log.warning("%s ended (%s); starting it again in %.1f s", self.spec.name, describe_exit(code), delay)
            await asyncio.sleep(delay)
        self.finished = True

    def stop(self) -> None:
        """Let it end: no restart any more, SIGTERM now."""
        self.stopping = True
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                assert self.process is not None
                self.process.send_signal(signal.SIGTERM)

    async def join(self, timeout_s: float) -> None:
        """Wait for the end after `stop`; SIGKILL when `timeout_s` is over."""
        self.stopping = True
        if self.alive:
            assert self.process is not None
            try:
                async with asyncio.timeout(timeout_s):
                    await self.process.wait()
            except TimeoutError:
                log.warning("%s did not end within %.0f s and is killed", self.spec.name, timeout_s)
                with contextlib.suppress(ProcessLookupError):
                    self.process.kill()
                await self.process.wait()
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
