"""What an error of the operating system means for the process that meets it: one line, and an exit code."""

from __future__ import annotations

import logging

from dpi_engine.launch.exit_codes import EXIT_CRASHED, EXIT_REFUSED
from dpi_engine.wire.sockets import TooFewDescriptors

log = logging.getLogger(__name__)


def give_up(error: OSError) -> int:
    """Log `error` as one line, and the exit code: another start may find a socket free, but no higher limit."""
    if isinstance(error, TooFewDescriptors):
        log.error("%s", error.strerror)
        return EXIT_REFUSED
    log.error("%s", error)
    return EXIT_CRASHED
