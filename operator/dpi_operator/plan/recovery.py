"""What happens to the pods of a wanted group: made, kept, replaced after a failure with back-off and budget. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from dpi_operator.api.conditions import counted
from dpi_operator.api.reasons import DeleteReason, EventReason
from dpi_operator.api.types import DataParallelInference, GangProvider
from dpi_operator.plan.actions import Action, Create, Delete, EmitEvent, OpenGate
from dpi_operator.plan.facts import PodFacts
from dpi_operator.plan.groups import Group, ranks_alone
from dpi_operator.plan.podspec import build_pod
from dpi_operator.plan.state import MAX_EVIDENCE, MAX_HANDLED, Domain, Evidence, State, clip
from dpi_operator.plan.times import in_words, to_seconds, to_text

HANDSHAKE_MARGIN_S = 30.0
"""The engine has the same deadline and knows more; the operator acts when it did not."""

ADVICE = {
    "OOMKilled": "raise engine.resources.limits.memory",
    "Evicted": "set ephemeral-storage and memory requests, or give the node more room",
    "NodeLost": "look at the node",
}


@dataclass(slots=True)
class Draft:
    """A plan in the making. `domains` and `formed` are the state's, changed as the plan grows."""

    now: float
    domains: dict[str, Domain]
    formed: dict[str, float]
    dismissed: set[str] = field(default_factory=set)  # uids of pods that go because they are not wanted
    deletes: list[Delete] = field(default_factory=list)
    creates: list[Create] = field(default_factory=list)
    gates: list[OpenGate] = field(default_factory=list)
    events: list[EmitEvent] = field(default_factory=list)
    requeue_at: float | None = None

    @classmethod
    def of(cls, state: State, now: float) -> Draft:
        return cls(now, dict(state.domains), dict(state.formed), set(state.dismissed))

    def ask_again(self, at: float | None) -> None:
        """Plan again at `at` at the latest; times that are over would mean a plan that never rests."""
        if at is not None and at > self.now:
            self.requeue_at = at if self.requeue_at is None else min(self.requeue_at, at)

    def delete(self, pod: PodFacts, reason: DeleteReason, grace_s: int | None = None) -> None:
        if pod.deleting is None or grace_s == 0:
            self.deletes.append(Delete("Pod", pod.name, pod.uid, reason, grace_s))

    def ordered(self) -> list[Action]:
        return [*self.deletes, *self.creates, *self.gates, *self.events]


def exhausted(dpi: DataParallelInference, domain: Domain) -> bool:
    most = dpi.spec.failure_policy.max_restarts
    return most is not None and domain.attempts > most


def domains_of(group: Group, domains: Mapping[str, Domain]) -> list[Domain]:
    """Failure domains of a group that have something in them."""
    keys = [p.name for p in group.plans] if ranks_alone(group.dpi) else [group.name]
    return [domains[k] for k in (group.name, *keys) if k in domains]


def used_up(most: int | None) -> str:
    return f"{counted(most or 0, 'recreation')} {'is' if most == 1 else 'are'} used up"


def back_off(dpi: DataParallelInference, attempt: int, blameless: bool) -> float:
    """Seconds before recreation number `attempt`. What the engine did not cause is mended at once the first time."""
    policy = dpi.spec.failure_policy.backoff
    if blameless and attempt <= 1:
        return 0.0
    return float(min(policy.base_seconds * 2 ** min(max(0, attempt - 1), 30), policy.max_seconds))


def _blameless(pod: PodFacts) -> bool:
    return bool(pod.disruption) or (pod.termination is not None and pod.termination.reason in ("Evicted", "NodeLost"))


def ending(pod: PodFacts, now: float) -> Evidence:
    """How a pod ended, or is ending."""
    if pod.termination is not None and pod.failed:
        return pod.termination
    lost = pod.disruption in ("DeletionByTaintManager", "DeletionByPodGC")
    reason = "NodeLost" if lost else (pod.disruption or "Deleted")
    return Evidence(
        pod=pod.name,
        uid=pod.uid,
        node=pod.node,
        rank_start=pod.rank_start,
        rank_count=pod.rank_count,
        exit_code=pod.termination.exit_code if pod.termination else None,
        reason=reason,
        message=pod.termination.message if pod.termination else "",
        started_at=to_text(pod.started) if pod.started else "",
        finished_at=to_text(now),
    )


def in_a_sentence(e: Evidence) -> str:
    """Rank 5 (pod demo-...-5 on node gpu-7) exited 137 OOMKilled after 41 s."""
    last = e.rank_start + e.rank_count - 1
    ranks = f"Rank {last}" if e.rank_count == 1 else f"Ranks {e.rank_start}-{last}"
    where = f"pod {e.pod}" + (f" on node {e.node}" if e.node else "")
    began, ended = to_seconds(e.started_at), to_seconds(e.finished_at)
    after = f" after {in_words(ended - began)}" if began is not None and ended is not None else ""
    how = f"exited {e.exit_code} {e.reason}".rstrip() if e.exit_code is not None else f"went away ({e.reason})"
    if e.container:
        ranks = f"Container {e.container} of {ranks[0].lower()}{ranks[1:]}"
    return f"{ranks} ({where}) {how}{after}."


def record(draft: Draft, dpi: DataParallelInference, key: str, what: str, pods: list[PodFacts], counts: bool) -> Domain:
    """Note that these pods ended; `counts` against the budget. The next recreation's time goes into the domain."""
    before = draft.domains.get(key, Domain())
    evidence = [ending(p, draft.now) for p in pods]
    attempts = before.attempts + (1 if counts else 0)
    wait = back_off(dpi, attempts, all(_blameless(p) for p in pods)) if counts else 0.0
    after = Domain(
        attempts=attempts,
        last=draft.now,
        due=draft.now + wait,
        handled=(*(p.uid for p in pods), *before.handled)[:MAX_HANDLED],
        evidence=tuple(msgspec.structs.replace(e, message=clip(e.message)) for e in (*evidence, *before.evidence))[
            :MAX_EVIDENCE
        ],
        recreating=before.recreating,
        releases=before.releases,
        held=before.held,
    )
    draft.domains[key] = after
    first, most = pods[0], dpi.spec.failure_policy.max_restarts
    sentence = " ".join(in_a_sentence(e) for e in evidence[:3])
    pod = (first.name, first.uid)
    if exhausted(dpi, after):
        text = f"{sentence} {what} stays down: {used_up(most)}. Mend the cause, then set restartedAt."
        draft.events.append(EmitEvent(EventReason.RESTART_BUDGET_EXHAUSTED, text, key, pod))
        return after
    when = "now" if wait <= 0 else f"in {in_words(wait)}"
    attempt = f" (attempt {attempts}{f' of {most}' if most is not None else ''})" if counts else ""
    advice = ADVICE.get(evidence[0].reason, "")
    if evidence[0].container and evidence[0].reason == "OOMKilled":
        advice = "raise that container's limits.memory in spec.template"
    text = f"{sentence} {what} is recreated {when}{attempt}" + (f"; {advice}." if advice else ".")
    reason = EventReason.RANK_REPLACED if what.startswith("The pod") else EventReason.GROUP_RECREATED
    draft.events.append(EmitEvent(reason, text, f"{key}/{attempts}/{first.uid}", pod))
    return after


def _forgive(draft: Draft, dpi: DataParallelInference, key: str, ready_since: float | None) -> None:
    """A long enough good run forgets earlier failures."""
    domain = draft.domains.get(key)
    if domain is None or not (domain.attempts or domain.due) or ready_since is None:
        return
    good_until = ready_since + dpi.spec.failure_policy.backoff.reset_after_seconds
    if draft.now >= good_until:
        draft.domains[key] = Domain(evidence=domain.evidence, last=domain.last)
    else:
        draft.ask_again(good_until)


def _force_stuck(draft: Draft, dpi: DataParallelInference, pod: PodFacts) -> None:
    """A pod whose grace period is long over holds its name: its node is dead, or its runtime hangs."""
    limit = dpi.spec.failure_policy.stuck_terminating_seconds
    if pod.deleting is None or not limit:
        return
    if draft.now >= pod.deleting + limit:
        draft.delete(pod, DeleteReason.STUCK_TERMINATING, grace_s=0)
        text = (
            f"Pod {pod.name} on node {pod.node or '?'} was still there {limit} s after its grace period; "
            "it is removed by force so that its ranks can come back. Look at the node."
        )
        draft.events.append(EmitEvent(EventReason.STUCK_TERMINATING_FORCED, text, pod.uid, (pod.name, pod.uid)))
    else:
        draft.ask_again(pod.deleting + limit)


def let_go(draft: Draft, group: Group, reason: DeleteReason) -> None:
    """Delete a group that is no longer wanted."""
    for pod in group.pods.values():
        if pod.deleting is None:
            draft.dismissed.add(pod.uid)
        draft.delete(pod, reason)
        _force_stuck(draft, group.dpi, pod)


def leave(draft: Draft, group: Group) -> None:
    """Look after a group that is on its way out."""
    for pod in group.pods.values():
        _force_stuck(draft, group.dpi, pod)


def keep(draft: Draft, group: Group, fresh: bool) -> None:
    """Bring a wanted group to its pods. `fresh`: it has none so far."""
    if not group.plans:
        return  # its revision is gone: the rollout replaces it, nothing can mend it
    if group.ready and group.name not in draft.formed:
        draft.formed[group.name] = draft.now
        ranks = f"All {group.size} ranks" if group.size > 1 else "The only rank"
        serve = "serve" if group.size > 1 else "serves"
        text = f"{ranks} of group {group.index} (revision {group.revision}) {serve}."
        draft.events.append(EmitEvent(EventReason.GROUP_READY, text, group.name))
    if gang_waits(group) and _release_gang(draft, group):
        return
    alone, before = ranks_alone(group.dpi), len(draft.creates)
    domain = draft.domains.get(group.name, Domain())
    if not alone and not domain.recreating and any(_dismissed(draft, p) for p in group.pods.values()):
        # Wanted again while it goes: it comes back as a whole, and nothing was lost.
        domain = msgspec.structs.replace(domain, recreating=True)
        draft.domains[group.name] = domain
    if not alone and (group.name in draft.formed or domain.recreating):
        _keep_together(draft, group)
    else:
        # Before a group has formed once, its members do not depend on each other yet.
        _keep_each(draft, group, alone)
        if not alone:
            _handshake_deadline(draft, group)
    keys = {group.name, *(p.name for p in group.plans)}
    made = tuple(c.manifest["metadata"]["name"] for c in draft.creates[before:])
    if fresh and made and not keys & draft.domains.keys():  # one that failed before comes back, it is not new
        size = f"{counted(len(group.plans), 'pod')}, {counted(group.size, 'rank')}"
        text = f"Group {group.index} of revision {group.revision}: {size}."
        draft.events.append(EmitEvent(EventReason.GROUP_CREATED, text, group.name, made=made))
    _open_gates(draft, group)


def _dismissed(draft: Draft, pod: PodFacts) -> bool:
    """Whether it goes because the operator no longer wanted it."""
    return pod.deleting is not None and pod.uid in draft.dismissed


def _create(draft: Draft, group: Group, index: int) -> None:
    draft.creates.append(Create(build_pod(group.dpi, group.plans[index], group.revision)))


def _keep_each(draft: Draft, group: Group, alone: bool) -> None:
    for plan in group.plans:
        key = plan.name if alone else group.name
        pod = group.pods.get(plan.place.index)
        domain = draft.domains.get(key, Domain())
        if pod is None:
            if exhausted(group.dpi, domain):
                continue
            if domain.due is not None and draft.now < domain.due:
                draft.ask_again(domain.due)
            else:
                _create(draft, group, plan.place.index)
        elif pod.deleting is not None:
            if pod.uid not in domain.handled and not _dismissed(draft, pod):
                record(draft, group.dpi, key, f"The pod of {ranks_in_words(pod)}", [pod], counts=pod.failed)
            _force_stuck(draft, group.dpi, pod)
        elif pod.failed:
            if pod.uid not in domain.handled:
                domain = record(draft, group.dpi, key, f"The pod of {ranks_in_words(pod)}", [pod], counts=True)
            if exhausted(group.dpi, domain):
                continue
            if domain.due is None or draft.now >= domain.due:
                draft.delete(pod, DeleteReason.FAILED)
            else:
                draft.ask_again(domain.due)
        elif pod.ready and (alone or group.ready):
            _forgive(draft, group.dpi, key, pod.ready_since)


def ranks_in_words(pod: PodFacts) -> str:
    last = pod.rank_start + pod.rank_count - 1
    return f"rank {last}" if pod.rank_count == 1 else f"ranks {pod.rank_start}-{last}"


def _keep_together(draft: Draft, group: Group) -> None:
    """A formed group: one lost pod takes the others with it, and none comes back before all are gone."""
    key, dpi = group.name, group.dpi
    domain = draft.domains.get(key, Domain())
    what = f"Group {group.index}"
    lost = [p for p in group.pods.values() if (p.failed or p.deleting is not None) and p.uid not in domain.handled]
    if not domain.recreating:
        absent = [p for p in group.plans if p.place.index not in group.pods]
        if lost:
            domain = record(draft, dpi, key, what, lost, counts=any(p.failed for p in lost))
        elif not absent:
            if group.ready:
                _forgive(draft, dpi, key, group.ready_since())
            return
        domain = msgspec.structs.replace(domain, recreating=True)
        draft.domains[key] = domain
    if exhausted(dpi, domain):
        return
    if domain.due is not None and draft.now < domain.due:
        draft.ask_again(domain.due)
        return
    if group.pods:
        for pod in group.pods.values():
            draft.delete(pod, DeleteReason.GROUP_BROKEN)
            _force_stuck(draft, dpi, pod)
        return
    draft.domains[key] = msgspec.structs.replace(domain, recreating=False)
    draft.formed.pop(key, None)
    for plan in group.plans:
        _create(draft, group, plan.place.index)


def gang_waits(group: Group) -> bool:
    """A group that has to get all its places at once and does not run yet."""
    gang = group.dpi.spec.scheduling.gang.provider is not GangProvider.NONE
    return gang and not any(p.ready for p in group.pods.values()) and not group.serving


def gang_deadline(group: Group) -> float | None:
    """When pods that have nodes give them back, because others of their group have none; None: nothing is held."""
    pods = list(group.pods.values())
    if len(pods) < len(group.plans) or all(p.scheduled for p in pods) or not any(p.scheduled for p in pods):
        return None
    if any(p.failed or p.deleting is not None for p in pods):
        return None
    return max(p.created for p in pods) + group.dpi.spec.scheduling.gang.timeout_seconds


def _release_gang(draft: Draft, group: Group) -> bool:
    """Whether the group gives its places back, or waits after that. It costs nothing of the budget of recreations."""
    domain = draft.domains.get(group.name, Domain())
    if domain.held is None:
        deadline = gang_deadline(group)
        if deadline is None:
            return False
        if draft.now < deadline:
            draft.ask_again(deadline)
            return False
        releases = domain.releases + 1
        wait = max(1.0, back_off(group.dpi, releases, blameless=False))
        domain = msgspec.structs.replace(domain, releases=releases, held=draft.now + wait)
        draft.domains[group.name] = domain
        without = ", ".join(p.name for p in group.pods.values() if not p.scheduled)
        text = (
            f"Group {group.index}: {without} found no node within {group.dpi.spec.scheduling.gang.timeout_seconds} s; "
            f"the other pods give theirs back. All are tried again in {in_words(wait)}."
        )
        draft.events.append(EmitEvent(EventReason.GANG_RELEASED, text, f"{group.name}/{releases}"))
    if group.pods:
        for pod in group.pods.values():
            draft.delete(pod, DeleteReason.GANG_INCOMPLETE)
            _force_stuck(draft, group.dpi, pod)
        return True
    if domain.held is not None and draft.now < domain.held:
        draft.ask_again(domain.held)
        return True
    draft.domains[group.name] = msgspec.structs.replace(domain, held=None)
    return False


def joined_deadline(group: Group) -> float | None:
    """When the handshake must be over: counted from the last container's start; None while some have not started."""
    starts = [p.started for p in group.pods.values()]
    if len(starts) < len(group.plans) or any(s is None for s in starts):
        return None
    return max(s for s in starts if s is not None) + group.dpi.spec.handshake.timeout_seconds


def _handshake_deadline(draft: Draft, group: Group) -> None:
    """A group of which nobody else watches the time is recreated when its ranks do not find each other."""
    deadline = joined_deadline(group)
    domain = draft.domains.get(group.name, Domain())
    if group.ready or deadline is None or any(p.failed or p.deleting is not None for p in group.pods.values()):
        return
    if draft.now < deadline + HANDSHAKE_MARGIN_S:
        draft.ask_again(deadline + HANDSHAKE_MARGIN_S)
        return
    pods = list(group.pods.values())
    if pods[0].uid in domain.handled:
        return
    missing = ", ".join(f"{r} ({group.pod_of(r)})" for r in group.missing()[:8])
    text = (
        f"Group {group.index}: after {group.dpi.spec.handshake.timeout_seconds} s these ranks are missing: {missing}."
    )
    draft.events.append(EmitEvent(EventReason.HANDSHAKE_TIMEOUT, text, group.name))
    domain = record(draft, group.dpi, group.name, f"Group {group.index}", pods, counts=True)
    draft.domains[group.name] = msgspec.structs.replace(domain, recreating=True)
    draft.ask_again(domain.due)


def _open_gates(draft: Draft, group: Group) -> None:
    """Open the gates of pods without a probe once the head says that all have joined; never close them blindly."""
    gated = [p for p in group.pods.values() if p.gated and p.deleting is None and not p.failed]
    if not gated or not group.serving:
        return
    for pod in gated:
        if not pod.gate_open:
            draft.gates.append(OpenGate(pod.name, pod.uid, True, "rank 0 serves, which it does once all ranks joined"))
