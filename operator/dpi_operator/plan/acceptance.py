"""Whether an object can be planned at all, beyond what `api.validate` says of its fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpi_operator.api.read import ManifestError, read_document
from dpi_operator.api.reasons import Reason
from dpi_operator.api.types import DataParallelInference, Device, GangProvider, Runtime
from dpi_operator.api.validate import Finding, validate
from dpi_operator.plan.consistency import Declared, compare_declared
from dpi_operator.plan.modes import refused_modes
from dpi_operator.plan.names import ENGINE
from dpi_operator.plan.network import Cluster, Network
from dpi_operator.plan.pods import NotPlannable, PodPlan, plan_group
from dpi_operator.plan.podspec import gpus_per_pod
from dpi_operator.plan.rollout import limits
from dpi_operator.plan.template import template_faults

OWN_ENV = "DPI_"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Findings (none: it can be planned), the pods of group 0, and the outcome of comparing them."""

    findings: tuple[Finding, ...]
    pods: tuple[PodPlan, ...] = ()
    declared: Declared = field(default_factory=Declared)


def _gpus(dpi: DataParallelInference) -> list[Finding]:
    engine, derived = dpi.spec.engine, gpus_per_pod(dpi)
    if not derived:
        return []
    found = []
    for kind in ("limits", "requests"):
        given = (engine.resources.get(kind) or {}).get(engine.gpu_resource_name)
        if given is not None and str(given) != str(derived):
            found.append(
                Finding(
                    Reason.GPU_REQUEST_MISMATCH,
                    f"spec.engine.resources.{kind}.{engine.gpu_resource_name}",
                    f"expected {derived} (dataParallelSizeLocal x tensorParallelSize x pipelineParallelSize), "
                    f"got {given}; correct it, leave it out, or set gpuResourceName to an empty string",
                )
            )
    return found


def _environment(dpi: DataParallelInference) -> list[Finding]:
    places = [("spec.engine.env", dpi.spec.engine.env)]
    places += [(f"spec.rankOverrides[{i}].env", o.env) for i, o in enumerate(dpi.spec.rank_overrides)]
    spec = dpi.spec.template.get("spec")
    containers = spec.get("containers") if isinstance(spec, Mapping) else None
    for container in containers if isinstance(containers, list) else ():
        if isinstance(container, Mapping) and container.get("name") == ENGINE:
            env = container.get("env")
            entries = [dict(e) for e in env if isinstance(e, Mapping)] if isinstance(env, list) else []
            places.append((f"spec.template.spec.containers[{ENGINE}].env", entries))
    found = []
    for place, env in places:
        for i, entry in enumerate(env):
            name = str(entry.get("name", ""))
            if not name:
                found.append(Finding(Reason.INVALID_SPEC, f"{place}[{i}]", "has no name"))
            elif name.startswith(OWN_ENV):
                message = f"{name}: names that begin with {OWN_ENV} are the operator's; use engine.args"
                found.append(Finding(Reason.RESERVED_FIELD, f"{place}[{i}]", message))
    return found


def _scheduling(dpi: DataParallelInference) -> list[Finding]:
    gang, field = dpi.spec.scheduling.gang, "spec.scheduling.gang.queue"
    if gang.provider is GangProvider.KUEUE and not gang.queue:
        return [Finding(Reason.INVALID_SPEC, field, "is required with Kueue: a LocalQueue of the namespace")]
    if gang.queue and gang.provider in (GangProvider.NONE, GangProvider.SCHEDULER_PLUGINS):
        message = f"means nothing with provider {gang.provider.value}, which has no queues; leave it out"
        return [Finding(Reason.INVALID_SPEC, field, message)]
    return []


def _other_runtime(dpi: DataParallelInference) -> list[Finding]:
    if dpi.spec.engine.runtime is not Runtime.VLLM:
        return []
    found = []
    if dpi.spec.model.uri.startswith("pypi:"):
        message = "the vllm runtime reads no pypi: models; use a path or hf://"
        found.append(Finding(Reason.NOT_SUPPORTED, "spec.model.uri", message))
    if dpi.spec.engine.device is Device.CPU and dpi.spec.parallelism.tensor_parallel_size > 1:
        message = "more than one device per rank needs GPUs with this runtime"
        found.append(Finding(Reason.NOT_SUPPORTED, "spec.parallelism.tensorParallelSize", message))
    return found


def _rollout(dpi: DataParallelInference) -> list[Finding]:
    try:
        limits(dpi.spec.rollout, dpi.spec.replicas)
    except ValueError:
        text = "maxSurge and maxUnavailable are numbers or percentages such as 25%"
        return [Finding(Reason.INVALID_SPEC, "spec.rollout", text)]
    return []


def refusals(document: Mapping[str, Any], domain: str) -> tuple[Finding, ...]:
    """Why an object as the API holds it cannot be used, as the reconciler would say it; empty when it can."""
    try:
        dpi = read_document(document, "the object")
    except ManifestError as e:
        return (unreadable(e),)
    judged = accept(dpi, Cluster(dpi.metadata.name, dpi.metadata.namespace, domain))
    differ = [Finding(Reason.FINGERPRINT_MISMATCH, "spec.rankOverrides", str(m)) for m in judged.declared.mismatches]
    return (*judged.findings, *differ)


def unreadable(error: ManifestError) -> Finding:
    return Finding(Reason.INVALID_SPEC, "spec", str(error).removeprefix("the object: "))


def accept(dpi: DataParallelInference, network: Network) -> Acceptance:
    """Judge the object and compare the pods it would have."""
    findings: list[Finding] = list(validate(dpi))
    findings += [Finding(Reason.RESERVED_FIELD, path, text) for path, text in template_faults(dpi.spec.template)]
    for judge in (_gpus, _environment, _scheduling, _rollout, _other_runtime, refused_modes):
        findings += judge(dpi)
    if findings:
        return Acceptance(tuple(findings))
    try:
        pods: Sequence[PodPlan] = plan_group(dpi, 0, network)
    except NotPlannable as e:
        return Acceptance((e.finding,))
    compared = compare_declared(dpi, pods)
    return Acceptance(compared.refused, tuple(pods), compared)
