"""Workers of one rank as threads of one process, over the shared memory that processes use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dpi_engine.config.tensor_parallel import Shard
from dpi_engine.wire.errors import WorkerLost
from dpi_engine.worker.shared_group import SharedGroup, group_bytes
from dpi_engine.worker.shared_region import SharedRegion


class Workers:
    """`groups[i]` is worker i's; an error of one ends the waits of all."""

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.region = SharedRegion(group_bytes(size))
        self._failed = threading.Event()
        self.groups = [
            SharedGroup(Shard(size, i), self.region, 0, self._check, create=i == 0, timeout=timeout)
            for i in range(size)
        ]

    def _check(self) -> None:
        if self._failed.is_set():
            raise WorkerLost("another worker failed")

    def run(self, job: Callable[[int], Any]) -> list[Any]:
        """What job(i) gives for each worker, all at the same time."""

        def one(index: int) -> Any:
            try:
                return job(index)
            except BaseException:
                self._failed.set()
                raise

        with ThreadPoolExecutor(len(self.groups)) as pool:
            futures = [pool.submit(one, i) for i in range(len(self.groups))]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, WorkerLost):
                raise error
        if errors:
            raise errors[0]
        return [future.result() for future in futures]
