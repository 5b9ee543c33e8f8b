"""What the coordinator knows of the ranks' waves in the `dpi` dialect, and whom it must wake. Pure.

Ranks report where they stand in absolute terms (LoadRecord: group, wave, pace), again and again. So a wake-up is
acknowledged by the next record of the rank, it is repeated until it is, and a coordinator that was started anew knows
everything after one round of records.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dpi_engine.wire.codec import StartWave
from dpi_engine.wire.messages import LoadRecord, Pace

FIRST_REPEAT = 0.1
"""Seconds from a wake-up to its repetition if some rank did not acknowledge it; doubled each time."""
MOST_REPEAT = 2.0


@dataclass(slots=True)
class WaveBoard:
    """Where each of `size` ranks stands. `group`, `wave` and `running` are those of the newest group."""

    size: int
    group: int = 0
    wave: int = 0
    running: bool = False
    _known: list[tuple[int, int, int] | None] = field(default_factory=list)
    # How many ranks of the newest group stand at (wave, pace), so that no report looks at all ranks; and the unheard.
    _stands: dict[tuple[int, int], int] = field(default_factory=dict)
    _unknown: int = 0
    _wanted: tuple[int, int | None] | None = None  # a front end's wake-up: wave, and the rank that need not be told
    _sent: StartWave | None = None
    _repeat_at: float = 0.0
    _pause: float = 0.0

    def __post_init__(self) -> None:
        self._known = [None] * self.size
        self._unknown = self.size

    # -- news --------------------------------------------------------------------------------------------------------

    def report(self, load: LoadRecord) -> bool:
        """A rank's newest record. True when `wave` or `running` changed. Records without a group say nothing."""
        if not load.group:
            return False
        before = (self.wave, self.running)
        old, new = self._known[load.rank], (load.group, load.wave, load.pace)
        self._known[load.rank] = new
        self._unknown -= old is None
        if load.group > self.group:
            self.group, self._wanted = load.group, None
            self._stands.clear()
        elif old is not None and old[0] == self.group:
            self._count(old[1:], -1)
        if load.group == self.group:
            self._count(new[1:], 1)
        self.wave = max((wave for wave, _ in self._stands), default=self.wave)
        self.running = any(pace == Pace.ENGAGED for _, pace in self._stands)
        return (self.wave, self.running) != before

    def _count(self, stand: tuple[int, int], change: int) -> None:
        count = self._stands.get(stand, 0) + change
        if count:
            self._stands[stand] = count
        else:
            del self._stands[stand]

    def wake(self, wave: int, exclude: int | None) -> None:
        """A front end sent the first request of what it takes for wave `wave` to rank `exclude`.

        A wave that is over excludes nobody: the rank may have got the request before it learned of the end.
        """
        if not self.running:
            self._wanted = (max(wave, self.wave), exclude if wave >= self.wave else None)

    # -- what to send ------------------------------------------------------------------------------------------------

    def behind(self) -> list[int]:
        """Ranks that a wake-up is meant for and that have not acknowledged it, ascending."""
        target = self._target()
        if target is None:
            return []
        wave, exclude = target
        return [rank for rank, known in enumerate(self._known) if rank != exclude and self._asleep(known, wave)]

    def _target(self) -> tuple[int, int | None] | None:
        if any(pace == Pace.HELD for _, pace in self._stands):
            return None  # a paused group is not woken
        engaged = [wave for wave, pace in self._stands if pace == Pace.ENGAGED]
        return (max(engaged), None) if engaged else self._wanted

    def _asleep(self, known: tuple[int, int, int] | None, wave: int) -> bool:
        if known is None:
            return True  # never heard of: a coordinator that is new
        # A rank that is not in this group yet begins with it by itself.
        return known[0] == self.group and known[2] == Pace.REST and known[1] <= wave

    def _any_behind(self, wave: int, exclude: int | None) -> bool:
        count = self._unknown + sum(n for (w, pace), n in self._stands.items() if pace == Pace.REST and w <= wave)
        if exclude is not None and 0 <= exclude < self.size:
            count -= self._asleep(self._known[exclude], wave)
        return count > 0

    def due(self, now: float) -> StartWave | None:
        """The wake-up to send now, if one is due: a new one at once, the same one again with growing pauses."""
        target = self._target()
        if target is None or not self._any_behind(*target):
            self._wanted, self._sent = None, None
            return None
        start = StartWave(target[0], target[1], self.group)
        if start == self._sent and now < self._repeat_at:
            return None
        self._pause = min(2 * self._pause, MOST_REPEAT) if start == self._sent else FIRST_REPEAT
        self._sent, self._repeat_at = start, now + self._pause
        return start

    def next_due(self) -> float | None:
        """When `due` will have something to repeat; None when nothing waits for an acknowledgement."""
        return self._repeat_at if self._sent is not None else None
