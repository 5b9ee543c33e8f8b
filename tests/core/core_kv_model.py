"""A deterministic runner that knows what every cache position must contain, and a bench that drives a scheduler.

A position's content stands for keys and values of a real model: it depends on all tokens up to it (and on the salt, so
that sharing across salts shows). The runner checks each plan against its own memory before it computes: slots, block
tables, budget, that nobody writes a block another one holds, and that the context of every sequence, read back through
its block table, is exactly its own tokens. The next token depends on context, seed and output index alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dpi_engine.core.integrity import check_integrity
from dpi_engine.core.limits import SchedulerConfig
from dpi_engine.core.plan import NewSequence, SequenceWork, StepPlan, StepResult
from dpi_engine.core.request import derive_seed
from dpi_engine.core.scheduler import Scheduler
from dpi_engine.wire.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    LogprobsLists,
    PrefillStats,
    SamplingParams,
)

MASK = (1 << 64) - 1


def mix(state: int, value: int) -> int:
    state = (state ^ (value + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & MASK
    return state ^ (state >> 29)


def contexts(tokens: Iterable[int], salt: str | None) -> list[int]:
    """Content of each position."""
    state = mix(0, 0 if salt is None else 1 + sum(ord(c) << i for i, c in enumerate(salt)))
    out = []
    for token in tokens:
        state = mix(state, token)
        out.append(state)
    return out


def next_token(context: int, seed: int, index: int, sampling: SamplingParams, vocab_size: int) -> int:
    """Output `index`, after the position with content `context`. Stop tokens are masked before min_tokens."""
    banned: set[int] = set()
    if index < sampling.min_tokens:
        banned = {*(sampling.stop_token_ids or ()), *(sampling.all_stop_token_ids or ()), sampling.eos_token_id or -1}
    legal = [token for token in range(vocab_size) if token not in banned]
    return legal[mix(mix(context, seed), index) % len(legal)]


@dataclass
class Sequence:
    request_id: str
    tokens: list[int]
    num_prompt: int
    table: list[int]
    sampling: SamplingParams
    seed: int
    salt: str | None
    computed: int = 0
    content: list[int] = field(default_factory=list)


class ModelRunner:
    """`tokens_per_step(context)` says how many tokens a sample yields (several stand for speculation)."""

    def __init__(
        self,
        config: SchedulerConfig,
        salts: dict[str, str | None],
        tokens_per_step: Callable[[int], int] = lambda context: 1,
    ) -> None:
        self.config = config
        self.salts = salts
        self.tokens_per_step = tokens_per_step
        self.memory: list[list[int | None]] = [[None] * config.block_size for _ in range(config.num_blocks)]
        self.slots: dict[int, Sequence] = {}
        self.step = 0
        self.tokens_computed = 0

    def execute(self, plan: StepPlan, errors: dict[str, str] | None = None) -> StepResult:
        """Check and run `plan`. `errors`: request ids whose sample fails, with the message."""
        assert plan.step == self.step + 1, "steps are numbered without gaps"
        self.step = plan.step
        self._seat(plan)
        self._check_plan(plan)
        for work in plan.work:
            self._check_context(work)
        for work in plan.work:
            self._compute(work)
        result = StepResult(step=plan.step, token_ids=[], logprobs=[])
        assert result.logprobs is not None
        for work in plan.work:
            sequence = self.slots[work.slot]
            if work.prompt_logprobs:
                result.prompt_logprobs[work.slot] = self._prompt_rows(sequence, work)
            if not work.sample:
                continue
            if errors and sequence.request_id in errors:
                result.errors[len(result.token_ids)] = errors[sequence.request_id]
                result.token_ids.append([])
                result.logprobs.append(None)
                continue
            tokens = self._sample(sequence)
            result.token_ids.append(tokens)
            rows = [[token] for token in tokens]
            wanted = sequence.sampling.logprobs is not None
            result.logprobs.append(LogprobsLists(rows, [[-1.0]] * len(rows), tokens) if wanted else None)
        return result

    def _seat(self, plan: StepPlan) -> None:
        for slot in plan.released:
            assert slot in self.slots, f"slot {slot} released, but empty"
            del self.slots[slot]
        for new in plan.new:
            assert new.slot not in self.slots, f"slot {new.slot} taken twice"
            assert 0 <= new.slot < self.config.max_num_seqs
            self.slots[new.slot] = self._sequence(new)

    def _sequence(self, new: NewSequence) -> Sequence:
        salt = self.salts[new.request_id]
        return Sequence(
            request_id=new.request_id,
            tokens=list(new.token_ids),
            num_prompt=new.num_prompt_tokens,
            table=list(new.block_ids),
            sampling=new.sampling,
            seed=new.seed,
            salt=salt,
            computed=-1,
            content=contexts(new.token_ids, salt),
        )

    def _check_plan(self, plan: StepPlan) -> None:
        config = self.config
        slots = [work.slot for work in plan.work]
        assert len(set(slots)) == len(slots) <= config.max_num_seqs, "a slot works twice"
        assert {new.slot for new in plan.new} <= set(slots), "a new sequence has nothing to do"
        assert plan.num_tokens == sum(work.count for work in plan.work) <= config.max_num_batched_tokens
        for work in plan.work:
            sequence = self.slots[work.slot]
            if sequence.computed < 0:
                assert not work.new_block_ids, "a new sequence's blocks are in its table already"
                assert work.start % config.block_size == 0, "only full blocks are found"
                sequence.computed = work.start
            sequence.table += work.new_block_ids
            end = work.start + work.count
            assert work.count >= 1
            assert work.start == sequence.computed, "computation skips or repeats a position"
            assert end <= len(sequence.tokens)
            assert work.sample == (end == len(sequence.tokens)), "sampling exactly at the last known token"
            limit = config.long_prefill_token_threshold
            assert not limit or work.count <= limit
            assert len(sequence.table) * config.block_size >= end, "block table too short"
            assert 0 not in sequence.table and len(set(sequence.table)) == len(sequence.table)
            if work.prompt_logprobs:
                assert work.start + 1 < sequence.num_prompt, "no prompt position left to report"
        holders: dict[int, int] = {}
        for sequence in self.slots.values():
            for block in sequence.table:
                holders[block] = holders.get(block, 0) + 1
        for work in plan.work:
            for position in range(work.start, work.start + work.count):
                block = self.slots[work.slot].table[position // config.block_size]
                assert holders[block] == 1, f"block {block} is written, but another sequence holds it too"

    def _check_context(self, work: SequenceWork) -> None:
        sequence = self.slots[work.slot]
        size = self.config.block_size
        for position in range(work.start):
            have = self.memory[sequence.table[position // size]][position % size]
            assert have == sequence.content[position], (
                f"{sequence.request_id}: position {position} of the cache holds another context"
            )

    def _compute(self, work: SequenceWork) -> None:
        sequence = self.slots[work.slot]
        size = self.config.block_size
        for position in range(work.start, work.start + work.count):
            self.memory[sequence.table[position // size]][position % size] = sequence.content[position]
        sequence.computed = work.start + work.count
        self.tokens_computed += work.count

    def _sample(self, sequence: Sequence) -> list[int]:
        tokens = []
        for _ in range(self.tokens_per_step(sequence.content[-1])):
            index = len(sequence.tokens) - sequence.num_prompt
            token = next_token(sequence.content[-1], sequence.seed, index, sequence.sampling, self.config.vocab_size)
            tokens.append(token)
            sequence.tokens.append(token)
            sequence.content.append(mix(sequence.content[-1], token))
        return tokens

    def _prompt_rows(self, sequence: Sequence, work: SequenceWork) -> LogprobsLists:
        positions = range(work.start + 1, min(work.start + work.count, sequence.num_prompt - 1) + 1)
        return LogprobsLists(
            [[sequence.tokens[p]] for p in positions], [[float(-p)] for p in positions], list(positions)
        )


@dataclass
class Record:
    """What one request's client has seen."""

    request: EngineCoreRequest
    seed: int
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    aborted: bool = False
    finished: bool = False
    prefill: PrefillStats | None = None
    prompt_logprobs: LogprobsLists | None = None
    logprob_tokens: list[int] = field(default_factory=list)
    events: list[int] = field(default_factory=list)

    @property
    def outputs(self) -> list[int]:
        return [*self.request.output_token_ids, *self.tokens]


def expected_outputs(
    request: EngineCoreRequest, seed: int, config: SchedulerConfig
) -> tuple[list[int], FinishReason, int | None]:
    """All output tokens, finish reason and stop reason that `request` must come to, told without any scheduling."""
    sampling = request.sampling_params
    assert sampling is not None and request.prompt_token_ids is not None
    tokens = [*request.prompt_token_ids, *request.output_token_ids]
    content = contexts(tokens, request.cache_salt)[-1]
    num_prompt = len(request.prompt_token_ids)
    limit = min(config.max_model_len, config.capacity, num_prompt + (sampling.max_tokens or config.max_model_len))
    while True:
        index = len(tokens) - num_prompt
        token = next_token(content, seed, index, sampling, config.vocab_size)
        tokens.append(token)
        content = mix(content, token)
        if index >= sampling.min_tokens:
            if token == sampling.eos_token_id and not sampling.ignore_eos:
                return tokens[num_prompt:], FinishReason.STOP, None
            stops = [*(sampling.stop_token_ids or ())]
            if not sampling.ignore_eos:
                stops += sampling.all_stop_token_ids or ()
            if token in stops:
                return tokens[num_prompt:], FinishReason.STOP, token
        if len(tokens) >= limit:
            return tokens[num_prompt:], FinishReason.LENGTH, None


class Bench:
    """A scheduler, the checking runner, and what each client got."""

    def __init__(self, config: SchedulerConfig, tokens_per_step: Callable[[int], int] = lambda context: 1) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.salts: dict[str, str | None] = {}
        self.runner = ModelRunner(config, self.salts, tokens_per_step)
        self.records: dict[str, Record] = {}
        self.past: list[Record] = []
        self.now = 0.0

    def add(self, request: EngineCoreRequest) -> Record:
        """Raises RequestRefused."""
        self.scheduler.add(request, self.now)
        sampling = request.sampling_params
        assert sampling is not None
        seed = sampling.seed if sampling.seed is not None else derive_seed(self.config.seed, request.request_id)
        record = Record(request, seed)
        if request.request_id in self.records:
            self.past.append(self.records[request.request_id])
        self.records[request.request_id] = record
        self.salts[request.request_id] = request.cache_salt
        return record

    def add_prompt(self, request_id: str, prompt: list[int], **sampling: object) -> Record:
        """Add a prompt; keywords are sampling parameters, or `priority`, `cache_salt`, `client_index`."""
        outer = {name: sampling.pop(name) for name in ("priority", "cache_salt", "client_index") if name in sampling}
        params = SamplingParams(**{"ignore_eos": True, "max_tokens": 4, **sampling})  # type: ignore[arg-type]
        return self.add(EngineCoreRequest(request_id, prompt, sampling_params=params, **outer))  # type: ignore[arg-type]

    def abort(self, *request_ids: str) -> list[str]:
        ended = self.scheduler.abort(request_ids)
        for request_id in ended:
            self.records[request_id].aborted = True
        return ended

    def plan(self) -> StepPlan | None:
        self.now += 1.0
        work = self.scheduler.has_work()
        plan = self.scheduler.schedule(self.now)
        assert (plan is not None) == work, "has_work and schedule disagree"
        return plan

    def finish(self, plan: StepPlan, errors: dict[str, str] | None = None) -> list[EngineCoreOutput]:
        out = self.scheduler.apply(plan, self.runner.execute(plan, errors), self.now)
        return self.receive(out.outputs, out.finished)

    def step(self, errors: dict[str, str] | None = None) -> StepPlan | None:
        plan = self.plan()
        if plan is not None:
            self.finish(plan, errors)
        check_integrity(self.scheduler)
        return plan

    def drain(self, limit: int = 5000) -> None:
        """Step until nothing is left; every block must be free then."""
        for _ in range(limit):
            if not self.scheduler.has_work():
                break
            self.step()
        else:
            raise AssertionError(f"not done after {limit} steps: {self.scheduler.stats()}")
        self.receive({}, self.scheduler.take_finished())
        assert self.scheduler.num_unfinished == 0
        assert self.scheduler.kv_usage == 0.0, "blocks leaked"
        check_integrity(self.scheduler)
        for record in [*self.records.values(), *self.past]:
            self.check_record(record)

    def receive(
        self, outputs: dict[int, list[EngineCoreOutput]], finished: dict[int, list[str]]
    ) -> list[EngineCoreOutput]:
        seen = []
        for client, entries in outputs.items():
            for output in entries:
                record = self.records[output.request_id]
                assert record.request.client_index == client, "output for another client"
                assert not record.finished and record.reason is None, "output after the end"
                assert not record.aborted, "output for an aborted request"
                assert output.output_index == len(record.outputs), "an output index is skipped or repeated"
                assert output.new_token_ids or output.finish_reason is not None, "an output without news"
                first = not record.tokens and output.new_token_ids
                assert (output.prefill_stats is not None) == bool(first), "prefill stats on the first output only"
                record.prefill = output.prefill_stats or record.prefill
                if output.new_prompt_logprobs_tensors is not None:
                    assert first
                    record.prompt_logprobs = output.new_prompt_logprobs_tensors
                if output.new_logprobs is not None:
                    record.logprob_tokens += [row[0] for row in output.new_logprobs.token_ids]
                record.tokens += output.new_token_ids
                record.events += [event.type for event in output.events or ()]
                record.reason, record.stop_reason = output.finish_reason, output.stop_reason
                record.error = output.error
                seen.append(output)
        for client, ids in finished.items():
            for request_id in ids:
                record = next(
                    r
                    for r in [*self.past, self.records[request_id]]
                    if r.request.request_id == request_id and not r.finished
                )
                assert record.request.client_index == client
                assert record.aborted or record.reason is not None, "finished without a reason"
                record.finished = True
        return seen

    def check_record(self, record: Record) -> None:
        """A request that has ended got exactly what it must, up to where it was cut off."""
        assert record.finished, f"{record.request.request_id}: its end was not reported"
        outputs, reason, stop_reason = expected_outputs(record.request, record.seed, self.config)
        got = record.outputs
        assert got == outputs[: len(got)], f"{record.request.request_id}: other tokens than alone"
        if record.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (got, record.reason, record.stop_reason) == (outputs, reason, stop_reason)
        sampling = record.request.sampling_params
        assert sampling is not None and record.request.prompt_token_ids is not None
        if sampling.logprobs is not None:
            assert record.logprob_tokens == record.tokens
        if sampling.prompt_logprobs is not None and record.tokens and not record.request.output_token_ids:
            assert record.prompt_logprobs is not None
            assert record.prompt_logprobs.ranks == list(range(1, len(record.request.prompt_token_ids)))


def config(**changes: object) -> SchedulerConfig:
    """64 usable blocks of 4 tokens, 8 sequences, 32 tokens a step, unless changed."""
    values: dict[str, object] = {
        "num_blocks": 65,
        "block_size": 4,
        "max_model_len": 64,
        "vocab_size": 100,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
    }
    return SchedulerConfig(**{**values, **changes})  # type: ignore[arg-type]


def counts(bench: Bench) -> tuple[int, int]:
    """Waiting and running requests."""
    return bench.scheduler.num_waiting, bench.scheduler.num_running


def work_of(bench: Bench, plan: StepPlan | None) -> dict[str, int]:
    """Tokens per request id in a plan, in the plan's order."""
    assert plan is not None
    return {bench.runner.slots[work.slot].request_id: work.count for work in plan.work}
