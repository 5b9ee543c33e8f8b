"""`dpi ranks`: the state and queue of every rank, live."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from dpi_engine.launch.exit_codes import EXIT_OK, EXIT_USAGE
from dpi_engine.tools.arguments import wrong_seconds

DEFAULT_MANAGEMENT_URL = "http://127.0.0.1:8081"


class RanksCommand:
    name = "ranks"
    help = "show every rank's state and queue, live"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--url", default=DEFAULT_MANAGEMENT_URL, help=f"management API of rank 0's pod ({DEFAULT_MANAGEMENT_URL})"
        )
        parser.add_argument("--once", action="store_true", help="print once and end")
        parser.add_argument("--json", action="store_true", help="print the document once, as JSON")
        parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between looks (1)")

    def run(self, args: argparse.Namespace) -> int:
        import asyncio

        from dpi_engine.tools.endpoint import EndpointError

        if wrong_seconds("dpi ranks", "--interval", args.interval):
            return EXIT_USAGE
        try:
            return asyncio.run(_main(args))
        except EndpointError as e:
            print(f"dpi ranks: {e}", file=sys.stderr)
            return e.code
        except KeyboardInterrupt:
            return EXIT_OK


def ranks_table(document: dict[str, Any]) -> Any:
    """A `/ranks` document as a table."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("rank", "pod", "state", "epoch", "waiting", "running", "kv", "steps", "note"):
        table.add_column(name, justify="left" if name in ("pod", "state", "note") else "right")
    for r in document.get("ranks", ()):
        note = r.get("error") or ("" if r["state"] == "READY" else r.get("stage", ""))
        table.add_row(
            str(r["rank"]),
            escape(r.get("pod", "")),
            r["state"],
            str(r.get("epoch", 0)),
            str(r.get("waiting", 0)),
            str(r.get("running", 0)),
            f"{100 * r.get('kv_usage', 0.0):.0f}%",
            str(r.get("steps", 0)),
            escape(note),  # errors have brackets of their own
        )
    return table


def _table_of(endpoint: Any, document: dict[str, Any]) -> Any:
    """The table, or an EndpointError for an answer that is no `/ranks` document."""
    from dpi_engine.tools.endpoint import EndpointError

    try:
        return ranks_table(document)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise EndpointError(f"{endpoint.base}/ranks: not the answer of a management API; is the port right?") from None


async def _main(args: argparse.Namespace) -> int:
    import asyncio
    import json

    from rich.live import Live

    from dpi_engine.tools.console import make_console
    from dpi_engine.tools.endpoint import Endpoint

    console = make_console()
    async with Endpoint(args.url) as endpoint:
        document = await endpoint.get("/ranks")
        if args.json:
            print(json.dumps(document, indent=2))
            return EXIT_OK
        if args.once or not console.is_terminal:
            console.print(_table_of(endpoint, document))
            return EXIT_OK
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(_table_of(endpoint, document), refresh=True)
                await asyncio.sleep(args.interval)
                document = await endpoint.get("/ranks")


COMMAND = RanksCommand()
