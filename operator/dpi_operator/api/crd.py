"""The CustomResourceDefinition, derived from the types: `python -m dpi_operator.api.crd` prints it.

Structural schema of apiextensions.k8s.io/v1: fields that the types do not have are pruned by the API server, defaults
are the types' own, and fields whose default is empty have none.
"""

from __future__ import annotations

import enum
import sys
from typing import Any

import msgspec
import yaml
from msgspec import inspect

from dpi_operator.api.cel import RULES
from dpi_operator.api.status import Status
from dpi_operator.api.types import CATEGORIES, GROUP, KIND, PLURAL, SHORT_NAME, VERSION, Spec

NAME = f"{PLURAL}.{GROUP}"

Schema = dict[str, Any]

HEADER = "# Generated from the operator's types by `python -m dpi_operator.api.crd`; edit those.\n"

ABOUT = (
    "A model served by groups of data-parallel ranks behind one endpoint. An object with a name, a model and an image "
    "is enough; everything else has a default."
)

_STATUS_LISTS = {"conditions": "type", "groups": "name", "ranks": "rank"}
"""Lists of the status and the field that is their key."""


def _column(name: str, path: str, about: str, kind: str = "string", wide: bool = False) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path, "description": about}
    return {**column, "priority": 1} if wide else column


COLUMNS = (
    _column("Mode", ".spec.loadBalancing.mode", "How requests reach ranks."),
    _column("Groups", ".spec.replicas", "Groups wanted.", "integer"),
    _column("Ready", ".status.readyReplicas", "Groups of which every rank is ready.", "integer"),
    _column("Updated", ".status.updatedReplicas", "Groups of the newest revision.", "integer"),
    _column("Ranks", ".status.rankSummary", "Ready and wanted ranks."),
    _column("GPUs", ".status.gpus", "GPUs that all groups ask for.", "integer"),
    _column("Available", '.status.conditions[?(@.type=="Available")].status', "Whether enough groups serve."),
    _column("Reason", '.status.conditions[?(@.type=="Ready")].reason', "Why the object is ready or is not."),
    _column("Age", ".metadata.creationTimestamp", "Time since the object was made.", "date"),
    _column("Model", ".spec.model.name", "Name of the model.", wide=True),
    _column("Revision", ".status.updateRevision", "Revision of the spec.", wide=True),
    _column("Restarts", ".status.restarts", "Recreations counted against the budget.", "integer", wide=True),
    _column("Waiting", ".status.waiting", "Requests that wait, over all ranks.", "integer", wide=True),
    _column("Endpoint", ".status.endpoint", "URL of the client Service.", wide=True),
)


def _default(field: inspect.Field) -> Any:
    """The field's default as JSON; NODEFAULT where it has none or an empty one."""
    value = field.default
    if value is msgspec.NODEFAULT and callable(field.default_factory):
        value = field.default_factory()
    if value in (None, "", [], {}) or value is msgspec.NODEFAULT or isinstance(value, msgspec.Struct):
        return msgspec.NODEFAULT
    return value.value if isinstance(value, enum.Enum) else value


def _filled(schema: Schema) -> bool:
    """Whether an object of this schema has defaults in it."""
    return any("default" in below for below in schema.get("properties", {}).values())


def _struct(kind: inspect.StructType, defaults: bool) -> Schema:
    properties: Schema = {}
    for field in kind.fields:
        schema = _schema(field.type, defaults)
        if defaults:
            default = _default(field)
            if default is not msgspec.NODEFAULT:
                schema["default"] = default
            elif _filled(schema) and not field.required and field.default is not None:
                schema["default"] = {}  # so that the defaults below it show and rules can read them
        elif field.encode_name in _STATUS_LISTS and schema["type"] == "array":
            schema["x-kubernetes-list-type"] = "map"
            schema["x-kubernetes-list-map-keys"] = [_STATUS_LISTS[field.encode_name]]
        properties[field.encode_name] = schema
    required = [f.encode_name for f in kind.fields if f.required]
    return {"type": "object", **({"required": required} if required else {}), "properties": properties}


def _number(kind: inspect.IntType) -> Schema:
    schema: Schema = {"type": "integer", "format": "int32" if kind.le is not None else "int64"}
    bounds = {"minimum": kind.ge, "maximum": kind.le}
    return schema | {name: value for name, value in bounds.items() if value is not None}


def _text(kind: inspect.StrType) -> Schema:
    bounds = {"minLength": kind.min_length, "maxLength": kind.max_length, "pattern": kind.pattern}
    return {"type": "string"} | {name: value for name, value in bounds.items() if value is not None}


def _union(kind: inspect.UnionType, defaults: bool) -> Schema:
    """`T | None` is T that may be left out; a number or a text is Kubernetes' int-or-string."""
    rest = [t for t in kind.types if not isinstance(t, inspect.NoneType)]
    if len(rest) == 1:
        return _schema(rest[0], defaults)
    merged: Schema = {}
    for member in rest:
        merged |= _schema(member, defaults)
    assert {type(t) for t in rest} == {inspect.IntType, inspect.StrType}, kind
    del merged["type"], merged["format"]
    return {"anyOf": [{"type": "integer"}, {"type": "string"}], **merged, "x-kubernetes-int-or-string": True}


def _mapping(kind: inspect.DictType) -> Schema:
    value = kind.value_type
    if isinstance(value, inspect.AnyType):
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {"type": "object", "additionalProperties": _schema(value, defaults=False)}


def _list(kind: inspect.ListType, defaults: bool) -> Schema:
    schema: Schema = {"type": "array", "items": _schema(kind.item_type, defaults)}
    return schema | ({"maxItems": kind.max_length} if kind.max_length is not None else {})


def _schema(kind: inspect.Type, defaults: bool) -> Schema:
    match kind:
        case inspect.Metadata():
            extra = kind.extra_json_schema or {}
            inner = _schema(kind.type, defaults)
            if "properties" in extra:  # the fragment says what is in the object, so unknown fields are pruned
                inner.pop("x-kubernetes-preserve-unknown-fields", None)
            if "enum" in extra:
                inner.pop("pattern", None)
            described = {"description": extra["description"]} if "description" in extra else {}
            return described | inner | extra
        case inspect.StructType():
            return _struct(kind, defaults)
        case inspect.EnumType():
            return {"type": "string", "enum": [member.value for member in kind.cls]}
        case inspect.IntType():
            return _number(kind)
        case inspect.StrType():
            return _text(kind)
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.UnionType():
            return _union(kind, defaults)
        case inspect.DictType():
            return _mapping(kind)
        case inspect.ListType():
            return _list(kind, defaults)
        case _:
            raise TypeError(f"no schema for {kind}")


def _with_rules(schema: Schema) -> Schema:
    """Adds every rule of cel.py at its place."""
    for rule in RULES:
        node = schema
        for key in rule.at.split(".") if rule.at else ():
            node = node["properties"][key]
        node.setdefault("x-kubernetes-validations", []).append(rule.manifest())
    return schema


def open_api_schema() -> Schema:
    """Schema of a whole object."""
    spec = {"description": "What is wanted."} | _schema(inspect.type_info(Spec), defaults=True)
    status = {"description": "What is, as the operator last saw it."} | _schema(
        inspect.type_info(Status), defaults=False
    )
    return _with_rules(
        {
            "description": ABOUT,
            "type": "object",
            "required": ["spec"],
            "properties": {
                "apiVersion": {"type": "string", "description": "Version of this schema."},
                "kind": {"type": "string", "description": f"Always {KIND}."},
                "metadata": {"type": "object"},
                "spec": spec,
                "status": status,
            },
        }
    )


def manifest() -> Schema:
    """The CustomResourceDefinition as the API takes it."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": NAME},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": [SHORT_NAME],
                "categories": list(CATEGORIES),
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": open_api_schema()},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": list(COLUMNS),
                }
            ],
        },
    }


class _Dumper(yaml.SafeDumper):
    """Writes equal parts out in full: anchors are hard to read and not every tool takes them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def manifest_yaml() -> str:
    """The CustomResourceDefinition as a file."""
    return HEADER + yaml.dump(manifest(), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


if __name__ == "__main__":
    sys.stdout.write(manifest_yaml())
