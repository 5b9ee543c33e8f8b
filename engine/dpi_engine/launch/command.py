"""`dpi serve`: the subcommand. Light: what it starts is imported when it runs."""

from __future__ import annotations

import argparse
import os

from dpi_engine import collector
from dpi_engine.config import settings as table


class ServeCommand:
    name = "serve"
    help = "serve a model: rank 0 with its endpoint, or headless ranks"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        table.add_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        settings = table.from_args(args, os.environ)

        with collector.paused():
            from dpi_engine.config.logs import setup_logging
            from dpi_engine.launch.launcher import launch

        setup_logging(settings.log_level, settings.log_format, "launcher")
        return launch(settings)


COMMAND = ServeCommand()
