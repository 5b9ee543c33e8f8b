"""Which pods a group consists of, and each one's command line. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dpi_operator.api.types import ControlChannel, DataParallelInference, Ports, Runtime
from dpi_operator.api.validate import Finding, Reason, parse_ranks
from dpi_operator.plan.modes import every_pod_serves, http_ports, place_flags
from dpi_operator.plan.network import Network, PodPlace


class Role(enum.StrEnum):
    RANK0 = "rank0"  # holds rank 0, and has an endpoint in every mode
    SERVER = "server"  # another pod with an endpoint of its own
    HEADLESS = "headless"  # ranks only


@dataclass(frozen=True, slots=True)
class PodPlan:
    """One pod: its ranks are rank_start .. rank_start + rank_count - 1; `args` follow the image's command."""

    place: PodPlace
    role: Role
    rank_start: int
    rank_count: int
    ports: Ports
    image: str
    args: tuple[str, ...]
    group_pods: int = 1  # pods of its group
    own_args: bool = False  # some of `args` come from a rank override
    http_ports: tuple[int, ...] = ()  # its endpoints: none, one, or one per rank

    @property
    def name(self) -> str:
        return self.place.hostname


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes derived from an object, never set by a user."""

    size: int
    local: int

    @property
    def pods(self) -> int:
        return self.size // self.local


class NotPlannable(ValueError):
    """The object asks for what this planner does not make; `finding` says what and what to do."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


def layout(dpi: DataParallelInference) -> Layout:
    p = dpi.spec.parallelism
    return Layout(size=p.data_parallel_size, local=p.data_parallel_size_local or 1)


def model_argument(dpi: DataParallelInference) -> str:
    """What the engine loads: the URI, or the name where there is none. Only ours knows the schemes."""
    model = dpi.spec.model
    if dpi.spec.engine.runtime is Runtime.VLLM:
        return model.uri.removeprefix("file://").removeprefix("hf://") or model.name
    return model.uri or model.name


def _model_flags(dpi: DataParallelInference) -> list[str]:
    model = dpi.spec.model
    flags = [model_argument(dpi), "--served-model-name", model.served_name or model.name]
    return flags + (["--revision", model.revision] if model.revision else [])


def _shape_flags(dpi: DataParallelInference) -> list[str]:
    p, flags = dpi.spec.parallelism, []
    if p.tensor_parallel_size > 1:
        flags += ["--tensor-parallel-size", str(p.tensor_parallel_size)]
    if p.pipeline_parallel_size > 1:
        flags += ["--pipeline-parallel-size", str(p.pipeline_parallel_size)]
    if p.expert_parallel:
        flags += ["--enable-expert-parallel"]
    return flags


def _own_flags(dpi: DataParallelInference, ports: Ports) -> list[str]:
    """Flags that only our runtime knows."""
    spec = dpi.spec
    flags = ["--management-port", str(ports.management), "--device", spec.engine.device.value]
    flags += ["--handshake-timeout", str(spec.handshake.timeout_seconds)]
    if spec.parallelism.expert_parallel:
        flags += ["--reform-timeout", str(spec.failure_policy.reform_timeout_seconds)]
    return flags


def _refuse(dpi: DataParallelInference) -> None:
    spec = dpi.spec
    if spec.model.revision and spec.engine.runtime is Runtime.DPI:
        raise NotPlannable(
            Finding(
                Reason.NOT_SUPPORTED,
                "spec.model.revision",
                "the dpi runtime takes no revision in this version; name a folder, or a pypi: package of one version",
            )
        )
    if spec.security.control_channel is ControlChannel.CURVE:
        raise NotPlannable(
            Finding(
                Reason.NOT_SUPPORTED,
                "spec.security.controlChannel",
                "Curve is not in this version; leave it out",
            )
        )


def plan_group(dpi: DataParallelInference, group: int, network: Network, revision: str = "") -> list[PodPlan]:
    """Pods of group `group`, rank 0's first. `revision` goes into their names. Raises NotPlannable.

    The object was validated before.
    """
    _refuse(dpi)
    shape = layout(dpi)
    middle = f"{revision}-{group}" if revision else str(group)

    def place(index: int) -> PodPlace:
        return PodPlace(group, index, group * shape.pods + index, f"{dpi.metadata.name}-{middle}-{index}")

    head, pods = place(0), []
    for index in range(shape.pods):
        pod = place(index)
        ports = network.ports(pod, dpi.spec.engine.ports)
        rpc = network.ports(head, dpi.spec.engine.ports).rpc
        others = Role.SERVER if every_pod_serves(dpi) else Role.HEADLESS
        role = others if index else Role.RANK0
        args = _model_flags(dpi)
        args += ["--host", network.http_host()]
        if role is not Role.HEADLESS:
            args += ["--port", str(ports.http)]
            if dpi.spec.engine.api_server_count is not None:
                args += ["--api-server-count", str(dpi.spec.engine.api_server_count)]
        else:
            args += ["--headless"]
        args += place_flags(dpi, index, shape.size, shape.local, network.head_address(pod, head), ports, rpc)
        args += _shape_flags(dpi)
        if dpi.spec.engine.runtime is Runtime.DPI:
            args += _own_flags(dpi, ports)
        args += ["--shutdown-timeout", str(dpi.spec.lifecycle.shutdown_timeout_seconds)]
        args += dpi.spec.engine.args
        ranks = range(index * shape.local, (index + 1) * shape.local)
        image, own_args = dpi.spec.engine.image, False
        for override in dpi.spec.rank_overrides:
            if ranks.start in parse_ranks(override.ranks):
                args += override.args
                own_args = own_args or bool(override.args)
                image = override.image or image
        pods.append(
            PodPlan(
                pod,
                role,
                ranks.start,
                len(ranks),
                ports,
                image,
                tuple(args),
                shape.pods,
                own_args,
                http_ports(dpi, index, ports),
            )
        )
    return pods
