"""The devices of ranks that share experts, as the loop of a rank links and leaves them."""

from __future__ import annotations

from dpi_engine.wire.exchange.device_links import DeviceLinks
from dpi_engine.worker.runner import Runner


class LinkedDevices:
    """DeviceGroup (core/coupled.py): the links, and what the runner recorded over them."""

    def __init__(self, links: DeviceLinks, runner: Runner) -> None:
        self._links, self._runner = links, runner

    def join(self) -> None:
        self._links.join()
        self._runner.joined()

    def leave(self) -> None:
        self._links.leave()
        self._runner.left()
