"""Ranks in lockstep under every order of events: nobody out of step, no deadlock, no livelock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep_walk import Budget, Group, OutOfStep, explore, first_state

from dpi_engine.core.lockstep import MAX_WAVE, Lockstep, Phase, Vote

ORDERS = {
    "requests of different lengths, late ones": Budget(requests=3, steps=2, interval=2),
    "each step a sync": Budget(requests=3, steps=2),
    "wake-ups that are stale, current and too early": Budget(requests=1, starts=2),
    "wake-ups between requests": Budget(requests=2, starts=1, interval=2, steps=2),
    "pause and resume of single ranks, and requests": Budget(requests=1, pauses=3, resumes=3),
    "pause, resume and wake-ups": Budget(requests=1, starts=1, pauses=1, resumes=1, steps=2),
    "a rank lost at any time, and back": Budget(requests=2, losses=1, steps=2, interval=2),
    "two losses": Budget(requests=1, losses=2),
    "a loss and a link that breaks": Budget(requests=1, losses=1, cuts=1),
    "a loss while pausing": Budget(requests=1, pauses=1, resumes=1, losses=1),
    "a loss while paused": Budget(pauses=3, resumes=1, losses=1),
    "a loss and a late wake-up": Budget(requests=1, starts=1, losses=1),
}


@pytest.mark.parametrize("name", ORDERS)
def test_every_order(name: str) -> None:
    budget = ORDERS[name]
    walk = explore(budget, limit=40_000)
    assert walk.states > 500 and walk.rests > 1
    assert bool(walk.held) or budget.pauses < budget.size
    assert bool(walk.re_formed) == bool(budget.losses + budget.cuts)


def test_two_ranks_can_be_paused_lost_and_resumed_in_any_order() -> None:
    walk = explore(Budget(requests=1, pauses=2, resumes=2, losses=1, size=2), limit=40_000)
    assert walk.held and walk.re_formed


def test_numbers_that_are_no_waves_are_passed_over() -> None:
    machine = Lockstep(1, 2)
    machine.formed(1)
    for wave in (-1, MAX_WAVE, 2**64 - 1):
        machine.request(wave)
        assert not machine.start_wave(wave)
    assert machine.wave == 0
    machine.request(7)
    assert machine.start_wave(9, None, 1) and machine.wave == 9
    assert not machine.start_wave(10, None, 2) and not machine.start_wave(10, 1)  # another group; not meant for rank 1


class StepsByItsOwnCount(Lockstep):
    """Makes a step more than the others when it is paused itself."""

    def agreed(self, outcome: Vote) -> None:
        super().agreed(outcome)
        if self.phase is Phase.STEP and self.told_paused:
            self.left += 1


class DoesNotListen(Lockstep):
    """Does not join a sync that another rank began."""

    def peer_began(self) -> None:
        return


class HoldsAlone(Lockstep):
    """Stands still as soon as it is paused itself."""

    def agreed(self, outcome: Vote) -> None:
        super().agreed(outcome)
        if self.told_paused and self.phase is Phase.STEP:
            self.phase = Phase.REST


class ForgetsToTell(Lockstep):
    """Rests after a resume without a word."""

    def next(self, unfinished: bool, paused: bool):
        if self.phase is Phase.REST and not paused:
            self.told_paused = False
        return super().next(unfinished, paused)


class VotesForEver(Lockstep):
    """Begins another sync after each one."""

    def agreed(self, outcome: Vote) -> None:
        super().agreed(outcome)
        self.woken = True


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.integers(2, 6), interval=st.integers(1, 5))
def test_long_random_runs_of_more_ranks(data: st.DataObject, size: int, interval: int) -> None:
    budget = Budget(
        requests=6, starts=4, pauses=size + 2, resumes=size + 2, losses=2, cuts=2, steps=4, size=size, interval=interval
    )
    choose = data.draw(st.randoms(use_true_random=False))
    state, outside_left = first_state(budget), 40
    for _ in range(4000):
        group = Group(state, budget)
        moves = list(group.successors())
        inner = [after for outside, _, after in moves if not outside]
        outer = [after for outside, _, after in moves if outside]
        if outer and outside_left and (not inner or choose.random() < 0.15):
            outside_left -= 1
            state = choose.choice(outer)
        elif inner:
            state = choose.choice(inner)
        else:
            group.check_rest()
            return
    raise AssertionError("the group does not come to rest")


FAULTS = {
    "steps by its own count": (StepsByItsOwnCount, Budget(requests=1, pauses=1), OutOfStep),
    "does not listen": (DoesNotListen, Budget(requests=1), AssertionError),
    "holds alone": (HoldsAlone, Budget(requests=1, pauses=1), AssertionError),
    "forgets to tell": (ForgetsToTell, Budget(pauses=3, resumes=3), AssertionError),
    "votes for ever": (VotesForEver, Budget(requests=1), AssertionError),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_walk_finds_a_fault(fault: str) -> None:
    machine, budget, error = FAULTS[fault]
    values = {name: getattr(budget, name) for name in budget.__dataclass_fields__} | {"machine": machine}
    with pytest.raises(error):
        explore(Budget(**values), limit=40_000)
