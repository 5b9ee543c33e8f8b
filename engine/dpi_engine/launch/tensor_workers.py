"""The other workers of a rank, as its first one keeps them: started, watched, asked, ended with it.

They are the rank's own processes: nothing outside knows them. When one ends, the rank cannot compute and ends too;
its launcher then starts the rank anew, and with it all workers. When the rank ends, the kernel ends them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from dpi_engine.config.errors import ConfigError
from dpi_engine.config.tensor_parallel import Shard
from dpi_engine.launch.children import BEGIN, describe_exit
from dpi_engine.launch.exit_codes import EXIT_CRASHED
from dpi_engine.launch.spec import ChildSpec, TensorPart
from dpi_engine.launch.tensor_channel import Call, Channel, Done, Failed, Stage, channel_pair
from dpi_engine.ops.tensor_group import TensorGroup
from dpi_engine.wire.errors import WorkerLost
from dpi_engine.worker.memory import Memory
from dpi_engine.worker.nccl_group import NcclGroup
from dpi_engine.worker.plan_region import PlanRegion
from dpi_engine.worker.shared_group import SharedGroup, group_bytes
from dpi_engine.worker.shared_region import SLICE_S, SharedRegion

log = logging.getLogger(__name__)

MODULE = "dpi_engine.launch.tensor_process"

LOAD_SILENCE_S = 900.0
"""A worker may be silent for this long while it loads: as long as it may wait for another to unpack the weights."""

FROZEN_S = 10.0
"""A loaded worker that has shown no life for this long is frozen, as the launcher takes a rank to be."""

STANDSTILL_S = 1.0
"""Who has not looked for this long stood still itself, or computed, and counts nobody's silence meanwhile."""

CALL_S = 120.0
STOP_S = 2.0
GPU_GRACE_S = 5.0
"""With a worker gone, a first worker that hangs on its GPU is ended after this long."""


class TensorWorkers:
    """Workers 1 .. size - 1 of the rank of `child`; this process is worker 0. `close` must be called."""

    def __init__(self, child: ChildSpec, dtype: str, max_model_len: int) -> None:
        """Starts them. `dtype` as the head settled it. Raises OSError."""
        settings = child.settings
        self.size = settings.tensor_parallel_size
        self._rank = child.index
        plan_bytes = PlanRegion.bytes_needed(
            self.size, settings.max_num_seqs, settings.max_num_batched_tokens, max_model_len
        )
        self._region = SharedRegion(plan_bytes + group_bytes(self.size))
        self.plans = PlanRegion(self._region, self.size, self.check, create=True)
        self._shard = Shard(self.size, 0)
        # Made before any worker can look at its semaphores.
        self._shared = SharedGroup(self._shard, self._region, plan_bytes, self.check, create=True)
        self._nccl: NcclGroup | None = None
        self._store = str(Path(child.run_dir) / f"tensor-{child.name}-{os.getpid()}")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._closing = False
        self._loaded = False
        self._looked = 0.0
        self._heard = [(0, 0.0)] * self.size  # beats, and when they were last seen to grow
        try:
            for index in range(1, self.size):
                self._start(child, index, dtype, plan_bytes)
        except BaseException:
            self.close()
            raise
        self._region.close()

    def _start(self, child: ChildSpec, index: int, dtype: str, plan_bytes: int) -> None:
        ours, theirs = channel_pair()
        self._channels.append(Channel(ours))
        part = TensorPart(
            index=index,
            size=self.size,
            memory=self._region.fd,
            memory_bytes=self._region.size,
            plan_bytes=plan_bytes,
            channel=theirs.fileno(),
            store=self._store,
            dtype=dtype,
        )
        spec = msgspec.structs.replace(child, name=f"{child.name}.{index}", parent=os.getpid(), tensor=part)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", BEGIN, MODULE],
                stdin=subprocess.PIPE,
                pass_fds=(self._region.fd, theirs.fileno()),
            )
        self._processes.append(process)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # its end is noticed by `check`
            pipe.write(msgspec.json.encode(spec))

    @property
    def pids(self) -> list[int]:
        """Of all workers of the rank, this one first."""
        return [os.getpid(), *(p.pid for p in self._processes)]

    def group(self, device: torch.device) -> TensorGroup:
        """Where partial results of this worker meet those of the others. On GPUs waits for them, and raises
        RuntimeError when they do not come.
        """
        if device.type == "cpu":
            return self._shared
        if self._nccl is None:
            threading.Thread(target=self._watch, name="tensor-workers", daemon=True).start()
            self._nccl = NcclGroup(self._shard, self._store, device)
        return self._nccl

    def check(self) -> None:
        """Raise WorkerLost if a worker has ended or is frozen."""
        for index, process in enumerate(self._processes, 1):
            code = process.poll()
            if code is not None:
                why = self._last_words(index)
                raise WorkerLost(
                    f"worker {index} of rank {self._rank} (pid {process.pid}) ended ({describe_exit(code)})"
                    f"{': ' + why if why else ''}; the rank ends with it and is started again whole"
                )

        if self._loaded:
            self._check_beats(time.monotonic())

    def _check_beats(self, now: float) -> None:
        gap = now - self._looked
        if gap < SLICE_S:
            return
        self._looked = now
        stood_still = gap if gap > STANDSTILL_S else 0.0
        for index, beats in enumerate(self.plans.beats()):
            known, since = self._heard[index]
            since += stood_still
            self._heard[index] = (known, since) if beats == known else (beats, now)
            if index and now - self._heard[index][1] > FROZEN_S:
                raise WorkerLost(
                    f"worker {index} of rank {self._rank} (pid {self._processes[index - 1].pid}) is frozen: no sign of "
                    f"life for {FROZEN_S:.0f} s; the rank ends with it and is started again whole"
                )

    def _last_words(self, index: int) -> str:
        for _ in range(1000):  # what it sent before lies in front
            message = self._channels[index - 1].receive(0.0)
            if message is None:
                break
            if isinstance(message, Failed):
                return message.error
        return ""

    def ask(self, name: str, value: int = 0) -> None:
        """Have all workers do it, and wait. Raises WorkerLost, ConfigError."""
        self.begin(name, value)
        self.wait(name, CALL_S)

    def begin(self, name: str, value: int = 0) -> None:
        """Have all workers do it; `wait` must follow. Raises WorkerLost."""
        self._loaded &= name != "load"  # reading weights may hold the interpreter
        for index, channel in enumerate(self._channels, 1):
            try:
                channel.send(Call(name=name, value=value))
            except OSError as error:
                time.sleep(0.05)
                self.check()
                raise WorkerLost(f"worker {index} of rank {self._rank} takes no message: {error}") from error
        self.plans.order_call()

    def wait(
        self, what: str, silence: float = LOAD_SILENCE_S, progress: Callable[[str, float | None], None] | None = None
    ) -> list[Done]:
        """Until all have done `what`, silent for `silence` seconds at most. Raises WorkerLost, ConfigError."""
        found = []
        for index, channel in enumerate(self._channels, 1):
            heard = time.monotonic()
            while True:
                message = channel.receive(0.1)
                now = time.monotonic()
                if isinstance(message, Done):
                    found.append(message)
                    break
                if isinstance(message, Failed):
                    text = f"worker {index} of rank {self._rank}: {message.error}"
                    raise ConfigError(text) if message.refused else WorkerLost(text)
                if isinstance(message, Stage):
                    heard = now
                    if progress is not None:
                        progress(f"worker {index}: {message.stage}", message.fraction)
                    continue
                self.check()
                if progress is not None:
                    progress(f"waiting for worker {index}", None)
                if now - heard > silence:
                    raise WorkerLost(
                        f"worker {index} of rank {self._rank} (pid {self._processes[index - 1].pid}) has been silent "
                        f"for {silence:.0f} s ({what})"
                    )
        if what == "load":
            self._looked = time.monotonic()
            self._heard = [(-1, self._looked)] * self.size
            self._loaded = True
        return found

    def memories(self, done: list[Done]) -> list[Memory]:
        """Of each worker's device, as they told when they had loaded."""
        return [Memory(d.free, d.total, d.own) for d in done]

    def _watch(self) -> None:
        """With GPUs a step waits where no signal reaches it; then the process is ended from here."""
        while not self._closing:
            time.sleep(0.25)
            try:
                self.check()
            except WorkerLost as error:
                time.sleep(GPU_GRACE_S)
                if not self._closing:
                    log.error("%s", error)
                    os._exit(EXIT_CRASHED)
                return

    def close(self) -> None:
        """End all workers, at once where they do not end when told."""
        self._closing = True
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + STOP_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)
        for channel in self._channels:
            channel.close()
        self._region.close()
        with contextlib.suppress(OSError):
            os.unlink(self._store)
