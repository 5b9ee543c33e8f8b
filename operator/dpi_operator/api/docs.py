"""docs/reference/manifest.md from the types of the object: `python -m dpi_operator.api.docs [FILE]`."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from dpi_operator.api.types import API_VERSION, KIND, Metadata, Spec
from dpi_operator.local.ignored import CLUSTER_ONLY

_HEAD = f"""# Fields of a {KIND}

<!-- Generated from the types of the object by `python -m dpi_operator.api.docs`; edit the types. -->

`apiVersion: {API_VERSION}`, `kind: {KIND}`. [How to run a manifest](../how-to/run-a-manifest.md) shows one in use.

Paths begin below the object; `[]` is an element of a list. A field that is not listed is refused, with the nearest
name. Fields marked ○ mean nothing to `dpi up`, which runs the object as processes on one machine and names those of
them that are set.
"""


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One field: `default` and `kind` in words, `bounds` without the type; empty where there is none."""

    path: str
    kind: str
    default: str
    bounds: str
    description: str


def rows() -> list[FieldRow]:
    """Every field of metadata.name and spec, in the order of the types; structs before their own fields."""
    name = next(f for f in _fields(Metadata) if f.encode_name == "name")
    return [_row("metadata.name", name, "Name of the object; pods begin with it."), *_walk("spec", Spec)]


def render() -> str:
    """The whole page: a section per object of the spec, what is not one before them."""
    sections: dict[str, list[FieldRow]] = {"General": []}
    everything = rows()
    for row in everything:
        top = ".".join(row.path.split(".")[:2]).removesuffix("[]")
        inside = any(_within(other.path, top) and other.path != top for other in everything)
        sections.setdefault(f"`{top}`" if inside else "General", []).append(row)
    parts = [_HEAD]
    for title, lines in sections.items():
        parts += [f"\n## {title}\n", "| field | type | default | bounds | meaning |\n|---|---|---|---|---|"]
        parts += [_line(row) for row in lines]
    return "\n".join(parts) + "\n"


def _line(row: FieldRow) -> str:
    mark = " ○" if any(_within(row.path, f"spec.{path}") for path in CLUSTER_ONLY) else ""
    bounds = row.bounds.replace("|", "\\|")
    return f"| `{row.path}`{mark} | {row.kind} | {row.default} | {bounds} | {row.description} |"


def _within(path: str, top: str) -> bool:
    return path == top or path.startswith((top + ".", top + "["))


def _fields(kind: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return info.fields


def _walk(path: str, kind: type[msgspec.Struct]) -> Iterator[FieldRow]:
    for field in _fields(kind):
        below = f"{path}.{field.encode_name}"
        yield _row(below, field)
        plain, _, _ = _unwrap(field.type)
        if isinstance(plain, inspect.StructType):
            yield from _walk(below, plain.cls)
        elif isinstance(plain, inspect.ListType) and isinstance(plain.item_type, inspect.StructType):
            yield from _walk(below + "[]", plain.item_type.cls)


def _row(path: str, field: inspect.Field, description: str = "") -> FieldRow:
    plain, optional, told = _unwrap(field.type)
    return FieldRow(path, _kind(plain), _default(field, plain, optional), _bounds(plain), description or told)


def _unwrap(kind: inspect.Type) -> tuple[inspect.Type, bool, str]:
    """(the type without description and null, whether null is allowed, the description)"""
    optional, told = False, ""
    while True:
        if isinstance(kind, inspect.Metadata):
            told = told or (kind.extra_json_schema or {}).get("description", "")
            kind = kind.type
        elif isinstance(kind, inspect.UnionType) and any(isinstance(t, inspect.NoneType) for t in kind.types):
            optional = True
            rest = tuple(t for t in kind.types if not isinstance(t, inspect.NoneType))
            kind = rest[0] if len(rest) == 1 else inspect.UnionType(rest)
        else:
            return kind, optional, told


def _kind(kind: inspect.Type) -> str:
    kind, _, _ = _unwrap(kind)
    if isinstance(kind, inspect.UnionType):
        return " or ".join(_kind(t) for t in kind.types)
    if isinstance(kind, inspect.ListType):
        return f"list of {_kind(kind.item_type)}s"
    if isinstance(kind, inspect.EnumType | inspect.StrType):
        return "text"
    names: dict[type[inspect.Type], str] = {
        inspect.IntType: "whole number",
        inspect.FloatType: "number",
        inspect.BoolType: "true or false",
        inspect.DictType: "object",
        inspect.StructType: "object",
        inspect.AnyType: "any",
    }
    return names[type(kind)]


def _default(field: inspect.Field, plain: inspect.Type, optional: bool) -> str:
    if field.required:
        return "required"
    value: Any = field.default
    if value is msgspec.NODEFAULT:
        value = field.default_factory() if callable(field.default_factory) else None
    if value is None:
        return "unset"
    if isinstance(plain, inspect.StructType) and not optional:
        return "see below"
    if isinstance(value, enum.Enum):
        return f"`{value.value}`"
    if value in ("", [], {}):
        return "empty"
    return f"`{json.dumps(value) if not isinstance(value, str) else value}`"


def _bounds(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.EnumType):
        return ", ".join(f"`{member.value}`" for member in kind.cls)
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        if kind.ge is not None and kind.le is not None:
            return f"{kind.ge} to {kind.le}"
        return f"at least {kind.ge}" if kind.ge is not None else ""
    if isinstance(kind, inspect.StrType):
        parts = []
        if kind.min_length or kind.max_length:
            low, high = kind.min_length or 0, kind.max_length
            parts.append(f"{low} to {high} characters" if high else f"at least {low} character")
        return "; ".join([*parts, *([f"`{kind.pattern}`"] if kind.pattern else [])])
    if isinstance(kind, inspect.ListType) and kind.max_length:
        return f"at most {kind.max_length} elements"
    return ""


if __name__ == "__main__":
    text = render()
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
