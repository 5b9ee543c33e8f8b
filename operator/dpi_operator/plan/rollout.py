"""Which groups should exist: scaling, and replacing one revision by another, by whole groups. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain, count, islice

from dpi_operator.api.reasons import DeleteReason
from dpi_operator.api.types import Rollout, Strategy
from dpi_operator.plan.groups import Group

Key = tuple[str, int]
"""Revision and index of a group."""


@dataclass(slots=True)
class Decision:
    """`wanted` groups are kept or made, `unwanted` ones deleted for the reason given; the rest waits.

    `current` is the revision that serves, `complete` says that nothing is left to be rolled out, `switch` that
    traffic goes to another revision by this decision, `replaces` that a group is to give way to one of the update.
    """

    current: str
    wanted: list[Key] = field(default_factory=list)
    unwanted: dict[Key, DeleteReason] = field(default_factory=dict)
    complete: bool = False
    switch: bool = False
    waits_for_delete: bool = False
    replaces: bool = False
    selector: str = ""  # revision that the client Service selects; empty: all
    requeue_at: float | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """What the spec asks for. `suspended` groups are gone though `replicas` stays.

    `paused`: no group that is there goes for another revision, and none is made beside one.
    """

    replicas: int
    update: str
    rollout: Rollout
    paused: bool = False
    suspended: bool = False

    @property
    def idle(self) -> bool:
        """No pods are to run."""
        return self.suspended or self.replicas == 0


def count_of(value: int | str, replicas: int, up: bool) -> int:
    """A number or a percentage of `replicas`. Raises ValueError for anything else."""
    if isinstance(value, int):
        return value
    text = value.strip()
    if not text.endswith("%"):
        return int(text)
    exact = replicas * int(text[:-1]) / 100
    return math.ceil(exact) if up else math.floor(exact)


def limits(rollout: Rollout, replicas: int) -> tuple[int, int]:
    """Groups that may be away, and groups above `replicas`; never both zero."""
    away = count_of(rollout.max_unavailable, replicas, up=False)
    above = count_of(rollout.max_surge, replicas, up=True)
    return (1, 0) if away == 0 and above == 0 else (away, above)


def decide(
    wish: Wish,
    groups: Mapping[Key, Group],
    current: str,
    switched: float | None,
    troubled: frozenset[Key],
    now: float,
    proven: frozenset[Key] = frozenset(),
    gone: Mapping[Key, Group] | None = None,
) -> Decision:
    """`troubled` groups were recreated lately: scaling down takes them before healthy ones.

    `proven` groups are of a revision that has served and may come back: what is broken and never worked goes at once,
    they go only within the limits, also while they do not serve. `gone`: those of them that have lost every pod.
    """
    live = {k: g for k, g in groups.items() if g.live} | dict(gone or {})
    current = _serving_revision(wish, live, current)
    if wish.idle:
        reason = DeleteReason.SUSPENDED if wish.suspended else DeleteReason.SCALED_DOWN
        complete = not groups and (current == wish.update or not wish.paused)
        return Decision(current=current, unwanted=dict.fromkeys(live, reason), complete=complete)
    if wish.rollout.strategy is Strategy.BLUE_GREEN:
        return _blue_green(wish, groups, live, current, switched, troubled, now)
    return _by_slots(wish, groups, live, current, troubled, now, proven)


def _serving_revision(wish: Wish, live: Mapping[Key, Group], current: str) -> str:
    """`current`, unless it has no groups any more; what holds a rollout back does so also while it has none."""
    by_colour = wish.rollout.strategy is Strategy.BLUE_GREEN
    held = bool(current) and (wish.paused or (wish.rollout.partition > 0 and not by_colour))
    if wish.idle:
        return current if held else wish.update
    serving = [k[0] for k, g in live.items() if g.serving]
    revisions = {k[0] for k in live}
    if current in revisions or (held and not (by_colour and serving)):
        return current
    return wish.update if wish.update in revisions or not serving else serving[0]


def _kept_indexes(
    worth: Mapping[int, tuple[bool, ...]],
    replicas: int,
    ending: set[int],
    former: frozenset[int] = frozenset(),
    room: int = 0,
) -> list[int]:
    """`replicas` indexes: of those there the best, then those whose groups are `ending`, then the lowest free ones.

    So a group that is on its way out is waited for, and none is made beside it under another index. Those of `former`
    nobody would miss: as many free indexes as there is `room` for go before them.
    """
    kept = sorted(worth, key=lambda i: (worth[i], i))[:replicas]
    free = (i for i in count() if i not in worth and i not in ending)
    gone = ending - worth.keys()
    others = chain(sorted(gone - former), islice(free, max(0, room)), sorted(gone & former), free)
    return sorted([*kept, *islice(others, replicas - len(kept))])


def _worth(
    live: Mapping[Key, Group], troubled: frozenset[Key], now: float, min_ready: int
) -> dict[int, tuple[bool, ...]]:
    """Per index: (not serving, not available, troubled) of its best group."""
    worth: dict[int, tuple[bool, ...]] = {}
    for key, group in live.items():
        value = (not group.serving, not group.available(now, min_ready), key in troubled)
        worth[key[1]] = min(worth.get(key[1], value), value)
    return worth


def _by_slots(
    wish: Wish,
    groups: Mapping[Key, Group],
    live: Mapping[Key, Group],
    current: str,
    troubled: frozenset[Key],
    now: float,
    proven: frozenset[Key],
) -> Decision:
    """RollingUpdate and OnDelete: each index is a slot that holds one group, two while it surges."""
    decision = Decision(current=current)
    min_ready = wish.rollout.min_ready_seconds
    away, above = limits(wish.rollout, wish.replicas)
    there = groups.keys() | live.keys()
    # What failed comes back where it was, with its back-off; what a larger scale left may end beside its successor.
    former = frozenset(k[1] for k in groups if k[1] >= wish.replicas) - {k[1] for k in troubled}
    room = wish.replicas + above - len(there)
    worth = _worth(live, troubled, now, min_ready)
    kept = _kept_indexes(worth, wish.replicas, {k[1] for k in groups}, former, room)
    for key in live:
        if key[1] not in kept:
            decision.unwanted[key] = DeleteReason.SCALED_DOWN

    slots = {i: [k for k in live if k[1] == i] for i in kept}
    targets: dict[int, str] = {}
    for i, here in slots.items():
        stays = wish.paused or i < wish.rollout.partition
        revisions = {k[0] for k in here}
        if wish.rollout.strategy is Strategy.ON_DELETE and here:
            stays = True
        targets[i] = (current if current in revisions or not here else max(revisions)) if stays else wish.update

    def available(key: Key) -> bool:
        return live[key].available(now, min_ready)

    up = sum(1 for here in slots.values() if any(available(k) for k in here))
    least = wish.replicas - away
    coming = sum(1 for i, here in slots.items() if (targets[i], i) in here and not any(available(k) for k in here))
    surging = len(there) - len({k[1] for k in there}.intersection(kept))  # all but one per slot

    candidates: list[tuple[int, Key]] = []
    for i, here in slots.items():
        if wish.paused and here:
            decision.wanted += here
            continue
        target = (targets[i], i)
        old = [k for k in here if k != target]
        if target in here or not old:
            decision.wanted.append(target)
            for key in old:
                worth_keeping = live[key].serving or key in proven
                if not worth_keeping or (target in here and available(target)):
                    decision.unwanted[key] = DeleteReason.NEW_REVISION
                else:
                    decision.wanted.append(key)
            continue
        # A slot never holds more than one old group; if it does, the one that serves stays.
        best = min(old, key=lambda k: (not live[k].serving, not available(k), k[0] != current, k[0]))
        for key in old:
            if key != best:
                decision.unwanted[key] = DeleteReason.NEW_REVISION
        candidates.append((i, best))

    for i, old_key in sorted(candidates, key=lambda c: (live[c[1]].serving, -c[0])):
        target = (targets[i], i)
        if not live[old_key].serving and old_key not in proven:
            decision.unwanted[old_key] = DeleteReason.NEW_REVISION
        elif surging < above:
            surging += 1
            decision.wanted += [target, old_key]
        elif not live[old_key].serving and coming < away:
            coming += 1
            decision.unwanted[old_key] = DeleteReason.NEW_REVISION
        elif live[old_key].serving and up - 1 >= least:
            up -= 1
            coming += 1
            decision.unwanted[old_key] = DeleteReason.NEW_REVISION
        else:
            decision.wanted.append(old_key)

    _wait_for_room(decision, groups)
    updated = sum(1 for k in decision.wanted if k[0] == wish.update)
    goal = {(targets[i], i) for i in kept}
    decision.replaces = any(k[0] != wish.update and k[1] >= wish.rollout.partition for k in live if k[1] in kept)
    decision.waits_for_delete = wish.rollout.strategy is Strategy.ON_DELETE and updated < wish.replicas
    settled = set(decision.wanted) == goal and not decision.unwanted and all(k in live and available(k) for k in goal)
    decision.complete = settled and not decision.waits_for_delete and (updated == wish.replicas or not wish.paused)
    if settled and updated == wish.replicas:
        decision.current = wish.update
    _ask_again(decision, live, min_ready, now)
    return decision


def _wait_for_room(decision: Decision, groups: Mapping[Key, Group]) -> None:
    """A new group waits until the old one of its slot is gone, unless it may surge beside it."""
    for key in list(decision.wanted):
        if key in groups:
            continue
        others = [k for k in groups if k[1] == key[1] and k != key]
        if any(k not in decision.wanted for k in others):
            decision.wanted.remove(key)


def _ask_again(decision: Decision, live: Mapping[Key, Group], min_ready: int, now: float) -> None:
    """When the next group has been ready for long enough."""
    for key in decision.wanted:
        group = live.get(key)
        since = group.ready_since() if group else None
        if min_ready and group and since is not None and not group.available(now, min_ready):
            at = since + min_ready
            decision.requeue_at = min(decision.requeue_at or at, at)


def _blue_green(
    wish: Wish,
    groups: Mapping[Key, Group],
    live: Mapping[Key, Group],
    current: str,
    switched: float | None,
    troubled: frozenset[Key],
    now: float,
) -> Decision:
    """All groups of the new revision beside the old ones; traffic moves when every one of them is available."""
    update = current if wish.paused else wish.update
    decision = Decision(current=current, selector=current)
    min_ready = wish.rollout.min_ready_seconds

    def keep(revision: str) -> list[Key]:
        mine = {k: g for k, g in live.items() if k[0] == revision}
        worth, ending = _worth(mine, troubled, now, min_ready), {k[1] for k in groups if k[0] == revision}
        kept = _kept_indexes(worth, wish.replicas, ending)
        for key in mine:
            if key[1] not in kept:
                decision.unwanted[key] = DeleteReason.SCALED_DOWN
        return [(revision, i) for i in kept]

    green = keep(update)
    decision.wanted += green
    ready = [k for k in green if k in live and live[k].available(now, min_ready)]
    blue_serves = any(g.serving for k, g in live.items() if k[0] == current)
    if current != update and (len(ready) == len(green) or (ready and not blue_serves)):
        decision.switch, decision.current, decision.selector = True, update, update
        switched = now
    if wish.paused:  # both colours stay as they are
        for revision in sorted({k[0] for k in live} - {update}):
            decision.wanted += [k for k in keep(revision) if k in live]
    for key, group in live.items():
        if key[0] in (update, decision.current) or wish.paused:
            continue
        leaves_at = (switched or 0.0) + wish.rollout.scale_down_delay_seconds
        if decision.current != update:
            decision.unwanted[key] = DeleteReason.NEW_REVISION
        elif group.serving and now < leaves_at:
            decision.requeue_at = min(decision.requeue_at or leaves_at, leaves_at)
            decision.wanted.append(key)
        else:
            decision.unwanted[key] = DeleteReason.OLD_COLOUR if group.serving else DeleteReason.NEW_REVISION
    if decision.current != update:
        decision.wanted += keep(decision.current)
    decision.replaces = any(k[0] != wish.update for k in live)
    decision.complete = (
        decision.current == wish.update
        and all(k[0] == wish.update for k in groups)
        and len(ready) == len(green) == wish.replicas
    )
    _ask_again(decision, live, min_ready, now)
    return decision
