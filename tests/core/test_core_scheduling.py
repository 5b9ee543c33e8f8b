"""What a step computes: counts, budget, chunks, order, preemption."""

from __future__ import annotations

import pytest
from core_kv_model import Bench, config, counts, work_of

from dpi_engine.core.limits import Policy
from dpi_engine.core.plan import StepResult
from dpi_engine.wire.messages import EventType, FinishReason


def test_counts_follow_add_finish_and_abort() -> None:
    bench = Bench(config(max_num_seqs=2))
    for name in "abc":
        bench.add_prompt(name, [1, 2, 3], max_tokens=3)
    assert counts(bench) == (3, 0)
    bench.step()
    assert counts(bench) == (1, 2)
    assert bench.scheduler.kv_usage == 2 / 64
    assert bench.abort("a") == ["a"]
    assert counts(bench) == (1, 1)
    bench.step()
    assert counts(bench) == (0, 2)
    bench.drain()
    assert counts(bench) == (0, 0) and bench.scheduler.is_quiet()


def test_schedule_without_work_is_nothing() -> None:
    bench = Bench(config())
    assert bench.scheduler.schedule(0.0) is None and not bench.scheduler.has_work()


def test_only_the_plan_in_flight_can_be_applied_and_once() -> None:
    bench = Bench(config())
    bench.add_prompt("a", [1, 2])
    plan = bench.plan()
    assert plan is not None
    with pytest.raises(RuntimeError, match="step 1 is in flight"):
        bench.scheduler.schedule(0.0)
    for result in (
        StepResult(step=2, token_ids=[[1]]),
        StepResult(step=1, token_ids=[]),
        StepResult(step=1, token_ids=[[1]], logprobs=[]),
    ):
        with pytest.raises(ValueError, match="step"):
            bench.scheduler.apply(plan, result, 0.0)
    bench.finish(plan)
    with pytest.raises(ValueError, match="in flight: none"):
        bench.scheduler.apply(plan, StepResult(step=1, token_ids=[[1]]), 0.0)
    bench.drain()


def test_a_long_prompt_is_computed_in_chunks_and_speaks_after_the_last() -> None:
    bench = Bench(config(max_num_batched_tokens=16))
    bench.add_prompt("a", list(range(40)), max_tokens=2)
    sizes = []
    for _ in range(3):
        plan = bench.step()
        assert plan is not None
        sizes.append((plan.work[0].start, plan.work[0].count, plan.work[0].sample))
    assert sizes == [(0, 16, False), (16, 16, False), (32, 8, True)]
    assert len(bench.records["a"].tokens) == 1
    bench.drain()


@pytest.mark.parametrize(
    ("first", "lengths", "steps"),
    [
        (None, [20, 20, 20], [{"a": 20, "b": 20, "c": 20}]),
        (100, [20, 20, 20], [{"a": 20, "b": 20, "c": 20}]),
        (30, [20, 20, 20], [{"a": 20, "b": 10}, {"a": 1, "b": 10, "c": 20}]),
        (20, [20, 20, 20], [{"a": 20}, {"a": 1, "b": 20, "c": 20}]),
        (5, [20, 20, 20], [{"a": 20}, {"a": 1, "b": 20, "c": 20}]),
        (0, [70, 20, 20], [{"a": 64}, {"a": 6, "b": 20, "c": 20}]),
    ],
)
def test_the_first_answer_to_a_burst_waits_for_few_of_the_prompts_behind_it(
    first: int | None, lengths: list[int], steps: list[dict[str, int]]
) -> None:
    bench = Bench(config(max_num_batched_tokens=64, max_model_len=100))
    for i, length in enumerate(lengths):
        bench.add_prompt("abc"[i], list(range(i, i + length)), max_tokens=9)
    for step in steps:
        plan = bench.scheduler.schedule(0.0, first)
        assert plan is not None and plan.num_tokens == sum(step.values())
        bench.finish(plan)
        assert work_of(bench, plan) == step
    bench.drain()


def test_running_sequences_get_their_token_before_any_prompt() -> None:
    bench = Bench(config(max_num_batched_tokens=16))
    bench.add_prompt("a", [1, 2], max_tokens=20)
    bench.add_prompt("b", [3, 4], max_tokens=20)
    bench.step()
    bench.add_prompt("long", list(range(60)), max_tokens=2)
    bench.add_prompt("c", [5, 6], max_tokens=20)
    for chunk in (14, 14, 14, 14):
        assert work_of(bench, bench.step()) == {"a": 1, "b": 1, "long": chunk}
    assert work_of(bench, bench.step()) == {"a": 1, "b": 1, "long": 4, "c": 2}
    bench.drain()


def test_a_long_prompt_of_high_priority_does_not_stop_the_others_tokens() -> None:
    bench = Bench(config(max_num_batched_tokens=16, policy=Policy.PRIORITY))
    bench.add_prompt("low", [1, 2], priority=5, max_tokens=20)
    bench.step()
    bench.add_prompt("high", list(range(60)), priority=0, max_tokens=2)
    for chunk in (15, 15, 15, 15):
        assert work_of(bench, bench.step()) == {"low": 1, "high": chunk}
    bench.drain()


def test_the_chunk_limit_leaves_budget_to_others_and_does_not_starve_a_lone_prompt() -> None:
    bench = Bench(config(max_num_batched_tokens=32, long_prefill_token_threshold=8))
    bench.add_prompt("long", list(range(30)), max_tokens=1)
    bench.add_prompt("short", [1, 2, 3], max_tokens=1)
    assert work_of(bench, bench.step()) == {"long": 8, "short": 3}
    chunks = [work_of(bench, bench.step())["long"] for _ in range(3)]
    assert chunks == [8, 8, 6]
    bench.drain()


def test_a_budget_below_the_number_of_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens: expected at least max_num_seqs"):
        config(max_num_seqs=8, max_num_batched_tokens=7)


def test_no_more_sequences_than_slots_and_slots_are_used_again() -> None:
    bench = Bench(config(max_num_seqs=2))
    for i in range(6):
        bench.add_prompt(f"r{i}", [i, i], max_tokens=2)
    seen = set()
    while bench.scheduler.has_work():
        plan = bench.step()
        assert plan is not None and len(plan.work) <= 2
        seen.update(work.slot for work in plan.work)
    assert seen == {0, 1}
    bench.drain()


def test_first_come_first_served_also_when_only_a_later_one_would_fit() -> None:
    bench = Bench(config(num_blocks=13, max_num_batched_tokens=64, policy=Policy.FCFS))
    bench.add_prompt("a", list(range(20)), max_tokens=4)
    bench.step()
    bench.add_prompt("big", list(range(50, 80)), max_tokens=2)
    bench.add_prompt("small", [1], max_tokens=2, priority=-5)
    assert work_of(bench, bench.step()) == {"a": 1}
    order = []
    while bench.scheduler.has_work():
        plan = bench.step()
        assert plan is not None
        order += [new.request_id for new in plan.new]
    assert order == ["big", "small"]
    bench.drain()


def test_priority_orders_the_queue_and_arrival_breaks_ties() -> None:
    bench = Bench(config(max_num_seqs=1, policy=Policy.PRIORITY))
    for name, priority in (("a", 1), ("b", 2), ("c", 0), ("d", 1)):
        bench.add_prompt(name, [1, 2], priority=priority, max_tokens=1)
    order = []
    while bench.scheduler.has_work():
        plan = bench.step()
        assert plan is not None
        order += [new.request_id for new in plan.new]
    assert order == ["c", "a", "d", "b"]


def test_a_resumed_request_comes_before_new_ones() -> None:
    bench = Bench(config(num_blocks=8, enable_prefix_caching=False))
    bench.add_prompt("a", list(range(8)), max_tokens=16)
    bench.add_prompt("b", list(range(8)), max_tokens=16, seed=2)
    while bench.scheduler.stats().preempted == 0:
        bench.step()
    bench.add_prompt("late", [1], max_tokens=1)
    order = []
    while bench.scheduler.has_work():
        plan = bench.step()
        assert plan is not None
        order += [new.request_id for new in plan.new]
    assert order == ["b", "late"]
    bench.drain()


@pytest.mark.parametrize("caching", [True, False])
def test_the_newest_gives_way_keeps_its_tokens_and_ends_the_same(caching: bool) -> None:
    bench = Bench(config(num_blocks=10, enable_prefix_caching=caching))
    for i, name in enumerate("abc"):
        bench.add_prompt(name, [i] * 5, max_tokens=25)
    victims = []
    while bench.scheduler.has_work():
        running = {request.request_id: len(request.tokens) for request in bench.scheduler._running}
        bench.step()
        for request in bench.scheduler._preempted.requests():
            if request.request_id in running:
                victims.append((request.request_id, max(running) == request.request_id))
                assert len(request.tokens) == running[request.request_id]
    assert victims and all(newest for _, newest in victims)
    assert EventType.PREEMPTED in bench.records["c"].events
    bench.drain()
    assert [len(bench.records[name].tokens) for name in "abc"] == [25, 25, 25]


def test_the_least_urgent_gives_way_under_priority() -> None:
    bench = Bench(config(num_blocks=8, policy=Policy.PRIORITY, enable_prefix_caching=False))
    bench.add_prompt("low", list(range(8)), priority=9, max_tokens=16)
    bench.add_prompt("high", list(range(8)), priority=1, max_tokens=16, seed=2)
    while bench.scheduler.stats().preempted == 0:
        bench.step()
    assert [request.request_id for request in bench.scheduler._preempted.requests()] == ["low"]
    bench.drain()


def test_a_request_alone_grows_to_the_whole_pool_and_ends_for_length() -> None:
    bench = Bench(config(num_blocks=5, max_model_len=1000, max_num_batched_tokens=8))
    record = bench.add_prompt("a", list(range(10)), max_tokens=None)
    bench.drain()
    assert (len(record.tokens), record.reason) == (6, FinishReason.LENGTH)
    assert bench.scheduler.stats().preemptions == 0


def test_a_resumed_request_waits_until_it_can_finish_what_is_known() -> None:
    bench = Bench(config(num_blocks=9, enable_prefix_caching=False))
    bench.add_prompt("a", list(range(12)), max_tokens=14)
    bench.add_prompt("b", list(range(12)), max_tokens=14, seed=2)
    while bench.scheduler.has_work():
        bench.step()
    assert bench.scheduler.stats().preemptions == 1
    bench.drain()


def test_a_prompt_preempted_between_chunks_reports_its_log_probabilities_once_and_whole() -> None:
    bench = Bench(config(num_blocks=12, long_prefill_token_threshold=1, max_num_batched_tokens=8))
    for i in range(2):
        bench.add_prompt(f"old{i}", [i] * 4, max_tokens=30)
    while len(bench.records["old1"].tokens) < 2:
        bench.step()
    record = bench.add_prompt("rows", list(range(16)), prompt_logprobs=0, max_tokens=2)
    while bench.scheduler.stats().preempted == 0:
        assert record.tokens == []
        bench.step()
    bench.drain()
    assert record.prompt_logprobs is not None and record.prompt_logprobs.ranks == list(range(1, 16))
