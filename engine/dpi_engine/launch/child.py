"""How child processes begin and end: read the spec, tie their life to the launcher's, set up logging and signals."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import msgspec

from dpi_engine.config.logs import setup_logging
from dpi_engine.launch.parent import end_with_parent
from dpi_engine.launch.spec import ChildSpec


def start(on_terminate: Callable[[], None]) -> ChildSpec:
    """Read the spec from standard input and install signal handlers. Raises msgspec.MsgspecError for a damaged spec.

    `on_terminate` runs at SIGTERM and SIGINT, from the first instruction on. Ends this process when the one that
    started it is gone already.
    """
    end_with_parent(signal.SIGKILL)  # a killed launcher leaves nothing behind; spec.parent shows one that is gone

    def handler(signum: int, frame: FrameType | None) -> None:
        on_terminate()

    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGINT, handler)
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=ChildSpec)
    if os.getppid() != spec.parent:
        os._exit(1)
    setup_logging(spec.settings.log_level, spec.settings.log_format, spec.name)
    return spec


def run(main: Callable[[], int]) -> NoReturn:
    """Be a process that holds a model, to its end; an error that nobody took is printed, with exit code 1.

    `main` closes what others must hear of. The rest is left to the kernel: taking down an interpreter with torch in it
    costs half a second of CPU, which on a busy machine is longer than the launcher waits.
    """
    try:
        code = main()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a pipe that nobody reads any more
            stream.flush()
    os._exit(code)
