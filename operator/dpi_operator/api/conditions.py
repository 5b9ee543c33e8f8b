"""Conditions: ordered rules give each one its value, and one function turns values into what is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dpi_operator.api.reasons import Reason
from dpi_operator.api.status import CONDITION_TYPES, Condition, Status, condition

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Value of one condition. `status` None: not known."""

    status: bool | None
    reason: Reason
    message: str = ""

    @property
    def text(self) -> str:
        return "Unknown" if self.status is None else str(self.status)


BESIDE_SERVING = (Reason.MISSING_CRD, Reason.QUEUE_IMBALANCE, Reason.STALE_METRICS, Reason.STATE_UNREADABLE)
"""Reasons of Degraded that never explain why groups do not serve."""

Rule = Callable[[T], Verdict | None]
"""A verdict when the rule applies, else None."""


def first(rules: Iterable[Rule[T]], facts: T, otherwise: Verdict) -> Verdict:
    """Verdict of the first rule that applies: the order of the rules is the order of importance."""
    for rule in rules:
        verdict = rule(facts)
        if verdict is not None:
            return verdict
    return otherwise


def ready_of(verdicts: dict[str, Verdict]) -> Verdict:
    """Ready sums up: it copies reason and message of the first child that is not True.

    A configuration that is not known to be consistent does not make what serves unready.
    """
    for kind in ("Accepted", "ConfigConsistent", "Available"):
        verdict = verdicts[kind]
        if verdict.status is False or (verdict.status is None and kind != "ConfigConsistent"):
            explained = _cause(verdicts) if kind == "Available" else None
            chosen = explained or verdict
            return Verdict(False, chosen.reason, chosen.message)
    return Verdict(True, Reason.READY, verdicts["Available"].message)


def _cause(verdicts: dict[str, Verdict]) -> Verdict | None:
    """Why groups are not available, where another condition knows it better."""
    if verdicts["Available"].reason in (Reason.SCALED_TO_ZERO, Reason.SUSPENDED):
        return None
    for kind, bad in (("Degraded", True), ("Scheduled", False), ("HandshakeComplete", False)):
        if verdicts[kind].status is bad and verdicts[kind].reason not in BESIDE_SERVING:
            return verdicts[kind]
    return None


def merged(old: Status, verdicts: dict[str, Verdict], generation: int, now_text: str) -> list[Condition]:
    """Conditions to be written: the time of the last transition stays as long as the value does."""
    out = []
    for kind in CONDITION_TYPES:
        verdict, before = verdicts[kind], condition(old, kind)
        same = before is not None and before.status == verdict.text
        out.append(
            Condition(
                type=kind,
                status=verdict.text,
                reason=verdict.reason.value,
                message=verdict.message,
                last_transition_time=before.last_transition_time if same and before else now_text,
                observed_generation=generation,
            )
        )
    return out


def counted(number: int, noun: str) -> str:
    """1 pod, 2 pods."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def joined(texts: Sequence[str], most: int = 5) -> str:
    """Texts as one, the first `most` in full."""
    shown = "; ".join(texts[:most])
    return f"{shown}; and {len(texts) - most} more" if len(texts) > most else shown


def sentence(text: str) -> str:
    """Somebody else's words with a full stop, so that more can follow."""
    return text if text.endswith((".", "!", "?")) else f"{text}."
