"""Rules over several fields that the API server checks itself, in CEL.

Each has a twin in `validate.py`, with the same field and message, for commands that read an object without an API
server. The schema's defaults are applied before a rule is evaluated. A rule stands at `spec`, or at a field without a
default: the API server also judges the default `{}` of a field by the rules there, and that has no fields yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpi_operator.api.validate import MAX_POOL_PORTS, MAX_RANK_SERVICES, MAX_RANKS


@dataclass(frozen=True, slots=True)
class Rule:
    """`cel` must be true of the value at `at` (path below the object); `field` names the culprit below `at`.

    The twin's message begins with `message` and may go on with the values found. Here they cannot be named: a number
    as text has no bound that the API server knows, so such a message is over its budget.
    """

    at: str
    cel: str
    field: str
    message: str

    @property
    def path(self) -> str:
        """The field as findings name it."""
        return ".".join(p for p in (self.at, self.field) if p)

    def manifest(self) -> dict[str, Any]:
        """One entry of x-kubernetes-validations."""
        entry = {"rule": self.cel, "message": self.message}
        if self.at:
            entry["fieldPath"] = f".{self.field}"
        return entry


_LOCAL = "(has(self.parallelism.dataParallelSizeLocal) ? self.parallelism.dataParallelSizeLocal : 1)"
_HTTP = "self.engine.ports.http"

RULES = (
    Rule(
        at="",
        cel="size(self.metadata.name) <= 40 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        field="metadata.name",
        message="must be at most 40 characters of a-z, 0-9 and '-', beginning with a letter: pods and Services are "
        "named after it",
    ),
    Rule(
        at="spec",
        cel=f"self.parallelism.dataParallelSize % {_LOCAL} == 0",
        field="parallelism.dataParallelSizeLocal",
        message="must divide dataParallelSize, since every pod holds the same number of ranks",
    ),
    Rule(
        at="spec",
        cel="!self.parallelism.expertParallel || self.model.architecture == 'MoE'",
        field="parallelism.expertParallel",
        message="needs model.architecture: MoE",
    ),
    Rule(
        at="spec",
        cel="self.parallelism.coupling != 'Independent' || self.model.architecture == 'Dense'",
        field="parallelism.coupling",
        message="Independent needs model.architecture: Dense",
    ),
    Rule(
        at="spec",
        cel=f"self.replicas * self.parallelism.dataParallelSize <= {MAX_RANKS}",
        field="replicas",
        message=f"replicas x dataParallelSize must be at most {MAX_RANKS}",
    ),
    Rule(
        at="spec",
        cel="self.parallelism.pipelineParallelSize == 1 || self.engine.runtime != 'dpi'",
        field="parallelism.pipelineParallelSize",
        message="the dpi runtime has no pipeline parallelism; use tensorParallelSize, or runtime: vllm",
    ),
    Rule(
        at="spec",
        cel="!self.parallelism.expertParallel || self.parallelism.tensorParallelSize == 1 || "
        "self.engine.runtime != 'dpi'",
        field="parallelism.tensorParallelSize",
        message="the dpi runtime has workers share each expert or ranks share the experts, not both: "
        "use 1, or leave expertParallel out",
    ),
    Rule(
        at="spec",
        cel="self.model.architecture != 'MoE' || !has(self.rankOverrides) || "
        "self.rankOverrides.all(o, !has(o.image) || o.image == '' || o.image == self.engine.image)",
        field="rankOverrides",
        message="the ranks of a MoE model run one image: leave image out here, and set engine.image",
    ),
    Rule(
        at="spec",
        cel="self.failurePolicy.action != 'RecreateRank' || self.parallelism.coupling == 'Independent' || "
        "(self.parallelism.coupling == 'Auto' && self.model.architecture == 'Dense')",
        field="failurePolicy.action",
        message="RecreateRank needs independent ranks (Dense, not Coupled)",
    ),
    Rule(
        at="spec",
        cel="self.failurePolicy.backoff.maxSeconds >= self.failurePolicy.backoff.baseSeconds",
        field="failurePolicy.backoff.maxSeconds",
        message="must be at least baseSeconds",
    ),
    Rule(
        at="spec",
        cel="self.lifecycle.terminationGracePeriodSeconds > "
        "self.lifecycle.preStopSeconds + self.lifecycle.shutdownTimeoutSeconds",
        field="lifecycle.terminationGracePeriodSeconds",
        message="must be more than preStopSeconds + shutdownTimeoutSeconds",
    ),
    Rule(
        at="spec",
        cel=f"self.loadBalancing.mode != 'External' || {_LOCAL} == 1",
        field="parallelism.dataParallelSizeLocal",
        message="External has one rank per pod",
    ),
    Rule(
        at="spec",
        cel=f"self.loadBalancing.mode != 'MultiPort' || {_LOCAL} >= 2",
        field="parallelism.dataParallelSizeLocal",
        message="MultiPort needs at least 2 ranks per pod",
    ),
    Rule(
        at="spec",
        cel="self.loadBalancing.mode != 'MultiPort' || !has(self.engine.apiServerCount) || "
        "self.engine.apiServerCount == 1 || self.engine.runtime != 'dpi'",
        field="engine.apiServerCount",
        message="MultiPort has one API server per rank: leave it out",
    ),
    Rule(
        at="spec",
        cel=f"self.loadBalancing.mode != 'MultiPort' || self.engine.ports.supervisor < {_HTTP} || "
        f"self.engine.ports.supervisor >= {_HTTP} + {_LOCAL}",
        field="engine.ports.supervisor",
        message="lies in the front ends' ports, which begin at http, one per rank of a pod",
    ),
    Rule(
        at="spec",
        cel=f"self.loadBalancing.mode != 'MultiPort' || self.engine.ports.management < {_HTTP} || "
        f"self.engine.ports.management >= {_HTTP} + {_LOCAL}",
        field="engine.ports.management",
        message="lies in the front ends' ports, which begin at http, one per rank of a pod",
    ),
    Rule(
        at="spec",
        cel=f"self.loadBalancing.mode != 'MultiPort' || self.loadBalancing.service.port + {_LOCAL} <= 65536",
        field="loadBalancing.service.port",
        message="the Service has a port per rank of a pod, and the last would be above 65535",
    ),
    Rule(
        at="spec",
        cel=f"self.loadBalancing.mode != 'MultiPort' || !self.loadBalancing.inferencePool.enabled || "
        f"{_LOCAL} <= {MAX_POOL_PORTS}",
        field="loadBalancing.inferencePool.enabled",
        message=f"a pool holds at most {MAX_POOL_PORTS} ports per pod",
    ),
    Rule(
        at="spec",
        cel="!self.loadBalancing.inferencePool.enabled || has(self.loadBalancing.inferencePool.endpointPickerRef)",
        field="loadBalancing.inferencePool.endpointPickerRef",
        message="is required when enabled",
    ),
    Rule(
        at="spec",
        cel="!(self.loadBalancing.perRankServices && self.parallelism.dataParallelSize > 64)",
        field="loadBalancing.perRankServices",
        message="is for groups of at most 64 ranks",
    ),
    Rule(
        at="spec",
        cel="!(self.loadBalancing.perRankServices && "
        f"self.replicas * self.parallelism.dataParallelSize > {MAX_RANK_SERVICES})",
        field="loadBalancing.perRankServices",
        message=f"is for at most {MAX_RANK_SERVICES} ranks over all groups",
    ),
    Rule(
        at="spec",
        cel="self.rollout.strategy != 'RollingUpdate' || "
        "(self.rollout.maxUnavailable != 0 && self.rollout.maxUnavailable != '0%') || "
        "(self.rollout.maxSurge != 0 && self.rollout.maxSurge != '0%')",
        field="rollout.maxUnavailable",
        message="is 0 and so is maxSurge: no group could be replaced; raise one of them",
    ),
    Rule(
        at="spec.storage.modelCache",
        cel="!(has(self.emptyDir) && has(self.pvc))",
        field="pvc",
        message="excludes emptyDir; give one of them",
    ),
)
"""In the order in which findings are reported."""
