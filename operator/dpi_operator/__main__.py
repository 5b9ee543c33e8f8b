"""`dpi-operator`: run the operator, print the CRD, print the version."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from dpi_engine.config.logs import LEVELS, setup_logging
from dpi_engine.launch.exit_codes import EXIT_USAGE
from dpi_engine.standard_streams import HelpParser, run_command
from dpi_engine.tools.arguments import path, whole, wrong_seconds

ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

MOST_PORT = 65535


def _own_namespace() -> str:
    """Of the pod that this runs in; `default` outside one."""
    try:
        return ACCOUNT_NAMESPACE.read_text(encoding="utf-8").strip() or "default"
    except OSError:
        return "default"


def _parser() -> argparse.ArgumentParser:
    parser = HelpParser(prog="dpi-operator", description="Operator of DataParallelInference objects.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run the operator until it is told to stop")
    run.add_argument(
        "--namespace", action="append", default=[], metavar="NS", help="look after this namespace only (repeatable)"
    )
    run.add_argument(
        "--metrics-port", type=whole(0, MOST_PORT), default=8080, help="port of /healthz, /readyz, /metrics (8080)"
    )
    run.add_argument("--lease-namespace", default=None, metavar="NS", help="where the lease is (the pod's namespace)")
    run.add_argument("--lease-name", default="dpi-operator", metavar="NAME", help="name of the lease")
    run.add_argument("--workers", type=whole(1), default=10, help="objects planned at the same time (10)")
    run.add_argument("--api-concurrency", type=whole(1), default=20, help="API calls at the same time (20)")
    run.add_argument("--resync-seconds", type=float, default=600.0, help="every object is looked at this often (600)")
    run.add_argument("--cluster-domain", default="cluster.local", help="DNS domain of the cluster")
    run.add_argument(
        "--webhook-port", type=whole(0, MOST_PORT), default=None, help="port of the validating webhook (no webhook)"
    )
    run.add_argument(
        "--webhook-certificates",
        type=path,
        default=Path("/etc/dpi-operator/tls"),
        metavar="DIR",
        help="folder of its tls.crt and tls.key, which may be renewed (/etc/dpi-operator/tls)",
    )
    run.add_argument("--log-level", choices=LEVELS, default="info")
    run.add_argument("--log-format", choices=("text", "json"), default="text")
    commands.add_parser("crd", help="print the CustomResourceDefinition as YAML")
    commands.add_parser("version", help="print the version")
    return parser


def _version() -> str:
    try:
        return metadata.version("dpinference")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 after a stop that was asked for, 3 when the lease was lost, 1 otherwise."""
    return run_command("dpi-operator", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    args = _parser().parse_args(argv)
    if args.command == "version":
        print(f"dpi-operator {_version()}")
        return 0
    if args.command == "crd":
        from dpi_operator.api.crd import manifest_yaml

        sys.stdout.write(manifest_yaml())
        return 0
    if wrong_seconds("dpi-operator", "--resync-seconds", args.resync_seconds):
        return EXIT_USAGE
    import asyncio

    from dpi_operator.handlers.service import Options, run

    setup_logging(args.log_level, args.log_format, "operator")
    if args.log_level != "debug":
        logging.getLogger("kopf").setLevel(logging.WARNING)  # it tells of every event that it hands over
    options = Options(
        namespaces=tuple(args.namespace),
        metrics_port=args.metrics_port,
        lease_namespace=args.lease_namespace or os.environ.get("DPI_POD_NAMESPACE") or _own_namespace(),
        lease_name=args.lease_name,
        workers=args.workers,
        api_concurrency=args.api_concurrency,
        resync_s=args.resync_seconds,
        cluster_domain=args.cluster_domain,
        webhook_port=args.webhook_port,
        webhook_certificates=args.webhook_certificates,
    )
    return asyncio.run(run(options))


if __name__ == "__main__":
    sys.exit(main())
