"""What every job gets: how many rounds, against whom, and where results go; and what a row is."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from suite.figures import Goal, Measure, judge
from suite.results import Results
from suite.table import row_text


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table. `shape`: what a served row asks for (`workload.Shape`), else None."""

    key: str
    title: str
    measures: tuple[Measure, ...]
    goals: tuple[Goal, ...] = ()
    shape: Any = None
    seconds: float = 0.0
    """About how long one round of one side takes, on two cores with AVX-512 BF16."""


@dataclass(slots=True)
class Context:
    """`peer`: compare with the peer. `bf16`: which goals hold here. `model`: in place of SmolLM2, for tests."""

    rounds: int
    peer: bool
    bf16: bool
    results: Results
    model: str = ""
    failures: list[str] = field(default_factory=list)

    def put(
        self,
        row: Row,
        sides: Mapping[str, Mapping[str, Sequence[float]]],
        notes: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Keep and print a measured row. `labels`: what a side was, where its name does not say it."""
        verdicts = [judge(goal, sides, self.bf16) for goal in row.goals]
        kept = {
            "title": row.title,
            "sides": {side: {k: list(v) for k, v in values.items()} for side, values in sides.items()},
            "labels": dict(labels or {}),
            "notes": list(notes),
            "load_average": round(os.getloadavg()[0], 1),
            "goals": [
                {"measure": g.measure.key, "goal": v.goal, "met": v.met, "ratio": v.ratio, "why": v.why}
                for g, v in zip(row.goals, verdicts, strict=True)
                if v.goal
            ],
        }
        self.results.put(row.key, kept)
        print(row_text(row.key, kept, row.measures), flush=True)

    def fail(self, row: Row, why: str) -> None:
        """A row that could not be measured: said, and the run's exit code tells."""
        self.failures.append(f"{row.key}: {why}")
        print(f"\n{row.key}  {row.title}\n  NOT measured: {why}", flush=True)
