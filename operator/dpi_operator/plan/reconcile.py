"""`reconcile(snapshot, now) -> Plan`: what to do for one object. Pure: equal input, equal plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dpi_operator.api.conditions import Verdict, merged
from dpi_operator.api.read import ManifestError, read_document
from dpi_operator.api.reasons import DeleteReason, EventReason, Reason
from dpi_operator.api.status import Status, condition, read_status
from dpi_operator.api.types import DataParallelInference, Strategy
from dpi_operator.api.validate import Finding
from dpi_operator.plan.acceptance import Acceptance, accept, unreadable
from dpi_operator.plan.actions import Action, Apply, Delete, EmitEvent, Manifest, Plan, Relabel, Try, kind_and_name
from dpi_operator.plan.facts import Snapshot
from dpi_operator.plan.groups import Group, assemble, make_group
from dpi_operator.plan.guards import build_disruption_budget, build_network_policy, build_service_account, build_state
from dpi_operator.plan.inferencepool import build_inference_pool
from dpi_operator.plan.judgement import Scene, told_complete
from dpi_operator.plan.names import A_APPLIED, engine_account, state_config_map
from dpi_operator.plan.needs import missing
from dpi_operator.plan.network import Cluster
from dpi_operator.plan.podgroup import build_pod_group
from dpi_operator.plan.podmonitor import build_pod_monitor
from dpi_operator.plan.pods import layout, plan_group
from dpi_operator.plan.podspec import build_pod, own_labels
from dpi_operator.plan.recovery import Draft, domains_of, exhausted, keep, leave, let_go
from dpi_operator.plan.report import build_status, settle
from dpi_operator.plan.revisions import Revision, controller_revision, newest_revision, stored_revisions
from dpi_operator.plan.rollout import Decision, Key, Wish, decide
from dpi_operator.plan.services import build_client_service, build_internal_service, build_rank_services
from dpi_operator.plan.state import State, bounded, clip
from dpi_operator.plan.times import to_text

TRY_AGAIN_S = 300.0
"""A refused revision is tried again this often: what refuses it may be a policy that is mended."""

UNANSWERED_S = 15.0


def stamped(manifest: Manifest) -> Manifest:
    """With the digest of its own content, by which a later plan sees that fields were taken out."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), A_APPLIED: digest}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def contains(live: Any, wanted: Any) -> bool:
    """Whether `live` has everything that `wanted` has; what others or the API server added does not count."""
    if isinstance(wanted, Mapping):
        if not isinstance(live, Mapping):
            return wanted == {} and live is None
        return all(contains(live.get(k), v) for k, v in wanted.items())
    if isinstance(wanted, list):
        if not isinstance(live, list):
            return wanted == [] and live is None
        return len(live) == len(wanted) and all(contains(a, b) for a, b in zip(live, wanted, strict=True))
    return bool(live == wanted) or (live is None and not wanted)  # the API leaves empty values out


def apply_if_needed(manifest: Manifest, snapshot: Snapshot) -> list[Action]:
    wanted = stamped(manifest)
    live = snapshot.children.get(kind_and_name(wanted))
    if live is not None and contains(live, wanted):
        return []
    return [Apply(wanted, exists=live is not None)]


def _unreadable(snapshot: Snapshot, old: Status, finding: Finding, now: float) -> Plan:
    """The object cannot be understood: say so, touch nothing."""
    generation = int((snapshot.document.get("metadata") or {}).get("generation") or 0)
    verdicts = {
        c.type: Verdict({"True": True, "False": False}.get(c.status), _reason(c.reason), c.message)
        for c in old.conditions
    }
    unknown = Verdict(None, Reason.NOT_OBSERVED, "The spec cannot be read.")
    verdicts = {
        kind: verdicts.get(kind, unknown)
        for kind in ("ConfigConsistent", "Scheduled", "HandshakeComplete", "Available", "Progressing", "Degraded")
    }
    refused = Verdict(False, finding.reason, str(finding))
    verdicts |= {"Accepted": refused, "Ready": refused}
    status = msgspec.structs.replace(
        old, observed_generation=generation, conditions=merged(old, verdicts, generation, to_text(now))
    )
    events = _spec_events(old, status)
    return Plan(tuple(events), status, None)


def _reason(text: str) -> Reason:
    try:
        return Reason(text)
    except ValueError:
        return Reason.NOT_OBSERVED


def _spec_events(old: Status, new: Status) -> list[Action]:
    """Events for a spec that became, or stopped being, usable."""
    events: list[Action] = []
    for kind, bad in (("Accepted", EventReason.SPEC_REJECTED), ("ConfigConsistent", EventReason.CONFIG_MISMATCH)):
        now, before = condition(new, kind), condition(old, kind)
        if now is None or (before is not None and (before.status, before.message) == (now.status, now.message)):
            continue
        if now.status == "False":
            bad = EventReason.NAME_TAKEN if now.reason == Reason.NAME_TAKEN else bad
            events.append(EmitEvent(bad, now.message, f"{kind}/{now.observed_generation}"))
        elif kind == "Accepted" and now.status == "True" and (before is None or before.status != "True"):
            events.append(EmitEvent(EventReason.ACCEPTED, now.message, f"{kind}/{now.observed_generation}"))
    return events


def _wanted_children(
    newest: Revision,
    untried: DataParallelInference | None,
    snapshot: Snapshot,
    decision: Decision,
    revisions: list[Revision],
    groups: Sequence[Group],
) -> list[Manifest]:
    """Objects around the pods, but for the state: right for the groups of every revision that has some.

    `untried`: the object as the API server is asked whether it takes its pods.
    """
    dpi, selector = newest.dpi, decision.selector
    by_revision = {newest.hash: dpi} | {g.revision: g.dpi for g in groups if g.plans}
    first = sorted(by_revision, key=lambda r: (r != decision.current, r != newest.hash, r))
    others = [by_revision[r] for r in sorted(by_revision) if r != newest.hash]
    reached = [by_revision[r] for r in first if selector in ("", r)]
    wanted = [
        build_service_account(
            dpi,
            [*others, *([untried] if untried else [])],
            made=("ServiceAccount", engine_account(dpi.metadata.name)) in snapshot.children,
        ),
        build_internal_service(dpi),
        build_client_service(dpi, selector, reached),
        build_network_policy(dpi, others),
        build_disruption_budget(dpi, _sizes(newest, decision, groups)),
        build_inference_pool(dpi, selector, reached),
        build_pod_monitor(dpi, others),
        *(
            s
            for index in sorted({g.index for g in groups})
            for s in build_rank_services(_reached_at(index, newest, selector, groups), index, selector)
        ),
        *(build_pod_group(g.dpi, g.name, len(g.plans)) for g in groups if g.plans),
    ]
    manifests = [m for m in wanted if m is not None] + [controller_revision(dpi, r) for r in revisions]
    return [m for m in manifests if kind_and_name(m)[0] not in snapshot.absent]


def _reached_at(index: int, newest: Revision, selector: str, groups: Sequence[Group]) -> DataParallelInference:
    """The object as the group of this index that serves has it; as it is now where none does."""
    here = [g for g in groups if g.index == index and g.plans and selector in ("", g.revision)]
    return min(here, key=lambda g: (not g.serving, g.revision != newest.hash)).dpi if here else newest.dpi


def _sizes(newest: Revision, decision: Decision, groups: Sequence[Group]) -> list[int]:
    """Pods of each group that is to serve, those that are yet to be made among them."""
    replicas = 0 if newest.dpi.spec.suspend else newest.dpi.spec.replicas
    indexes = {i for r, i in decision.wanted if decision.selector in ("", r)}
    there = [layout(_reached_at(i, newest, decision.selector, groups)).pods for i in sorted(indexes)]
    return [*there, *[layout(newest.dpi).pods] * (replicas - len(there))]


def _children(dpi: DataParallelInference, snapshot: Snapshot, manifests: Sequence[Manifest]) -> list[Action]:
    """What brings the objects around the pods to these, and removes those that are no longer wanted."""
    actions: list[Action] = []
    for manifest in manifests:
        if kind_and_name(manifest) not in snapshot.foreign:
            actions += apply_if_needed(manifest, snapshot)
    kept = {kind_and_name(m) for m in manifests} | {("ConfigMap", state_config_map(dpi.metadata.name))}
    for key, live in sorted(snapshot.children.items()):
        if key not in kept and not (live.get("metadata") or {}).get("deletionTimestamp"):
            actions.append(Delete(key[0], key[1], live["metadata"]["uid"], DeleteReason.NO_LONGER_WANTED))
    return actions


def _history(stored: Mapping[str, Revision], used: set[str], limit: int) -> list[Revision]:
    """Revisions to be kept: those in use, and the newest `limit` others."""
    idle = sorted((r for r in stored.values() if r.hash not in used), key=lambda r: -r.number)
    return [r for r in stored.values() if r.hash in used] + idle[:limit]


def reconcile(snapshot: Snapshot, now: float, domain: str = "cluster.local") -> Plan:
    """The plan for one object. `domain` is the cluster's DNS domain. Never raises for what a user wrote."""
    old = read_status(snapshot.document.get("status"))
    try:
        dpi = read_document(snapshot.document, "the object")
    except ManifestError as e:
        return _unreadable(snapshot, old, unreadable(e), now)
    network = Cluster(dpi.metadata.name, dpi.metadata.namespace, domain)
    stored = stored_revisions(dpi, snapshot.children)
    acceptance = accept(dpi, network)
    usable = not acceptance.findings and not acceptance.declared.mismatches
    trial = Trial(state=snapshot.state)
    if usable:
        newest, collisions = newest_revision(dpi, stored)
        basis = dpi
        trial = _trial(snapshot, newest, dpi, stored, network, now)
        if trial.base is not None:  # what runs goes on as it is
            newest, basis = trial.base, trial.base.dpi
    else:
        # What runs is looked after by the revision that it was made from; nothing new is made.
        known = stored.get(snapshot.state.current)
        if known is None or (judged := accept(known.dpi, network)).findings or judged.declared.mismatches:
            return _refused(dpi, snapshot, old, acceptance, now)
        newest, collisions, basis = known, old.collision_count, known.dpi
    return _Reconciler(
        snapshot, now, basis, network, newest, collisions, {**stored, newest.hash: newest}, acceptance, old, trial
    ).plan()


@dataclass(frozen=True, slots=True)
class Trial:
    """Whether the API server takes pods of the newest revision, asked before anything of another one is deleted.

    `state` has what is known by now. `base`: the revision that is looked after instead, as long as the answer is not
    yes; `revision`, `refusal` and `untried` are then those of the newest one.
    """

    state: State
    base: Revision | None = None
    revision: str = ""
    refusal: str = ""
    ask: Try | None = None
    again: float | None = None
    dropped: str = ""  # refused revision that the spec no longer asks for
    untried: DataParallelInference | None = None


def _trial(
    snapshot: Snapshot,
    newest: Revision,
    dpi: DataParallelInference,
    stored: Mapping[str, Revision],
    network: Cluster,
    now: float,
) -> Trial:
    state, name = snapshot.state, newest.hash
    said = snapshot.trials.get(name)
    if said is not None and (said or (state.tried, state.refusal) != (name, "")):
        at = now if said else None
        state = msgspec.structs.replace(state, tried=name, refusal=clip(said), tried_at=at)
    live = [p.revision for p in snapshot.pods if p.deleting is None]
    made = any(p.revision == name for p in snapshot.pods)
    idle = dpi.spec.paused or dpi.spec.suspend or not dpi.spec.replicas
    dropped = ""
    if state.refusal and state.tried != name and made:  # the spec is back at what runs
        dropped, state = state.tried, msgspec.structs.replace(state, tried="", refusal="", tried_at=None)
    if made or idle or not live or (state.tried, state.refusal) == (name, ""):
        return Trial(state, dropped=dropped)
    base = next((stored[r] for r in (state.current, *live) if r != name and r in stored), None)
    if base is None or accept(base.dpi, network).findings:
        return Trial(state)  # nothing that runs could be looked after
    refusal = state.refusal if state.tried == name else ""
    due = (state.tried_at or 0.0) + TRY_AGAIN_S
    if refusal and now < due:
        return Trial(state, base, name, refusal, again=due, untried=dpi)
    ask = Try(name, tuple(_samples(dpi, network, name)))
    return Trial(state, base, name, refusal, ask, now + UNANSWERED_S, untried=dpi)


def _samples(dpi: DataParallelInference, network: Cluster, revision: str) -> list[Manifest]:
    """The first pod of a group, one of the others, and one of each override: those that can differ."""
    plans = plan_group(dpi, 0, network, revision)
    chosen = {0, min(1, len(plans) - 1)}
    for override in dpi.spec.rank_overrides:
        first = int(override.ranks.partition("-")[0])
        chosen |= {i for i, p in enumerate(plans) if p.rank_start <= first < p.rank_start + p.rank_count}
    return [build_pod(dpi, plans[i], revision) for i in sorted(chosen)]


def _refused(dpi: DataParallelInference, snapshot: Snapshot, old: Status, acceptance: Acceptance, now: float) -> Plan:
    """A spec that cannot be used, and nothing that runs by an earlier one."""
    wish = Wish(0, "", dpi.spec.rollout)
    scene = Scene(
        dpi,
        wish,
        now,
        acceptance.findings,
        acceptance.declared.mismatches,
        refused=acceptance.declared.revision,
        digest=acceptance.declared.digest,
    )
    status = build_status(scene, old, dpi.metadata.generation, old.current_revision, old.collision_count)
    status.ranks = 0
    return Plan(tuple(_spec_events(old, status)), settle(status, old, now)[0])


class _Reconciler:
    """One planning: the steps in `plan` in their order."""

    def __init__(
        self,
        snapshot: Snapshot,
        now: float,
        dpi: DataParallelInference,
        network: Cluster,
        newest: Revision,
        collisions: int,
        revisions: Mapping[str, Revision],
        acceptance: Acceptance,
        old: Status,
        trial: Trial,
    ) -> None:
        self.snapshot, self.now, self.dpi, self.network = snapshot, now, dpi, network
        self.newest, self.collisions, self.revisions = newest, collisions, dict(revisions)
        self.acceptance, self.old, self.trial = acceptance, old, trial
        # A spec that cannot be used, or about which the API server has yet to answer: what runs stays as it is.
        self.held = trial.base is not None or bool(acceptance.findings or acceptance.declared.mismatches)
        self.draft = Draft.of(snapshot.state, now)
        self.draft.ask_again(trial.again)
        self.relabels: list[Relabel] = []
        self.groups = assemble(snapshot.pods, self.revisions, dpi, network, snapshot.reports)

    def plan(self) -> Plan:
        spec, state = self.dpi.spec, self.trial.state
        wish = Wish(
            replicas=spec.replicas,
            update=self.newest.hash,
            rollout=spec.rollout,
            paused=spec.paused or self.held,
            suspended=spec.suspend,
        )
        troubled = frozenset(
            k for k, g in self.groups.items() if (d := state.domains.get(g.name)) is not None and d.attempts
        )
        served = self._served(state)
        made_of = {*self.revisions, *(r for r, _ in self.groups)}  # somebody may delete a ControllerRevision
        current = state.current if state.current in made_of else ""
        known = self.groups | {k: self._group(k) for k in state.old if k[0] in self.revisions}
        proven = {
            k: g
            for k, g in known.items()
            if k[0] in served and not any(exhausted(g.dpi, d) for d in domains_of(g, state.domains))
        }
        by_hand = wish.rollout.strategy is Strategy.ON_DELETE  # there a group changes by losing its pods
        gone = {} if by_hand else {k: g for k, g in proven.items() if k in state.old and not g.live}
        decision = decide(wish, self.groups, current, state.switched, troubled, self.now, frozenset(proven), gone)
        wanted = [self._group(key) for key in sorted(decision.wanted, key=lambda k: (k[1], k[0]))]
        leaving = [g for k, g in self.groups.items() if k not in decision.wanted]
        children = self._wanted_children(decision, [*wanted, *leaving])
        taken = self._taken(children, wanted)
        lacking = missing(self.dpi, self.snapshot.absent, serving=True)
        for group in wanted:
            unseen = (group.revision, group.index) not in self.groups
            blocked = any(("Pod", p.name) in taken for p in group.plans)
            if not blocked and not (unseen and (taken or lacking)):
                keep(self.draft, group, fresh=unseen)
        for group in leaving:
            reason = decision.unwanted.get((group.revision, group.index))
            if reason is DeleteReason.NEW_REVISION and (taken or lacking):
                reason = None  # what would come in its place is not made
            if reason is not None:
                let_go(self.draft, group, reason)
            else:
                leave(self.draft, group)
        unlabelled = self._put_labels_back([*wanted, *leaving])
        before, state = state, self._next_state(state, decision, wish, wanted)
        self.draft.ask_again(decision.requeue_at)
        actions = self._actions(state, children)
        scene = Scene(
            dpi=self.dpi,
            wish=wish,
            now=self.now,
            findings=self.acceptance.findings,
            mismatches=self.acceptance.declared.mismatches,
            refused=self.acceptance.declared.revision,
            foreign=tuple(f"{kind} {name}" for kind, name in sorted(taken)),
            digest=self.acceptance.declared.digest,
            decision=decision,
            groups=tuple(wanted),
            leaving=tuple(leaving),
            domains=state.domains,
            formed=frozenset(self.draft.formed),
            refusals=self.snapshot.refusals,
            progress_at=state.progress_at,
            rolling=state.rolling,
            uneven=(degraded := condition(self.old, "Degraded")) is not None
            and degraded.reason == Reason.QUEUE_IMBALANCE,
            state_error=self.snapshot.state_error,
            rejected=self.snapshot.rejected,
            untried=self.trial.revision,
            refusal=self.trial.refusal,
            dismissed=frozenset(self.draft.dismissed),
            unlabelled=tuple(unlabelled),
            lacking=lacking,
            unmet=missing(self.dpi, self.snapshot.absent, serving=False),
        )
        generation = int(self.snapshot.document["metadata"].get("generation") or 0)
        fresh = build_status(scene, self.old, generation, decision.current, self.collisions)
        status, due = settle(fresh, self.old, self.now)
        self.draft.ask_again(due)
        self._deadlines(scene)
        events = _spec_events(self.old, status) + self._rollout_events(decision, before, state)
        return Plan((*actions, *events), status, self.draft.requeue_at)

    def _group(self, key: Key) -> Group:
        return self.groups.get(key) or make_group(
            key[0], key[1], {}, self.revisions, self.dpi, self.network, self.snapshot.reports
        )

    def _served(self, state: State, formed: Collection[str] = ()) -> set[str]:
        """Revisions of which a group has served."""
        names = {*state.formed, *formed}
        return {g.revision for g in self.groups.values() if g.name in names} | set(state.proven)

    def _next_state(self, state: State, decision: Decision, wish: Wish, wanted: list[Group]) -> State:
        """State after this plan: what belongs to groups that are gone is forgotten."""
        groups = {g.name: g for g in (*wanted, *self.groups.values())}
        pods = {p.name for g in groups.values() for p in g.plans} | {p.name for p in self.snapshot.pods}
        domains = {k: d for k, d in self.draft.domains.items() if k in groups or k in pods}
        formed = {k: t for k, t in self.draft.formed.items() if k in groups}
        ready = sorted(g.name for g in wanted if g.revision == wish.update and g.ready)
        progress = "" if decision.complete else f"{wish.update}:{wish.replicas}:{len(ready)}:{len(self.groups)}"
        moved = progress != state.progress
        if self.held:
            progress, moved = state.progress, False
        rolling = not decision.complete and not (wish.paused or wish.idle) and (state.rolling or decision.replaces)
        served = self._served(state, self.draft.formed)
        kept = {decision.current, *(r for r, _ in (*decision.wanted, *self.groups))}
        return bounded(
            State(
                domains=domains,
                formed=formed,
                current=decision.current,
                switched=self.now if decision.switch else state.switched,
                rolling=state.rolling if self.held else rolling,
                tried=state.tried,
                refusal=state.refusal,
                tried_at=state.tried_at,
                proven=tuple(sorted(served & kept)),
                old=tuple(sorted(k for k in decision.wanted if k[0] != wish.update and k[0] in served)),
                dismissed=tuple(sorted(self.draft.dismissed & {p.uid for p in self.snapshot.pods})),
                progress=progress,
                progress_at=(self.now if progress else None) if moved else state.progress_at,
            )
        )

    def _wanted_children(self, decision: Decision, groups: list[Group]) -> list[Manifest]:
        used = {r for r, _ in decision.wanted} | {k[0] for k in self.groups} | {self.newest.hash, decision.current}
        kept = _history(self.revisions, used, self.dpi.spec.revision_history_limit)
        return _wanted_children(self.newest, self.trial.untried, self.snapshot, decision, kept, groups)

    def _taken(self, children: list[Manifest], wanted: list[Group]) -> frozenset[tuple[str, str]]:
        """Names that others hold and that are needed now."""
        needed = {kind_and_name(m) for m in children} | {("Pod", p.name) for g in wanted for p in g.plans}
        return self.snapshot.foreign & {*needed, ("ConfigMap", state_config_map(self.dpi.metadata.name))}

    def _actions(self, state: State, children: list[Manifest]) -> list[Action]:
        """State before anything is deleted; accounts and Services before pods."""
        actions: list[Action] = []
        key = ("ConfigMap", state_config_map(self.dpi.metadata.name))
        if key not in self.snapshot.foreign:
            actions += apply_if_needed(build_state(self.dpi, state), self.snapshot)
        actions += _children(self.dpi, self.snapshot, children)
        tries = [self.trial.ask] if self.trial.ask is not None else []
        return [*actions, *self.relabels, *self.draft.ordered(), *tries]

    def _put_labels_back(self, groups: list[Group]) -> list[str]:
        """Pods whose labels are not those that they were made with: Services and selectors miss them."""
        found = []
        for group in groups:
            for plan in group.plans:
                pod = group.pods.get(plan.place.index)
                if pod is None or pod.labels is None or pod.deleting is not None or pod.name != plan.name:
                    continue
                labels = own_labels(group.dpi, plan, group.revision)
                if wrong := {k: v for k, v in labels.items() if pod.labels.get(k) != v}:
                    self.relabels.append(Relabel(pod.name, pod.uid, wrong))
                    found.append(pod.name)
        return found

    def _rollout_events(self, decision: Decision, before: State, after: State) -> list[Action]:
        events: list[Action] = []
        update = self.newest.hash
        if self.held:
            return events
        if gone := self.trial.dropped:
            text = (
                f"The spec is back at revision {update}, which runs; revision {gone} was refused and never rolled out."
            )
            events.append(EmitEvent(EventReason.ROLLED_BACK, text, f"{update}/{gone}"))
        # A rollout that is under way, or stuck, gives way to the next one.
        last = before.progress.partition(":")[0] if before.rolling else before.current
        how, back = self.dpi.spec.rollout.strategy.value, self.newest.former
        if (
            last
            and last != update
            and (back is not None or (after.rolling and (not before.rolling or before.progress)))
        ):
            serves = before.current if before.current not in ("", update) else last
            text = f"Revision {update} replaces {serves} ({how})."
            if back is not None:
                text = f"Revision {update}, number {back} before, comes back in place of {serves} ({how})."
            reason = EventReason.ROLLOUT_STARTED if back is None else EventReason.ROLLED_BACK
            events.append(EmitEvent(reason, text, f"{update}/{self.newest.number}"))
        if before.rolling and decision.complete:
            text = told_complete(decision, self.dpi.spec.replicas, update)
            events.append(EmitEvent(EventReason.ROLLOUT_COMPLETED, text, update))
        if decision.switch and self.dpi.spec.rollout.strategy is Strategy.BLUE_GREEN and before.current:
            text = f"The Service sends requests to revision {decision.current} from now on."
            events.append(EmitEvent(EventReason.TRAFFIC_SWITCHED, text, decision.current))
        return events

    def _deadlines(self, scene: Scene) -> None:
        """Times at which a condition changes by itself."""
        if scene.progress_at is not None:
            self.draft.ask_again(scene.progress_at + scene.wish.rollout.progress_deadline_seconds)
        for group in scene.groups:
            for report in group.reports.values():
                if report.error and group.serving:
                    self.draft.ask_again(report.at + scene.dpi.spec.metrics.queue_stats.stale_after_seconds)
        for group in (*scene.groups, *scene.leaving):
            for pod in group.pods.values():
                if pod.deleting is not None:
                    self.draft.ask_again(pod.deleting + 1)
