"""What a plan consists of. Actions are carried out in the order of the plan; `apply` knows how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dpi_operator.api.reasons import WARNINGS, DeleteReason, EventReason
from dpi_operator.api.status import Status
from dpi_operator.plan.names import POD_GROUP

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Create:
    """Make an object that must not exist yet (pods: their names are unique to revision, group and index)."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Apply:
    """Bring an object of ours to this form, by server-side apply. `exists`: it was seen."""

    manifest: Manifest
    exists: bool


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete exactly the object with this uid. `grace_s` None: its own grace period; 0: force."""

    kind: str
    name: str
    uid: str
    reason: DeleteReason
    grace_s: int | None = None


@dataclass(frozen=True, slots=True)
class Try:
    """Ask the API server whether it would take these pods of a revision, without making them."""

    revision: str
    manifests: tuple[Manifest, ...]


@dataclass(frozen=True, slots=True)
class Relabel:
    """Give a pod back the labels of ours that somebody changed."""

    pod: str
    uid: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class OpenGate:
    """Set the readiness gate of a pod."""

    pod: str
    uid: str
    open: bool
    message: str


@dataclass(frozen=True, slots=True)
class EmitEvent:
    """Tell people. `key` joins repetitions of one matter; `pod` is (name, uid) of the pod concerned, if any.

    `made`: pods made by the same plan; when the API server took none of them there is nothing to tell.
    """

    reason: EventReason
    message: str
    key: str = ""
    pod: tuple[str, str] | None = None
    made: tuple[str, ...] = ()

    @property
    def warning(self) -> bool:
        return self.reason in WARNINGS


Action = Create | Apply | Delete | Try | Relabel | OpenGate | EmitEvent


@dataclass(frozen=True, slots=True)
class Plan:
    """Actions, the status to be written, and when to plan again at the latest (epoch seconds)."""

    actions: tuple[Action, ...] = ()
    status: Status = field(default_factory=Status)
    requeue_at: float | None = None


def kind_and_name(manifest: Manifest) -> tuple[str, str]:
    """The kind, with its API group behind a dot where two groups have one of that name."""
    kind: str = manifest["kind"]
    if kind == POD_GROUP:
        kind += "." + manifest["apiVersion"].partition("/")[0]
    return kind, manifest["metadata"]["name"]
