"""Settings from their three sources: flags over environment over YAML file. Every error names its source."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from dpi_engine.config.errors import SettingsError, near
from dpi_engine.config.fields import Field
from dpi_engine.config.refusals import advice
from dpi_engine.standard_streams import HelpParser

_NUMBER = re.compile(r"-\d+(\.\d*)?")
_CLOSE = 0.85  # an unknown DPI_ variable this like a known one is a slip of the pen, not another program's


class FlagParser(HelpParser):
    """A parser that raises SettingsError in place of exiting, and says more about flags it does not know.

    Underscores in long flags are taken for dashes. `advise`, where set, knows more about a flag than its spelling.
    """

    advise: Callable[[str], str | None] | None = None

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}. `{self.prog} --help` lists the flags.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if args is not None:
            args = self._named(list(args))
        return super().parse_known_args(args, namespace)

    def _named(self, argv: list[str]) -> list[str]:
        known = self._option_string_actions
        result: list[str] = []
        for i, token in enumerate(argv):
            if token == "--":
                return result + argv[i:]
            name, equals, value = token.partition("=")
            if not token.startswith("-") or token == "-" or " " in name or _NUMBER.fullmatch(token):
                result.append(token)
                continue
            if name.startswith("--"):
                name = name.replace("_", "-")
            if name not in known:
                told = self.advise(name) if self.advise else None
                alike = [k for k in known if k.startswith("--no-") == name.startswith("--no-")]
                raise SettingsError(told or f"flag {name} is not known.{near(name, alike)}")
            result.append(name + equals + value)
        return result


def add_arguments(parser: argparse.ArgumentParser, fields: Iterable[Field], groups: Sequence[str]) -> None:
    """One argument per field. Values stay text and absent flags stay absent: conversion is `read_sources`' work."""
    if isinstance(parser, FlagParser):
        parser.advise = advice
    parser.usage = f"{parser.prog} MODEL [flags]"
    sections = {name: parser.add_argument_group(name) for name in groups}
    parser.add_argument(
        "--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file of settings; flags and DPI_* win over it"
    )
    for field in fields:
        section = sections[field.flag.group]
        common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": help_text(field).replace("%", "%%")}
        if field.name == "model":
            section.add_argument("model", nargs="?", metavar="MODEL", **common)
            section.add_argument("--model", dest="model_flag", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
            continue
        common["dest"] = field.name
        if field.kind is bool:
            section.add_argument(*field.options, action=argparse.BooleanOptionalAction, **common)
            continue
        common["metavar"] = metavar(field)
        if field.kind is list:
            section.add_argument(*field.options, nargs="+", action="extend", **common)
        else:
            section.add_argument(*field.options, **common)


def metavar(field: Field) -> str:
    """Placeholder of a flag's value in the help."""
    if field.flag.metavar:
        return field.flag.metavar
    if field.flag.choices:
        return "{" + ",".join(field.flag.choices) + "}"
    return {int: "N", float: "SECONDS", str: "TEXT", list: "TEXT"}[field.kind]


def help_text(field: Field) -> str:
    """Help with the default, where it has one that says something."""
    if field.default is None or field.default == [] or field.name == "model":
        return field.flag.help
    return f"{field.flag.help} (default: {default_text(field)})"


def default_text(field: Field) -> str:
    """The default as one would write it; `unset` for none."""
    if field.kind is bool:
        return "on" if field.default else "off"
    if field.default is None or field.default == []:
        return "unset"
    return f"{field.default:g}" if field.kind is float else str(field.default)


def read_sources(args: argparse.Namespace, env: Mapping[str, str], fields: Sequence[Field]) -> dict[str, Any]:
    """Values by field name, those given somewhere only. Raises one SettingsError with a line per wrong value."""
    problems: list[str] = []
    path = getattr(args, "config", None)
    if path == "":
        raise SettingsError("flag --config: expected a file, got an empty text; leave the flag out for none")
    path = path or env.get("DPI_CONFIG")
    values = _from_yaml(path, fields, problems) if path else {}
    values |= _from_env(env, fields, problems)
    values |= _from_flags(args, fields, problems)
    if problems:
        raise SettingsError("\n".join(problems))
    return values


def _from_flags(args: argparse.Namespace, fields: Sequence[Field], problems: list[str]) -> dict[str, Any]:
    given = vars(args)
    values: dict[str, Any] = {}
    for field in fields:
        raw = given.get(field.name)
        where = f"flag {field.option}"
        if field.name == "model":
            if raw is not None and given.get("model_flag") not in (None, raw):
                problems.append(f"the model is given twice: {raw!r} and --model {given['model_flag']!r}")
            where = "MODEL"
            raw = given.get("model_flag") if raw is None else raw
        if raw is None:
            continue
        try:
            if field.kind is bool:
                values[field.name] = raw
            elif field.kind is list:
                values[field.name] = field.from_native(raw)
            else:
                values[field.name] = field.from_text(raw)
        except ValueError:
            problems.append(_refused(where, field, raw))
    return values


def _from_env(env: Mapping[str, str], fields: Sequence[Field], problems: list[str]) -> dict[str, Any]:
    by_env = {field.env: field for field in fields}
    values: dict[str, Any] = {}
    for name in sorted(n for n in env if n.startswith("DPI_")):
        text = env[name]
        field = by_env.get(name)
        where = f"environment variable {name}"
        if field is None:
            if slip := _slip(name, by_env):
                problems.append(f"{where} is not known. Did you mean {slip!r}?")
            continue
        try:
            values[field.name] = field.from_text(text)
        except ValueError:
            line = _refused(where, field, text)
            if "://" in text and field.kind is int:
                line += (
                    ' Kubernetes puts such a value there for a Service named "dpi": set enableServiceLinks: false '
                    "in the pod, or give the Service another name."
                )
            elif not text:
                line += " Unset the variable to get the default."
            problems.append(line)
    return values


def _slip(name: str, known: Iterable[str]) -> str | None:
    if name in ("DPI_CONFIG", "DPI_POD_IP", "DPI_POD_NAME", "DPI_POD_NAMESPACE"):
        return None
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=_CLOSE)), None)


def _from_yaml(path: str, fields: Sequence[Field], problems: list[str]) -> dict[str, Any]:
    from dpi_engine.config.yaml_file import load_yaml  # most starts have no file, and PyYAML is a tenth of them

    by_name = {field.name: field for field in fields}
    values: dict[str, Any] = {}
    for key, value in load_yaml(path).items():
        where = f"file {path}, key {key}"
        name = str(key).replace("-", "_")
        field = by_name.get(name)
        if field is None:
            told = advice("--" + name.replace("_", "-"))
            known = [n.replace("_", "-") for n in by_name]
            problems.append(f"{where}: {told}" if told else f"{where} is not known.{near(str(key), known)}")
            continue
        if name in values:
            problems.append(f"{where} is given twice, with dashes and with underscores")
            continue
        if value is None:
            continue
        try:
            values[name] = field.from_native(value)
        except ValueError:
            line = _refused(where, field, value)
            if isinstance(value, str) and field.kind in (int, float, bool):
                line += " Remove the quotes." if _plain(value, field) else ""
            elif field.kind is str:
                line += " Put it in quotes."
            problems.append(line)
    return values


def _plain(text: str, field: Field) -> bool:
    try:
        field.from_text(text)
    except ValueError:
        return False
    return True


def _refused(where: str, field: Field, got: Any) -> str:
    hint = ""
    if field.flag.choices and isinstance(got, str):
        hint = near(got, field.flag.choices)
    return f"{where}: expected {field.expected}, got {field.show(got)}.{hint}"
