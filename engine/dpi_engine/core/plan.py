"""What crosses between scheduler and runner: a plan of one step, and its result. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

from dpi_engine.wire.messages import LogprobsLists, SamplingParams


@dataclass(slots=True)
class NewSequence:
    """A request that takes a batch slot in this step (first time, or resumed after preemption).

    `token_ids` are all tokens known so far: prompt, then outputs. `seed` is always set: random numbers are a function
    of (seed, output index) alone, so a replayed or preempted request continues as if nothing had happened.
    """

    slot: int
    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    block_ids: list[int]
    sampling: SamplingParams
    seed: int


@dataclass(slots=True)
class SequenceWork:
    """Tokens [start, start + count) of the sequence in `slot` are computed in this step.

    `new_block_ids` extend its block table before the step (empty for a NewSequence of the same step). `sample` is true
    when the step reaches the last known token, so one new token comes out. `prompt_logprobs` asks for the log
    probabilities of prompt tokens start+1 .. min(start+count, num_prompt_tokens-1).
    """

    slot: int
    start: int
    count: int
    new_block_ids: list[int]
    sample: bool
    prompt_logprobs: bool = False


@dataclass(slots=True)
class StepPlan:
    """One step. `released` slots were given up since the last plan and may be taken again by `new` in this one."""

    step: int
    work: list[SequenceWork]
    new: list[NewSequence] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    num_tokens: int = 0


@dataclass(slots=True)
class StepResult:
    """Per work item with `sample`, in the order of the plan.

    `token_ids[i]` are the new tokens (one, more with speculation; empty where `errors[i]` is set). `logprobs[i]` where
    asked for. `errors` maps an index to why that request must fail (not-a-number logits, no legal token).
    `prompt_logprobs` maps a slot to the rows computed in this step.
    """

    step: int
    token_ids: list[list[int]]
    logprobs: list[LogprobsLists | None] | None = None
    errors: dict[int, str] = field(default_factory=dict)
    prompt_logprobs: dict[int, LogprobsLists] = field(default_factory=dict)
