"""Every reason that a condition, an event, a deletion or a refusal carries, each defined once."""

from __future__ import annotations

import enum


class Reason(enum.StrEnum):
    """Why an object is not accepted, or why a condition has its value."""

    # Accepted
    ACCEPTED = "Accepted"
    INVALID_SPEC = "InvalidSpec"
    RESERVED_FLAG = "ReservedFlag"
    RESERVED_FIELD = "ReservedField"
    NOT_SUPPORTED = "NotSupported"
    RANK_OVERRIDE_OVERLAP = "RankOverrideOverlap"
    GPU_REQUEST_MISMATCH = "GpuRequestMismatch"
    POOL_PORT_LIMIT = "PoolPortLimit"
    MISSING_CRD = "MissingCRD"
    NAME_TAKEN = "NameTaken"
    # ConfigConsistent
    FINGERPRINTS_AGREE = "FingerprintsAgree"
    DECLARED_ONLY = "DeclaredOnly"
    FINGERPRINT_MISMATCH = "FingerprintMismatch"
    HASH_MISMATCH = "HashMismatch"
    HASH_UNKNOWN = "HashUnknown"
    ARCHITECTURE_MISMATCH = "ArchitectureMismatch"
    # Scheduled
    ALL_SCHEDULED = "AllScheduled"
    PODS_PENDING = "PodsPending"
    VOLUME_CLAIM_MISSING = "VolumeClaimMissing"
    INSUFFICIENT_CAPACITY = "InsufficientCapacity"
    GANG_INCOMPLETE = "GangIncomplete"
    TOPOLOGY_UNSATISFIED = "TopologyUnsatisfied"
    QUEUED = "Queued"
    QUOTA_EXCEEDED = "QuotaExceeded"
    # HandshakeComplete
    ALL_RANKS_JOINED = "AllRanksJoined"
    RANKS_MISSING = "RanksMissing"
    HANDSHAKE_TIMEOUT = "HandshakeTimeout"
    RANK0_NOT_READY = "Rank0NotReady"
    IMAGE_PULLING = "ImagePulling"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    MISSING_SECRET = "MissingSecret"
    CONTAINER_CONFIG_ERROR = "ContainerConfigError"
    # Available
    ENOUGH_GROUPS = "EnoughGroups"
    MINIMUM_GROUPS_UNAVAILABLE = "MinimumGroupsUnavailable"
    SCALED_TO_ZERO = "ScaledToZero"
    SUSPENDED = "Suspended"
    # Progressing
    ROLLOUT_COMPLETE = "RolloutComplete"
    ROLLING_OUT = "RollingOut"
    SCALING = "Scaling"
    WAITING_FOR_DELETE = "WaitingForDelete"
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    PAUSED = "Paused"
    # Degraded
    HEALTHY = "Healthy"
    RANK_LOST = "RankLost"
    CRASH_LOOP = "CrashLoop"
    OOM_KILLED = "OOMKilled"
    RESTART_BUDGET_EXHAUSTED = "RestartBudgetExhausted"
    STUCK_TERMINATING = "StuckTerminating"
    QUEUE_IMBALANCE = "QueueImbalance"
    STALE_METRICS = "StaleMetrics"
    STATE_UNREADABLE = "StateUnreadable"
    OBJECT_REFUSED = "ObjectRefused"
    # Ready
    READY = "Ready"
    NOT_OBSERVED = "NotObserved"


class DeleteReason(enum.StrEnum):
    """Why the operator deletes an object. No pod goes without one."""

    FAILED = "Failed"
    GROUP_BROKEN = "GroupBroken"
    STUCK_TERMINATING = "StuckTerminating"
    SCALED_DOWN = "ScaledDown"
    SUSPENDED = "Suspended"
    GANG_INCOMPLETE = "GangIncomplete"
    NEW_REVISION = "NewRevision"
    OLD_COLOUR = "OldColour"
    NO_LONGER_WANTED = "NoLongerWanted"


class EventReason(enum.StrEnum):
    """Events on the object and on the pod concerned."""

    ACCEPTED = "Accepted"
    SPEC_REJECTED = "SpecRejected"
    CONFIG_MISMATCH = "ConfigMismatch"
    GROUP_CREATED = "GroupCreated"
    GROUP_READY = "GroupReady"
    GROUP_RECREATED = "GroupRecreated"
    RANK_REPLACED = "RankReplaced"
    HANDSHAKE_TIMEOUT = "HandshakeTimeout"
    GANG_RELEASED = "GangReleased"
    RESTART_BUDGET_EXHAUSTED = "RestartBudgetExhausted"
    STUCK_TERMINATING_FORCED = "StuckTerminatingForced"
    ROLLOUT_STARTED = "RolloutStarted"
    ROLLED_BACK = "RolledBack"
    ROLLOUT_COMPLETED = "RolloutCompleted"
    TRAFFIC_SWITCHED = "TrafficSwitched"
    NAME_TAKEN = "NameTaken"


WARNINGS = frozenset(
    {
        EventReason.SPEC_REJECTED,
        EventReason.CONFIG_MISMATCH,
        EventReason.HANDSHAKE_TIMEOUT,
        EventReason.GROUP_RECREATED,
        EventReason.RANK_REPLACED,
        EventReason.GANG_RELEASED,
        EventReason.RESTART_BUDGET_EXHAUSTED,
        EventReason.STUCK_TERMINATING_FORCED,
        EventReason.NAME_TAKEN,
    }
)
"""Events of type Warning; the rest are Normal."""
