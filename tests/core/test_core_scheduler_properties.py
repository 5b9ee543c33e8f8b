"""Any order of adding, aborting, stepping, failing, pausing and resetting leaves contents, counts and outputs right."""

from __future__ import annotations

import hypothesis.strategies as st
from core_kv_model import Bench, Record
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dpi_engine.core.integrity import check_integrity
from dpi_engine.core.limits import PauseMode, Policy, SchedulerConfig
from dpi_engine.core.validation import RequestRefused
from dpi_engine.wire.messages import EngineCoreRequest, FinishReason, SamplingParams

VOCAB = 12

# Prompts share beginnings often, and end on and off block borders.
PROMPTS = st.builds(
    lambda stem, length, tail: [(stem + i) % 4 for i in range(length)] + tail,
    stem=st.integers(0, 1),
    length=st.integers(0, 20),
    tail=st.lists(st.integers(0, VOCAB - 1), max_size=3),
).filter(bool)

SAMPLING = st.builds(
    lambda longest, least, stops, eos, ignore, seed, logprobs, rows, skip: SamplingParams(
        max_tokens=longest,
        min_tokens=min(least, longest or least),
        stop_token_ids=stops,
        eos_token_id=eos,
        all_stop_token_ids=sorted({*(stops or ()), *([] if eos is None else [eos])}),
        ignore_eos=ignore,
        seed=seed,
        logprobs=logprobs,
        prompt_logprobs=rows,
        skip_reading_prefix_cache=skip,
    ),
    longest=st.one_of(st.integers(1, 12), st.none()),
    least=st.integers(0, 3),
    stops=st.one_of(st.none(), st.lists(st.integers(4, 7), max_size=2, unique=True)),
    eos=st.one_of(st.none(), st.just(8)),
    ignore=st.booleans(),
    seed=st.one_of(st.none(), st.integers(0, 3)),
    logprobs=st.sampled_from([None, 0]),
    rows=st.sampled_from([None, None, None, 1]),
    skip=st.sampled_from([None, None, True, False]),
)


@st.composite
def configs(draw: st.DrawFn, **fixed: object) -> SchedulerConfig:
    sequences = draw(st.integers(1, 5))
    values: dict[str, object] = {
        "num_blocks": draw(st.integers(4, 24)),
        "block_size": draw(st.integers(1, 4)),
        "max_model_len": draw(st.integers(6, 40)),
        "vocab_size": VOCAB,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": sequences + draw(st.integers(0, 16)),
        "policy": draw(st.sampled_from(Policy)),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 5])),
        "enable_prefix_caching": draw(st.sampled_from([True, True, True, False])),
    }
    return SchedulerConfig(**{**values, **fixed})  # type: ignore[arg-type]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(config=configs(), several=st.booleans())
    def begin(self, config: SchedulerConfig, several: bool) -> None:
        self.bench = Bench(config, (lambda context: 1 + (context >> 20) % 3) if several else (lambda context: 1))
        self.count = 0

    def live(self) -> list[str]:
        return sorted(self.bench.scheduler._requests)

    def try_add(self, request: EngineCoreRequest) -> None:
        bench = self.bench
        before = bench.scheduler.stats()
        prompt = request.prompt_token_ids or []
        fits = len(prompt) < min(bench.config.max_model_len, bench.config.capacity)
        try:
            bench.add(request)
        except RequestRefused as refused:
            assert bench.scheduler.stats() == before
            assert not fits or (refused.code == "nothing_to_generate" and request.output_token_ids)
        else:
            assert fits

    @rule(
        prompt=PROMPTS,
        sampling=SAMPLING,
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "a"]),
        client=st.integers(0, 1),
        copies=st.integers(1, 2),
    )
    def add(
        self, prompt: list[int], sampling: SamplingParams, priority: int, salt: str | None, client: int, copies: int
    ) -> None:
        for _ in range(copies):
            self.count += 1
            self.try_add(
                EngineCoreRequest(
                    f"r{self.count}",
                    list(prompt),
                    sampling_params=sampling,
                    priority=priority,
                    cache_salt=salt,
                    client_index=client,
                )
            )

    @rule(data=st.data())
    @precondition(lambda self: self.bench.records)
    def replay(self, data: st.DataObject) -> None:
        """What a lost rank had delivered goes on elsewhere, under the same seed, to the same end."""
        source: Record = self.bench.records[data.draw(st.sampled_from(sorted(self.bench.records)))]
        if source.reason in (FinishReason.STOP, FinishReason.LENGTH):
            return
        self.count += 1
        sampling = SamplingParams(
            **{f: getattr(source.request.sampling_params, f) for f in SamplingParams.__struct_fields__}
        )
        sampling.seed = source.seed
        self.try_add(
            EngineCoreRequest(
                f"r{self.count}",
                source.request.prompt_token_ids,
                sampling_params=sampling,
                cache_salt=source.request.cache_salt,
                output_token_ids=source.outputs,
            )
        )

    @rule(data=st.data(), readd=st.booleans())
    @precondition(lambda self: self.live())
    def abort(self, data: st.DataObject, readd: bool) -> None:
        request_id = data.draw(st.sampled_from(self.live()))
        assert self.bench.abort(request_id, "unknown", request_id) == [request_id]
        if readd:
            self.bench.add(self.bench.records[request_id].request)

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.bench.step()

    @rule(data=st.data(), readd=st.booleans())
    def step_with_abort_in_flight(self, data: st.DataObject, readd: bool) -> None:
        plan = self.bench.plan()
        if plan is None:
            return
        victims = data.draw(st.lists(st.sampled_from(self.live()), max_size=2, unique=True))
        self.bench.abort(*victims)
        if readd and victims:
            self.bench.add(self.bench.records[victims[0]].request)
        check_integrity(self.bench.scheduler)
        self.bench.finish(plan)

    @rule(data=st.data())
    @precondition(lambda self: self.live())
    def step_with_error(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.live()))
        self.bench.step({request_id: "not a number"})
        record = self.bench.records[request_id]
        assert record.error == ("not a number" if record.reason is FinishReason.ERROR else None)

    @rule()
    def failed_step(self) -> None:
        plan = self.bench.plan()
        if plan is None:
            return
        self.bench.runner.execute(plan)
        out = self.bench.scheduler.fail_step(plan, "device lost", self.bench.now)
        outputs = self.bench.receive(out.outputs, out.finished)
        assert len(outputs) == len(plan.work)
        assert {(o.finish_reason, o.error) for o in outputs} == {(FinishReason.ERROR, "device lost")}

    @rule(mode=st.sampled_from(PauseMode), count=st.integers(0, 5))
    def pause(self, mode: PauseMode, count: int) -> None:
        scheduler = self.bench.scheduler
        out = scheduler.pause(mode)
        self.bench.receive(out.outputs, out.finished)
        for _ in range(count):
            plan = self.bench.step()
            assert plan is None or all(self.bench.runner.slots[new.slot].computed >= 0 for new in plan.new)
            if mode is PauseMode.ABORT:
                assert plan is None
            if mode is PauseMode.KEEP:
                assert plan is None and not scheduler.has_work()
        assert scheduler.is_paused

    @rule()
    def resume(self) -> None:
        self.bench.scheduler.resume()

    @rule(preempt=st.booleans())
    def reset_prefix_cache(self, preempt: bool) -> None:
        scheduler = self.bench.scheduler
        idle = scheduler.num_running == 0
        assert scheduler.reset_prefix_cache(self.bench.now, preempt_running=preempt) is (idle or preempt)

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "bench"):
            check_integrity(self.bench.scheduler)

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.scheduler.resume()
            self.bench.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompts=st.lists(PROMPTS, min_size=1, max_size=8),
    roomy=configs(num_blocks=400, max_model_len=40),
    tight=configs(max_model_len=40, block_size=2, num_blocks=24),
)
def test_outputs_do_not_depend_on_preemption_chunking_or_caching(
    prompts: list[list[int]], roomy: SchedulerConfig, tight: SchedulerConfig
) -> None:
    """The same requests through a roomy and a tight pool, any budgets and policies: the same tokens."""
    texts = []
    for config in (roomy, tight):
        bench = Bench(config)
        for i, prompt in enumerate(prompts):
            bench.add_prompt(f"r{i}", prompt, max_tokens=15, seed=i)
        bench.drain()
        texts.append([bench.records[f"r{i}"].tokens for i in range(len(prompts))])
    assert texts[0] == texts[1]
    assert all(len(tokens) == 15 for tokens in texts[0])


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=12),
    num_blocks=st.integers(9, 24),
    caching=st.booleans(),
)
def test_nobody_is_preempted_within_a_block_after_an_admission(
    lengths: list[int], num_blocks: int, caching: bool
) -> None:
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=4,
        max_model_len=64,
        vocab_size=VOCAB,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        enable_prefix_caching=caching,
    )
    bench = Bench(config)
    for i, length in enumerate(lengths):
        if length < config.capacity:
            bench.add_prompt(f"r{i}", [(i + k) % VOCAB for k in range(length)], max_tokens=40)
    admitted_at = -1000
    preemptions = 0
    for step in range(3000):
        if not bench.scheduler.has_work():
            break
        plan = bench.step()
        assert plan is not None
        if bench.scheduler.stats().preemptions > preemptions:
            preemptions = bench.scheduler.stats().preemptions
            assert step - admitted_at >= config.block_size
        if plan.new:
            admitted_at = step
    bench.drain()
