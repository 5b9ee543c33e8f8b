"""The pod of one PodPlan."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from dpi_operator.api.types import DataParallelInference, Device, Mode, Probe, RankOverride, Runtime, TopologyMode
from dpi_operator.api.validate import parse_ranks
from dpi_operator.plan.actions import Manifest
from dpi_operator.plan.modes import independent_servers, port_name
from dpi_operator.plan.names import (
    ENGINE,
    GATE_JOINED,
    L_GROUP,
    L_NAME,
    L_POD,
    L_RANK_COUNT,
    L_RANK_START,
    L_REVISION,
    L_ROLE,
    L_RUNTIME,
    child_metadata,
    common_labels,
    engine_account,
    group_name,
    internal_service,
)
from dpi_operator.plan.podgroup import membership, scheduler_of
from dpi_operator.plan.pods import PodPlan, Role
from dpi_operator.plan.template import merge

CACHE_DIR = "/var/cache/dpi"
"""Where engine images keep packed weights and kernels: a volume, since the root file system is read-only."""

STARTUP_PERIOD_S = 2
STARTUP_MARGIN_S = 120
MIN_STARTUP_BUDGET_S = 2700
UNREACHABLE_S = 30
HF_TOKEN = "HF_TOKEN"
RPC_PORTS = (("rpc", 0), ("coord-0", 1), ("coord-1", 2), ("coord-2", 3), ("store", 4))


def gpus_per_pod(dpi: DataParallelInference) -> int:
    """GPUs that a pod asks for when the object does not say."""
    spec, p = dpi.spec, dpi.spec.parallelism
    on_gpu = spec.engine.device is Device.CUDA or (
        spec.engine.runtime is Runtime.VLLM and spec.engine.device is Device.AUTO
    )
    if not on_gpu or not spec.engine.gpu_resource_name:
        return 0
    return (p.data_parallel_size_local or 1) * p.tensor_parallel_size * p.pipeline_parallel_size


def needs_gate(dpi: DataParallelInference, plan: PodPlan) -> bool:
    """Headless pods of a runtime whose pods say nothing of themselves: the operator tells when they have joined."""
    return dpi.spec.engine.runtime is Runtime.VLLM and plan.role is Role.HEADLESS


def _override(dpi: DataParallelInference, plan: PodPlan) -> RankOverride | None:
    return next((o for o in dpi.spec.rank_overrides if plan.rank_start in parse_ranks(o.ranks)), None)


def _resources(dpi: DataParallelInference, override: RankOverride | None) -> dict[str, Any]:
    chosen = override.resources if override and override.resources else dpi.spec.engine.resources
    resources: dict[str, Any] = copy.deepcopy(chosen)
    name, gpus = dpi.spec.engine.gpu_resource_name, gpus_per_pod(dpi)
    if gpus and name not in resources.get("limits", {}) and name not in resources.get("requests", {}):
        resources.setdefault("limits", {})[name] = str(gpus)
    return resources


def _env(dpi: DataParallelInference, override: RankOverride | None) -> list[dict[str, Any]]:
    def field(name: str, path: str) -> dict[str, Any]:
        return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}

    env = [
        field("DPI_POD_IP", "status.podIP"),
        field("DPI_POD_NAME", "metadata.name"),
        field("DPI_POD_NAMESPACE", "metadata.namespace"),
    ]
    credentials, own = dpi.spec.credentials, dpi.spec.engine.runtime is Runtime.DPI
    if ref := credentials.hugging_face_token_secret_ref:
        secret = {"name": ref.name, "key": ref.key or HF_TOKEN}
        env.append({"name": HF_TOKEN, "valueFrom": {"secretKeyRef": secret}})
    if ref := credentials.api_key_secret_ref:
        name = "DPI_API_KEY" if own else "VLLM_API_KEY"
        env.append({"name": name, "valueFrom": {"secretKeyRef": {"name": ref.name, "key": ref.key or name}}})
    env = merge(env, dpi.spec.engine.env, "env")
    return list(merge(env, override.env, "env")) if override else env


def _ports(dpi: DataParallelInference, plan: PodPlan) -> list[dict[str, Any]]:
    ports = [
        {"name": port_name(number), "containerPort": port, "protocol": "TCP"}
        for number, port in enumerate(plan.http_ports)
    ]
    if dpi.spec.load_balancing.mode is Mode.MULTI_PORT:
        ports.append({"name": "supervisor", "containerPort": plan.ports.supervisor, "protocol": "TCP"})
    if dpi.spec.engine.runtime is Runtime.DPI:
        ports.append({"name": "management", "containerPort": plan.ports.management, "protocol": "TCP"})
    if plan.role is Role.RANK0 and plan.group_pods > 1 and not independent_servers(dpi):
        for name, offset in RPC_PORTS:
            ports.append({"name": name, "containerPort": plan.ports.rpc + offset, "protocol": "TCP"})
    return ports


def _probe(users: Probe, path: str, port: str, period: int, timeout: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": users.path or path, "port": users.port or port, "scheme": "HTTP"},
        "periodSeconds": users.period_seconds or period,
        "timeoutSeconds": users.timeout_seconds or timeout,
        "failureThreshold": users.failure_threshold or failures,
    }


def _probes(dpi: DataParallelInference, plan: PodPlan) -> dict[str, Any]:
    """Ours answers on its management port in every pod; the other runtime only where it serves HTTP."""
    users = dpi.spec.probes
    if dpi.spec.engine.runtime is Runtime.DPI:
        paths, port = ("/startupz", "/readyz", "/livez"), "management"
    elif plan.http_ports:
        paths = ("/health", "/health", "/health")
        port = "supervisor" if dpi.spec.load_balancing.mode is Mode.MULTI_PORT else "http"
    else:
        return {}
    period = users.startup.period_seconds or STARTUP_PERIOD_S
    budget = max(MIN_STARTUP_BUDGET_S, dpi.spec.handshake.timeout_seconds + STARTUP_MARGIN_S)
    return {
        "startupProbe": _probe(users.startup, paths[0], port, period, 5, math.ceil(budget / period)),
        "readinessProbe": _probe(users.readiness, paths[1], port, 5, 5, 3),
        "livenessProbe": _probe(users.liveness, paths[2], port, 30, 10, 3),
    }


def _volumes(dpi: DataParallelInference) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes and mounts: what the engine may write to besides its read-only root."""
    storage, cache = dpi.spec.storage, dpi.spec.storage.model_cache
    volumes: list[dict[str, Any]] = [{"name": "tmp", "emptyDir": {}}]
    mounts: list[dict[str, Any]] = [{"name": "tmp", "mountPath": "/tmp"}]
    if cache.pvc is not None:
        volumes.append({"name": "cache", "persistentVolumeClaim": dict(cache.pvc)})
    else:
        volumes.append({"name": "cache", "emptyDir": dict(cache.empty_dir or {})})
    mounts.append({"name": "cache", "mountPath": CACHE_DIR})
    if storage.shared_memory not in ("0", ""):
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": storage.shared_memory}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    return volumes, mounts


def _security(dpi: DataParallelInference) -> tuple[dict[str, Any], dict[str, Any]]:
    """Security contexts of pod and container. Images of the other runtime run as root and write beside their code."""
    container: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    pod: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if dpi.spec.engine.runtime is Runtime.DPI:
        container["readOnlyRootFilesystem"] = True
        pod["runAsNonRoot"] = True
    return pod, container


def _affinity(dpi: DataParallelInference, plan: PodPlan, revision: str) -> dict[str, Any]:
    scheduling = dpi.spec.scheduling
    own = {L_NAME: dpi.metadata.name, L_REVISION: revision, L_GROUP: str(plan.place.group)}
    out: dict[str, Any] = {}
    if key := scheduling.topology.key:
        term = {"labelSelector": {"matchLabels": own}, "topologyKey": key}
        if scheduling.topology.mode is TopologyMode.REQUIRED:
            out["podAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
        else:
            weighted = {"weight": 100, "podAffinityTerm": term}
            out["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": [weighted]}
    if key := scheduling.exclusive_topology_key:
        out["podAntiAffinity"] = {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"labelSelector": {"matchExpressions": others}, "topologyKey": key} for others in _other_groups(own)
            ]
        }
    return out


def _other_groups(own: Mapping[str, str]) -> list[list[dict[str, Any]]]:
    """Selectors of the pods of every other group: of other objects, of other slots, of other revisions of its slot."""
    found: list[list[dict[str, Any]]] = []
    equal: list[dict[str, Any]] = [{"key": L_NAME, "operator": "Exists"}]
    for label in (L_NAME, L_GROUP, L_REVISION):
        found.append([*equal, {"key": label, "operator": "NotIn", "values": [own[label]]}])
        equal = [*equal, {"key": label, "operator": "In", "values": [own[label]]}]
    return found


def _last_of_each(tolerations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One toleration per taint that evicts, the user's rather than ours: of two the shorter time would count."""
    taken = {(t.get("key"), t.get("effect")): i for i, t in enumerate(tolerations) if "tolerationSeconds" in t}
    return [
        t
        for i, t in enumerate(tolerations)
        if "tolerationSeconds" not in t or taken[(t.get("key"), t.get("effect"))] == i
    ]


def own_labels(dpi: DataParallelInference, plan: PodPlan, revision: str) -> dict[str, str]:
    """Labels by which pods are found and selected; nobody else may change them."""
    return {
        **common_labels(dpi, plan.role.value),
        L_GROUP: str(plan.place.group),
        L_POD: str(plan.place.index),
        L_RANK_START: str(plan.rank_start),
        L_RANK_COUNT: str(plan.rank_count),
        L_ROLE: plan.role.value,
        L_RUNTIME: dpi.spec.engine.runtime.value,
        L_REVISION: revision,
    }


def build_pod(dpi: DataParallelInference, plan: PodPlan, revision: str) -> Manifest:
    """Manifest of one pod; `dpi` is the object at that revision."""
    spec, override = dpi.spec, _override(dpi, plan)
    volumes, mounts = _volumes(dpi)
    pod_security, container_security = _security(dpi)
    container: dict[str, Any] = {
        "name": ENGINE,
        "image": plan.image,
        "imagePullPolicy": spec.engine.image_pull_policy,
        "args": list(plan.args),
        "env": _env(dpi, override),
        "ports": _ports(dpi, plan),
        "volumeMounts": mounts,
        "securityContext": container_security,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **_probes(dpi, plan),
    }
    if spec.engine.command:
        container["command"] = list(spec.engine.command)
    if spec.engine.env_from:
        container["envFrom"] = copy.deepcopy(spec.engine.env_from)
    if resources := _resources(dpi, override):
        container["resources"] = resources
    if spec.lifecycle.pre_stop_seconds:
        container["lifecycle"] = {"preStop": {"sleep": {"seconds": spec.lifecycle.pre_stop_seconds}}}
    unreachable = [
        {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}
        for key, seconds in (("unreachable", UNREACHABLE_S), ("not-ready", UNREACHABLE_S))
    ]
    pod: dict[str, Any] = {
        "hostname": plan.name,
        "subdomain": internal_service(dpi.metadata.name),
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "serviceAccountName": spec.security.service_account_name or engine_account(dpi.metadata.name),
        "terminationGracePeriodSeconds": spec.lifecycle.termination_grace_period_seconds,
        "securityContext": pod_security,
        "tolerations": unreachable,
        "containers": [container],
        "volumes": volumes,
    }
    if needs_gate(dpi, plan):
        pod["readinessGates"] = [{"conditionType": GATE_JOINED}]
    if spec.engine.image_pull_secrets:
        pod["imagePullSecrets"] = copy.deepcopy(spec.engine.image_pull_secrets)
    if scheduler := scheduler_of(dpi):
        pod["schedulerName"] = scheduler
    if spec.scheduling.gang.priority_class_name:
        pod["priorityClassName"] = spec.scheduling.gang.priority_class_name
    if affinity := _affinity(dpi, plan, revision):
        pod["affinity"] = affinity
    template = spec.template
    pod = merge(pod, template.get("spec") or {})
    if override:
        if override.node_selector:
            pod["nodeSelector"] = {**pod.get("nodeSelector", {}), **override.node_selector}
        pod["tolerations"] = merge(pod["tolerations"], override.tolerations)
    pod["tolerations"] = _last_of_each(pod["tolerations"])
    metadata = child_metadata(dpi, plan.name, plan.role.value)
    users = template.get("metadata") or {}
    group = group_name(dpi.metadata.name, revision, plan.place.group)
    gang_labels, gang_annotations = membership(dpi, group, plan.group_pods)
    metadata["labels"] = {
        **(users.get("labels") or {}),
        **gang_labels,
        **own_labels(dpi, plan, revision),
    }
    if annotations := {**(users.get("annotations") or {}), **gang_annotations}:
        metadata["annotations"] = annotations
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}
