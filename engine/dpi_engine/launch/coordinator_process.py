"""The coordinator as a child of the launcher."""

from __future__ import annotations

import logging
import time

from dpi_engine.coordinator import Coordinator
from dpi_engine.launch import child
from dpi_engine.launch.control import ControlThread, CoordinatorReport, ToChild
from dpi_engine.launch.exit_codes import EXIT_CRASHED, EXIT_OK
from dpi_engine.launch.failures import give_up
from dpi_engine.wire.coordination import CoordinatorState
from dpi_engine.wire.messages import Dialect

log = logging.getLogger(__name__)


def main() -> int:
    running: list[Coordinator] = []

    def terminate() -> None:
        for coordinator in running:
            coordinator.stop()

    spec = child.start(terminate)
    ends = spec.coordinator
    if ends is None:
        log.error("the spec has no coordinator endpoints")
        return EXIT_CRASHED
    settings = spec.settings
    dialect = Dialect(settings.data_parallel_protocol)
    try:
        coordinator = Coordinator(
            CoordinatorState(settings.data_parallel_size, dialect, spec.waves, now=time.monotonic()),
            front=ends.front_bind,
            back=ends.back_bind,
            pull=ends.pull_bind,
        )
    except OSError as e:
        return give_up(e)
    running.append(coordinator)

    def report() -> CoordinatorReport:
        counts = coordinator.counters.snapshot()
        return CoordinatorReport(listening=True, malformed={f"{s}:{r}": n for (s, r), n in counts.items()})

    def ignore(_: ToChild) -> None:
        return None

    control = ControlThread(spec.control, spec.name, report, ignore)
    control.start()
    try:
        coordinator.run()
    finally:
        control.stop()
    return EXIT_OK
