"""What a load-balancing mode means to the pods of a group: endpoints, ports and flags. Pure.

The modes are those of the peer (`vllm serve --help=DataParallel`): internal, hybrid, external, multi-port external.
"""

from __future__ import annotations

from dpi_operator.api.types import Architecture, DataParallelInference, Mode, Ports, Runtime, SupervisorPolicy
from dpi_operator.api.validate import Finding, Reason

POLICY_FLAGS = {SupervisorPolicy.FAIL_TOGETHER: "fail-together", SupervisorPolicy.RESTART_ONE: "restart-one"}


def every_pod_serves(dpi: DataParallelInference) -> bool:
    """Whether every pod has an endpoint of its own, and says itself what its ranks do."""
    return dpi.spec.load_balancing.mode is not Mode.INTERNAL


def independent_servers(dpi: DataParallelInference) -> bool:
    """Whether pods know nothing of each other: the vllm runtime has no external mode for dense models."""
    spec = dpi.spec
    return (
        spec.engine.runtime is Runtime.VLLM
        and spec.load_balancing.mode is Mode.EXTERNAL
        and spec.model.architecture is Architecture.DENSE
    )


def endpoints_per_pod(dpi: DataParallelInference) -> int:
    """Consecutive HTTP ports of a pod that serves."""
    multi = dpi.spec.load_balancing.mode is Mode.MULTI_PORT
    return (dpi.spec.parallelism.data_parallel_size_local or 1) if multi else 1


def http_ports(dpi: DataParallelInference, index: int, ports: Ports) -> tuple[int, ...]:
    """HTTP ports of the pod with this index in its group, none where it has no endpoint."""
    if index and not every_pod_serves(dpi):
        return ()
    return tuple(range(ports.http, ports.http + endpoints_per_pod(dpi)))


def port_name(number: int) -> str:
    """Name of the HTTP port of a pod's rank `number`, in pods and in Services."""
    return f"http-{number}" if number else "http"


def place_flags(
    dpi: DataParallelInference, index: int, size: int, local: int, address: str, ports: Ports, rpc: int
) -> list[str]:
    """Flags that say which ranks a pod holds and how it finds rank 0."""
    if size == 1 or independent_servers(dpi):
        return []
    mode, first = dpi.spec.load_balancing.mode, index * local
    flags = ["--data-parallel-size", str(size)]
    if mode is Mode.EXTERNAL:
        flags += ["--data-parallel-external-lb", "--data-parallel-rank", str(first)]
    else:
        flags += ["--data-parallel-size-local", str(local)]
        if mode is Mode.HYBRID:
            flags += ["--data-parallel-hybrid-lb"]
        if mode is Mode.MULTI_PORT:
            flags += ["--data-parallel-multi-port-external-lb"]
            flags += ["--data-parallel-supervisor-port", str(ports.supervisor)]
            if dpi.spec.engine.runtime is Runtime.DPI:
                flags += ["--data-parallel-supervisor-policy", POLICY_FLAGS[dpi.spec.load_balancing.supervisor_policy]]
        if first or mode is not Mode.INTERNAL:
            flags += ["--data-parallel-start-rank", str(first)]
    return [*flags, "--data-parallel-address", address, "--data-parallel-rpc-port", str(rpc)]


def refused_modes(dpi: DataParallelInference) -> list[Finding]:
    """Modes that the runtime cannot run, each with what to do instead."""
    spec = dpi.spec
    mode, local, size = (
        spec.load_balancing.mode,
        spec.parallelism.data_parallel_size_local or 1,
        spec.parallelism.data_parallel_size,
    )
    if spec.engine.runtime is not Runtime.VLLM or size == 1:
        return []
    where = "spec.loadBalancing.mode"
    if mode is Mode.HYBRID and local == 1:
        text = "Hybrid with one rank per pod is External to the vllm runtime; raise dataParallelSizeLocal"
        return [Finding(Reason.NOT_SUPPORTED, where, text)]
    if mode is Mode.MULTI_PORT and spec.model.architecture is Architecture.DENSE:
        text = "the vllm runtime has MultiPort for MoE models only; use External with one rank per pod, or runtime: dpi"
        return [Finding(Reason.NOT_SUPPORTED, where, text)]
    return []
