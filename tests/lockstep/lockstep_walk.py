"""Every order of events for a few ranks in lockstep, breadth first.

The state machine is the real one. The coordinator is replaced by the worst there can be: START_DP_WAVE with old, new
and future wave numbers reaches any rank at any time, or never. The network is the exchange itself: a rank leaves an
exchange at some time after all ranks have entered it, and sees at some time that another has begun one, that the group
is broken, or that it is formed anew.

A state is a sorted tuple of ranks (nothing in the rules depends on which rank is which), the events that may still come
from outside, and the group's epoch at the head, which grows with every loss. Waves count from the lowest one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from dpi_engine.core.lockstep import Lockstep, Move, Phase, agree

STEP = "step"


class OutOfStep(AssertionError):
    """Two ranks are in different exchanges at once: in a real group both would wait for ever."""


@dataclass(frozen=True)
class Budget:
    """How many events of each kind come from outside, in any order and at any time."""

    requests: int = 0
    starts: int = 0  # START_DP_WAVE to one rank
    pauses: int = 0  # of one rank
    resumes: int = 0
    losses: int = 0  # of a rank's process
    cuts: int = 0  # of a link between two living ranks
    steps: int = 1  # that a request takes
    interval: int = 1
    size: int = 3
    machine: type[Lockstep] = Lockstep


REQUESTS, STARTS, PAUSES, RESUMES, LOSSES, CUTS = range(6)

# A machine: (phase, wave, running, held, woken, left, told_paused, group). A rank: (machine or None when its process is
# gone, work, paused, exchanges ended in this group (0 or 1 from the lowest), last exchange, current exchange); an
# exchange is STEP, a vote, or None.
M_PHASE, M_WAVE, M_RUNNING, M_HELD, M_WOKEN, M_LEFT, M_TOLD, M_GROUP = range(8)
APART, REST, SYNC, STEPPING = Phase.APART, Phase.REST, Phase.SYNC, Phase.STEP


def _thaw(kind: type[Lockstep], m: tuple, interval: int) -> Lockstep:
    machine = kind(1, 3, interval)
    machine.phase = Phase(m[0])
    machine.wave, machine.running, machine.held, machine.woken, machine.left, machine.told_paused, machine.group = m[1:]
    return machine


def _freeze(k: Lockstep) -> tuple:
    return (k.phase, k.wave, k.running, k.held, k.woken, k.left, k.told_paused, k.group)


@cache
def call(kind: type[Lockstep], m: tuple, interval: int, method: str, *args: Any) -> tuple[tuple, Any, Any]:
    """The machine after a call of `method`, what it returned, and its vote."""
    machine = _thaw(kind, m, interval)
    result = getattr(machine, method)(*args)
    return _freeze(machine), result, machine.vote


@cache
def shift(rank: tuple, low: int, base: int) -> tuple:
    """The rank with waves counted from `low` and exchanges from `base`."""
    m, work, paused, done, last, current = rank
    if m is not None:
        m = (m[0], m[1] - low, *m[2:])
    return (m, work, paused, max(done - base, 0), _shift(last, low), _shift(current, low))


def _shift(op: Any, low: int) -> Any:
    return (max(op[0] - low, -1), *op[1:]) if isinstance(op, tuple) else op


def canonical(ranks: list[tuple], left: tuple, epoch: int) -> tuple:
    waves = [r[0][M_WAVE] for r in ranks if r[0] is not None]
    low = min(waves, default=0)
    bases = [r[3] for r in ranks if r[0] is not None and r[0][M_PHASE] is not APART]
    base = min(bases, default=0)
    if low or base:
        ranks = [shift(r, low, base) for r in ranks]
    if bases and max(bases) - base == 0:  # what is over for all of them counts no more
        ranks = [(r[0], r[1], r[2], r[3], None, r[5]) for r in ranks]
    return (tuple(sorted(ranks, key=repr)), left, epoch)


def spend(left: tuple, kind: int) -> tuple:
    return (*left[:kind], left[kind] - 1, *left[kind + 1 :])


class Group:
    """The events of one state."""

    def __init__(self, state: tuple, budget: Budget) -> None:
        self.ranks, self.left, self.epoch = state
        self.budget = budget
        living = [r[0] for r in self.ranks if r[0] is not None]
        self.complete = len(living) == len(self.ranks)
        # Links of an epoch can be made once every rank lives and has left the one before.
        self.forming = self.complete and all(m[M_PHASE] is APART or m[M_GROUP] == self.epoch for m in living)

    def successors(self) -> Iterator[tuple[bool, str, tuple]]:
        """(comes from outside, what happens, the state after it)"""
        for i, rank in enumerate(self.ranks):
            for outside, name, after, left in self._of(rank):
                others = list(self.ranks)
                others[i] = after
                epoch = self.epoch + (name in ("loss", "cut"))
                yield outside, f"{name}[{i}]", canonical(others, left, epoch)

    def _of(self, rank: tuple) -> Iterator[tuple[bool, str, tuple, tuple]]:
        m, work, paused, done, last, current = rank
        left, budget = self.left, self.budget

        def do(method: str, *args: Any) -> tuple:
            return call(budget.machine, m, budget.interval, method, *args)

        if m is None:  # started again: it knows nothing, but for the epochs that its head tells it
            fresh = (APART, 0, False, False, False, 0, False, 0)
            yield False, "restart", (fresh, 0, False, 0, None, None), left
            return
        phase = m[M_PHASE]
        if left[REQUESTS] and not work:
            yield True, "request", (m, budget.steps, paused, done, last, current), spend(left, REQUESTS)
        if left[PAUSES] and not paused:
            yield True, "pause", (m, work, True, done, last, current), spend(left, PAUSES)
        if left[RESUMES] and paused:
            yield True, "resume", (m, work, False, done, last, current), spend(left, RESUMES)
        if left[LOSSES]:
            yield True, "loss", (None, 0, False, 0, None, None), spend(left, LOSSES)
        if left[STARTS]:
            for wave in (m[M_WAVE] - 1, m[M_WAVE], m[M_WAVE] + 2):
                woken = do("start_wave", wave)[0]
                yield True, f"start {wave}", (woken, work, paused, done, last, current), spend(left, STARTS)
        if phase is APART:
            if self.forming and m[M_GROUP] < self.epoch:
                yield False, "form", (do("formed", self.epoch)[0], work, paused, 0, None, None), left
            return
        if left[CUTS]:
            yield True, "cut", (do("broken")[0], work, paused, 0, None, None), spend(left, CUTS)
        if m[M_GROUP] < self.epoch:
            # The rank hears of it some time; until then it waits in an exchange that not all of its group enter.
            yield False, "break", (do("broken")[0], work, paused, 0, None, None), left
        if current is not None:
            if (votes := self._votes(m, done)) is not None:
                if current is STEP:
                    after = do("stepped")[0]
                    yield False, "leave", (after, max(work - (not paused), 0), paused, done + 1, STEP, None), left
                else:
                    after = do("agreed", agree(votes))[0]
                    yield False, "leave", (after, work, paused, done + 1, current, None), left
            return
        after, move, vote = do("next", bool(work) and not paused, paused)
        if move is not Move.WAIT:
            op = STEP if move is Move.STEP else tuple(vote)
            self._check(m, done, op)
            yield False, "enter", (after, work, paused, done, last, op), left
        elif any((self._op(other, done) or STEP) is not STEP for other in self._peers(m)):
            yield False, "hear", (do("peer_began")[0], work, paused, done, last, current), left

    @staticmethod
    def _op(rank: tuple, number: int) -> Any:
        """What `rank` did in exchange `number`, or None if it has not entered it."""
        done = rank[3]
        return rank[5] if done == number else rank[4] if done == number + 1 else None

    def _peers(self, m: tuple) -> list[tuple]:
        """The ranks that are in the same group now, `m` among them."""
        return [r for r in self.ranks if r[0] and r[0][M_GROUP] == m[M_GROUP] and r[0][M_PHASE] is not APART]

    def _votes(self, m: tuple, number: int) -> list[Any] | None:
        """Votes of all ranks in exchange `number`, once all have entered it."""
        peers = self._peers(m)
        found = [self._op(r, number) for r in peers]
        return None if len(peers) < len(self.ranks) or None in found else found

    def _check(self, m: tuple, number: int, op: Any) -> None:
        for other in self._peers(m):
            there = self._op(other, number)
            if there is not None and (there is STEP) != (op is STEP):
                raise OutOfStep(f"one rank enters {op}, another is in {there}")

    def check_rest(self) -> None:
        """What must hold where nothing happens any more by itself."""
        assert self.complete
        machines = [r[0] for r in self.ranks]
        assert {m[M_GROUP] for m in machines} == {self.epoch}
        phases = [m[M_PHASE].name for m in machines]
        assert phases == ["REST"] * len(machines), f"stands still in {phases}"
        held = {m[M_HELD] for m in machines}
        assert len(held) == 1, "ranks disagree on whether they are held"
        assert len({m[M_WAVE] for m in machines}) == 1, "ranks disagree on the wave"
        paused = [r[2] for r in self.ranks]
        assert not all(paused) or held == {True}, "all ranks are paused, but the group is not held"
        assert any(paused) or held == {False}, "nobody is paused, but the group is held"
        for _, work, pause, *_ in self.ranks:
            assert not work or pause or held == {True}, "a rank has work, and nothing happens"


@dataclass
class Walk:
    """What `explore` saw: states, those at rest, of these held ones and ones after a loss."""

    states: int = 0
    rests: int = 0
    held: int = 0
    re_formed: int = 0


def first_state(budget: Budget) -> tuple:
    """Ranks that have just started, and a head that has told epoch 1."""
    fresh = ((APART, 0, False, False, False, 0, False, 0), 0, False, 0, None, None)
    left = (budget.requests, budget.starts, budget.pauses, budget.resumes, budget.losses, budget.cuts)
    return canonical([fresh] * budget.size, left, 1)


def explore(budget: Budget, limit: int) -> Walk:
    """Every state that can be reached. Raises AssertionError with the events that lead to a bad one.

    Bad are: two ranks in different exchanges (OutOfStep); rest although there is work (a deadlock); and a circle of
    states that the group can go round without any event from outside (a livelock).
    """
    start = first_state(budget)
    came_from: dict[tuple, tuple[tuple, str] | None] = {start: None}
    inner: dict[tuple, set[tuple]] = {}
    queue = deque([start])
    walk = Walk()
    while queue:
        state = queue.popleft()
        walk.states += 1
        assert walk.states <= limit, f"more than {limit} states: the model is not bounded as it should be"
        group = Group(state, budget)
        moves = set()
        try:
            for outside, event, after in group.successors():
                if not outside:
                    moves.add(after)
                if after not in came_from:
                    came_from[after] = (state, event)
                    queue.append(after)
            if not moves:
                group.check_rest()
                walk.rests += 1
                walk.held += group.ranks[0][0][M_HELD]
                walk.re_formed += group.epoch > 1
        except (AssertionError, RuntimeError, ValueError) as error:
            raise type(error)(f"{error}\nafter: {' -> '.join(path(came_from, state))}") from error
        inner[state] = moves
    check_progress(inner, came_from)
    return walk


def path(came_from: dict, state: tuple) -> list[str]:
    """The events that lead to a state."""
    events = []
    while (step := came_from[state]) is not None:
        state, event = step
        events.append(event)
    return events[::-1]


def check_progress(inner: dict[tuple, set[tuple]], came_from: dict) -> None:
    """Without events from outside every way ends: take away states whose followers are all gone until none is left."""
    waiting = {state: len(moves) for state, moves in inner.items()}
    before: dict[tuple, list[tuple]] = {}
    for state, moves in inner.items():
        for after in moves:
            before.setdefault(after, []).append(state)
    done = deque(state for state, count in waiting.items() if not count)
    left = len(waiting)
    while done:
        state = done.popleft()
        left -= 1
        for earlier in before.get(state, ()):
            waiting[earlier] -= 1
            if not waiting[earlier]:
                done.append(earlier)
    if left:
        state = next(state for state, count in waiting.items() if count)
        raise AssertionError(
            f"{left} states in or before a circle without events from outside, after: "
            + " -> ".join(path(came_from, state))
        )
