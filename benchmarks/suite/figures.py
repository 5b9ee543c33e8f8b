"""Arithmetic of the table: spread of rounds, ratio of two sides, whether a goal is met."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Sides = Mapping[str, Mapping[str, Sequence[float]]]
"""Side -> measure -> its value in each round."""

OURS, TUNED, INSTALLED = "dpi", "vllm tuned", "vllm as installed"


@dataclass(frozen=True, slots=True)
class Spread:
    """Least, median and greatest of the rounds."""

    least: float
    median: float
    greatest: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Raises ValueError for no value."""
        if not values:
            raise ValueError("the spread of no rounds")
        return Spread(min(values), statistics.median(values), max(values))


@dataclass(frozen=True, slots=True)
class Measure:
    """One line of a row. `key` is its name in results, `higher`: more is better."""

    key: str
    label: str
    unit: str
    higher: bool = False
    digits: int = 1


@dataclass(frozen=True, slots=True)
class Goal:
    """What a measure of ours must reach: `limit` times that of the side `over`, or `limit` itself if `over` is empty.

    A measure of which more is better must be at least that, another at most. `limit_avx2` holds where the processor
    has AVX2 and no bfloat16 instructions; None: no goal there (`limit` None: no goal elsewhere).
    """

    measure: Measure
    limit: float | None
    over: str = ""
    limit_avx2: float | None = None

    def bound(self, bf16: bool) -> float | None:
        return self.limit if bf16 else self.limit_avx2

    def text(self, bf16: bool) -> str:
        """Such as ">= 1.3 x vllm tuned"; empty without a goal on such a machine."""
        bound = self.bound(bf16)
        if bound is None:
            return ""
        sign = ">=" if self.measure.higher else "<="
        return f"{sign} {bound:g} x {self.over}" if self.over else f"{sign} {bound:g} {self.measure.unit}".rstrip()


@dataclass(frozen=True, slots=True)
class Verdict:
    """`met` is None where it cannot be told; `why` says the reason."""

    goal: str
    met: bool | None
    ratio: float | None
    why: str = ""

    @property
    def word(self) -> str:
        return {True: "met", False: "NOT met", None: "not judged"}[self.met]


def ratio(sides: Sides, measure: str, over: str, ours: str = OURS) -> float | None:
    """Our median over theirs; None where a side lacks the measure or theirs is 0."""
    mine, theirs = sides.get(ours, {}).get(measure), sides.get(over, {}).get(measure)
    if not mine or not theirs or statistics.median(theirs) == 0:
        return None
    return statistics.median(mine) / statistics.median(theirs)


def judge(goal: Goal, sides: Sides, bf16: bool) -> Verdict:
    """By medians over the rounds."""
    text, bound = goal.text(bf16), goal.bound(bf16)
    if bound is None:
        return Verdict("", None, None, "no goal on this kind of processor")
    mine = sides.get(OURS, {}).get(goal.measure.key)
    if not mine:
        return Verdict(text, None, None, f"{OURS} was not measured")
    if goal.over:
        value = ratio(sides, goal.measure.key, goal.over)
        if value is None:
            return Verdict(text, None, None, f"{goal.over} was not measured")
    else:
        value = statistics.median(mine)
    met = value >= bound if goal.measure.higher else value <= bound
    return Verdict(text, met, value if goal.over else None)
