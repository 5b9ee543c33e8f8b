"""The `dpi` command: finds its subcommands by entry points and runs one. Light: `dpi --help` imports no torch."""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from dpi_engine.config.errors import ConfigError, near
from dpi_engine.config.loading import FlagParser
from dpi_engine.launch.exit_codes import EXIT_OK, EXIT_USAGE
from dpi_engine.standard_streams import run_command

GROUP = "dpinference.commands"
DISTRIBUTION = "dpinference"

BUILT_IN = {
    "serve": "dpi_engine.launch.command:COMMAND",
    "chat": "dpi_engine.tools.chat:COMMAND",
    "ranks": "dpi_engine.tools.ranks:COMMAND",
    "bench": "dpi_engine.tools.bench:COMMAND",
    "up": "dpi_operator.local.up:COMMAND",
    "render": "dpi_operator.local.render:COMMAND",
    "status": "dpi_operator.local.status:COMMAND",
    "rollback": "dpi_operator.local.rollback:COMMAND",
}
"""The project's own subcommands, also for a checkout that is not installed, or was before some of them were there."""


class Command(Protocol):
    """One subcommand, the object an entry point of the group names. Its module must import nothing heavy."""

    name: str
    help: str  # one line for `dpi --help`

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add flags and positionals."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do the work; the exit code. A ConfigError raised here is printed without a traceback."""
        ...


Loader = Callable[[], Command]


def commands() -> dict[str, Loader]:
    """Loaders of all subcommands by name: the built-in ones, and those that installed distributions add."""
    import importlib.metadata  # slow, and a built-in subcommand does without

    added: dict[str, Loader] = {e.name: e.load for e in importlib.metadata.entry_points(group=GROUP)}
    return added | {name: _loader(target) for name, target in BUILT_IN.items()}


def version() -> str:
    """Version of the installed distribution, or `unknown (not installed)` in a bare checkout."""
    import importlib.metadata

    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `dpi ARGV`; the exit code: the command's own, 2 for wrong input, 130 for Ctrl-C."""
    args = list(sys.argv[1:] if argv is None else argv)
    return run_command("dpi", lambda: _run(args))


def _run(args: list[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error does: text may be of any language
    try:
        return _dispatch(args)
    except ConfigError as e:
        print(f"dpi: error: {e}", file=sys.stderr)
        return EXIT_USAGE


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(_overview(commands()))
        return EXIT_OK if args else EXIT_USAGE
    if args[0] in ("-V", "--version"):
        print(f"dpi {version()}")
        return EXIT_OK
    name, rest = args[0], args[1:]
    loader = _loader(BUILT_IN[name]) if name in BUILT_IN else None
    if loader is None and (loader := (known := commands()).get(name)) is None:
        raise ConfigError(f"{name!r} is no subcommand; there are: {', '.join(known)}.{near(name, known)}")
    command = _load(name, loader)
    parser = FlagParser(prog=f"dpi {name}", description=command.help, allow_abbrev=False)
    command.add_arguments(parser)
    return command.run(parser.parse_args(rest))


def _loader(target: str) -> Loader:
    module, _, attribute = target.partition(":")

    def load() -> Command:
        command: Command = getattr(importlib.import_module(module), attribute)
        return command

    return load


def _load(name: str, loader: Loader) -> Command:
    try:
        return loader()
    except (ImportError, AttributeError) as e:
        raise ConfigError(
            f"subcommand {name!r} cannot be loaded: {e}. It may need an extra: "
            "pip install 'dpinference[engine]' or 'dpinference[operator]'."
        ) from e


def _overview(known: dict[str, Loader]) -> str:
    lines = ["usage: dpi COMMAND ...", "", "Data-parallel serving of large language models.", "", "commands:"]
    for name, loader in known.items():
        try:
            text = _load(name, loader).help
        except ConfigError as e:
            text = f"(not available: {e.__cause__})"
        lines.append(f"  {name:<10}{text}")
    return "\n".join([*lines, "", "`dpi COMMAND --help` lists a command's flags; `dpi --version` prints the version."])
