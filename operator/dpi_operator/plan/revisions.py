"""Revisions: which fields roll groups, their hash, and the ControllerRevisions that keep them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from dpi_operator.api.types import DataParallelInference, Spec
from dpi_operator.plan.actions import Manifest
from dpi_operator.plan.names import L_REVISION, child_metadata, revision_name

HASH_DIGITS = 10

ROLLING = (
    "model",
    "parallelism",
    "loadBalancing.mode",
    "loadBalancing.supervisorPolicy",
    "engine",
    "template",
    "rankOverrides",
    "handshake.timeoutSeconds",
    "scheduling",
    "lifecycle",
    "probes",
    "storage",
    "security.controlChannel",
    "security.serviceAccountName",
    "credentials",
    "restartedAt",
)
"""Paths below spec whose change means other pods."""

NOT_ROLLING = ("parallelism.coupling", "engine.imagePullSecrets", "model.architecture")
"""Exceptions below them."""


def _get(document: Mapping[str, Any], path: str) -> Any:
    value: Any = document
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def _put(document: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        document = document.setdefault(key, {})
    document[last] = value


def _drop(document: dict[str, Any], path: str) -> None:
    *parents, last = path.split(".")
    for key in parents:
        document = document.get(key, {})
    document.pop(last, None)


def _pruned(value: Any) -> Any:
    """Without objects that have nothing in them: all their fields are at the default."""
    if not isinstance(value, dict):
        return value
    inner = {k: _pruned(v) for k, v in value.items()}
    return {k: v for k, v in inner.items() if v != {}}


def _told(value: Any) -> Any:
    """A value as plain data, without fields that equal their default: the API server writes those into objects."""
    if isinstance(value, msgspec.Struct):
        out = {}
        for field in msgspec.structs.fields(value):
            given, factory = getattr(value, field.name), field.default_factory
            default = factory() if factory is not msgspec.NODEFAULT else field.default
            if given != default or default is msgspec.NODEFAULT:
                out[field.encode_name] = _told(given)
        return out
    if isinstance(value, Mapping):
        return {k: _told(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_told(v) for v in value]
    return msgspec.to_builtins(value)


def rolling_fields(spec: Spec) -> dict[str, Any]:
    """What of the spec pods depend on, without fields at their default, which the API server writes into objects.

    So a field that a later version adds, or a default that it changes, rolls nothing.
    """
    document = _told(spec)
    out: dict[str, Any] = {}
    for path in ROLLING:
        value = _get(document, path)
        if value is not None:
            _put(out, path, value)
    for path in NOT_ROLLING:
        _drop(out, path)
    pruned: dict[str, Any] = _pruned(out)
    return pruned


def revision_hash(fields: Mapping[str, Any], collisions: int = 0) -> str:
    """10 hex digits."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{collisions}:{text}".encode()).hexdigest()[:HASH_DIGITS]


@dataclass(frozen=True, slots=True)
class Revision:
    """One revision: `dpi` is today's object with the rolling fields of then.

    `former`: the number that it had before the spec came back to it by this plan.
    """

    hash: str
    number: int
    fields: Mapping[str, Any]
    dpi: DataParallelInference
    former: int | None = None


def at_revision(dpi: DataParallelInference, fields: Mapping[str, Any]) -> DataParallelInference:
    """The object as it would be if its rolling fields were `fields`. Raises msgspec.ValidationError."""
    document = msgspec.to_builtins(dpi.spec)
    for path in ROLLING:
        value = _get(fields, path)
        if value is None:
            _drop(document, path)
    kept = {path: _get(msgspec.to_builtins(dpi.spec), path) for path in NOT_ROLLING}
    for path in ROLLING:
        value = _get(fields, path)
        if value is not None:
            _put(document, path, json.loads(json.dumps(value)))
    for path, value in kept.items():
        if value is None:
            _drop(document, path)
        else:
            _put(document, path, value)
    return msgspec.structs.replace(dpi, spec=msgspec.convert(document, Spec))


def stored_revisions(
    dpi: DataParallelInference, children: Mapping[tuple[str, str], Mapping[str, Any]]
) -> dict[str, Revision]:
    """Revisions in the cluster, by hash, without those that this version cannot read."""
    found = {}
    for (kind, _), live in children.items():
        if kind != "ControllerRevision":
            continue
        name = (live.get("metadata") or {}).get("labels", {}).get(L_REVISION, "")
        fields = (live.get("data") or {}).get("spec")
        if not name or not isinstance(fields, Mapping):
            continue
        try:
            found[name] = Revision(name, int(live.get("revision") or 0), fields, at_revision(dpi, fields))
        except msgspec.ValidationError:
            continue
    return found


def newest_revision(dpi: DataParallelInference, stored: Mapping[str, Revision]) -> tuple[Revision, int]:
    """The revision of the spec as it is, and how many hashes were taken by other specs."""
    fields, collisions = rolling_fields(dpi.spec), 0
    while True:
        name = revision_hash(fields, collisions)
        known = stored.get(name)
        if known is None or known.fields == fields:
            break
        collisions += 1
    top = max((r.number for r in stored.values()), default=0)
    number = known.number if known and known.number == top else top + 1
    former = known.number if known and known.number != top else None
    return Revision(name, number, fields, dpi, former), collisions


def controller_revision(dpi: DataParallelInference, revision: Revision) -> Manifest:
    metadata = child_metadata(dpi, revision_name(dpi.metadata.name, revision.hash), "revision")
    metadata["labels"][L_REVISION] = revision.hash
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": metadata,
        "revision": revision.number,
        "data": {"spec": dict(revision.fields)},
    }
