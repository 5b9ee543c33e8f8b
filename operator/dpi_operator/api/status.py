"""The status of a DataParallelInference: what its fields mean, and how it is written to and read from the object."""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec

from dpi_operator.api.types import about

MAX_GROUPS = 64
"""Groups listed one by one."""

MAX_RANKS = 256
"""Ranks listed one by one, over all groups."""

MAX_MESSAGE = 512
"""Characters kept of a container's last words."""


class Phase(enum.StrEnum):
    """Where a group stands."""

    PENDING = "Pending"  # some of its pods do not exist yet
    SCHEDULING = "Scheduling"  # a pod has no node
    STARTING = "Starting"  # a container does not run yet
    HANDSHAKE = "Handshake"  # containers run, ranks join
    READY = "Ready"
    DRAINING = "Draining"  # on its way out
    RECOVERING = "Recovering"  # a pod was lost and is, or will be, replaced
    FAILED = "Failed"  # its budget of recreations is spent


class _Status(msgspec.Struct, rename="camel", kw_only=True):
    pass


class Condition(_Status):
    type: Annotated[str, about("What is judged.", min_length=1, max_length=316)]
    status: Annotated[str, about("True, False or Unknown.", pattern="^(True|False|Unknown)$")]
    reason: Annotated[str, about("One word for why.", min_length=1, max_length=1024)]
    message: Annotated[str, about("What is the case, and what to do about it.", max_length=32768)] = ""
    last_transition_time: Annotated[str, about("When the status last changed (RFC 3339).")] = ""
    observed_generation: Annotated[int, about("Generation of the spec that was judged.")] = 0


class Termination(_Status):
    """How a container ended."""

    exit_code: Annotated[int | None, about("Exit code of the engine container.")] = None
    reason: Annotated[str, about("Reason in one word: Error, OOMKilled, Evicted, NodeLost, Deleted.")] = ""
    message: Annotated[str, about("Last words of the container.", max_length=MAX_MESSAGE)] = ""
    finished_at: Annotated[str, about("When it ended (RFC 3339).")] = ""


class RankStatus(_Status):
    rank: Annotated[int, about("Number of the rank in its group.")]
    pod: Annotated[str, about("Pod that holds the rank.")] = ""
    node: Annotated[str, about("Node of the pod.")] = ""
    state: Annotated[str, about("NEW, HELLO, LOADING, READY, SUSPECT or LOST; Unknown where nobody could say.")] = (
        "Unknown"
    )
    stage: Annotated[str, about("What a rank that is not ready is doing or waiting for.")] = ""
    config_hash: Annotated[str, about("Fingerprint that the rank reports, 12 digits.")] = ""
    waiting: Annotated[int | None, about("Requests that wait in the rank; absent when not known.")] = None
    running: Annotated[int | None, about("Requests that run in the rank; absent when not known.")] = None
    kv_cache_usage: Annotated[str | None, about("Share of KV cache blocks in use, 0.00 to 1.00.")] = None
    sample_time: Annotated[str | None, about("When the three numbers were read (RFC 3339).")] = None
    last_termination: Annotated[Termination | None, about("How the rank's pod last ended.")] = None


class GroupStatus(_Status):
    name: Annotated[str, about("Name of the group: object, revision and index.")]
    index: Annotated[int, about("Index of the group.")]
    revision: Annotated[str, about("Revision that all its pods have.")]
    phase: Annotated[str, about("Where the group stands.")]
    ready_ranks: Annotated[int, about("Ranks that serve.")] = 0
    restarts: Annotated[int, about("Recreations since it last ran long enough.")] = 0
    last_restart_time: Annotated[str | None, about("When something of it was last recreated (RFC 3339).")] = None
    next_restart_time: Annotated[str | None, about("When the next recreation is due (RFC 3339).")] = None
    reason: Annotated[str, about("One word for why it is not ready.")] = ""
    message: Annotated[str, about("What it waits for, or what went wrong.")] = ""
    config_hash: Annotated[str, about("Declared fingerprint of its pods, 12 digits.")] = ""
    ranks: Annotated[list[RankStatus], about("Its ranks, as far as the list's bound allows.")] = []


class Status(_Status):
    """Everything `kubectl describe` answers from."""

    observed_generation: Annotated[int, about("Generation of the spec that this status judges.")] = 0
    replicas: Annotated[int, about("Groups that exist.")] = 0
    ready_replicas: Annotated[int, about("Groups of which every rank is ready.")] = 0
    updated_replicas: Annotated[int, about("Groups of the newest revision.")] = 0
    available_replicas: Annotated[int, about("Groups that serve, for at least minReadySeconds.")] = 0
    selector: Annotated[str, about("Selects one pod per group, rank 0's: for autoscalers.")] = ""
    ranks: Annotated[int, about("Ranks wanted, over all groups.")] = 0
    ready_ranks: Annotated[int, about("Ranks that serve.")] = 0
    rank_summary: Annotated[str, about("Ready and wanted ranks, as 15/16.")] = ""
    pods_per_group: Annotated[int, about("Pods of one group.")] = 0
    gpus: Annotated[int, about("GPUs that all groups together ask for.")] = 0
    waiting: Annotated[int | None, about("Waiting requests over all ranks, at most a minute old.")] = None
    restarts: Annotated[int, about("Recreations counted against the budget, over all groups.")] = 0
    current_revision: Annotated[str, about("Revision that serves.")] = ""
    update_revision: Annotated[str, about("Revision of the spec as it is now.")] = ""
    collision_count: Annotated[int, about("Times that two specs had the same hash.")] = 0
    config_fingerprint: Annotated[str, about("Declared fingerprint of the newest revision, 12 digits.")] = ""
    endpoint: Annotated[str, about("URL of the client Service.")] = ""
    conditions: Annotated[list[Condition], about("Judgements, one per type.")] = []
    groups: Annotated[list[GroupStatus], about("Groups one by one, at most 64.")] = []
    truncated: Annotated[bool, about("Whether groups or ranks were left out; metrics carry all.")] = False


def read_status(document: Any) -> Status:
    """The status in an object; an empty one where there is none or an older version wrote what cannot be read."""
    if not isinstance(document, dict):
        return Status()
    try:
        return msgspec.convert(document, Status)
    except msgspec.ValidationError:
        return Status()


def write_status(status: Status) -> dict[str, Any]:
    """As the API takes it: values that are not known are left out, and so are empty texts of groups."""
    plain: dict[str, Any] = _without_nulls(msgspec.to_builtins(status))
    for group in plain["groups"]:
        for entry in (group, *group["ranks"]):
            for key in [k for k, v in entry.items() if v == ""]:
                del entry[key]
    return plain


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_nulls(v) for v in value]
    return value


def condition(status: Status, kind: str) -> Condition | None:
    """The condition of one type."""
    return next((c for c in status.conditions if c.type == kind), None)


CONDITION_TYPES = (
    "Ready",
    "Accepted",
    "ConfigConsistent",
    "Scheduled",
    "HandshakeComplete",
    "Available",
    "Progressing",
    "Degraded",
)
"""In the order in which they are written."""
