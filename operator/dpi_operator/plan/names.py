"""Names, labels and owner references of everything made for one object. Selectors use only labels from here."""

from __future__ import annotations

from typing import Any

from dpi_operator.api.types import API_VERSION, GROUP, KIND, DataParallelInference

MANAGER = "dpi-operator"
"""Field manager of server-side apply, value of the managed-by label, controller named in events."""

MANAGED_BY = "app.kubernetes.io/managed-by"
L_NAME = f"{GROUP}/name"
L_GROUP = f"{GROUP}/group-index"
L_POD = f"{GROUP}/pod-index"
L_RANK_START = f"{GROUP}/rank-start"
L_RANK_COUNT = f"{GROUP}/rank-count"
L_ROLE = f"{GROUP}/role"
L_RUNTIME = f"{GROUP}/runtime"
L_REVISION = f"{GROUP}/revision"

A_APPLIED = f"{GROUP}/applied"
"""Digest of the manifest as last applied."""

GATE_JOINED = f"{GROUP}/joined"
"""Readiness gate of pods whose engine has no probe of its own: opened once the group's handshake is complete."""

POD_MONITOR = "PodMonitor"
POD_GROUP = "PodGroup"
VOLCANO_POD_GROUP = "PodGroup.scheduling.volcano.sh"
PLUGINS_POD_GROUP = "PodGroup.scheduling.x-k8s.io"
KUEUE = "Kueue"
INFERENCE_POOL = "InferencePool"
"""Kinds that not every cluster has. Of two kinds with one name each has its API group behind a dot."""

ENGINE = "engine"
"""Name of the engine container."""


def client_service(name: str) -> str:
    return name


def rank_service(name: str, group: int, rank: int) -> str:
    return f"{name}-{group}-rank-{rank}"


def internal_service(name: str) -> str:
    return f"{name}-internal"


def state_config_map(name: str) -> str:
    return f"{name}-state"


def engine_account(name: str) -> str:
    return f"{name}-engine"


def revision_name(name: str, revision: str) -> str:
    return f"{name}-{revision}"


def group_name(name: str, revision: str, group: int) -> str:
    return f"{name}-{revision}-{group}"


def common_labels(dpi: DataParallelInference, component: str) -> dict[str, str]:
    """Labels of every child."""
    return {
        "app.kubernetes.io/name": "dataparallelinference",
        "app.kubernetes.io/instance": dpi.metadata.name,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/part-of": "dataparallelinference",
        MANAGED_BY: MANAGER,
        L_NAME: dpi.metadata.name,
    }


def child_selector(name: str) -> str:
    """Label selector of all children of one object."""
    return f"{MANAGED_BY}={MANAGER},{L_NAME}={name}"


def owner_reference(dpi: DataParallelInference) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": dpi.metadata.name,
        "uid": dpi.metadata.uid,
        "controller": True,
    }


def child_metadata(dpi: DataParallelInference, name: str, component: str) -> dict[str, Any]:
    """Metadata of a child: name, namespace, labels, owner."""
    return {
        "name": name,
        "namespace": dpi.metadata.namespace,
        "labels": common_labels(dpi, component),
        "ownerReferences": [owner_reference(dpi)],
    }
