"""What a front end knows of each rank: the head's table, the rank's own link, and where it stands by both. No I/O."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from dpi_engine.wire.errors import WireError
from dpi_engine.wire.messages import Dialect, RankInfo, RankState, ReadyResponse

RANK_BYTES = 2
BOOT_BYTES = 8


@dataclass(slots=True)
class Link:
    """The connection of a rank's engine to this front end."""

    identity: bytes | None = None  # None: the engine has not introduced itself yet
    ready: ReadyResponse | None = None
    epoch: int = 0
    down: str = ""  # why nothing can be sent; empty while it can
    dead: bool = False  # the engine said so itself: only a new introduction ends this
    info: RankInfo | None = None  # as the head published it last


def parse_identity(identity: bytes, first_rank: int, num_ranks: int) -> tuple[int, bytes]:
    """(rank, boot id) of a peer's identity; the boot id of a vLLM engine is empty. Raises WireError."""
    if len(identity) not in (RANK_BYTES, RANK_BYTES + BOOT_BYTES):
        raise WireError(
            "bad_identity",
            f"identity of {len(identity)} bytes; expected 2 (rank) or 10 (rank and boot id)",
        )
    rank = int.from_bytes(identity[:RANK_BYTES], "little")
    if not first_rank <= rank < first_rank + num_ranks:
        raise WireError(
            "rank_out_of_range", f"rank {rank}: expected {first_rank} to {first_rank + num_ranks - 1} on this front end"
        )
    return rank, identity[RANK_BYTES:]


class Links:
    """Ranks `first_rank` .. `first_rank + num_ranks - 1`."""

    def __init__(self, first_rank: int, num_ranks: int, dialect: Dialect) -> None:
        self._first = first_rank
        self._num = num_ranks
        self._vllm = dialect is Dialect.VLLM
        self._links = [Link() for _ in range(num_ranks)]
        self._limits: Counter[int] = Counter()  # max_model_len -> engines that have it

    def __getitem__(self, rank: int) -> Link:
        return self._links[rank - self._first]

    def __contains__(self, rank: int) -> bool:
        return self._first <= rank < self._first + self._num

    def ranks(self) -> range:
        return range(self._first, self._first + self._num)

    def introduce(self, identity: bytes, ready: ReadyResponse | None) -> int | None:
        """An engine's first message. Returns its rank, or None if it is an older life of the rank than the known one.

        A vLLM engine has no epoch: each introduction is a new life of it. Raises WireError.
        """
        rank, boot = parse_identity(identity, self._first, self._num)
        if ready is not None and ready.max_model_len < 1:
            raise WireError("malformed", f"ready response of rank {rank}: max_model_len {ready.max_model_len} < 1")
        link = self[rank]
        if self._vllm:
            epoch = link.epoch + 1
        else:
            epoch = ready.epoch if ready is not None else 0
            if not epoch and link.info is not None and boot and link.info.boot_id == boot.hex():
                epoch = link.info.epoch
            if link.identity is not None and epoch < link.epoch:
                return None
        self._count_limit(link.ready, -1)
        self._count_limit(ready, 1)
        link.identity, link.ready, link.epoch = identity, ready, epoch
        link.down, link.dead = "", False
        return rank

    def publish(self, info: RankInfo) -> bool:
        """The head's news of a rank; False if it is older than what is known, or of a rank that is not served here."""
        if info.rank not in self:
            return False
        link = self[info.rank]
        if link.info is not None and info.epoch < link.info.epoch:
            return False
        link.info = info
        return True

    def standing(self, rank: int) -> tuple[RankState, int, str]:
        """(state, epoch, reason) by which requests are routed; READY only if table and link agree on one life of it."""
        link = self[rank]
        info = link.info
        if self._vllm:
            if link.down:
                return RankState.LOST, link.epoch, link.down
            if link.identity is None:
                return RankState.NEW, link.epoch, "its engine has not connected yet"
            if info is not None and info.state in (RankState.SUSPECT, RankState.LOST):
                return info.state, link.epoch, _reason(info)
            return RankState.READY, link.epoch, ""
        if info is None:
            if link.down:
                return RankState.LOST, link.epoch, link.down
            if link.identity is None:
                return RankState.NEW, 0, "its engine has not connected yet"
            return RankState.READY, link.epoch, ""
        epoch = max(info.epoch, link.epoch)
        if link.identity is None or link.epoch < info.epoch:
            waiting = info.state in (RankState.READY, RankState.SUSPECT)
            return (RankState.LOADING if waiting else info.state), epoch, _reason(info)
        if link.epoch > info.epoch:
            return RankState.LOADING, epoch, "the head has not confirmed its new start yet"
        if link.down:
            return RankState.LOST, epoch, link.down
        return info.state, epoch, _reason(info)

    def max_model_len(self) -> int:
        """The shortest limit of the engines known; 0 before the first."""
        return min(self._limits, default=0)

    def _count_limit(self, ready: ReadyResponse | None, change: int) -> None:
        if ready is not None:
            self._limits[ready.max_model_len] += change
            if not self._limits[ready.max_model_len]:
                del self._limits[ready.max_model_len]


def _reason(info: RankInfo) -> str:
    known = info.error or info.stage
    return known if known or info.state == RankState.READY else f"the head says {info.state.value}"
