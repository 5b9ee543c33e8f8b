"""What the planner knows of the cluster: pods, ranks and children as plain values. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dpi_operator.plan.state import Evidence, State


@dataclass(frozen=True, slots=True)
class PodFacts:
    """One pod of an object. Times are epoch seconds; `engine_*` speak of the engine container."""

    name: str
    uid: str
    revision: str
    group: int
    index: int
    rank_start: int
    rank_count: int
    phase: str = "Pending"
    node: str = ""
    ip: str = ""
    created: float = 0.0
    scheduled: bool = False
    scheduling_reason: str = ""  # why it has no node: SchedulingGated, Unschedulable
    scheduling_message: str = ""
    started: float | None = None
    ready: bool = False
    ready_since: float | None = None
    deleting: float | None = None  # when its grace period ends
    disruption: str = ""  # reason of a DisruptionTarget condition that is True
    waiting_reason: str = ""
    waiting_message: str = ""
    gated: bool = False  # has our readiness gate
    gate_open: bool = False
    ended: bool = False  # one of its containers ended, the engine or one beside it: it cannot be ready any more
    termination: Evidence | None = None
    labels: Mapping[str, str] | None = None  # those of ours that it has; None: not looked at

    @property
    def failed(self) -> bool:
        """It ended for good, or is of no use any more; a restart in place is never asked for."""
        return self.phase in ("Failed", "Succeeded") or (self.ended and self.deleting is None)

    @property
    def running(self) -> bool:
        return self.started is not None and not self.failed

    @property
    def ranks(self) -> range:
        return range(self.rank_start, self.rank_start + self.rank_count)


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank as its group's head sees it."""

    rank: int
    state: str = "Unknown"
    stage: str = ""
    fingerprint: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    waiting: int | None = None
    running: int | None = None
    kv_usage: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class HeadReport:
    """The last answer of a group's head. `at` is when it came, `healthy` whether it said it may get traffic."""

    pod_uid: str
    at: float
    healthy: bool
    ranks: tuple[RankReport, ...] = ()
    error: str = ""  # why the last attempt to ask failed; the rest is then older


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything one plan is made from.

    `document`: the object as the API holds it. `children`: other objects that it owns, by (kind, name).
    `foreign`: objects of others that have a name of ours, by (kind, name). `refusals`: why the API
    did not take pods, by name; `rejected`: why it did not take other objects, by (kind, name).
    `trials`: what the API server said of pods of revisions that it was asked about; empty: it would take them.
    `absent`: why kinds that only some clusters have cannot be used, by kind.
    """

    document: Mapping[str, Any]
    pods: tuple[PodFacts, ...] = ()
    children: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    foreign: frozenset[tuple[str, str]] = frozenset()
    state: State = field(default_factory=State)
    state_error: str = ""
    reports: Mapping[str, HeadReport] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)
    rejected: Mapping[tuple[str, str], str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    trials: Mapping[str, str] = field(default_factory=dict)
