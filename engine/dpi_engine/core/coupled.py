"""A core that steps together with all other ranks of its group: Lockstep decides, the links carry, the core computes.

When the group breaks, the step in progress is void on every rank, but what it was to compute is kept: the weights stay,
the requests stay, and the same step is computed again once the group is formed anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dpi_engine.core.engine import EngineCore
from dpi_engine.core.lockstep import Lockstep, Move, Phase, Report, Vote
from dpi_engine.core.outputs import StepOutputs
from dpi_engine.core.utility import SLEEP_MODES, Utilities, UtilityError
from dpi_engine.wire.errors import ExchangeError
from dpi_engine.wire.messages import Pace

log = logging.getLogger(__name__)


class Links(Protocol):
    """Links to the other ranks (wire/exchange/mesh.py)."""

    @property
    def group(self) -> int: ...
    @property
    def missing(self) -> str: ...
    def form(self, timeout: float, fds: Sequence[int] = ()) -> bool: ...
    def rest(self, timeout: float, fds: Sequence[int] = ()) -> bool: ...
    def check_news(self) -> None: ...
    def all_reduce_max(self, values: Sequence[int]) -> list[int]: ...
    def leave(self) -> None: ...
    def abandon(self) -> None: ...


class DeviceGroup(Protocol):
    """What the devices of the ranks exchange by, where that is not the links themselves."""

    def join(self) -> None:
        """The links of a group stand on all ranks: link the devices too. Raises ExchangeError."""
        ...

    def leave(self) -> None:
        """The group is over: whatever a device waits for is ended. Nothing happens without a group."""
        ...


@dataclass(slots=True)
class CoupledCounts:
    """Totals since start. `waves` are those with work; a sync that finds none ends a wave that never ran."""

    waves: int = 0
    steps: int = 0
    dummy_steps: int = 0
    syncs: int = 0
    breaks: int = 0
    formed: int = 0


@dataclass(slots=True)
class Turn:
    """What one turn did. `computed`: a step of this rank's own; `tokens` of it."""

    outputs: StepOutputs = field(default_factory=StepOutputs)
    computed: bool = False
    tokens: int = 0


Answer = Callable[[Any, str | None, StepOutputs], None]
"""answer(value, failure, outputs)"""


@dataclass(slots=True)
class _Waiting:
    """A call that is answered when the whole group has done it."""

    method: str
    done: Callable[[], bool]
    finish: Callable[[], tuple[Any, StepOutputs]]
    answer: Answer


class CoupledCore:
    """One rank. `on_left` is called when the links of an epoch were given up; the head must hear of it."""

    def __init__(
        self,
        core: EngineCore,
        links: Links,
        lockstep: Lockstep,
        on_left: Callable[[], None],
        devices: DeviceGroup | None = None,
    ) -> None:
        self.core, self.links, self.lockstep, self._devices = core, links, lockstep, devices
        self.counts = CoupledCounts()
        self.stopping = False
        """This rank is about to leave, as the others are perhaps: that they do is no news."""
        self._on_left = on_left
        self._waiting: list[_Waiting] = []
        self._apart_since: float | None = None

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def pace(self) -> Pace:
        step = self.lockstep
        return Pace.ENGAGED if step.engaged else Pace.HELD if step.held else Pace.REST

    @property
    def group(self) -> int:
        """Epoch of the group; 0 while there is none."""
        return 0 if self.lockstep.phase is Phase.APART else self.lockstep.group

    def apart_for(self, now: float) -> float | None:
        """Seconds that this rank has had a head but no group; None while that is not so."""
        if self.lockstep.phase is not Phase.APART or self._apart_since is None:
            return None
        return now - self._apart_since

    def take_reports(self) -> list[Report]:
        return self.lockstep.take_reports()

    # -- news --------------------------------------------------------------------------------------------------------

    def joined(self, now: float) -> None:
        """READY at a head: from now on the others are waited for."""
        self._apart_since = now

    def head_lost(self) -> None:
        """The head is gone or has given this rank up; so is the group."""
        if self.group:
            self._break(ExchangeError("the head of the group is lost"))
        self.links.abandon()
        self._apart_since = None

    # -- the loop ----------------------------------------------------------------------------------------------------

    def idle(self) -> bool:
        """Nothing to do before there is news: `rest` then, else `turn`."""
        return self._next() is Move.WAIT

    def _next(self) -> Move:
        busy = self.core.has_work()
        return self.lockstep.next(busy, self.core.scheduler.is_paused and not busy)

    def rest(self, now: float, timeout: float, fd: int) -> None:
        """Wait for news at most `timeout` seconds; `fd` is readable when there is some from elsewhere."""
        try:
            if self.lockstep.phase is Phase.APART:
                if self.links.form(timeout, [fd]):
                    self.lockstep.formed(self.links.group)
                    if self._devices is not None:
                        self._devices.join()
                    self.counts.formed += 1
                    waited = "" if self._apart_since is None else f" after {now - self._apart_since:.1f} s"
                    waiting = self.core.scheduler.num_unfinished
                    log.info("group %d is formed%s; %d requests here go on", self.links.group, waited, waiting)
            elif self.links.rest(timeout, [fd]):
                self.lockstep.peer_began()
        except ExchangeError as error:
            self._break(error, now)

    def turn(self, now: float, before_apply: Callable[[], None] | None = None) -> Turn:
        """One sync or one step. Nothing happens where there is nothing to do."""
        try:
            self.links.check_news()
            move = self._next()
            if move is Move.SYNC:
                assert self.lockstep.vote is not None
                self.counts.syncs += 1
                ran = self.lockstep.running
                self.lockstep.agreed(Vote(*self.links.all_reduce_max(self.lockstep.vote)))
                self.counts.waves += self.lockstep.running and not ran
                return Turn()
            if move is Move.STEP:
                return self._step(now, before_apply)
        except ExchangeError as error:
            self._break(error, now)
        return Turn()

    def _step(self, now: float, before_apply: Callable[[], None] | None) -> Turn:
        core = self.core
        outputs = core.step(now, before_apply)
        if core.computed:
            self.counts.steps += 1
            self.lockstep.stepped()
            return Turn(outputs, True, core.step_tokens)
        if core.failed:  # somewhere between two exchanges: the others cannot go on with this rank
            self._break(ExchangeError("a step failed on this rank"), now)
            return Turn(outputs)
        try:
            core.idle()
        except ExchangeError as error:
            self._break(error, now)
            return Turn(outputs)
        self.counts.dummy_steps += 1
        self.lockstep.stepped()
        return Turn(outputs)

    def _break(self, error: ExchangeError, now: float | None = None) -> None:
        self.counts.breaks += 1
        doing = self.lockstep.phase.name.lower()
        log.log(
            logging.INFO if self.stopping else logging.WARNING,
            "group %d is broken (during %s): %s; weights are kept, %d requests here wait until it is formed anew",
            self.lockstep.group, doing, error, self.core.scheduler.num_unfinished,
        )  # fmt: skip
        self.links.leave()
        if self._devices is not None:
            self._devices.leave()
        self.lockstep.broken()
        self._apart_since = now
        self._on_left()

    # -- calls that the whole group must have done ---------------------------------------------------------------------

    def call(self, utilities: Utilities, method: str, args: list[Any], answer: Answer) -> StepOutputs | None:
        """Take `pause_scheduler`, `resume_scheduler`, `sleep` or `wake_up`, and give back what it caused at once (the
        outputs of requests that it ended); None for all others. Raises UtilityError.

        The answer comes when every rank has done it: until all are paused, a paused rank takes part in the others'
        steps, and must have its weights for that.
        """

        def nothing() -> tuple[Any, StepOutputs]:
            return None, StepOutputs()

        if method == "pause_scheduler":
            return self._begin(method, utilities.call(method, args), self._held, nothing, answer)
        if method == "sleep":
            level, *rest = args or [1]
            mode = rest[0] if rest else "abort"
            if level == 0:
                return self._begin(method, utilities.call("pause_scheduler", [mode]), self._held, nothing, answer)
            if level not in (1, 2) or mode not in SLEEP_MODES or len(rest) > 1:
                utilities.call(method, args)  # says what is wrong
            ended = utilities.call("pause_scheduler", [mode])
            return self._begin(method, ended, self._held, lambda: utilities.call("sleep", [level, mode]), answer)
        if method == "resume_scheduler":
            return self._begin(method, utilities.call(method, args), self._going, nothing, answer)
        if method == "wake_up":
            woken = utilities.call(method, args)
            return self._begin(method, woken, self._going, lambda: (True, StepOutputs()), answer)
        return None

    def _held(self) -> bool:
        return self.group > 0 and self.lockstep.held and self.core.scheduler.is_paused

    def _going(self) -> bool:
        return self.group > 0 and not self.lockstep.held and not self.lockstep.told_paused

    def _begin(
        self,
        method: str,
        called: tuple[Any, StepOutputs],
        done: Callable[[], bool],
        finish: Callable[[], tuple[Any, StepOutputs]],
        answer: Answer,
    ) -> StepOutputs:
        pauses = ("pause_scheduler", "sleep")
        for waiting in list(self._waiting):  # the newest call counts
            if (waiting.method in pauses) != (method in pauses):
                self._waiting.remove(waiting)
                waiting.answer(None, f"{waiting.method}: {method} came before every rank had done it", StepOutputs())
        self._waiting.append(_Waiting(method, done, finish, answer))
        return called[1]

    def settle(self) -> None:
        """Answer the calls that are done."""
        for waiting in list(self._waiting):
            if not waiting.done():
                continue
            self._waiting.remove(waiting)
            try:
                value, outputs = waiting.finish()
            except UtilityError as error:
                waiting.answer(None, str(error), StepOutputs())
            else:
                waiting.answer(value, None, outputs)
