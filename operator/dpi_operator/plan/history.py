"""Going back to an earlier revision: which there are, which is meant, and the change of the spec that brings it back.

Pure. The rolling fields become those of then; everything else of the spec stays as it is now.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dpi_operator.api.types import Spec
from dpi_operator.plan.names import L_REVISION
from dpi_operator.plan.revisions import NOT_ROLLING, ROLLING, rolling_fields


class NoSuchRevision(ValueError):
    """There is nothing to go back to; the message says what there is."""


@dataclass(frozen=True, slots=True)
class Past:
    """One ControllerRevision. `created`: RFC 3339."""

    number: int
    hash: str
    fields: Mapping[str, Any]
    created: str = ""

    def __str__(self) -> str:
        return f"{self.number} ({self.hash})"


def past_revisions(documents: Iterable[Mapping[str, Any]]) -> list[Past]:
    """ControllerRevisions of one object, the newest first; what the operator did not write is left out."""
    found = []
    for document in documents:
        metadata = document.get("metadata") or {}
        name = (metadata.get("labels") or {}).get(L_REVISION)
        fields = (document.get("data") or {}).get("spec")
        if name and isinstance(fields, Mapping):
            created = metadata.get("creationTimestamp") or ""
            found.append(Past(int(document.get("revision") or 0), name, fields, created))
    return sorted(found, key=lambda r: -r.number)


def choose(past: Iterable[Past], spec: Spec, to: str = "") -> Past:
    """The revision with number or hash `to`; without one the newest that the spec is not. Raises NoSuchRevision."""
    known, now = list(past), rolling_fields(spec)
    listed = ", ".join(map(str, known)) or "none"
    if to:
        found = [r for r in known if to in (str(r.number), r.hash)]
        if not found:
            raise NoSuchRevision(f"there is no revision {to}; there are: {listed}")
        return found[0]
    others = [r for r in known if r.fields != now]
    if not others:
        raise NoSuchRevision(f"there is no other revision to go back to; there are: {listed}")
    return others[0]


def _has_other_fields(path: str) -> bool:
    """Whether an object of the spec holds fields besides those that a revision keeps."""
    return any(p.startswith(f"{path}.") for p in (*ROLLING, *NOT_ROLLING))


def _difference(have: Mapping[str, Any], want: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    patch: dict[str, Any] = {}
    for key in sorted(have.keys() | want.keys()):
        here, old, new = f"{path}{key}", have.get(key), want.get(key)
        if isinstance(old, Mapping) and (isinstance(new, Mapping) or (new is None and _has_other_fields(here))):
            if below := _difference(old, new or {}, f"{here}."):
                patch[key] = below
        elif old != new:
            patch[key] = new
    return patch


def patch_to(spec: Spec, fields: Mapping[str, Any]) -> dict[str, Any]:
    """JSON merge patch after which the rolling fields of `spec` are `fields`; {} when they are.

    A field that was at its default then is removed, so that it gets the default of today.
    """
    return _difference(rolling_fields(spec), fields)


def changes(patch: Mapping[str, Any], spec: Mapping[str, Any], path: str = "spec") -> list[str]:
    """The patch in words, a field a line: path, what is there, what comes."""
    lines = []
    for key, value in sorted(patch.items()):
        here, old = f"{path}.{key}", spec.get(key)
        if isinstance(value, Mapping) and (old is None or isinstance(old, Mapping)):
            lines += changes(value, old or {}, here)
        else:
            new = "its default" if value is None else json.dumps(value)
            lines.append(f"{here}: {'unset' if old is None else json.dumps(old)} -> {new}")
    return lines
