"""Where the tools print tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from dpi_engine.launch.exit_codes import EXIT_PIPE


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """As rich does, but with the exit code of all tools."""
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise SystemExit(EXIT_PIPE) from None


def make_console(file: Any = None) -> Console:
    """A console on `file`, by default on standard output."""
    return _Console(file=file, highlight=False)
