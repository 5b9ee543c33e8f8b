"""The end of every command: standard streams that are missing or take no more, Ctrl-C. Imports nothing heavy."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Callable
from typing import IO, Any, cast

from dpi_engine.launch.exit_codes import EXIT_CRASHED, EXIT_INTERRUPTED, EXIT_PIPE

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a write that name no file: what standard output goes to takes no more."""


class Unfailing:
    """A text stream that drops what it cannot write: its disk is full, its terminal or its reader is gone."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class HelpParser(argparse.ArgumentParser):
    """As argparse's, but help that cannot be written is an error, as all output is."""

    def print_help(self, file: Any = None) -> None:
        (file or sys.stdout).write(self.format_help())


def run_command(name: str, command: Callable[[], int]) -> int:
    """Exit code of `command`, the work of a program called `name`, or of what became of its output."""
    open_missing()
    with contextlib.redirect_stderr(cast(IO[str], Unfailing(sys.stderr))):  # an error keeps its code, heard or not
        return _run(name, command)


def _run(name: str, command: Callable[[], int]) -> int:
    try:
        try:
            return command()
        finally:  # also where argparse ends with its help
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has enough, as `head` does
        _silence(sys.stdout)
        return EXIT_PIPE
    except OSError as e:
        if e.filename is not None or e.errno not in FULL:
            raise
        _silence(sys.stdout)
        print(f"{name}: error: standard output: {e.strerror}", file=sys.stderr)
        return EXIT_CRASHED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def open_missing() -> None:
    """Where this process was started without standard input, output or error, /dev/null takes the place.

    Otherwise the next file or socket would get its number, and child processes would write to that.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number, which is this
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process lives


def _silence(stream: IO[str]) -> None:
    """What is still in the buffer would fail once more when the interpreter ends."""
    with contextlib.suppress(OSError, ValueError):  # not a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
