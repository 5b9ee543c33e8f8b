"""Why a pod cannot go on, and with which exit code its process ends."""

from __future__ import annotations

import logging

from dpi_engine.launch.exit_codes import EXIT_CRASHED, EXIT_REFUSED
from dpi_engine.wire.sockets import PathTooLong, TooFewDescriptors

log = logging.getLogger(__name__)


class LaunchFailed(RuntimeError):
    """The pod cannot go on; `code` is the process's exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def give_up(error: OSError) -> int:
    """Log `error` as one line, and the exit code: another start may find a socket free, not another limit or path."""
    if isinstance(error, TooFewDescriptors | PathTooLong):
        log.error("%s", error.strerror)
        return EXIT_REFUSED
    log.error("%s", error)
    return EXIT_CRASHED
