"""A pod as the API holds it -> PodFacts. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dpi_operator.api.types import GROUP
from dpi_operator.plan.facts import PodFacts
from dpi_operator.plan.names import (
    ENGINE,
    GATE_JOINED,
    L_GROUP,
    L_POD,
    L_RANK_COUNT,
    L_RANK_START,
    L_REVISION,
)
from dpi_operator.plan.revisions import HASH_DIGITS
from dpi_operator.plan.state import Evidence, clip
from dpi_operator.plan.times import to_seconds

POD_NAME = re.compile(rf".+-(?P<revision>[0-9a-f]{{{HASH_DIGITS}}})-(?P<group>\d+)-(?P<index>\d+)")
OURS = (f"{GROUP}/", "app.kubernetes.io/")


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return next((c for c in status.get("conditions") or () if c.get("type") == kind), {})


def _evidence(pod: Mapping[str, Any], statuses: list[Mapping[str, Any]], facts: dict[str, Any]) -> Evidence | None:
    """How the pod ended: the engine's own words first, then those of a container beside it, then the pod's."""
    status = pod.get("status") or {}
    ended = [
        (s, (s.get("state") or {}).get("terminated")) for s in sorted(statuses, key=lambda s: s.get("name") != ENGINE)
    ]
    over = [(s.get("name") or "", t) for s, t in ended if t]
    container, found = next((o for o in over if o[1].get("exitCode")), over[0] if over else (ENGINE, {}))
    if status.get("phase") not in ("Failed", "Succeeded") and not over:
        return None
    message = "\n".join(m for m in (status.get("message"), found.get("message")) if m)
    reason = status.get("reason") or found.get("reason") or ("Exited" if found.get("exitCode") == 0 else "Error")
    return Evidence(
        pod=facts["name"],
        uid=facts["uid"],
        node=facts["node"],
        rank_start=facts["rank_start"],
        rank_count=facts["rank_count"],
        container="" if container == ENGINE else container,
        exit_code=found.get("exitCode"),
        reason=str(reason),
        message=clip(message),
        started_at=found.get("startedAt") or "",
        finished_at=found.get("finishedAt") or "",
    )


def _number(labels: Mapping[str, str], key: str, otherwise: int) -> int:
    value = labels.get(key, "")
    return int(value) if value.isascii() and value.isdigit() else otherwise


def pod_facts(pod: Mapping[str, Any]) -> PodFacts | None:
    """None for a pod whose name is not of the planner's making, and whose labels do not tell either.

    The name comes first: it cannot be changed, labels can. Ranks are then corrected by the plan of its revision.
    """
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    labels = metadata.get("labels") or {}
    named = POD_NAME.fullmatch(metadata["name"])
    try:
        facts: dict[str, Any] = {
            "name": metadata["name"],
            "uid": metadata["uid"],
            "revision": named["revision"] if named else labels[L_REVISION],
            "group": int(named["group"] if named else labels[L_GROUP]),
            "index": int(named["index"] if named else labels[L_POD]),
            "rank_start": _number(labels, L_RANK_START, 0),
            "rank_count": _number(labels, L_RANK_COUNT, 1),
            "node": spec.get("nodeName") or "",
        }
    except (KeyError, ValueError):
        return None
    containers = list(status.get("containerStatuses") or [])
    inits = list(status.get("initContainerStatuses") or [])
    engine: Mapping[str, Any] = next((c for c in containers if c.get("name") == ENGINE), {})
    state = engine.get("state") or {}
    started = (state.get("running") or state.get("terminated") or {}).get("startedAt")
    waiting: Mapping[str, Any] = next(
        (w for c in (*inits, engine) if (w := (c.get("state") or {}).get("waiting")) and w.get("reason")), {}
    )
    scheduled, ready = _condition(status, "PodScheduled"), _condition(status, "Ready")
    disruption = _condition(status, "DisruptionTarget")
    deletion = to_seconds(metadata.get("deletionTimestamp"))
    gates = [g.get("conditionType") for g in spec.get("readinessGates") or ()]
    is_ready = ready.get("status") == "True"
    return PodFacts(
        **facts,
        phase=status.get("phase") or "Pending",
        ip=status.get("podIP") or "",
        created=to_seconds(metadata.get("creationTimestamp")) or 0.0,
        scheduled=bool(facts["node"]) or scheduled.get("status") == "True",
        scheduling_reason=scheduled.get("reason") or "" if scheduled.get("status") == "False" else "",
        scheduling_message=scheduled.get("message") or "" if scheduled.get("status") == "False" else "",
        started=to_seconds(started),
        ready=is_ready,
        ready_since=to_seconds(ready.get("lastTransitionTime")) if is_ready else None,
        deleting=deletion,
        disruption=disruption.get("reason") or "" if disruption.get("status") == "True" else "",
        waiting_reason=waiting.get("reason") or "",
        waiting_message=clip(waiting.get("message") or ""),
        gated=GATE_JOINED in gates,
        gate_open=_condition(status, GATE_JOINED).get("status") == "True",
        labels={k: v for k, v in labels.items() if k.startswith(OURS)},
        ended=any((c.get("state") or {}).get("terminated") for c in containers),
        termination=_evidence(pod, [*containers, *inits], facts),
    )
