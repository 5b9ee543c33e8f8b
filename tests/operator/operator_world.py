"""A model of a cluster for the planner: it does what plans say, and tests make pods live and die in it."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dpi_operator.api.status import Status, read_status, write_status
from dpi_operator.plan.actions import Apply, Create, Delete, EmitEvent, OpenGate, Plan, Relabel, Try, kind_and_name
from dpi_operator.plan.facts import HeadReport, PodFacts, Snapshot
from dpi_operator.plan.names import GATE_JOINED, L_GROUP, L_POD, L_RANK_COUNT, L_RANK_START, L_REVISION
from dpi_operator.plan.reconcile import reconcile
from dpi_operator.plan.state import STATE_KEY, Evidence, State, read_state
from dpi_operator.plan.times import to_text

START = 1_800_000_000.0


def document(**spec: Any) -> dict[str, Any]:
    """An object of two ranks in two pods; keywords replace or add to parts of its spec."""
    base: dict[str, Any] = {
        "model": {"name": "m"},
        "engine": {"image": "engine:1", "device": "cpu"},
        "parallelism": {"dataParallelSize": 2},
    }
    for key, value in spec.items():
        base[key] = {**base.get(key, {}), **value} if isinstance(value, dict) else value
    return {
        "apiVersion": "dpinference.dev/v1alpha1",
        "kind": "DataParallelInference",
        "metadata": {"name": "demo", "namespace": "ns", "uid": "object-uid", "generation": 1},
        "spec": copy.deepcopy(base),
    }


class Violation(AssertionError):
    """A plan did what no plan may do."""


@dataclass
class World:
    doc: dict[str, Any]
    now: float = START
    pods: dict[str, PodFacts] = field(default_factory=dict)
    manifests: dict[str, dict[str, Any]] = field(default_factory=dict)
    children: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    reports: dict[str, HeadReport] = field(default_factory=dict)
    strangers: set[str] = field(default_factory=set)
    absent: dict[str, str] = field(default_factory=dict)  # kinds that this cluster does not have, and why
    instant: bool = True  # deleted pods vanish at once
    refuses: Callable[[dict[str, Any]], str] = lambda manifest: ""  # what the API server has against a pod
    refusals: dict[str, str] = field(default_factory=dict)
    trials: dict[str, str] = field(default_factory=dict)
    tried: list[str] = field(default_factory=list)  # revisions that the API server was asked about
    events: list[EmitEvent] = field(default_factory=list)
    created: list[tuple[float, str]] = field(default_factory=list)
    deleted: list[tuple[float, str, str]] = field(default_factory=list)
    _uids: Any = field(default_factory=lambda: itertools.count(1))

    # -- the operator's side -------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        live = self.children.get(("ConfigMap", "demo-state"))
        return read_state(live["data"][STATE_KEY])[0] if live else State()

    @property
    def status(self) -> Status:
        return read_status(self.doc.get("status"))

    def snapshot(self) -> Snapshot:
        return Snapshot(
            document=copy.deepcopy(self.doc),
            pods=tuple(sorted(self.pods.values(), key=lambda p: p.name)),
            children=copy.deepcopy(self.children),
            state=self.state,
            reports=dict(self.reports),
            absent=dict(self.absent),
            refusals=dict(self.refusals),
            trials=dict(self.trials),
        )

    def plan(self) -> Plan:
        return reconcile(self.snapshot(), self.now)

    def carry_out(self, plan: Plan) -> None:
        self.refusals, self.trials = {}, {}
        for action in plan.actions:
            match action:
                case Create(manifest):
                    if why := self.refuses(manifest):
                        self.refusals[manifest["metadata"]["name"]] = why
                    else:
                        self._create(manifest)
                case Try(revision, manifests):
                    self.tried.append(revision)
                    self.trials[revision] = next((w for m in manifests if (w := self.refuses(m))), "")
                case Relabel(pod, uid, labels):
                    if self.pods[pod].uid == uid:
                        self._change(pod, labels={**(self.pods[pod].labels or {}), **labels})
                case Apply(manifest):
                    key = kind_and_name(manifest)
                    if key[0] in self.absent:
                        raise Violation(f"{key[0]} is applied, which this cluster does not have")
                    uid = self.children.get(key, {}).get("metadata", {}).get("uid") or f"uid-{next(self._uids)}"
                    live = copy.deepcopy(manifest)
                    live["metadata"]["uid"] = uid
                    self.children[key] = live
                case Delete(kind, name, uid, reason, grace):
                    self._delete(kind, name, uid, reason.value, grace)
                case OpenGate(pod):
                    self._change(pod, gate_open=True)
                case EmitEvent(made=made) if made and all(n in self.refusals for n in made):
                    pass
                case EmitEvent():
                    self.events.append(action)
        self.doc["status"] = write_status(plan.status)

    def settle(self, rounds: int = 12) -> Plan:
        """Plan and carry out until a plan changes nothing. Fails when that never happens."""
        for _ in range(rounds):
            plan = self.plan()
            quiet = not plan.actions and write_status(plan.status) == self.doc.get("status")
            self.carry_out(plan)
            if quiet:
                return plan
        raise Violation(f"plans do not come to rest: {plan.actions}")

    def _create(self, manifest: dict[str, Any]) -> None:
        name, labels = manifest["metadata"]["name"], manifest["metadata"]["labels"]
        if name in self.pods:
            raise Violation(f"{name} is created while it exists")
        self.created.append((self.now, name))
        self.manifests[name] = manifest
        gates = [g["conditionType"] for g in manifest["spec"].get("readinessGates", [])]
        self.pods[name] = PodFacts(
            name=name,
            uid=f"uid-{next(self._uids)}",
            revision=labels[L_REVISION],
            group=int(labels[L_GROUP]),
            index=int(labels[L_POD]),
            rank_start=int(labels[L_RANK_START]),
            rank_count=int(labels[L_RANK_COUNT]),
            created=self.now,
            labels=dict(labels),
            gated=GATE_JOINED in gates,
        )

    def _delete(self, kind: str, name: str, uid: str, reason: str, grace: int | None) -> None:
        if name in self.strangers:
            raise Violation(f"{kind} {name} is a stranger's and was deleted")
        if kind != "Pod":
            if self.children[(kind, name)]["metadata"]["uid"] != uid:
                raise Violation(f"{kind} {name} was deleted by another uid")
            del self.children[(kind, name)]
            return
        pod = self.pods.get(name)
        if pod is None or pod.uid != uid:
            raise Violation(f"{name} was deleted by another uid")
        self.deleted.append((self.now, name, reason))
        if self.instant or grace == 0:
            del self.pods[name]
        else:
            self._change(name, deleting=self.now + 75, ready=False, ready_since=None)

    # -- the cluster's side --------------------------------------------------------------------------------------------

    def _change(self, name: str, **fields: Any) -> None:
        self.pods[name] = dataclasses.replace(self.pods[name], **fields)

    def start(self, name: str) -> None:
        self._change(name, scheduled=True, node="node-1", ip="10.0.0.1", phase="Running", started=self.now)

    def make_ready(self, name: str) -> None:
        if self.pods[name].started is None:
            self.start(name)
        self._change(name, ready=True, ready_since=self.now)

    def all_ready(self) -> None:
        """Every pod that can becomes ready, heads last, and the operator looks at it."""
        for name in sorted(self.pods, key=lambda n: -self.pods[n].index):
            pod = self.pods[name]
            if not pod.failed and pod.deleting is None and not pod.ready:
                self.make_ready(name)

    def fail(self, name: str, exit_code: int = 1, reason: str = "Error", message: str = "boom") -> None:
        pod = self.pods[name]
        end = Evidence(
            pod=name,
            uid=pod.uid,
            node=pod.node,
            rank_start=pod.rank_start,
            rank_count=pod.rank_count,
            exit_code=exit_code,
            reason=reason,
            message=message,
            started_at=to_text(pod.started or self.now),
            finished_at=to_text(self.now),
        )
        self._change(name, phase="Failed", ready=False, ready_since=None, termination=end)

    def remove(self, name: str) -> None:
        del self.pods[name]

    def kubectl_delete(self, name: str) -> None:
        self._change(name, deleting=self.now + 75, ready=False, ready_since=None)

    def change(self, **spec: Any) -> None:
        """Edit the object."""
        for key, value in spec.items():
            self.doc["spec"][key] = {**self.doc["spec"].get(key, {}), **value} if isinstance(value, dict) else value
        self.doc["metadata"]["generation"] += 1

    def condition(self, kind: str) -> Any:
        return next(c for c in self.status.conditions if c.type == kind)

    def names(self) -> list[str]:
        """Pods by group and index, without object and revision."""
        return sorted(f"{p.group}-{p.index}" for p in self.pods.values())

    def revisions(self) -> set[str]:
        return {p.revision for p in self.pods.values()}

    def pod(self, group: int, index: int) -> str:
        (found,) = [p.name for p in self.pods.values() if (p.group, p.index) == (group, index)]
        return found


def up(**spec: Any) -> World:
    """A world in which all pods of the object are ready."""
    world = World(document(**spec))
    world.settle()
    world.all_ready()
    world.settle()
    return world


def plain(value: Any) -> Any:
    return msgspec.to_builtins(value)
