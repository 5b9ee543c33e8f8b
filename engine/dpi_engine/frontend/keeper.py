"""Keeps the router in line with what links, the head's table and probes say of each rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import msgspec

from dpi_engine.frontend.events import Hooks, RankEvent
from dpi_engine.frontend.links import Links
from dpi_engine.frontend.router import Router
from dpi_engine.wire.messages import RankInfo, RankState, ReadyResponse

logger = logging.getLogger(__name__)

MAX_ORPHANS = 16384
"""Ids kept per unreachable rank to abort there if it comes back in the same life."""

UNREACHABLE = "its engine is not connected any more"

SendAbort = Callable[[int, list[str]], bool]
OnGone = Callable[[int, list[str], str], None]
OnChange = Callable[[int], None]


class RankKeeper:
    """Owns the way from news of a rank to its place in the router.

    `send_abort(rank, ids)` sends and says whether there is a way; `on_gone(rank, ids, reason)` is told that a life of a
    rank is over, with the requests it had; `on_change(rank)` that a rank's place changed.
    """

    def __init__(
        self,
        links: Links,
        router: Router,
        hooks: Hooks,
        *,
        send_abort: SendAbort,
        on_gone: OnGone,
        on_change: OnChange,
    ) -> None:
        self.links = links
        self.router = router
        self._hooks = hooks
        self._send_abort = send_abort
        self._on_gone = on_gone
        self._on_change = on_change
        self._orphans: dict[int, set[str]] = {}

    def introduce(self, identity: bytes, ready: ReadyResponse | None) -> bool:
        """An engine's first message; False if it is of an older life. Raises WireError."""
        rank = self.links.introduce(identity, ready)
        if rank is None:
            return False
        self._orphans.pop(rank, None)
        self._sync(rank)
        return True

    def publish(self, infos: Iterable[RankInfo]) -> None:
        """The head's table."""
        for info in infos:
            if self.links.publish(info):
                self._sync(info.rank)

    def unreachable(self, rank: int) -> None:
        """A message could not be sent."""
        link = self.links[rank]
        if link.identity is not None and not link.down:
            link.down = UNREACHABLE
            self._sync(rank)

    def died(self, rank: int) -> None:
        """The engine said so: nothing is sent to this life of it any more, even while its sockets are still there."""
        link = self.links[rank]
        if link.identity is not None and not link.dead:
            link.dead = True
            link.down = "its engine reported that it died"
            self._sync(rank)

    def probe(self, every_rank: bool) -> None:
        """Send empty aborts: they do nothing in an engine, but show whether there is a way to it.

        Without `every_rank` only to ranks whose way was gone; one back in the same life gets the aborts it missed.
        """
        for rank in self.links.ranks():
            link = self.links[rank]
            if link.identity is None or link.dead or not (every_rank or link.down):
                continue
            if not self._send_abort(rank, list(self._orphans.get(rank, ()))):
                self.unreachable(rank)
            elif link.down:
                self._orphans.pop(rank, None)
                link.down = ""
                self._sync(rank)

    def infos(self) -> list[RankInfo]:
        """All ranks, with the states that requests are routed by and the engines' newest numbers."""
        return [self._info(rank) for rank in self.links.ranks()]

    def cut_off(self) -> dict[int, str]:
        """Ranks that had introduced themselves and cannot be sent anything now, each with the reason."""
        return {rank: down for rank in self.links.ranks() if (down := self.links[rank].down)}

    def linked(self) -> list[int]:
        """Ranks that can be sent something now."""
        links = ((rank, self.links[rank]) for rank in self.links.ranks())
        return [rank for rank, link in links if link.identity is not None and not (link.down or link.dead)]

    def missing(self) -> list[str]:
        """The ranks that get no work, each with its state and reason."""
        standings = ((rank, *self.links.standing(rank)) for rank in self.links.ranks())
        return [
            f"rank {rank} is {state.value}" + (f" ({reason})" if reason else "")
            for rank, state, _, reason in standings
            if state != RankState.READY
        ]

    def _sync(self, rank: int) -> None:
        state, epoch, reason = self.links.standing(rank)
        old_state, old_epoch = self.router.state(rank), self.router.epoch(rank)
        if (state, epoch) == (old_state, old_epoch):
            return
        gone = self.router.set_state(rank, state, epoch)
        if state == RankState.LOST or epoch != old_epoch:
            self._on_gone(rank, gone, reason if state == RankState.LOST else "its engine started anew")
        link = self.links[rank]
        if gone and link.down and not link.dead:
            orphans = self._orphans.setdefault(rank, set())
            orphans.update(gone[: MAX_ORPHANS - len(orphans)])
        if state != old_state:
            level = logging.WARNING if state in (RankState.LOST, RankState.SUSPECT) else logging.INFO
            logger.log(level, "rank %d is %s%s", rank, state.value, f": {reason}" if reason else "")
            self._hooks.event(RankEvent(rank=rank, state=state, epoch=epoch, reason=reason, requests_lost=len(gone)))
        self._on_change(rank)

    def _info(self, rank: int) -> RankInfo:
        state, epoch, reason = self.links.standing(rank)
        link = self.links[rank]
        waiting, running, kv_usage = self.router.reported(rank) or (0, 0, 0.0)
        base = link.info or RankInfo(rank=rank)
        return msgspec.structs.replace(
            base,
            state=state,
            epoch=epoch,
            boot_id=base.boot_id or (link.identity or b"")[2:].hex(),
            stage=reason or base.stage,
            waiting=waiting,
            running=running,
            kv_usage=kv_usage,
        )
