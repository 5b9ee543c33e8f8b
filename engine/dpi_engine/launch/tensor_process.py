"""A worker of a rank other than its first: loads its part of the model, then computes what the first one orders."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from typing import Any

from dpi_engine.config.errors import ConfigError
from dpi_engine.launch import child
from dpi_engine.launch.exit_codes import EXIT_CRASHED, EXIT_OK, EXIT_REFUSED
from dpi_engine.launch.spec import ChildSpec, TensorPart
from dpi_engine.launch.tensor_channel import Call, Channel, Done, Failed, Stage
from dpi_engine.launch.torch_import import import_torch
from dpi_engine.wire.errors import WorkerLost

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 0.25

BEAT_EVERY_S = 0.5


class TensorProcess:
    """One worker. `run` returns when the rank has no more use for it."""

    def __init__(self, spec: ChildSpec, part: TensorPart, stop: threading.Event) -> None:
        self._spec, self._part, self._stop = spec, part, stop
        self._channel = Channel(socket.socket(fileno=part.channel))
        self._told = 0.0
        self._model: Any = None
        self._caches: Any = None

    def run(self) -> int:
        try:
            self._run()
        except KeyboardInterrupt:
            return EXIT_OK
        except Exception as error:
            if self._stop.is_set():  # an import that the stop broke off may end in an error of its own
                return EXIT_OK
            refused = isinstance(error, ConfigError) or type(error).__name__ == "OpsUnavailable"
            text = str(error) if refused else f"{type(error).__name__}: {error}"
            log.log(logging.ERROR, "%s", text, exc_info=None if refused else error)
            try:
                self._channel.send(Failed(error=text, refused=refused))
            except OSError:
                log.debug("the first worker is gone")
            return EXIT_REFUSED if refused else EXIT_CRASHED
        return EXIT_OK

    def _check(self) -> None:
        if os.getppid() != self._spec.parent:
            raise WorkerLost("the first worker of the rank is gone")

    def _progress(self, stage: str, fraction: float | None) -> None:
        now = time.monotonic()
        if now - self._told >= PROGRESS_EVERY_S:
            self._told = now
            self._channel.send(Stage(stage=stage, fraction=fraction))

    def _run(self) -> None:
        import_torch()
        import torch

        from dpi_engine.config.tensor_parallel import Shard
        from dpi_engine.launch.engine_loading import Parts
        from dpi_engine.worker.memory import device_memory
        from dpi_engine.worker.nccl_group import NcclGroup
        from dpi_engine.worker.plan_region import Order, PlanRegion
        from dpi_engine.worker.shared_group import SharedGroup
        from dpi_engine.worker.shared_region import SharedRegion

        part = self._part
        region = SharedRegion(part.memory_bytes, part.memory)
        region.close()
        plans = PlanRegion(region, part.size, self._check, create=False)
        shard = Shard(part.size, part.index)
        parts = Parts.of(self._spec, part.dtype, self._progress, part.index)
        device = parts.ops.device
        group: SharedGroup | NcclGroup
        if device.type == "cpu":
            group = SharedGroup(shard, region, part.plan_bytes, self._check, create=False)
        else:
            group = NcclGroup(shard, part.store, device)
        self._model = parts.open_model(group)

        def loaded() -> Done:
            memory = device_memory(device)
            return Done(free=memory.free, total=memory.total, own=memory.own)

        def beat() -> None:
            while True:
                plans.beat(part.index)
                time.sleep(BEAT_EVERY_S)

        threading.Thread(target=beat, name="beats", daemon=True).start()
        self._channel.send(loaded())
        while True:
            if plans.wait(part.index) is Order.STEP:
                self._model.forward(plans.read_step(part.index, device), self._caches)
                continue
            call = self._channel.receive(5.0)
            if not isinstance(call, Call):
                raise WorkerLost(f"the first worker of the rank ordered a call and sent {call!r}")
            if call.name == "load":
                self._model = self._model or parts.open_model(group)
            elif call.name == "caches":
                self._caches = None
                self._caches = self._model.new_caches(call.value)
            elif call.name == "sleep":
                self._caches = None
                if call.value == 2:
                    self._model = None
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            else:
                raise WorkerLost(f"the first worker of the rank asked for {call.name!r}, which is not known")
            self._channel.send(loaded() if call.name == "load" else Done())


def main() -> int:
    stop = threading.Event()

    def terminate() -> None:
        stop.set()
        raise KeyboardInterrupt

    try:
        spec = child.start(terminate)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert spec.tensor is not None
        return TensorProcess(spec, spec.tensor, stop).run()
    except KeyboardInterrupt:
        return EXIT_OK
