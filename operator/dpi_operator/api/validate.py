"""What an object must hold beyond the bounds of its single fields. Pure; a finding names the field and the remedy."""

from __future__ import annotations

from dataclasses import dataclass

from dpi_operator.api.reasons import Reason
from dpi_operator.api.types import (
    Architecture,
    Coupling,
    DataParallelInference,
    FailureAction,
    Mode,
    RankOverride,
    Runtime,
    Strategy,
)

RESERVED_FLAGS = (
    "--data-parallel-size",
    "-dp",
    "--data-parallel-size-local",
    "-dpl",
    "--data-parallel-rank",
    "-dpn",
    "--data-parallel-start-rank",
    "-dpr",
    "--data-parallel-address",
    "-dpa",
    "--data-parallel-rpc-port",
    "-dpp",
    "--data-parallel-hybrid-lb",
    "-dph",
    "--data-parallel-external-lb",
    "-dpe",
    "--data-parallel-multi-port-external-lb",
    "-dpm",
    "--data-parallel-supervisor-port",
    "--headless",
    "--host",
    "--port",
    "--management-port",
    "--served-model-name",
    "--tensor-parallel-size",
    "-tp",
    "--pipeline-parallel-size",
    "-pp",
    "--enable-expert-parallel",
    "-ep",
    "--api-server-count",
    "-asc",
    "--device",
    "--api-key",
    "--shutdown-timeout",
    "--handshake-timeout",
    "--reform-timeout",
)
"""Flags that the planner sets from fields of the object; `engine.args` must not repeat them."""

HELP_FLAGS = ("--help", "-h")

MAX_RANKS = 4096
"""Ranks of one object over all its groups."""

MAX_RANK_SERVICES = 256
"""Services per rank of one object: every node's proxy carries each of them."""

MAX_POOL_PORTS = 8
"""Ports per pod of an InferencePool."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Why an object cannot be used: `field` is its path below the root."""

    reason: Reason
    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


def parse_ranks(text: str) -> range:
    """`3` or `4-7` -> range. The pattern was checked before."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _invalid(field: str, message: str) -> Finding:
    return Finding(Reason.INVALID_SPEC, field, message)


def _parallelism(dpi: DataParallelInference) -> list[Finding]:
    p, found = dpi.spec.parallelism, []
    local = p.data_parallel_size_local
    if local is not None and p.data_parallel_size % local:
        found.append(
            _invalid(
                "spec.parallelism.dataParallelSizeLocal",
                "must divide dataParallelSize, since every pod holds the same number of ranks: "
                f"got {local} of {p.data_parallel_size}",
            )
        )
    if p.expert_parallel and dpi.spec.model.architecture is not Architecture.MOE:
        found.append(_invalid("spec.parallelism.expertParallel", "needs model.architecture: MoE"))
    if p.coupling is Coupling.INDEPENDENT and dpi.spec.model.architecture is Architecture.MOE:
        found.append(_invalid("spec.parallelism.coupling", "Independent needs model.architecture: Dense"))
    if dpi.spec.replicas * p.data_parallel_size > MAX_RANKS:
        found.append(_invalid("spec.replicas", f"replicas x dataParallelSize must be at most {MAX_RANKS}"))
    if p.pipeline_parallel_size > 1 and dpi.spec.engine.runtime is Runtime.DPI:
        found.append(
            Finding(
                Reason.NOT_SUPPORTED,
                "spec.parallelism.pipelineParallelSize",
                "the dpi runtime has no pipeline parallelism; use tensorParallelSize, or runtime: vllm",
            )
        )
    if p.expert_parallel and p.tensor_parallel_size > 1 and dpi.spec.engine.runtime is Runtime.DPI:
        found.append(
            Finding(
                Reason.NOT_SUPPORTED,
                "spec.parallelism.tensorParallelSize",
                "the dpi runtime has workers share each expert or ranks share the experts, not both: "
                "use 1, or leave expertParallel out",
            )
        )
    return found


def _images(dpi: DataParallelInference) -> list[Finding]:
    """Images of one wire and one schema may be mixed where ranks are independent."""
    image = dpi.spec.engine.image
    others = [
        f"rankOverrides[{i}] has {override.image}"
        for i, override in enumerate(dpi.spec.rank_overrides)
        if override.image not in ("", image)
    ]
    if dpi.spec.model.architecture is not Architecture.MOE or not others:
        return []
    text = "the ranks of a MoE model run one image: leave image out here, and set engine.image"
    return [_invalid("spec.rankOverrides", f"{text}; {', '.join(others)}, engine.image is {image}")]


def _failure(dpi: DataParallelInference) -> list[Finding]:
    spec, found = dpi.spec, []
    independent = spec.parallelism.coupling is Coupling.INDEPENDENT or (
        spec.parallelism.coupling is Coupling.AUTO and spec.model.architecture is Architecture.DENSE
    )
    if spec.failure_policy.action is FailureAction.RECREATE_RANK and not independent:
        found.append(_invalid("spec.failurePolicy.action", "RecreateRank needs independent ranks (Dense, not Coupled)"))
    backoff = spec.failure_policy.backoff
    if backoff.max_seconds < backoff.base_seconds:
        found.append(
            _invalid("spec.failurePolicy.backoff.maxSeconds", f"must be at least baseSeconds ({backoff.base_seconds})")
        )
    life = spec.lifecycle
    needed = life.pre_stop_seconds + life.shutdown_timeout_seconds
    if life.termination_grace_period_seconds <= needed:
        found.append(
            _invalid(
                "spec.lifecycle.terminationGracePeriodSeconds",
                f"must be more than preStopSeconds + shutdownTimeoutSeconds ({needed})",
            )
        )
    return found


def _modes(dpi: DataParallelInference) -> list[Finding]:
    p, lb, found = dpi.spec.parallelism, dpi.spec.load_balancing, []
    local = p.data_parallel_size_local or 1
    if lb.mode is Mode.EXTERNAL and local != 1:
        found.append(_invalid("spec.parallelism.dataParallelSizeLocal", f"External has one rank per pod, got {local}"))
    if lb.mode is Mode.MULTI_PORT:
        if local < 2:
            found.append(_invalid("spec.parallelism.dataParallelSizeLocal", "MultiPort needs at least 2 ranks per pod"))
        if dpi.spec.engine.api_server_count not in (None, 1) and dpi.spec.engine.runtime is Runtime.DPI:
            text = f"MultiPort has one API server per rank: leave it out; got {dpi.spec.engine.api_server_count}"
            found.append(_invalid("spec.engine.apiServerCount", text))
        http = dpi.spec.engine.ports.http
        if dpi.spec.engine.ports.supervisor in range(http, http + local):
            found.append(
                _invalid(
                    "spec.engine.ports.supervisor",
                    "lies in the front ends' ports, which begin at http, one per rank of a pod: "
                    f"{http} to {http + local - 1}",
                )
            )
        if dpi.spec.engine.ports.management in range(http, http + local):
            found.append(
                _invalid(
                    "spec.engine.ports.management",
                    "lies in the front ends' ports, which begin at http, one per rank of a pod: "
                    f"{http} to {http + local - 1}",
                )
            )
        if lb.service.port + local > 65536:
            found.append(
                _invalid(
                    "spec.loadBalancing.service.port",
                    "the Service has a port per rank of a pod, and the last would be above 65535: "
                    f"got {lb.service.port} for the first of {local}",
                )
            )
        if lb.inference_pool.enabled and local > MAX_POOL_PORTS:
            text = f"a pool holds at most {MAX_POOL_PORTS} ports per pod: got {local}, one per rank of a pod"
            found.append(Finding(Reason.POOL_PORT_LIMIT, "spec.loadBalancing.inferencePool.enabled", text))
    if lb.inference_pool.enabled and lb.inference_pool.endpoint_picker_ref is None:
        found.append(_invalid("spec.loadBalancing.inferencePool.endpointPickerRef", "is required when enabled"))
    if lb.per_rank_services and p.data_parallel_size > 64:
        found.append(_invalid("spec.loadBalancing.perRankServices", "is for groups of at most 64 ranks"))
    if lb.per_rank_services and dpi.spec.replicas * p.data_parallel_size > MAX_RANK_SERVICES:
        text = f"is for at most {MAX_RANK_SERVICES} ranks over all groups"
        found.append(_invalid("spec.loadBalancing.perRankServices", text))
    return found


def _rollout(dpi: DataParallelInference) -> list[Finding]:
    rollout, found = dpi.spec.rollout, []
    nothing = (0, "0%")
    if (
        rollout.strategy is Strategy.ROLLING_UPDATE
        and rollout.max_unavailable in nothing
        and rollout.max_surge in nothing
    ):
        found.append(
            _invalid(
                "spec.rollout.maxUnavailable",
                "is 0 and so is maxSurge: no group could be replaced; raise one of them",
            )
        )
    cache = dpi.spec.storage.model_cache
    if cache.empty_dir is not None and cache.pvc is not None:
        found.append(_invalid("spec.storage.modelCache.pvc", "excludes emptyDir; give one of them"))
    return found


def _args(field: str, args: list[str], runtime: Runtime) -> list[Finding]:
    found = []
    for arg in args:
        flag = arg.partition("=")[0]
        if flag.startswith("--"):
            flag = flag.replace("_", "-")  # as both runtimes read it
        if flag in RESERVED_FLAGS:
            found.append(Finding(Reason.RESERVED_FLAG, field, f"{flag} is set from the object's own fields; remove it"))
        elif flag in HELP_FLAGS:
            found.append(_invalid(field, f"{flag}: a pod would print its flags and end; remove it"))
        elif flag == "--config" and runtime is Runtime.DPI:
            # Read where objects are judged, it would be a file of the operator's pod, and no rank's.
            text = (
                f"{flag} names a file that only the pods have, so that ranks cannot be compared; give its keys as flags"
            )
            found.append(Finding(Reason.NOT_SUPPORTED, field, text))
    return found


def _overrides(overrides: list[RankOverride], size: int, local: int, runtime: Runtime) -> list[Finding]:
    found: list[Finding] = []
    seen: dict[int, int] = {}
    for i, override in enumerate(overrides):
        field = f"spec.rankOverrides[{i}].ranks"
        ranks = parse_ranks(override.ranks)
        if not ranks or ranks[-1] >= size:
            found.append(_invalid(field, f"{override.ranks} is not a range within 0 to {size - 1}"))
            continue
        if ranks.start % local or ranks.stop % local:
            found.append(_invalid(field, f"{override.ranks} cuts a pod: pods hold {local} ranks each"))
        for rank in ranks:
            if rank in seen:
                found.append(
                    Finding(Reason.RANK_OVERRIDE_OVERLAP, field, f"rank {rank} is in rankOverrides[{seen[rank]}] too")
                )
                break
            seen[rank] = i
        found += _args(f"spec.rankOverrides[{i}].args", override.args, runtime)
    return found


def validate(dpi: DataParallelInference) -> list[Finding]:
    """All findings, none when the object can be planned."""
    spec = dpi.spec
    local = spec.parallelism.data_parallel_size_local or 1
    found = (
        _parallelism(dpi)
        + _images(dpi)
        + _failure(dpi)
        + _modes(dpi)
        + _rollout(dpi)
        + _args("spec.engine.args", spec.engine.args, spec.engine.runtime)
    )
    if not any(f.field == "spec.parallelism.dataParallelSizeLocal" for f in found):
        found += _overrides(spec.rank_overrides, spec.parallelism.data_parallel_size, local, spec.engine.runtime)
    return found
