"""How the tokens of a mixture-of-experts layer reach the ranks that hold their experts, and how the results come back.

A layer does, on every rank:

    ids, weights = route(hidden)                     # of this rank's n tokens, over all experts
    batch = exchange.dispatch(hidden, ids, weights)  # -> the m tokens that want experts of this rank
    partial = experts of this rank on batch          # [m, hidden]: per token the weighted sum over those experts
    out = exchange.combine(partial, batch)           # [n, hidden]: the sum over all ranks

Expert weights are applied where the experts are, so a token travels once to each rank it needs, however many experts
it wants there, and one partial sum comes back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from dpi_engine.config.experts import ExpertPlacement
from dpi_engine.wire.errors import ExchangeError

__all__ = ["NOT_HERE", "ExchangeError", "ExpertBatch", "ExpertExchange", "LocalExperts", "StepMeeting", "StepOfAll"]

NOT_HERE = -1
"""In `ExpertBatch.ids`: this choice is another rank's, or the row is padding. Nothing is computed for it."""


@dataclass(slots=True)
class ExpertBatch:
    """Tokens for the experts of one rank; m may be 0, and rows may be padding.

    hidden [m, hidden size], contiguous, `Ops.dtype`, on the ops' device.
    ids [m, k] int32: local expert indices (0 .. len(placement.local) - 1), NOT_HERE for choices that are not computed
    here. A local index occurs at most once in a row.
    weights [m, k] float32; those of NOT_HERE do not count.
    handle: whatever `combine` of the same exchange needs to know; nobody else looks at it.
    """

    hidden: Tensor
    ids: Tensor
    weights: Tensor
    handle: Any = None


class ExpertExchange(Protocol):
    """One for all mixture-of-experts layers of a model.

    Every rank of the group calls dispatch and then combine once per such layer, layers in order, the same number of
    times in each step: this order of calls is all that names a layer. n differs between ranks, and between the layers
    of a step (the last layer computes wanted rows only). It may be 0, and then both calls still have to be made;
    `Decoder.idle()` makes them for a rank that has nothing to compute.
    """

    placement: ExpertPlacement

    def dispatch(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> ExpertBatch:
        """Send this rank's tokens, and give back those that want its experts.

        hidden [n, hidden size] contiguous in `Ops.dtype`; ids [n, k] int32, experts 0 .. num_experts - 1, none twice in
        a row; weights [n, k] float32 (not a number where hidden is not). All on the ops' device. They are only read,
        and stay as they are until `combine` has returned. Raises ExchangeError.
        """

    def combine(self, partial: Tensor, batch: ExpertBatch) -> Tensor:
        """Send results back, and give each of this rank's tokens its sum over all ranks: [n, hidden size], `Ops.dtype`.

        partial [m, hidden size] in `Ops.dtype`: row i for row i of `batch`, of the latest dispatch; zeros where all of
        it is NOT_HERE. Sums are added in float32 in order of ranks, so that every run gives the same bits. Raises
        ExchangeError.
        """


@dataclass(frozen=True, slots=True)
class StepOfAll:
    """What all ranks know of the step that begins, the same on each.

    tokens: of the rank that has most. eager: a rank's step cannot be a recorded one. unrecorded: a rank that could have
    recorded steps has none yet, so that all record now.
    """

    tokens: int
    eager: bool
    unrecorded: bool


class StepMeeting(Protocol):
    """Where ranks must settle the shape of a step before it begins: exchanges between devices are padded and recorded.

    A rank calls `begin` once for each step, with tokens or without, before its first exchange.
    """

    def agree(self, values: list[int]) -> list[int]:
        """The element-wise maximum over all ranks, which all call this now. Raises ExchangeError."""

    def begin(self, tokens: int, eager: bool, unrecorded: bool) -> StepOfAll:
        """This rank computes `tokens` tokens next; see StepOfAll for the rest. Raises ExchangeError."""

    def pad(self, tokens: int) -> None:
        """The exchanges that follow carry `tokens` tokens of each rank, not fewer than `begin` found, by shapes that
        depend on nothing else: they can be recorded."""

    def settle(self) -> None:
        """Wait for what the device was told. Raises ExchangeError where it would wait for a lost rank for ever."""


class LocalExperts:
    """One rank holds every expert: nothing travels."""

    def __init__(self, num_experts: int) -> None:
        self.placement = ExpertPlacement(num_experts)

    def dispatch(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> ExpertBatch:
        return ExpertBatch(hidden, ids, weights)

    def combine(self, partial: Tensor, batch: ExpertBatch) -> Tensor:
        return partial
