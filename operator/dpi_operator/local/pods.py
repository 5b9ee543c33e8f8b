"""A planned pod as a process on this machine, restarted with a back-off as a kubelet would."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dpi_engine.launch.parent import end_with_parent
from dpi_operator.plan.pods import PodPlan

EXIT_CONFIG = (2, 78)
"""Exit codes of the engine for flags or a configuration that no restart can mend."""

BACKOFF_BASE_S = 1.0
BACKOFF_MAX_S = 30.0
TAIL_LINES = 15


def backoff(restarts: int) -> float:
    """Seconds before restart number `restarts` + 1."""
    return min(BACKOFF_BASE_S * 2.0 ** min(restarts, 10), BACKOFF_MAX_S)  # the power itself has an end


@dataclass
class PodProcess:
    """Runs one pod until `stop`. `say` gets a line per event; `failed` is called once when it will not start again.

    Once it was ready for `forget_after_s` (as `seen` is told), earlier restarts do not count any more.
    """

    plan: PodPlan
    log_file: Path
    max_restarts: int | None
    say: Callable[[str], None]
    failed: Callable[[str], None]
    echo: bool = False
    extra_args: tuple[str, ...] = ()
    forget_after_s: float = 1200.0
    restarts: int = 0
    process: asyncio.subprocess.Process | None = None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    _ready_since: float | None = None
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._supervise())
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A pod that nobody watches any more must not pass for one that runs."""
        if not task.cancelled() and (error := task.exception()) is not None and not self._stop.is_set():
            self.failed(f"{self.plan.name}: it cannot be run: {type(error).__name__}: {error}")

    async def _copy_output(self, stream: asyncio.StreamReader) -> None:
        """To the end, whatever becomes of the copies: a pod whose output nobody reads stands still."""
        lost = 0
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # a line longer than the reader's limit; the rest follows
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self.tail.append(text)
            try:
                with self.log_file.open("ab", buffering=0) as log:  # opened anew: nothing is kept that failed once
                    log.write(line)
                if lost:
                    self.say(f"{self.plan.name}: {self.log_file} is written again; {lost} lines are missing")
                    lost = 0
            except OSError as e:
                if not lost:
                    self.say(f"{self.plan.name}: {self.log_file} cannot be written, the pod runs on: {e.strerror or e}")
                lost += 1
            if self.echo:
                try:
                    print(f"{self.plan.name} | {text}", file=sys.stderr, flush=True)
                except OSError:  # whoever read it is gone
                    self.echo = False

    async def _run_once(self) -> int:
        # Only the manifest configures a pod, as on a cluster; DPI_CACHE_DIR says where this machine keeps its caches.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DPI_") or k == "DPI_CACHE_DIR"}
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "dpi_engine",
            "serve",
            *self.plan.args,
            *self.extra_args,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**environment, "DPI_POD_NAME": self.plan.name},
            start_new_session=True,
            # No pod outlives the runner, however that ends (Linux).
            preexec_fn=functools.partial(end_with_parent, signal.SIGTERM, os.getpid()),
        )
        if self._stop.is_set():  # while it was being started
            self.terminate()
        assert self.process.stdout is not None
        copying = asyncio.create_task(self._copy_output(self.process.stdout))
        code = await self.process.wait()
        with contextlib.suppress(TimeoutError):  # a grandchild may hold the pipe for a moment
            async with asyncio.timeout(5):
                await copying
        return code

    def seen(self, ready: bool, now: float) -> None:
        """What a look at the pod gave, at the monotonic time `now`."""
        if not ready:
            self._ready_since = None
        elif self._ready_since is None:
            self._ready_since = now
        elif now - self._ready_since >= self.forget_after_s:
            self.restarts = 0

    async def _supervise(self) -> None:
        while not self._stop.is_set():
            code = await self._run_once()
            if self._stop.is_set():
                return
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            last = "\n".join(f"    {line}" for line in self.tail)
            if code in EXIT_CONFIG:
                self.failed(f"{self.plan.name}: configuration refused ({how}); its last lines:\n{last}")
                return
            if self.max_restarts is not None and self.restarts >= self.max_restarts:
                self.failed(f"{self.plan.name}: {how} after {self.restarts} restarts; its last lines:\n{last}")
                return
            wait = backoff(self.restarts)
            self.restarts += 1
            self.say(f"{self.plan.name}: {how}; restart {self.restarts} in {wait:.0f} s; its last lines:\n{last}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._stop.wait()

    def terminate(self) -> None:
        """SIGTERM, no restart any more. The second one ends running requests too."""
        self._stop.set()
        if self.process and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()

    async def join(self, timeout_s: float) -> bool:
        """Wait for the end; after `timeout_s` its whole process group is killed. True when it ended by itself."""
        self._stop.set()
        clean = True
        if self.process and self.process.returncode is None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self.process.wait()
            except TimeoutError:
                clean = False
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                await self.process.wait()
        if self._task:
            _, late = await asyncio.wait({self._task}, timeout=6)
            for task in late:
                task.cancel()
        return clean
