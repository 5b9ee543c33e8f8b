"""`dpi up -f FILE`: run a DataParallelInference on this machine, without a cluster."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dpi_engine import collector
from dpi_engine.tools.arguments import filled, path, wrong_seconds


class UpCommand:
    name = "up"
    help = "run a DataParallelInference on this machine, without a cluster"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "-f", "--filename", type=filled, required=True, metavar="FILE", help="manifest of one object"
        )
        parser.add_argument("--ask", metavar="QUESTION", help="ask one chat question, show the ranks, stop")
        parser.add_argument("--logs", action="store_true", help="print the engines' logs here too")
        parser.add_argument("--no-table", action="store_true", help="no live table of ranks")
        parser.add_argument(
            "--timeout", type=float, default=600.0, metavar="SECONDS", help="give up when not ready by then (600)"
        )
        parser.add_argument(
            "--state-dir",
            type=path,
            default=None,
            metavar="DIR",
            help="where logs go (default: ~/.cache/dpinference/up/NAME)",
        )

    def run(self, args: argparse.Namespace) -> int:
        import asyncio

        if wrong_seconds("dpi up", "--timeout", args.timeout):
            return 2
        if args.ask is not None and not args.ask.strip():
            print("dpi up: --ask: expected a question, got none", file=sys.stderr)
            return 2

        with collector.paused():
            from dpi_operator.api.read import ManifestError, read_manifest
            from dpi_operator.api.validate import validate
            from dpi_operator.local.runner import LocalRunner, UpOptions
            from dpi_operator.plan.pods import NotPlannable

        try:
            dpi = read_manifest(args.filename)
        except ManifestError as e:
            print(f"dpi up: {e}", file=sys.stderr)
            return 2
        findings = [str(f) for f in validate(dpi)]
        if not findings:
            try:
                options = UpOptions(
                    state_dir=args.state_dir or Path.home() / ".cache" / "dpinference" / "up" / dpi.metadata.name,
                    ask=args.ask,
                    logs=args.logs,
                    timeout_s=args.timeout,
                    table=not args.no_table,
                )

                async def main() -> int:
                    return await LocalRunner(dpi, options).run()

                return asyncio.run(main())
            except NotPlannable as e:
                findings = [str(e)]
        for finding in findings:
            print(f"dpi up: {args.filename}: {finding}", file=sys.stderr)
        return 2


COMMAND = UpCommand()
