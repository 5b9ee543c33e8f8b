"""`dpi bench`: a closed-loop streaming load generator for any OpenAI endpoint."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from dpi_engine.launch.exit_codes import EXIT_CRASHED, EXIT_INTERRUPTED, EXIT_USAGE
from dpi_engine.tools.arguments import wrong_seconds


class BenchCommand:
    name = "bench"
    help = "load an endpoint and print throughput and latencies"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from dpi_engine.tools.endpoint import add_endpoint_arguments

        add_endpoint_arguments(parser)
        parser.add_argument("--streams", type=int, default=8, help="requests in flight (8)")
        parser.add_argument(
            "--requests", type=int, default=None, help="requests in a round (default: as many as streams)"
        )
        parser.add_argument("--input-tokens", type=int, default=128, help="tokens of each prompt (128)")
        parser.add_argument(
            "--output-tokens", type=int, default=128, help="tokens of each answer, always as many (128)"
        )
        parser.add_argument("--rounds", type=int, default=1, help="rounds, each with other prompts (1)")
        parser.add_argument("--warmup", type=int, default=1, help="short requests before the first round (1)")
        parser.add_argument("--seed", type=int, default=0, help="chooses the prompts (0)")
        parser.add_argument(
            "--timeout", type=float, default=600.0, help="seconds without a byte that fail a request (600)"
        )
        parser.add_argument("--json", action="store_true", help="one JSON object per round instead of the table")

    def run(self, args: argparse.Namespace) -> int:
        import asyncio

        from dpi_engine.tools.endpoint import EndpointError
        from dpi_engine.tools.load import BenchError, bench

        for name in ("streams", "requests", "input_tokens", "output_tokens", "rounds"):
            if getattr(args, name) is not None and getattr(args, name) < 1:
                print(f"dpi bench: --{name.replace('_', '-')} must be at least 1", file=sys.stderr)
                return EXIT_USAGE
        if args.warmup < 0:
            print("dpi bench: --warmup must be at least 0", file=sys.stderr)
            return EXIT_USAGE
        if wrong_seconds("dpi bench", "--timeout", args.timeout):
            return EXIT_USAGE
        try:
            return asyncio.run(bench(args))
        except (EndpointError, BenchError) as e:
            print(f"dpi bench: {e}", file=sys.stderr)
            return e.code if isinstance(e, EndpointError) else EXIT_CRASHED
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED


COMMAND: Any = BenchCommand()
