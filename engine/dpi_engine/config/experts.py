"""Which rank holds which experts: a pure table, the same on every rank."""

from __future__ import annotations

import msgspec

from dpi_engine.config.errors import ConfigError


class ExpertPlacement(msgspec.Struct, frozen=True):
    """Linear placement: rank r of `ep_size` holds one run of consecutive experts, ranks in order.

    Where the number of experts does not divide, the first ranks hold one more (10 experts on 4 ranks: 3, 3, 2, 2), as
    vLLM's default does. Experts are routed experts by their number in the checkpoint, the same in every layer.
    """

    num_experts: int
    ep_size: int = 1
    ep_rank: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError: a rank outside the group, or a rank that would hold nothing."""
        if self.num_experts < 1 or self.ep_size < 1 or not 0 <= self.ep_rank < self.ep_size:
            raise ConfigError(
                f"expert placement: expected 0 <= rank < size and at least 1 expert, got rank {self.ep_rank}, "
                f"size {self.ep_size}, {self.num_experts} experts"
            )
        if self.ep_size > self.num_experts:
            raise ConfigError(
                f"expert parallelism over {self.ep_size} ranks: the model has {self.num_experts} experts, so "
                f"{self.ep_size - self.num_experts} ranks would hold none. Use at most {self.num_experts} ranks, or "
                "leave out --enable-expert-parallel"
            )

    def first(self, rank: int) -> int:
        """The first expert of `rank`; `first(ep_size)` is the number of experts."""
        share, more = divmod(self.num_experts, self.ep_size)
        return rank * share + min(rank, more)

    def count(self, rank: int) -> int:
        """How many experts `rank` holds; at least 1."""
        return self.first(rank + 1) - self.first(rank)

    @property
    def local(self) -> range:
        """The experts of this rank. Expert e has local index e - local.start."""
        return range(self.first(self.ep_rank), self.first(self.ep_rank + 1))

    def owner(self, expert: int) -> int:
        """The rank that holds `expert`. Raises ConfigError outside 0 .. num_experts - 1."""
        if not 0 <= expert < self.num_experts:
            raise ConfigError(f"expert {expert}: the model has experts 0 to {self.num_experts - 1}")
        share, more = divmod(self.num_experts, self.ep_size)
        if expert < more * (share + 1):
            return expert // (share + 1)
        return more + (expert - more * (share + 1)) // share

    @property
    def owners(self) -> tuple[int, ...]:
        """Rank of each expert, in order of experts."""
        return tuple(rank for rank in range(self.ep_size) for _ in range(self.count(rank)))
