"""Carries out a plan: actions in their order, then the status if it changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from dpi_operator.api.status import Status, read_status, write_status
from dpi_operator.api.types import API_VERSION, KIND
from dpi_operator.apply.client import Api, ApiError
from dpi_operator.apply.events import Events
from dpi_operator.observe.snapshot import owned
from dpi_operator.plan.actions import (
    Action,
    Apply,
    Create,
    Delete,
    EmitEvent,
    OpenGate,
    Plan,
    Relabel,
    Try,
    kind_and_name,
)
from dpi_operator.plan.names import GATE_JOINED
from dpi_operator.plan.refusals import is_quota, is_terminating
from dpi_operator.plan.times import to_text

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome:
    """What the next snapshot has to know: names that others hold, and pods and other objects that the API refused."""

    foreign: set[tuple[str, str]] = field(default_factory=set)
    refusals: dict[str, str] = field(default_factory=dict)
    rejected: dict[tuple[str, str], str] = field(default_factory=dict)
    trials: dict[str, str] = field(default_factory=dict)  # revision -> why its pods would be refused; empty: taken
    kinds: set[str] = field(default_factory=set)  # of which something was written


class Executor:
    def __init__(self, api: Api, events: Events) -> None:
        self._api, self._events = api, events

    async def run(self, plan: Plan, document: dict[str, Any], now: float) -> Outcome:
        """Raises ApiError when something failed; what was done until then stands, and the next plan goes on from it.

        Names come before pods: once one is found to be another's, what comes after it is left to the next plan.
        """
        outcome, owner = Outcome(), document["metadata"]
        # Neighbours of one kind do not depend on each other; different kinds keep their order.
        for kind, same in groupby(plan.actions, key=type):
            batch = list(same)
            if kind in (Create, Delete, Relabel, OpenGate):
                results = await asyncio.gather(
                    *(self._one(a, owner, outcome, now) for a in batch), return_exceptions=True
                )
                if failed := next((r for r in results if isinstance(r, BaseException)), None):
                    raise failed
            else:
                for action in batch:
                    await self._one(action, owner, outcome, now)
            if outcome.foreign:
                return outcome  # the rest was planned without knowing that: no pod is made, nothing is told
        await self._status(plan.status, document)
        return outcome

    async def _one(self, action: Action, owner: dict[str, Any], outcome: Outcome, now: float) -> None:
        namespace = owner["namespace"]
        if isinstance(action, EmitEvent):
            if not action.made or any(name not in outcome.refusals for name in action.made):
                await self._events.emit(action, owner)
            return
        if isinstance(action, Try):
            await self._try(action, owner, outcome)
            return
        outcome.kinds.add(_kind(action))
        if isinstance(action, Apply):
            await self._apply(action, owner, outcome)
        elif isinstance(action, Create):
            await self._create(action, owner, outcome)
        elif isinstance(action, Delete):
            log.info("%s/%s: delete %s %s: %s", namespace, owner["name"], action.kind, action.name, action.reason.value)
            await self._api.delete(action.kind, namespace, action.name, action.uid, action.grace_s)
        elif isinstance(action, Relabel):
            await self._relabel(action.pod, action.uid, action.labels, owner, outcome)
        elif isinstance(action, OpenGate):
            await self._gate(action, namespace, now)

    async def _apply(self, action: Apply, owner: dict[str, Any], outcome: Outcome) -> None:
        kind, name = kind_and_name(action.manifest)
        if not action.exists:
            live = await self._api.get(kind, owner["namespace"], name)
            if live is not None and not owned(live, owner["uid"]):
                outcome.foreign.add((kind, name))
                return
        try:
            await self._api.apply(kind, owner["namespace"], action.manifest)
        except ApiError as e:
            # The state comes before everything that rests on it; what else is refused must not hold up the pods.
            if e.status not in (400, 403, 422) or kind == "ConfigMap":
                raise
            log.warning("%s/%s: %s %s is refused: %s", owner["namespace"], owner["name"], kind, name, e.message)
            outcome.rejected[kind, name] = e.message

    async def _create(self, action: Create, owner: dict[str, Any], outcome: Outcome) -> None:
        kind, name = kind_and_name(action.manifest)
        try:
            await self._api.create(kind, owner["namespace"], action.manifest)
        except ApiError as e:
            if e.status == 409:
                live = await self._api.get(kind, owner["namespace"], name)
                if live is not None and not owned(live, owner["uid"]):
                    outcome.foreign.add((kind, name))
                elif live is not None and _lacks_labels(live, action.manifest):
                    # Ours, and not found by our selector: somebody took its labels.
                    labels = action.manifest["metadata"]["labels"]
                    await self._relabel(name, live["metadata"]["uid"], labels, owner, outcome)
                return  # ours, from a plan that was cut short, or just going: the next look tells
            if e.status in (400, 403, 422):
                outcome.refusals[name] = e.message
                return
            raise

    async def _try(self, action: Try, owner: dict[str, Any], outcome: Outcome) -> None:
        """A server that cannot answer now is asked again by the next plan; nothing was changed until then."""
        for manifest in action.manifests:
            try:
                await self._api.create("Pod", owner["namespace"], manifest, dry_run=True)
            except ApiError as e:
                # A name that is taken was looked at last; a quota may have room once old pods are gone.
                if e.status == 409 or is_quota(e.message):
                    continue
                if e.status not in (400, 403, 422) or is_terminating(e.message):
                    log.warning("%s/%s: revision %s: %s", owner["namespace"], owner["name"], action.revision, e)
                    return
                outcome.trials[action.revision] = e.message
                return
        outcome.trials[action.revision] = ""

    async def _relabel(
        self, name: str, uid: str, labels: Mapping[str, str], owner: dict[str, Any], outcome: Outcome
    ) -> None:
        log.info("%s/%s: labels of pod %s are put back", owner["namespace"], owner["name"], name)
        try:
            await self._api.merge("Pod", owner["namespace"], name, {"metadata": {"uid": uid, "labels": dict(labels)}})
        except ApiError as e:
            if e.status in (404, 409):  # it is gone, or another one by now
                return
            if e.status not in (400, 403, 422):
                raise
            outcome.rejected["Pod", name] = e.message

    async def _gate(self, action: OpenGate, namespace: str, now: float) -> None:
        condition = {
            "type": GATE_JOINED,
            "status": str(action.open),
            "reason": "HandshakeComplete" if action.open else "HandshakeLost",
            "message": action.message,
            "lastTransitionTime": to_text(now),
        }
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": action.pod, "uid": action.uid},
            "status": {"conditions": [condition]},
        }
        try:
            await self._api.apply("Pod", namespace, body, sub="status")
        except ApiError as e:
            if e.status not in (404, 409):
                raise

    async def _status(self, status: Status, document: dict[str, Any]) -> None:
        wanted = write_status(status)
        if wanted == write_status(read_status(document.get("status"))) and document.get("status"):
            return
        metadata = document["metadata"]
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": metadata["name"]}, "status": wanted}
        try:
            await self._api.apply(KIND, metadata["namespace"], body, sub="status")
        except ApiError as e:
            if e.status != 404:
                raise


def _lacks_labels(live: Mapping[str, Any], manifest: Mapping[str, Any]) -> bool:
    have = live["metadata"].get("labels") or {}
    return any(have.get(k) != v for k, v in manifest["metadata"]["labels"].items())


def _kind(action: Action) -> str:
    if isinstance(action, Create | Apply):
        return kind_and_name(action.manifest)[0]
    return action.kind if isinstance(action, Delete) else "Pod"


def writes(actions: Sequence[Action]) -> list[Action]:
    """Actions that change something in the cluster."""
    return [a for a in actions if not isinstance(a, EmitEvent | Try)]
