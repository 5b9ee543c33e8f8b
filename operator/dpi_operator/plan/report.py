"""The status that an object gets from what is seen and decided. Pure."""

from __future__ import annotations

import msgspec

from dpi_operator.api.conditions import merged
from dpi_operator.api.status import MAX_GROUPS, MAX_RANKS, GroupStatus, Phase, RankStatus, Status, Termination
from dpi_operator.plan.groups import Group
from dpi_operator.plan.judgement import Scene, available_groups, judge, missing_ranks
from dpi_operator.plan.names import L_NAME, L_ROLE
from dpi_operator.plan.pods import Role, layout
from dpi_operator.plan.podspec import gpus_per_pod
from dpi_operator.plan.recovery import domains_of, exhausted
from dpi_operator.plan.services import endpoint
from dpi_operator.plan.state import Evidence
from dpi_operator.plan.times import to_seconds, to_text

VOLATILE_S = 60.0
"""Queue numbers are written at most this often."""

SHORT = 12


def phase_of(scene: Scene, group: Group, leaving: bool) -> tuple[Phase, str]:
    """Phase, and one word for why."""
    if leaving:
        return Phase.DRAINING, ""
    domains = domains_of(group, scene.domains)
    if any(exhausted(group.dpi, d) for d in domains):
        return Phase.FAILED, "RestartBudgetExhausted"
    if group.ready:
        return Phase.READY, ""
    pods = list(group.pods.values())
    if pods and all(p.deleting is not None and p.uid in scene.dismissed for p in pods):
        return Phase.PENDING, "PodsPending"
    due = any(d.recreating or (d.due is not None and d.attempts) for d in domains)
    lost = group.serving and group.name in scene.formed  # before it has formed, the others are on their way
    if due or any(p.failed or p.deleting is not None for p in pods) or lost:
        reason = next((d.evidence[0].reason for d in domains if d.evidence), "RankLost")
        return Phase.RECOVERING, reason
    if len(pods) < len(group.plans) or not pods:
        return Phase.PENDING, "PodsPending"
    if not all(p.scheduled for p in pods):
        return Phase.SCHEDULING, "Unscheduled"
    if not all(p.started is not None for p in pods):
        waiting = next((p.waiting_reason for p in pods if p.waiting_reason), "ContainerCreating")
        return Phase.STARTING, waiting
    return Phase.HANDSHAKE, "RanksMissing"


def _termination(e: Evidence) -> Termination:
    message = f"container {e.container}: {e.message or 'no last words'}" if e.container else e.message
    return Termination(exit_code=e.exit_code, reason=e.reason, message=message, finished_at=e.finished_at)


def _ranks(scene: Scene, group: Group, room: int) -> list[RankStatus]:
    reports, out = group.sampled(), []
    evidence = [e for d in domains_of(group, scene.domains) for e in d.evidence]
    ready = set(range(group.size)) - set(group.missing())
    for rank in range(min(group.size, room)):
        pod = next((p for p in group.pods.values() if rank in p.ranks), None)
        report, at = reports.get(rank, (None, 0.0))
        last = next((e for e in evidence if e.rank_start <= rank < e.rank_start + e.rank_count), None)
        status = RankStatus(
            rank=rank,
            pod=group.pod_of(rank),
            node=pod.node if pod else "",
            last_termination=_termination(last) if last else None,
        )
        if report is not None:
            status.state = report.state
            if rank not in ready or report.state != "READY":
                status.stage = report.error or report.stage
            status.config_hash = report.fingerprint[:SHORT]
            if report.waiting is not None and pod is not None:
                status.waiting, status.running, status.sample_time = report.waiting, report.running, to_text(at)
                status.kv_cache_usage = None if report.kv_usage is None else f"{report.kv_usage:.2f}"
        elif rank in ready:
            status.state = "READY"
        elif pod is None:
            status.state, status.stage = "NEW", "its pod does not exist"
        out.append(status)
    return out


def _group(scene: Scene, group: Group, leaving: bool, digest: str, room: int) -> GroupStatus:
    phase, reason = phase_of(scene, group, leaving)
    domains = domains_of(group, scene.domains)
    times = [t for d in domains for t in (d.due, d.held)]
    restarts, due = sum(d.attempts for d in domains), [t for t in times if t and t > scene.now]
    last = max((d.last for d in domains if d.last), default=None)
    message = ""
    if phase is Phase.HANDSHAKE or (phase is Phase.RECOVERING and group.pods):
        message = f"ranks {missing_ranks(group)}" if group.missing() else "rank 0 is not ready"
    return GroupStatus(
        name=group.name,
        index=group.index,
        revision=group.revision,
        phase=phase.value,
        ready_ranks=0 if leaving else group.ready_ranks(),
        restarts=restarts,
        last_restart_time=to_text(last) if last else None,
        next_restart_time=to_text(min(due)) if due and phase is not Phase.FAILED else None,
        reason=reason,
        message=message,
        config_hash=digest,
        ranks=_ranks(scene, group, room),
    )


def build_status(scene: Scene, old: Status, generation: int, current: str, collisions: int) -> Status:
    """The whole status. Queue numbers may be newer than those in `old`; `settle` decides whether they are written."""
    shape, groups = layout(scene.dpi), sorted(scene.groups, key=lambda g: (g.index, g.revision))
    status = Status(
        observed_generation=generation,
        replicas=len({g.index for g in groups if g.pods}),
        ready_replicas=len({g.index for g in groups if g.ready}),
        updated_replicas=sum(1 for g in groups if g.revision == scene.wish.update and g.pods),
        available_replicas=available_groups(scene),
        selector=f"{L_NAME}={scene.dpi.metadata.name},{L_ROLE}={Role.RANK0.value}",
        ranks=shape.size * scene.wish.replicas,
        ready_ranks=sum(g.ready_ranks() for g in groups),
        pods_per_group=shape.pods,
        gpus=gpus_per_pod(scene.dpi) * shape.pods * scene.wish.replicas,
        current_revision=current,
        update_revision=scene.wish.update,
        collision_count=collisions,
        config_fingerprint=scene.digest,
        endpoint=endpoint(scene.dpi),
    )
    status.rank_summary = f"{status.ready_ranks}/{status.ranks}"
    rows = [(g, False) for g in groups] + [(g, True) for g in sorted(scene.leaving, key=lambda g: g.name)]
    room = MAX_RANKS
    for group, leaving in rows[:MAX_GROUPS]:
        digest = scene.digest if group.revision == scene.wish.update else ""
        listed = _group(scene, group, leaving, digest, 0 if leaving else room)
        room -= len(listed.ranks)
        status.groups.append(listed)
        status.truncated = status.truncated or (not leaving and len(listed.ranks) < group.size)
    status.truncated = status.truncated or len(rows) > MAX_GROUPS
    status.restarts = sum(d.attempts for g in groups for d in domains_of(g, scene.domains))
    known = [r.waiting for g in groups for r in g.rank_reports().values() if r.waiting is not None]
    status.waiting = sum(known) if known else None
    status.conditions = merged(old, judge(scene), generation, to_text(scene.now))
    return status


def _stable(status: Status) -> Status:
    """Without what changes all the time."""
    copy = msgspec.convert(msgspec.to_builtins(status), Status)
    copy.waiting = None
    for group in copy.groups:
        for rank in group.ranks:
            rank.waiting = rank.running = rank.kv_cache_usage = rank.sample_time = None
    return copy


def _without_times(status: Status) -> Status:
    copy = msgspec.convert(msgspec.to_builtins(status), Status)
    for group in copy.groups:
        for rank in group.ranks:
            rank.sample_time = None
    return copy


def _sampled(status: Status) -> float:
    times = [to_seconds(r.sample_time) for g in status.groups for r in g.ranks]
    return max((t for t in times if t is not None), default=0.0)


def settle(new: Status, old: Status, now: float) -> tuple[Status, float | None]:
    """What is written, and when queue numbers that were held back are due.

    Nothing is written for the time of a sample alone, and numbers only once a minute.
    """
    if _stable(new) != _stable(old) or _without_times(new) == _without_times(old):
        return (new, None) if _without_times(new) != _without_times(old) else (old, None)
    due = _sampled(old) + VOLATILE_S
    return (new, None) if now >= due else (old, due)
