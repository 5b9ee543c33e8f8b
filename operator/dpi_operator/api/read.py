"""Reading a DataParallelInference from a manifest, with errors that say where, expected and got."""

from __future__ import annotations

import difflib
import re
from typing import Any

import msgspec
import yaml

from dpi_engine.config.yaml_file import OnceLoader
from dpi_operator.api.types import API_VERSION, KIND, DataParallelInference


class ManifestError(ValueError):
    """A manifest that cannot be used; the message names the file, the field, what was expected and what was found."""


def _at(document: Any, path: str) -> Any:
    value = document
    for key in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        try:
            value = value[key[0]] if key[0] else value[int(key[1])]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _type_at(path: str) -> Any:
    """What may stand at `path` ($.spec.engine): a struct or enumeration rather than others; None if nothing."""
    kind: Any = msgspec.inspect.type_info(DataParallelInference)
    for key in re.findall(r"\.(\w+)", path):
        field = next((f for f in getattr(kind, "fields", ()) if f.encode_name == key), None)
        if field is None:
            return None
        kind = field.type
        while isinstance(kind, msgspec.inspect.Metadata):
            kind = kind.type
        if isinstance(kind, msgspec.inspect.UnionType):
            named = (msgspec.inspect.StructType, msgspec.inspect.EnumType, msgspec.inspect.LiteralType)
            kind = next((t for t in kind.types if isinstance(t, named)), kind)
        if isinstance(kind, msgspec.inspect.ListType):
            kind = kind.item_type
    return kind


def _fields_at(path: str) -> list[str]:
    """camelCase names of the struct that stands at `path`."""
    return [f.encode_name for f in getattr(_type_at(path), "fields", ())]


def _choices_at(path: str) -> list[str]:
    """What the enumeration at `path` has."""
    kind = _type_at(path)
    if isinstance(kind, msgspec.inspect.EnumType):
        return [str(member.value) for member in kind.cls]
    return [str(value) for value in getattr(kind, "values", ())]


def _explain(error: msgspec.ValidationError, document: Any) -> str:
    text, _, path = str(error).partition(" - at `")
    path = path.rstrip("`") or "$"
    where = path.removeprefix("$.").removeprefix("$") or "the object"
    if m := re.search(r"unknown field `(\w+)`", text):
        near = difflib.get_close_matches(m[1], _fields_at(path), n=1)
        hint = f"; did you mean `{near[0]}`?" if near else f"; it has {', '.join(_fields_at(path)) or 'no fields'}"
        return f"{where}: there is no field `{m[1]}`{hint}"
    if m := re.search(r"missing required field `(\w+)`", text):
        return f"{where}: `{m[1]}` is required"
    got = _at(document, path)
    if text.startswith("Invalid enum value") and (choices := _choices_at(path)):
        text = f"expected one of {', '.join(choices)}"
    if got is not None:
        text = re.sub(r", got `\w+`$", "", text)  # its type, which the value shows
    return f"{where}: {text[:1].lower()}{text[1:]}" + ("" if got is None else f", got {got!r}")


def read_document(document: Any, source: str) -> DataParallelInference:
    """One parsed YAML document -> object with all defaults. Raises ManifestError."""
    if not isinstance(document, dict):
        raise ManifestError(f"{source}: expected one {KIND}, got {type(document).__name__}")
    for key, want in (("apiVersion", API_VERSION), ("kind", KIND)):
        if document.get(key) != want:
            raise ManifestError(f"{source}: {key}: expected {want}, got {document.get(key)!r}")
    try:
        return msgspec.convert(document, DataParallelInference)
    except msgspec.ValidationError as e:
        raise ManifestError(f"{source}: {_explain(e, document)}") from None


def the_document(path: str) -> Any:
    """The one DataParallelInference in a YAML file as it stands there, other kinds beside it ignored.

    A lone document of another kind is returned too: reading it says what is wrong. Raises ManifestError.
    """
    try:
        with open(path, encoding="utf-8") as f:
            documents = [d for d in yaml.load_all(f, Loader=OnceLoader) if d is not None]
    except OSError as e:
        raise ManifestError(f"{path}: cannot be read: {e.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as e:  # ValueError: no UTF-8, or no date such as 2026-02-31
        raise ManifestError(f"{path}: not YAML: {' '.join(str(e).split())}") from None
    ours = [d for d in documents if isinstance(d, dict) and d.get("kind") == KIND]
    if len(ours) != 1:
        if not ours and len(documents) == 1:
            return documents[0]
        kinds = ", ".join(str(d.get("kind")) if isinstance(d, dict) else type(d).__name__ for d in documents)
        raise ManifestError(f"{path}: expected one {KIND}, got {len(ours)} (documents: {kinds or 'none'})")
    return ours[0]


def read_manifest(path: str) -> DataParallelInference:
    """The one DataParallelInference in a YAML file, with all defaults. Raises ManifestError."""
    return read_document(the_document(path), path)
