"""Every condition of an object, each from one list of rules. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dpi_operator.api.conditions import Rule, Verdict, counted, first, joined, ready_of, sentence
from dpi_operator.api.reasons import Reason
from dpi_operator.api.types import Architecture, DataParallelInference, Runtime
from dpi_operator.api.validate import Finding
from dpi_operator.plan.consistency import RESOLVED, Mismatch, compare_reported, reported_architecture
from dpi_operator.plan.facts import PodFacts
from dpi_operator.plan.groups import Group
from dpi_operator.plan.modes import every_pod_serves, independent_servers
from dpi_operator.plan.pods import layout
from dpi_operator.plan.recovery import (
    domains_of,
    exhausted,
    gang_deadline,
    gang_waits,
    in_a_sentence,
    joined_deadline,
    ranks_in_words,
    used_up,
)
from dpi_operator.plan.refusals import is_quota, is_terminating
from dpi_operator.plan.rollout import Decision, Wish, limits
from dpi_operator.plan.state import Domain
from dpi_operator.plan.times import in_words, to_text

PULL_FAILURES = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
UNEVEN_FROM, UNEVEN_UNTIL, UNEVEN_LEAST = 1.8, 1.4, 10
"""A queue is uneven from this multiple of the mean on and until that one; shorter queues than the last never are."""

NO_SECRET = re.compile(r'secret "(?P<name>[^"]+)" not found|in Secret (?:[^ /]+/)?(?P<other>\S+)')
"""What the kubelet says of a Secret, or a key in it, that an environment variable asks for."""

NO_CLAIM = re.compile(r"persistentvolumeclaims?\b", re.IGNORECASE)
"""What the scheduler's message has when a claim does not exist, or no volume is bound to it."""

CONFIG_FAILURES = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")


@dataclass(frozen=True, slots=True)
class Scene:
    """What the rules look at. `groups` are the wanted ones, in the order of their index."""

    dpi: DataParallelInference
    wish: Wish
    now: float
    findings: tuple[Finding, ...] = ()
    mismatches: tuple[Mismatch, ...] = ()
    refused: str = ""  # revision whose ranks would not agree
    foreign: tuple[str, ...] = ()
    digest: str = ""
    decision: Decision | None = None
    groups: tuple[Group, ...] = ()
    leaving: tuple[Group, ...] = ()
    domains: Mapping[str, Domain] = field(default_factory=dict)
    formed: frozenset[str] = frozenset()  # groups all of whose ranks have served at the same time
    refusals: Mapping[str, str] = field(default_factory=dict)
    progress_at: float | None = None
    rolling: bool = False
    uneven: bool = False  # the last status said that queues are uneven
    state_error: str = ""
    lacking: tuple[Finding, ...] = ()  # kinds without which the object cannot serve as asked
    unmet: tuple[Finding, ...] = ()  # kinds that only something beside serving needs
    rejected: Mapping[tuple[str, str], str] = field(default_factory=dict)
    untried: str = ""  # revision that is not rolled out, since the API server has not said that it takes its pods
    refusal: str = ""  # what it said instead; empty: it has yet to answer
    dismissed: frozenset[str] = frozenset()  # uids of pods that the operator did not want any more
    unlabelled: tuple[str, ...] = ()  # pods whose labels somebody changed

    @property
    def waiting(self) -> list[Group]:
        """Wanted groups that are not ready."""
        return [g for g in self.groups if not g.ready]

    @property
    def unmade(self) -> int:
        """Groups that are to be made once the old ones of their indexes have gone."""
        if self.wish.idle or self.decision is None:
            return 0
        return max(0, self.wish.replicas - len({g.index for g in self.groups}))

    @property
    def unready_pods(self) -> list[PodFacts]:
        return [p for g in self.waiting for p in g.pods.values() if p.deleting is None and not p.failed]


# -- Accepted ------------------------------------------------------------------------------------------------------


def _name_taken(s: Scene) -> Verdict | None:
    if not s.foreign:
        return None
    text = f"{joined(s.foreign)}: exists and is not ours; delete it or rename the object."
    return Verdict(False, Reason.NAME_TAKEN, text)


def _refused(s: Scene) -> Verdict | None:
    if not s.findings:
        return None
    return Verdict(False, s.findings[0].reason, joined([str(f) for f in s.findings]))


def _lacking(s: Scene) -> Verdict | None:
    if not s.lacking:
        return None
    text = joined([str(f) for f in s.lacking])
    return Verdict(False, Reason.MISSING_CRD, f"{text}. Groups that run are kept, new ones are not made.")


def _pods_refused(s: Scene) -> Verdict | None:
    """What the API server does not take as a pod cannot work, whatever the spec's own rules say."""
    if s.refusal:
        text = f"The API server refuses pods of revision {s.untried}: {sentence(s.refusal)}"
        return Verdict(False, Reason.OBJECT_REFUSED, f"{text} Mend the spec; what runs goes on as it is.")
    wrong = {n: w for n, w in s.refusals.items() if not is_quota(w) and not is_terminating(w)}
    if not wrong:
        return None
    name, why = min(wrong.items())
    more = f" (and {counted(len(wrong) - 1, 'other')})" if len(wrong) > 1 else ""
    return Verdict(
        False, Reason.OBJECT_REFUSED, f"The API server refuses pod {name}{more}: {sentence(why)} It is tried again."
    )


# -- ConfigConsistent ----------------------------------------------------------------------------------------------


def _declared_differ(s: Scene) -> Verdict | None:
    if not s.mismatches:
        return None
    text = joined([str(m) for m in s.mismatches])
    return Verdict(
        False,
        Reason.FINGERPRINT_MISMATCH,
        f"Revision {s.refused} of the spec: {text}. Expected is what rank 0 has, and ranks of a group need equal "
        "values: mend spec.rankOverrides. No pod was made for this revision.",
    )


def _reported_differ(s: Scene) -> Verdict | None:
    for group in s.groups:
        found = compare_reported(list(group.rank_reports().values()))
        if found:
            text = joined([str(m) for m in found])
            return Verdict(False, Reason.HASH_MISMATCH, f"Group {group.index}: {text}. Use one image and one model.")
    return None


def _other_architecture(s: Scene) -> Verdict | None:
    """The spec's architecture is a hint by which failures are planned; what ranks found in the model is the truth."""
    for group in s.groups:
        hint = s.dpi.spec.model.architecture
        for rank, report in sorted(group.rank_reports().items()):
            found = reported_architecture(report.fields)
            if found in (None, hint):
                continue
            then = "a lost rank then takes its group with it" if found is Architecture.MOE else "ranks then stand alone"
            text = (
                f"Group {group.index}: rank {rank} ({group.pod_of(rank)}) reports a model that is {found.value}, "
                f"spec.model.architecture says {hint.value}. Set it to {found.value}: that replaces no pod, and {then}."
            )
            return Verdict(False, Reason.ARCHITECTURE_MISMATCH, text)
    return None


def _unknown(s: Scene) -> Verdict | None:
    """Ranks of our runtime that serve and say nothing of what they run."""
    if not s.dpi.spec.handshake.require_config_hash or s.dpi.spec.engine.runtime is not Runtime.DPI:
        return None
    silent = [
        f"{r.rank} ({g.pod_of(r.rank)})"
        for g in s.groups
        for r in g.rank_reports().values()
        if r.state == "READY" and RESOLVED not in r.fields
    ]
    if not silent:
        return None
    return Verdict(None, Reason.HASH_UNKNOWN, f"Ranks {joined(silent)} report no configuration; use one image.")


def _foreign_runtime(s: Scene) -> Verdict | None:
    if s.dpi.spec.engine.runtime is not Runtime.VLLM:
        return None
    return Verdict(True, Reason.DECLARED_ONLY, "Flags of all pods agree; this runtime reports no fingerprint.")


# -- Scheduled -----------------------------------------------------------------------------------------------------


def _quota(s: Scene) -> Verdict | None:
    if not s.refusals:
        return None
    name, why = next(iter(sorted(s.refusals.items())))
    more = f" ({len(s.refusals)} pods)" if len(s.refusals) > 1 else ""
    quota = is_quota(why)
    return Verdict(False, Reason.QUOTA_EXCEEDED if quota else Reason.PODS_PENDING, f"Pod {name} refused{more}: {why}")


def _queued(s: Scene) -> Verdict | None:
    """Pods that nobody schedules before a queue lets them."""
    pods = [p for g in s.waiting for p in g.pods.values() if p.scheduling_reason == "SchedulingGated"]
    if not pods:
        return None
    queue = s.dpi.spec.scheduling.gang.queue
    where = f"queue {queue}" if queue else "whoever set a scheduling gate"
    return Verdict(False, Reason.QUEUED, f"{joined([p.name for p in pods], 4)}: {where} has not let them go yet.")


def _gang(s: Scene) -> Verdict | None:
    for group in s.waiting:
        pods, gang = list(group.pods.values()), group.dpi.spec.scheduling.gang
        held = s.domains.get(group.name, Domain()).held
        if held is not None and s.now < held:
            text = f"Group {group.index} found places for some of its pods only; it tries again at {to_text(held)}."
            return Verdict(False, Reason.GANG_INCOMPLETE, text)
        without = [p for p in pods if not p.scheduled and not p.failed and p.deleting is None]
        if not gang_waits(group) or not without or len(pods) < len(group.plans):
            continue
        why = next((f" {p.scheduling_message}" for p in without if p.scheduling_message), "")
        text = (
            f"Group {group.index}: {len(pods) - len(without)} of {len(pods)} pods have a node ({gang.provider.value})."
        )
        if (deadline := gang_deadline(group)) is not None:
            text += f" They give it back at {to_text(deadline)} unless {joined([p.name for p in without], 4)} get one."
        return Verdict(False, Reason.GANG_INCOMPLETE, text + why)
    return None


def _no_node(s: Scene) -> Verdict | None:
    pods = [p for g in s.groups for p in g.pods.values() if not p.scheduled and not p.failed and p.deleting is None]
    if not pods:
        return None
    why = next((p.scheduling_message for p in pods if p.scheduling_message), "")
    names = joined([p.name for p in pods], 4)
    if NO_CLAIM.search(why):
        then = "Create the claim that spec.storage or spec.template names, or see why no volume is bound to it"
        return Verdict(False, Reason.VOLUME_CLAIM_MISSING, f"{names}: {sentence(why)} {then}.")
    if "affinity" in why and "Insufficient" not in why:
        return Verdict(False, Reason.TOPOLOGY_UNSATISFIED, f"{names}: {why}")
    if why:
        return Verdict(False, Reason.INSUFFICIENT_CAPACITY, f"{names}: {why}")
    return Verdict(False, Reason.PODS_PENDING, f"{names}: waiting for a node.")


def _no_pods_yet(s: Scene) -> Verdict | None:
    absent = [g for g in s.groups if len(g.pods) < len(g.plans)]
    if not absent and not s.unmade:
        return None
    made, all_of_them = sum(len(g.pods) for g in absent), sum(len(g.plans) for g in absent)
    text = f"{made} of {all_of_them + s.unmade * layout(s.dpi).pods} pods exist."
    if s.unmade:
        waits = "waits until its old pods have" if s.unmade == 1 else "wait until their old pods have"
        text += f" {counted(s.unmade, 'group')} {waits} ended."
    return Verdict(False, Reason.PODS_PENDING, text)


# -- HandshakeComplete ---------------------------------------------------------------------------------------------


def _cannot_pull(s: Scene) -> Verdict | None:
    for pod in s.unready_pods:
        if pod.waiting_reason in PULL_FAILURES:
            text = f"Pod {pod.name}: {pod.waiting_reason}: {pod.waiting_message or 'no message'}"
            return Verdict(False, Reason.IMAGE_PULL_FAILED, text)
        if pod.waiting_reason in CONFIG_FAILURES and (m := NO_SECRET.search(pod.waiting_message)):
            text = (
                f"Pod {pod.name}: {pod.waiting_message}. Create the Secret {m['name'] or m['other']}; it then starts."
            )
            return Verdict(False, Reason.MISSING_SECRET, text)
        if pod.waiting_reason in CONFIG_FAILURES:
            text = f"Pod {pod.name}: {pod.waiting_reason}: {pod.waiting_message or 'no message'}"
            return Verdict(False, Reason.CONTAINER_CONFIG_ERROR, text)
    return None


def _containers_starting(s: Scene) -> Verdict | None:
    pods = [p for p in s.unready_pods if p.scheduled and p.started is None]
    if not pods:
        return None
    nodes = joined(sorted({p.node for p in pods}), 4)
    return Verdict(False, Reason.IMAGE_PULLING, f"Containers of {joined([p.name for p in pods], 4)} start on {nodes}.")


def _has_joined(group: Group, rank: int) -> bool:
    """Whether the head has it, however its pod is: the kubelet may yet have to probe that."""
    report = group.rank_reports().get(rank)
    return report is not None and report.state == "READY" and not report.error


def missing_ranks(group: Group) -> str:
    """Ranks that do not serve, each with its pod and what it is doing."""
    return _told(group, group.missing())


def _told(group: Group, ranks: Sequence[int]) -> str:
    reports, parts = group.rank_reports(), []
    for rank in ranks:
        report = reports.get(rank)
        doing = ""
        if _has_joined(group, rank):
            doing = ", its pod is not ready"
        elif report is not None:
            doing = f", {report.error or report.stage or report.state}"
        parts.append(f"{rank} ({group.pod_of(rank)}{doing})")
    return joined(parts, 8)


def _handshake(s: Scene) -> Verdict | None:
    for group in s.waiting:
        if not group.pods:
            continue
        deadline, missing = joined_deadline(group), group.missing()
        late = [r for r in missing if not _has_joined(group, r)]
        ranks = _told(group, late or missing)
        if deadline is not None and s.now >= deadline:
            limit = in_words(group.dpi.spec.handshake.timeout_seconds)
            text = f"Group {group.index}: ranks {ranks} {'did not join' if late else 'were not ready'} within {limit}."
            return Verdict(False, Reason.HANDSHAKE_TIMEOUT, text)
        until = f" They have until {to_text(deadline)}." if deadline is not None else ""
        if (group.head is None or not group.head.running) and not every_pod_serves(group.dpi):
            where = group.pod_of(0)
            return Verdict(False, Reason.RANK0_NOT_READY, f"Group {group.index}: rank 0 ({where}) does not run.{until}")
        if missing:
            how = "have not joined" if late else "have joined and are not ready yet"
            text = f"Group {group.index}: ranks {ranks} {how}.{until}"
            return Verdict(False, Reason.RANKS_MISSING, text)
        head = group.report.error if group.report and group.report.error else "its readiness probe fails"
        text = f"Group {group.index}: rank 0 ({group.pod_of(0)}): {head}.{until}"
        return Verdict(False, Reason.RANK0_NOT_READY, text)
    return None


def _pods_missing(s: Scene) -> Verdict | None:
    empty = sum(1 for g in s.waiting if not g.pods) + s.unmade
    if not empty:
        return None
    return Verdict(
        False, Reason.RANK0_NOT_READY, f"{counted(empty, 'group')} {'has' if empty == 1 else 'have'} no pods yet."
    )


# -- Available -----------------------------------------------------------------------------------------------------


def available_groups(s: Scene) -> int:
    """Groups that serve: with all their endpoints, or with what is left of a group that had them all."""
    least = s.dpi.spec.rollout.min_ready_seconds
    return len({g.index for g in s.groups if g.available(s.now, least) or (g.serving and g.name in s.formed)})


def _nothing_wanted(s: Scene) -> Verdict | None:
    if s.wish.suspended:
        return Verdict(False, Reason.SUSPENDED, "spec.suspend is true: no pods run.")
    if s.wish.replicas == 0:
        return Verdict(False, Reason.SCALED_TO_ZERO, "spec.replicas is 0: no pods run.")
    return None


def _too_few(s: Scene) -> Verdict | None:
    if s.unlabelled:
        text = f"Labels of {joined(s.unlabelled, 4)} were changed: Services may not reach them. They are put back."
        return Verdict(False, Reason.MINIMUM_GROUPS_UNAVAILABLE, text)
    up, least = available_groups(s), max(1, s.wish.replicas - limits(s.wish.rollout, s.wish.replicas)[0])
    if up >= least:
        return None
    return Verdict(
        False, Reason.MINIMUM_GROUPS_UNAVAILABLE, f"{up} of {s.wish.replicas} groups serve, at least {least} must."
    )


# -- Progressing ---------------------------------------------------------------------------------------------------


def _held(s: Scene) -> Verdict | None:
    if s.wish.suspended:
        return Verdict(False, Reason.SUSPENDED, "spec.suspend is true.")
    if s.wish.paused and s.decision is not None and not s.decision.complete:
        if s.findings or s.mismatches:
            return Verdict(False, Reason.INVALID_SPEC, "Groups keep their revision until the spec can be used.")
        return Verdict(False, Reason.PAUSED, "spec.paused is true: groups keep their revision.")
    return None


def _untried(s: Scene) -> Verdict | None:
    if not s.untried:
        return None
    if s.refusal:
        text = f"Revision {s.untried} is not rolled out: the API server refuses its pods."
        return Verdict(False, Reason.OBJECT_REFUSED, text)
    text = f"The API server is asked whether it takes pods of revision {s.untried}."
    return Verdict(True, Reason.ROLLING_OUT, text)


def told_complete(decision: Decision, replicas: int, update: str) -> str:
    """What holds once nothing is left to be rolled out."""
    updated = sum(1 for revision, _ in decision.wanted if revision == update)
    if updated < replicas:
        text = f"{updated} of {replicas} groups are of revision {update}; the others stay below spec.rollout.partition."
    elif replicas:
        text = f"All groups are of revision {update}."
    else:
        text = "spec.replicas is 0: there are no groups."
    return text


def _done(s: Scene) -> Verdict | None:
    if s.decision is None:
        return Verdict(False, Reason.INVALID_SPEC, "Nothing is rolled out before the spec can be used.")
    if s.decision.complete:
        return Verdict(True, Reason.ROLLOUT_COMPLETE, told_complete(s.decision, s.wish.replicas, s.wish.update))
    return None


def _late(s: Scene) -> Verdict | None:
    if s.progress_at is None:
        return None
    limit = s.wish.rollout.progress_deadline_seconds
    if s.now - s.progress_at < limit:
        return None
    return Verdict(
        False, Reason.PROGRESS_DEADLINE_EXCEEDED, f"No step of the rollout since {to_text(s.progress_at)} ({limit} s)."
    )


def _by_hand(s: Scene) -> Verdict | None:
    if s.decision is None or not s.decision.waits_for_delete:
        return None
    return Verdict(True, Reason.WAITING_FOR_DELETE, "OnDelete: groups take the new revision when they are deleted.")


def _last_pods(s: Scene) -> Verdict | None:
    """The way to zero: no group is wanted, and some are not gone yet."""
    if s.wish.replicas or s.decision is None:
        return None
    left = sum(len(g.pods) for g in s.leaving)
    last = "last pod" if left == 1 else f"last {left} pods"
    return Verdict(True, Reason.SCALING, f"spec.replicas is 0: it waits for the {last} to end.")


def _rolling(s: Scene) -> Verdict:
    updated = len({g.index for g in s.groups if g.revision == s.wish.update and g.ready})
    reason = Reason.ROLLING_OUT if s.rolling else Reason.SCALING
    return Verdict(True, reason, f"{updated} of {s.wish.replicas} groups of revision {s.wish.update} are ready.")


# -- Degraded ------------------------------------------------------------------------------------------------------


def _spent(s: Scene) -> Verdict | None:
    for group in s.groups:
        for domain in domains_of(group, s.domains):
            if exhausted(group.dpi, domain):
                last = f" {in_a_sentence(domain.evidence[0])}" if domain.evidence else ""
                text = f"Group {group.index}: {used_up(group.dpi.spec.failure_policy.max_restarts)}.{last}"
                advice = " Mend the cause, then set spec.restartedAt or raise spec.failurePolicy.maxRestarts."
                return Verdict(True, Reason.RESTART_BUDGET_EXHAUSTED, text + advice)
    return None


def _stuck(s: Scene) -> Verdict | None:
    for group in (*s.groups, *s.leaving):
        for pod in group.pods.values():
            if pod.deleting is not None and s.now > pod.deleting:
                limit = group.dpi.spec.failure_policy.stuck_terminating_seconds
                then = f"it is removed by force at {to_text(pod.deleting + limit)}" if limit else "remove it by force"
                text = f"Pod {pod.name} on node {pod.node or '?'} has not ended within its grace period; {then}."
                return Verdict(True, Reason.STUCK_TERMINATING, text)
    return None


def _failing(s: Scene) -> Verdict | None:
    """A failure that is being mended, until the group is whole again."""
    for group in s.waiting:
        for domain in domains_of(group, s.domains):
            if not domain.evidence or not domain.attempts:
                continue
            last, most = domain.evidence[0], group.dpi.spec.failure_policy.max_restarts
            of = f" of {most}" if most is not None else ""
            when = f" Recreation due {to_text(domain.due)}" if domain.due is not None else ""
            text = f"{in_a_sentence(last)}{when} (attempt {domain.attempts}{of})."
            killed = last.reason == "OOMKilled" and not last.container
            if killed:
                text += " Raise engine.resources.limits.memory."
            if last.message:
                text += f" Last words: {last.message.splitlines()[-1][:200]}"
            if killed:
                return Verdict(True, Reason.OOM_KILLED, text)
            return Verdict(True, Reason.CRASH_LOOP if domain.attempts > 1 else Reason.RANK_LOST, text)
    return None


def _going(s: Scene, pod: PodFacts) -> bool:
    """Lost, or about to be; not what the operator itself let go."""
    return pod.failed or (pod.deleting is not None and pod.uid not in s.dismissed)


def _lost(s: Scene) -> Verdict | None:
    for group in s.waiting:
        if (group.serving and group.name in s.formed) or any(_going(s, p) for p in group.pods.values()):
            missing = missing_ranks(group)
            if missing:
                return Verdict(True, Reason.RANK_LOST, f"Group {group.index}: ranks {missing} do not serve.")
    return None


def _deaf(s: Scene) -> Verdict | None:
    """A pod whose ranks serve and cannot be asked: its numbers are old, which is not the ranks' fault."""
    limit = s.dpi.spec.metrics.queue_stats.stale_after_seconds
    for group in s.groups:
        for index, report in group.reports.items():
            if not report.error or not group.serving or s.now - report.at < limit or index not in group.pods:
                continue
            where = f"{ranks_in_words(group.pods[index])} of group {group.index} ({group.pods[index].name})"
            text = f"The pod of {where} {report.error}, for more than {in_words(limit)}."
            return Verdict(True, Reason.STALE_METRICS, f"{text} Does a NetworkPolicy keep the operator from its port?")
    return None


def _uneven(s: Scene) -> Verdict | None:
    """One rank with a long queue beside short ones; once said it stays until the queues are clearly closer."""
    limit = UNEVEN_UNTIL if s.uneven else UNEVEN_FROM
    for group in s.groups:
        queues = {r.rank: r.waiting for r in group.rank_reports().values() if r.waiting is not None}
        longest = max(queues, key=lambda r: queues[r], default=None)
        if longest is None or queues[longest] < UNEVEN_LEAST:
            continue
        mean = sum(queues.values()) / len(queues)
        if queues[longest] >= limit * mean and len(queues) > 1:
            where = f"rank {longest} ({group.pod_of(longest)})"
            text = f"Group {group.index}: {where} has a far longer queue than the others. Is it slower, or pinned to?"
            return Verdict(True, Reason.QUEUE_IMBALANCE, text)
    return None


def _rejected(s: Scene) -> Verdict | None:
    """Objects beside the pods that the API server does not take: a Service, a pool."""
    if not s.rejected:
        return None
    told = [f"{kind.partition('.')[0]} {name}: {why}" for (kind, name), why in sorted(s.rejected.items())]
    return Verdict(True, Reason.OBJECT_REFUSED, f"The API server refuses {sentence(joined(told))} It is tried again.")


def _unmet(s: Scene) -> Verdict | None:
    return Verdict(True, Reason.MISSING_CRD, joined([str(f) for f in s.unmet])) if s.unmet else None


def _no_state(s: Scene) -> Verdict | None:
    return Verdict(True, Reason.STATE_UNREADABLE, s.state_error) if s.state_error else None


ACCEPTED: tuple[Rule[Scene], ...] = (_refused, _name_taken, _lacking, _pods_refused)
CONSISTENT: tuple[Rule[Scene], ...] = (
    _declared_differ,
    _reported_differ,
    _other_architecture,
    _unknown,
    _foreign_runtime,
)
SCHEDULED: tuple[Rule[Scene], ...] = (_quota, _queued, _gang, _no_node, _no_pods_yet)
HANDSHAKE: tuple[Rule[Scene], ...] = (_cannot_pull, _containers_starting, _handshake, _pods_missing)
AVAILABLE: tuple[Rule[Scene], ...] = (_nothing_wanted, _too_few)
PROGRESSING: tuple[Rule[Scene], ...] = (_untried, _held, _done, _late, _by_hand, _last_pods)
DEGRADED: tuple[Rule[Scene], ...] = (
    _spent,
    _stuck,
    _failing,
    _lost,
    _no_state,
    _rejected,
    _unmet,
    _deaf,
    _uneven,
)


def judge(s: Scene) -> dict[str, Verdict]:
    """A verdict for every type of condition."""
    agree = f"Declared flags of all pods agree ({s.digest})." if s.digest else "No pods were compared."
    up = f"{available_groups(s)} of {s.wish.replicas} groups serve."
    usable = "The spec can be used."
    if independent_servers(s.dpi):
        usable += " The vllm runtime has no External mode for dense models: pods are servers independent of each other."
    verdicts = {
        "Accepted": first(ACCEPTED, s, Verdict(True, Reason.ACCEPTED, usable)),
        "ConfigConsistent": first(CONSISTENT, s, Verdict(True if s.digest else None, Reason.FINGERPRINTS_AGREE, agree)),
        "Scheduled": first(SCHEDULED, s, Verdict(True, Reason.ALL_SCHEDULED, "Every pod has a node.")),
        "HandshakeComplete": first(HANDSHAKE, s, Verdict(True, Reason.ALL_RANKS_JOINED, "All ranks have joined.")),
        "Available": first(AVAILABLE, s, Verdict(True, Reason.ENOUGH_GROUPS, up)),
        "Progressing": first(PROGRESSING, s, _rolling(s)),
        "Degraded": first(DEGRADED, s, Verdict(False, Reason.HEALTHY, "")),
    }
    return verdicts | {"Ready": ready_of(verdicts)}
