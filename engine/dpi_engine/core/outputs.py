"""What comes out of a step: outputs by client, load, and the check that a result belongs to its plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from dpi_engine.core.plan import StepPlan, StepResult
from dpi_engine.wire.messages import EngineCoreOutput, LogprobsLists


@dataclass(slots=True)
class StepOutputs:
    """What goes to the front ends, by client index.

    `outputs` has one entry per request with news. `finished` has the id of every request that ended since the last
    such report, aborted ones included, each exactly once.
    """

    outputs: dict[int, list[EngineCoreOutput]] = field(default_factory=dict)
    finished: dict[int, list[str]] = field(default_factory=dict)

    def put(self, client_index: int, output: EngineCoreOutput) -> None:
        entries = self.outputs.get(client_index)
        if entries is None:
            self.outputs[client_index] = [output]
        else:
            entries.append(output)

    def merged(self, later: StepOutputs) -> StepOutputs:
        """These outputs and then those of `later`."""
        if not self:
            return later
        for client, entries in later.outputs.items():
            self.outputs.setdefault(client, []).extend(entries)
        for client, ids in later.finished.items():
            self.finished.setdefault(client, []).extend(ids)
        return self

    def __bool__(self) -> bool:
        return bool(self.outputs or self.finished)


@dataclass(slots=True)
class CoreStats:
    """Load now, and totals since start. `preempted_*` count resumed requests, which the other prefix numbers leave out.

    `waiting` includes `preempted` requests. `waiting_tokens` are known tokens not yet computed, of waiting and running
    requests. `last_step` is when the last result was applied (the scheduler's clock), None before the first.
    """

    waiting: int = 0
    preempted: int = 0
    running: int = 0
    kv_usage: float = 0.0
    waiting_tokens: int = 0
    steps: int = 0
    last_step: float | None = None
    preemptions: int = 0
    prefix_requests: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


def first_rows(rows: LogprobsLists | None, count: int) -> LogprobsLists | None:
    """The log probabilities of the first `count` positions."""
    if rows is None:
        return None
    return LogprobsLists(rows.token_ids[:count], rows.logprobs[:count], rows.ranks[:count])


def check_result(plan: StepPlan, result: StepResult) -> None:
    """Raise ValueError unless `result` has an entry for each sequence that samples in `plan`."""
    if result.step != plan.step:
        raise ValueError(f"result of step {result.step} for the plan of step {plan.step}")
    samples = sum([work.sample for work in plan.work])
    if len(result.token_ids) != samples:
        raise ValueError(f"step {plan.step}: expected tokens of {samples} sequences, got {len(result.token_ids)}")
    if result.logprobs is not None and len(result.logprobs) != samples:
        raise ValueError(
            f"step {plan.step}: expected log probabilities of {samples} sequences, got {len(result.logprobs)}"
        )
