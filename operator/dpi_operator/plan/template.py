"""Merging the user's pod template and ours: lists of named things by name, the user's scalars win."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from dpi_operator.api.types import GROUP
from dpi_operator.plan.names import ENGINE

RESERVED_POD_FIELDS = ("hostname", "subdomain", "restartPolicy", "enableServiceLinks", "hostNetwork")
"""Fields of the pod spec that addressing and recovery rest on."""

RESERVED_CONTAINER_FIELDS = ("image", "command", "args", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle")
"""Fields of the engine container that the object's own fields set."""

BY_NAME = ("containers", "initContainers", "volumes", "env", "imagePullSecrets", "readinessGates")
"""Lists whose entries are told apart by a key."""

KEYS = {"volumeMounts": "mountPath", "readinessGates": "conditionType", "ports": "name"}


def merge(ours: Any, users: Any, key: str = "") -> Any:
    """`ours` overlaid with `users`: objects field by field, keyed lists entry by entry, other lists appended."""
    if isinstance(ours, Mapping) and isinstance(users, Mapping):
        out = dict(ours)
        for name, value in users.items():
            out[name] = merge(out[name], value, name) if name in out else copy.deepcopy(value)
        return out
    if isinstance(ours, list) and isinstance(users, list):
        if key in BY_NAME or key in KEYS:
            field = KEYS.get(key, "name")
            out_list = list(ours)
            at = {entry.get(field): i for i, entry in enumerate(out_list) if isinstance(entry, Mapping)}
            for entry in users:
                i = at.get(entry.get(field)) if isinstance(entry, Mapping) else None
                if i is None:
                    out_list.append(copy.deepcopy(entry))
                else:
                    out_list[i] = merge(out_list[i], entry)
            return out_list
        return [*ours, *(copy.deepcopy(e) for e in users if e not in ours)]
    return copy.deepcopy(users)


def template_faults(template: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(path, message) of what a template must not set, and of parts with a wrong type."""
    found = []
    for key in template:
        if key not in ("metadata", "spec"):
            found.append((f"spec.template.{key}", "a pod template has metadata and spec"))
    spec = template.get("spec") or {}
    metadata = template.get("metadata") or {}
    if not isinstance(spec, Mapping) or not isinstance(metadata, Mapping):
        return [("spec.template", "metadata and spec are objects")]
    for key in metadata:
        if key not in ("labels", "annotations"):
            found.append((f"spec.template.metadata.{key}", "only labels and annotations are taken"))
    labels = metadata.get("labels") or {}
    if not isinstance(labels, Mapping):
        return [*found, ("spec.template.metadata.labels", "is an object of texts")]
    for key in labels:
        if str(key).startswith(f"{GROUP}/"):
            found.append((f"spec.template.metadata.labels[{key}]", "is set by the operator; remove it"))
    for key in RESERVED_POD_FIELDS:
        if key in spec:
            found.append((f"spec.template.spec.{key}", "is set by the operator; remove it"))
    for name in ("containers", "initContainers", "volumes"):
        entries = spec.get(name, [])
        if not isinstance(entries, list) or not all(isinstance(e, Mapping) and e.get("name") for e in entries):
            found.append((f"spec.template.spec.{name}", "is a list of objects, each with a name"))
            return found
    for container in spec.get("containers", []):
        if container["name"] == ENGINE:
            for key in RESERVED_CONTAINER_FIELDS:
                if key in container:
                    found.append(
                        (
                            f"spec.template.spec.containers[{ENGINE}].{key}",
                            "has its own field in the object (spec.engine, spec.probes, spec.lifecycle); use that",
                        )
                    )
    return found
