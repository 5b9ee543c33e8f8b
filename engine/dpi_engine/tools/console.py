"""Where the tools print tables."""

from __future__ import annotations

from rich.console import Console

from dpi_engine.launch.exit_codes import EXIT_PIPE


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """As rich does, but with the exit code of all tools."""
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise SystemExit(EXIT_PIPE) from None


def make_console() -> Console:
    return _Console(highlight=False)
