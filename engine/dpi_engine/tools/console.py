"""Where the tools print tables."""

from __future__ import annotations

from typing import IO, Any

from rich.console import Console

from dpi_engine.launch.exit_codes import EXIT_PIPE


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """As rich does, but with the exit code of all tools."""
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise SystemExit(EXIT_PIPE) from None


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


def make_console(file: Any = None) -> Console:
    """A console on `file`, by default on standard output."""
    return _Console(file=file, highlight=False)
