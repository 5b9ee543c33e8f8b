"""Which fields of an object mean nothing without a cluster, so that `dpi up` can say so."""

from __future__ import annotations

from typing import Any

import msgspec

from dpi_operator.api.types import DataParallelInference

CLUSTER_ONLY = (
    "engine.image",
    "engine.imagePullPolicy",
    "engine.imagePullSecrets",
    "engine.command",
    "engine.env",
    "engine.envFrom",
    "engine.resources",
    "engine.gpuResourceName",
    "loadBalancing.service",
    "loadBalancing.perRankServices",
    "loadBalancing.inferencePool",
    "template",
    "rollout",
    "revisionHistoryLimit",
    "restartedAt",
    "paused",
    "scheduling",
    "disruption",
    "lifecycle.preStopSeconds",
    "lifecycle.terminationGracePeriodSeconds",
    "probes",
    "storage",
    "security.networkPolicy",
    "security.serviceAccountName",
    "credentials",
    "metrics",
    "failurePolicy.backoff.baseSeconds",
    "failurePolicy.backoff.maxSeconds",
    "failurePolicy.stuckTerminatingSeconds",
    "failurePolicy.reformTimeoutSeconds",
)
"""Paths below spec."""


def _without_empty(value: Any) -> Any:
    """Objects whose every field is at its default are left with nothing, and dropped."""
    if not isinstance(value, dict):
        return value
    pruned = {k: _without_empty(v) for k, v in value.items()}
    return {k: v for k, v in pruned.items() if v != {}}


def ignored_fields(dpi: DataParallelInference) -> list[str]:
    """Those of CLUSTER_ONLY that the object sets to something else than the default."""
    spec: dict[str, Any] = _without_empty(msgspec.to_builtins(dpi.spec))
    found = []
    for path in CLUSTER_ONLY:
        value: Any = spec
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value:
            found.append(path)
    return found
