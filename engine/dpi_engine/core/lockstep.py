"""When ranks that share the experts of a model compute, and when they rest: one rank's side. Pure: no I/O, no clock.

Every layer of experts is an exchange between all ranks, so a step is computed by all of them or by none: a rank without
work takes part in the others' steps (a dummy step). Which exchange comes next must never depend on what one rank alone
knows. So there is one rule: between two *syncs* all ranks do the same thing, and what that is follows from the values
that the sync gave to all of them. A sync is an all-reduce (element-wise maximum) of each rank's Vote:

    sync -> somebody has work, and the group is not held -> `interval` steps -> sync -> ...
    sync -> nobody has work, or held                     -> rest; the wave is over and its number grows

A rank that rests may begin the next sync at any time, since a sync is the only exchange that can follow a rest: because
it has work, because it was woken (START_DP_WAVE, or the vote of another rank), or because it must tell that it was
paused or resumed. Whoever rests joins. A wake-up that comes late costs one empty sync and can do no harm.

Pausing has two phases: a rank that was paused goes on with dummy steps until a sync finds all ranks paused. From then
on the group is held, and no step is computed until a sync finds none of them paused.

The rules for wave numbers are those of vLLM 0.32's DPEngineCoreProc, but for one: a rank with work always starts a wave
by itself, so that no request depends on a wake-up that somebody else has to send.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_WAVE = 1 << 48
"""Numbers from here on are no waves: nobody counts that far, and a sync carries 64 bits."""


class Vote(NamedTuple):
    """What a rank brings into a sync, as integers whose maximum over all ranks is what the group agrees on.

    wave: the highest wave it has heard of. unfinished: it has requests to compute. paused, unpaused: exactly one is 1.
    held: the group was held when this rank last knew (after a loss, a new rank does not know).
    """

    wave: int
    unfinished: int
    paused: int
    unpaused: int
    held: int


def agree(votes: Iterable[Sequence[int]]) -> Vote:
    """The outcome of a sync: the element-wise maximum. Raises ValueError for votes of another length."""
    columns = list(zip(*votes, strict=True))
    return Vote(*(max(column) for column in columns))


class Phase(enum.IntEnum):
    """Where a rank stands between two exchanges."""

    APART = 0  # no group: it is being formed, or a rank of it is lost
    REST = 1
    SYNC = 2  # has voted, waits for the others' votes
    STEP = 3  # the next exchanges are those of a step


class Move(enum.Enum):
    """What the loop has to do now."""

    WAIT = "wait"  # for news: a request, a wake-up, a vote of another rank, a group
    SYNC = "sync"  # exchange `vote`, then call `agreed`
    STEP = "step"  # compute what is scheduled, or a dummy step; then call `stepped`


@dataclass(slots=True)
class Report:
    """For the coordinator, as vLLM has it: exactly one of the two is set."""

    start_wave: int | None = None
    wave_complete: int | None = None


@dataclass(slots=True)
class Lockstep:
    """One rank of `size`, in groups that are numbered by an epoch (`group`, 0: none).

    `interval`: steps between two syncs. 1 ends a wave without a dummy step of everybody; more saves syncs.
    """

    rank: int
    size: int
    interval: int = 1
    group: int = 0
    wave: int = 0
    phase: Phase = Phase.APART
    running: bool = False
    """A wave runs: the last sync found work."""
    held: bool = False
    """All ranks are paused and stand still; the same on every rank of a group."""
    woken: bool = False
    left: int = 0
    """Steps until the next sync."""
    vote: Vote | None = None
    """The vote of the sync in progress."""
    told_paused: bool = False
    """What this rank's last vote said."""
    reports: list[Report] = field(default_factory=list)
    """For the coordinator; the loop takes and clears them."""

    # -- news --------------------------------------------------------------------------------------------------------

    def formed(self, group: int) -> None:
        """All ranks are linked under a new epoch. The first thing they do is a sync, which levels wave and `held`."""
        if group <= self.group:
            raise ValueError(f"group {group} follows {self.group}: epochs only grow")
        self.group = group
        self.phase, self.woken, self.running = Phase.REST, True, False
        self.left, self.vote = 0, None

    def broken(self) -> None:
        """The group is over, whatever this rank was doing: an exchange that had begun will not end."""
        self.phase, self.running, self.woken, self.left, self.vote = Phase.APART, False, False, 0, None

    def request(self, wave: int) -> None:
        """A request came that was sent when its front end believed in `wave`. (That there is work, `next` is told.)"""
        if wave < MAX_WAVE:
            self.wave = max(self.wave, wave)

    def start_wave(self, wave: int, exclude: int | bytes | None = None, group: int = 0) -> bool:
        """START_DP_WAVE: take part. False when there is nothing to do: it is late, or this rank knows already.

        `group` 0 (vLLM's form) is any epoch.
        """
        late = group not in (0, self.group) or not self.wave <= wave < MAX_WAVE
        if late or self.phase is Phase.APART or self.held or exclude == self.rank:
            return False
        # A later wave than the one that runs here follows it, even if this one ends at the sync in progress.
        self.woken = self.woken or self.phase is Phase.REST or wave > self.wave
        self.wave = wave
        return True

    def peer_began(self) -> None:
        """The vote of another rank has arrived: it began the next sync."""
        if self.phase is Phase.REST:
            self.woken = True

    # -- the loop ----------------------------------------------------------------------------------------------------

    @property
    def engaged(self) -> bool:
        """Takes part in a wave, or is about to: need not be woken."""
        return self.woken or self.phase in (Phase.SYNC, Phase.STEP)

    def next(self, unfinished: bool, paused: bool) -> Move:
        """What to do now. `unfinished`: there are requests that a step would compute. `paused`: a pause was asked for,
        and what it lets finish has finished."""
        if self.phase is Phase.APART:
            return Move.WAIT
        if self.phase is Phase.STEP:
            return Move.STEP
        if self.phase is Phase.REST:
            starts = unfinished and not self.held
            if not (self.woken or starts or paused != self.told_paused):
                return Move.WAIT
            if starts and not self.woken:
                self.reports.append(Report(start_wave=self.wave))
            self.phase, self.woken, self.told_paused = Phase.SYNC, False, paused
            self.vote = Vote(self.wave, int(unfinished), int(paused), int(not paused), int(self.held))
        return Move.SYNC

    def agreed(self, outcome: Vote) -> None:
        """The sync has ended with the same `outcome` (see `agree`) on every rank."""
        if self.phase is not Phase.SYNC:
            raise RuntimeError(f"the outcome of a sync in phase {self.phase.name}")
        self.vote = None
        self.wave = max(self.wave, outcome.wave)  # a wake-up may have come after the vote
        self.held = not outcome.unpaused or bool(outcome.held and outcome.paused)
        if outcome.unfinished and not self.held:
            self.phase, self.left = Phase.STEP, self.interval
            if not self.running and self.rank == 0:
                self.reports.append(Report(start_wave=outcome.wave))
            self.running = True
            return
        if self.rank == 0:
            self.reports.append(Report(wave_complete=outcome.wave))
        self.phase, self.running = Phase.REST, False
        self.wave = max(self.wave, outcome.wave + 1)

    def stepped(self) -> None:
        """A step has ended, a dummy one or not."""
        if self.phase is not Phase.STEP:
            raise RuntimeError(f"a step has ended in phase {self.phase.name}")
        self.left -= 1
        if not self.left:
            self.phase, self.woken = Phase.REST, True

    def take_reports(self) -> list[Report]:
        taken, self.reports = self.reports, []
        return taken
