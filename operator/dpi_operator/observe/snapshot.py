"""Reading everything that a plan for one object needs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from dpi_operator.api.types import KIND
from dpi_operator.apply.client import Api
from dpi_operator.apply.kinds import CHILD_KINDS, KINDS, OPTIONAL_KINDS
from dpi_operator.observe.pods import pod_facts
from dpi_operator.plan.facts import HeadReport, Snapshot
from dpi_operator.plan.names import child_selector, state_config_map
from dpi_operator.plan.state import STATE_KEY, State, read_state


def owned(document: Mapping[str, Any], uid: str) -> bool:
    """Whether the object with this uid controls `document`."""
    references = (document.get("metadata") or {}).get("ownerReferences") or ()
    return any(r.get("uid") == uid and r.get("controller") for r in references)


ALL_KINDS = frozenset(("Pod", *CHILD_KINDS, *OPTIONAL_KINDS))

Lists = dict[str, list[dict[str, Any]]]
"""What was last read of each kind."""


async def take_snapshot(
    api: Api,
    namespace: str,
    name: str,
    reports: Mapping[str, HeadReport],
    lists: Lists,
    stale: frozenset[str] = ALL_KINDS,
    foreign: frozenset[tuple[str, str]] = frozenset(),
    refusals: Mapping[str, str] | None = None,
    absent: Mapping[str, str] | None = None,
    rejected: Mapping[tuple[str, str], str] | None = None,
    trials: Mapping[str, str] | None = None,
) -> Snapshot | None:
    """None when the object is gone or on its way out. Raises ApiError.

    Kinds in `stale` are read anew into `lists`, the others taken from there; what `lists` does not have is read.
    `absent`: kinds that the cluster does not have, and why they cannot be used.
    """
    document = await api.get(KIND, namespace, name)
    if document is None or document["metadata"].get("deletionTimestamp"):
        return None
    uid, selector = document["metadata"]["uid"], child_selector(name)
    children_kinds = (*CHILD_KINDS, *(k for k in OPTIONAL_KINDS if k not in (absent or {})))
    wanted = [kind for kind in ("Pod", *children_kinds) if kind in stale or kind not in lists]
    found = await asyncio.gather(*(api.list_all(kind, namespace, selector) for kind in wanted))
    known = {p["metadata"]["name"] for p in lists.get("Pod", ()) if owned(p, uid)}
    lists.update(zip(wanted, found, strict=True))
    # A pod that is no longer listed is gone, or somebody took the labels by which it is found.
    unlisted = sorted(known - {p["metadata"]["name"] for p in lists["Pod"]})
    lists["Pod"] += [p for p in await asyncio.gather(*(api.get("Pod", namespace, n) for n in unlisted)) if p]
    pods = [facts for pod in lists["Pod"] if owned(pod, uid) and (facts := pod_facts(pod)) is not None]
    children = {
        (kind, item["metadata"]["name"]): {
            **item,
            "apiVersion": KINDS[kind].api_version,
            "kind": kind.partition(".")[0],
        }
        for kind in children_kinds
        for item in lists[kind]
        if owned(item, uid)
    }
    config_map = children.get(("ConfigMap", state_config_map(name)))
    state, error = read_state((config_map.get("data") or {}).get(STATE_KEY)) if config_map else (State(), "")
    return Snapshot(
        document=document,
        pods=tuple(sorted(pods, key=lambda p: p.name)),
        children=children,
        foreign=foreign,
        state=state,
        state_error=f"ConfigMap {state_config_map(name)} {error}" if error else "",
        reports=reports,
        refusals=refusals or {},
        rejected=rejected or {},
        absent=absent or {},
        trials=trials or {},
    )
