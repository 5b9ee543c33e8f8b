"""Schema of the parts of an object that are Kubernetes' own types, and of lists that are merged by a key.

The structs read these parts as plain dicts; the fragments go into the CRD beside what is derived from the struct.
"""

from __future__ import annotations

from typing import Any

_NUMBER = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)"
_QUANTITY: dict[str, Any] = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "pattern": rf"^[+-]?{_NUMBER}([KMGTPE]i|[numkMGTPE]|[eE][+-]?{_NUMBER})?$",
    "x-kubernetes-int-or-string": True,
}
_AMOUNTS: dict[str, Any] = {"type": "object", "additionalProperties": _QUANTITY}

RESOURCES: dict[str, Any] = {
    "properties": {
        "limits": {**_AMOUNTS, "description": "Most that the container may use, by resource name."},
        "requests": {**_AMOUNTS, "description": "What the scheduler sets aside for the container, by resource name."},
        "claims": {
            "type": "array",
            "description": "Names of the pod's resource claims that the container uses.",
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string", "description": "Name of an entry in the pod's resourceClaims."},
                    "request": {"type": "string", "description": "One request of the claim; empty means all."},
                },
            },
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
        },
    }
}
"""Requests and limits of a container."""

NAMED_OPEN: dict[str, Any] = {
    "items": {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"type": "string", "minLength": 1, "description": "Name, unique in the list."}},
        "x-kubernetes-preserve-unknown-fields": True,
    },
    "x-kubernetes-list-type": "map",
    "x-kubernetes-list-map-keys": ["name"],
}
"""A list of Kubernetes objects with a name, which two appliers may own element by element."""

NAMED: dict[str, Any] = {
    "items": {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"type": "string", "minLength": 1, "description": "Name, unique in the list."}},
    },
    "x-kubernetes-list-type": "map",
    "x-kubernetes-list-map-keys": ["name"],
}
"""References by name alone."""

ATOMIC: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}
"""A list that has one owner: its order matters, or its elements have no key."""

POD_TEMPLATE: dict[str, Any] = {
    "properties": {
        "metadata": {
            "type": "object",
            "description": "Labels and annotations that every pod carries beside the operator's own.",
            "properties": {
                "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
            },
        },
        "spec": {
            "type": "object",
            "description": "A pod's spec; what the operator sets itself wins.",
            "x-kubernetes-preserve-unknown-fields": True,
        },
    }
}

CLAIM: dict[str, Any] = {
    "required": ["claimName"],
    "properties": {
        "claimName": {"type": "string", "minLength": 1, "description": "Name of a PersistentVolumeClaim."},
        "readOnly": {"type": "boolean", "description": "Mount the claim without the right to write."},
    },
}

EMPTY_DIR: dict[str, Any] = {
    "properties": {
        "medium": {"type": "string", "enum": ["", "Memory"], "description": "Memory keeps the volume in RAM."},
        "sizeLimit": {**_QUANTITY, "description": "Most that the volume may hold."},
    }
}


def keyed(key: str) -> dict[str, Any]:
    """A list of structs that is merged by the field `key`."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
