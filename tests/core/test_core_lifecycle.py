"""Aborts in every state, reports, pauses and failures."""

from __future__ import annotations

import pytest
from core_kv_model import Bench, config, counts

from dpi_engine.core.limits import PauseMode, Policy
from dpi_engine.wire.messages import EngineCoreRequest, EventType, FinishReason, SamplingParams


def test_abort_while_waiting_and_twice_and_unknown() -> None:
    bench = Bench(config(max_num_seqs=1))
    bench.add_prompt("a", [1, 2])
    bench.add_prompt("b", [1, 2])
    assert bench.abort("b", "nobody", "b") == ["b"]
    assert bench.abort("b") == []
    assert bench.scheduler.take_finished() == {0: ["b"]}
    bench.records["b"].finished = True
    bench.drain()
    assert bench.scheduler.stats().waiting_tokens == 0


def test_abort_between_chunks() -> None:
    bench = Bench(config(max_num_batched_tokens=8))
    bench.add_prompt("a", list(range(20)))
    bench.step()
    bench.abort("a")
    assert bench.scheduler.kv_usage == 0.0 and not bench.scheduler.has_work()
    bench.add_prompt("b", list(range(50, 60)))
    bench.drain()


def test_abort_while_preempted() -> None:
    bench = Bench(config(num_blocks=8, enable_prefix_caching=False))
    bench.add_prompt("a", list(range(8)), max_tokens=16)
    bench.add_prompt("b", list(range(8)), max_tokens=16)
    while bench.scheduler.stats().preempted == 0:
        bench.step()
    assert bench.abort("b") == ["b"]
    assert counts(bench) == (0, 1)
    bench.drain()


@pytest.mark.parametrize("prompt", [[1, 2], list(range(40))], ids=["its last step", "an unfinished chunk"])
def test_abort_wins_over_the_step_in_flight_and_the_id_is_free_at_once(prompt: list[int]) -> None:
    bench = Bench(config())
    first = bench.add_prompt("a", prompt, max_tokens=1)
    plan = bench.plan()
    assert plan is not None
    bench.abort("a")
    second = bench.add_prompt("a", [9, 9], max_tokens=2)
    assert bench.finish(plan) == []
    assert first.finished and first.reason is None and first.tokens == []
    bench.drain()
    assert len(second.tokens) == 2


def test_abort_immediately_is_only_ever_reported_as_finished() -> None:
    bench = Bench(config())
    params = SamplingParams()
    bench.scheduler.add(
        EngineCoreRequest("a", [1], sampling_params=params, client_index=3, abort_immediately=True), 0.0
    )
    assert not bench.scheduler.has_work()
    assert bench.scheduler.take_finished() == {3: ["a"]}
    assert bench.scheduler.take_finished() == {}


def test_ten_thousand_waiting_are_aborted_and_forgotten() -> None:
    bench = Bench(config(max_num_seqs=1))
    for i in range(10_000):
        bench.scheduler.add(EngineCoreRequest(f"r{i}", [1, 2], sampling_params=SamplingParams()), 0.0)
    bench.scheduler.abort([f"r{i}" for i in range(10_000) if i != 7_777])
    assert len(bench.scheduler._waiting._heap) < 100, "what was aborted is still kept"
    plan = bench.scheduler.schedule(0.0)
    assert plan is not None and [new.request_id for new in plan.new] == ["r7777"]
    assert len(bench.scheduler.take_finished()[0]) == 9_999


def test_usage_counts_what_the_first_admission_found_also_after_preemption() -> None:
    bench = Bench(config(num_blocks=14, max_num_batched_tokens=8))
    bench.add_prompt("a", list(range(9)), max_tokens=1)
    bench.drain()
    record = bench.add_prompt("b", list(range(20)), max_tokens=2)
    bench.step()
    assert bench.scheduler.reset_prefix_cache(bench.now, preempt_running=True)
    bench.drain()
    assert record.prefill is not None
    assert (record.prefill.num_prompt_tokens, record.prefill.num_cached_tokens) == (20, 8)
    assert record.prefill.num_cache_creation_tokens == 12


def test_events_tell_the_way_with_times() -> None:
    bench = Bench(config(num_blocks=8, enable_prefix_caching=False))
    bench.now = 10.0
    bench.add_prompt("a", list(range(8)), max_tokens=16)
    bench.add_prompt("b", list(range(8)), max_tokens=16, seed=2)
    plan = bench.plan()
    assert plan is not None
    first = bench.finish(plan)[1].events
    assert first is not None
    assert [(e.type, e.timestamp) for e in first] == [(EventType.QUEUED, 10.0), (EventType.SCHEDULED, 11.0)]
    bench.drain()
    assert bench.records["b"].events == [
        EventType.QUEUED,
        EventType.SCHEDULED,
        EventType.PREEMPTED,
        EventType.SCHEDULED,
    ]


def test_outputs_go_to_the_client_that_asked() -> None:
    bench = Bench(config())
    for client in (0, 2, 2):
        bench.add_prompt(f"c{len(bench.records)}", [1], client_index=client, max_tokens=1)
    plan = bench.plan()
    assert plan is not None
    out = bench.scheduler.apply(plan, bench.runner.execute(plan), 0.0)
    assert {client: [o.request_id for o in outputs] for client, outputs in out.outputs.items()} == {
        0: ["c0"],
        2: ["c1", "c2"],
    }
    assert out.finished == {0: ["c0"], 2: ["c1", "c2"]}


def test_stats_are_absolute() -> None:
    bench = Bench(config(max_num_batched_tokens=8))
    bench.add_prompt("a", list(range(20)), max_tokens=2)
    bench.add_prompt("b", [1, 2, 3], max_tokens=2)
    assert bench.scheduler.stats().waiting_tokens == 23
    assert bench.scheduler.stats().last_step is None
    bench.step()
    stats = bench.scheduler.stats()
    assert (stats.waiting, stats.running, stats.waiting_tokens) == (1, 1, 15)
    assert (stats.steps, stats.last_step, stats.kv_usage) == (1, bench.now, 5 / 64)
    bench.drain()
    assert bench.scheduler.stats().waiting_tokens == 0


def test_a_request_without_a_seed_gets_one_that_another_engine_would_give_too() -> None:
    seeds = []
    for _ in range(2):
        bench = Bench(config(seed=5))
        for name in "ab":
            bench.add_prompt(name, [1])
        plan = bench.scheduler.schedule(0.0)
        assert plan is not None
        seeds.append([new.seed for new in plan.new])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 2 and all(0 <= seed < 1 << 63 for seed in seeds[0])


def test_a_replayed_request_goes_on_where_it_was() -> None:
    whole = Bench(config())
    record = whole.add_prompt("a", list(range(9)), seed=4, max_tokens=10)
    whole.drain()
    rest = Bench(config())
    params = SamplingParams(seed=4, max_tokens=10, ignore_eos=True, prompt_logprobs=0)
    replayed = rest.add(
        EngineCoreRequest("a2", list(range(9)), sampling_params=params, output_token_ids=record.tokens[:6])
    )
    rest.drain()
    assert replayed.outputs == record.tokens
    assert len(replayed.tokens) == 4 and replayed.prompt_logprobs is None


def test_pause_abort_ends_all_and_queues_what_comes() -> None:
    bench = Bench(config())
    bench.add_prompt("a", [1, 2])
    bench.step()
    out = bench.scheduler.pause("abort")
    assert [(o.request_id, o.finish_reason, o.output_index) for o in out.outputs[0]] == [("a", FinishReason.ABORT, 1)]
    bench.receive(out.outputs, out.finished)
    bench.add_prompt("b", [1, 2])
    assert bench.scheduler.is_paused and bench.scheduler.is_quiet() and bench.plan() is None
    bench.scheduler.resume()
    bench.drain()
    assert len(bench.records["b"].tokens) == 4


def test_pause_wait_lets_the_begun_end_also_if_preempted() -> None:
    bench = Bench(config(num_blocks=8, enable_prefix_caching=False, policy=Policy.PRIORITY))
    bench.add_prompt("a", list(range(8)), max_tokens=16, priority=1)
    bench.add_prompt("b", list(range(8)), max_tokens=16, priority=2)
    bench.step()
    bench.add_prompt("new", [1], priority=0)
    bench.scheduler.pause("wait")
    while bench.scheduler.has_work():
        bench.step()
    assert bench.scheduler.stats().preemptions > 0
    assert [bench.records[name].finished for name in ("a", "b", "new")] == [True, True, False]
    assert bench.scheduler.is_quiet() and bench.scheduler.kv_usage == 0.0
    bench.scheduler.resume()
    bench.drain()


def test_pause_keep_freezes_and_goes_on() -> None:
    bench = Bench(config())
    bench.add_prompt("a", [1, 2], max_tokens=4)
    bench.step()
    plan = bench.plan()
    assert plan is not None
    bench.scheduler.pause(PauseMode.KEEP)
    assert not bench.scheduler.is_quiet(), "a step is in flight"
    bench.finish(plan)
    assert bench.scheduler.is_quiet() and bench.plan() is None
    assert bench.scheduler.num_running == 1
    bench.scheduler.resume()
    bench.drain()


def test_an_unknown_pause_mode_is_refused() -> None:
    bench = Bench(config())
    with pytest.raises(ValueError, match="sideways"):
        bench.scheduler.pause("sideways")
    assert not bench.scheduler.is_paused


def test_finish_all_tells_everyone_why_with_a_step_in_flight() -> None:
    bench = Bench(config(max_num_seqs=1))
    bench.add_prompt("a", [1, 2])
    bench.add_prompt("b", [1, 2], client_index=1)
    plan = bench.plan()
    assert plan is not None
    out = bench.scheduler.finish_all(FinishReason.ERROR, "this rank shuts down")
    outputs = bench.receive(out.outputs, out.finished)
    assert {(o.request_id, o.finish_reason, o.error) for o in outputs} == {
        ("a", FinishReason.ERROR, "this rank shuts down"),
        ("b", FinishReason.ERROR, "this rank shuts down"),
    }
    assert bench.finish(plan) == []
    bench.drain()


def test_a_step_that_cannot_run_fails_its_requests_and_no_other() -> None:
    bench = Bench(config(max_num_seqs=1))
    bench.add_prompt("a", [1, 2])
    bench.add_prompt("b", [1, 2])
    plan = bench.plan()
    assert plan is not None
    bench.runner.execute(plan)
    out = bench.scheduler.fail_step(plan, "device lost", 2.0)
    assert [o.request_id for o in bench.receive(out.outputs, out.finished)] == ["a"]
    bench.drain()
    assert len(bench.records["b"].tokens) == 4


def test_a_missing_prompt_report_fails_that_request() -> None:
    bench = Bench(config())
    bench.add_prompt("a", [1, 2, 3], prompt_logprobs=0)
    plan = bench.plan()
    assert plan is not None
    result = bench.runner.execute(plan)
    result.prompt_logprobs.clear()
    out = bench.scheduler.apply(plan, result, 0.0)
    (output,) = bench.receive(out.outputs, out.finished)
    assert output.finish_reason is FinishReason.ERROR and "prompt" in (output.error or "")
    bench.drain()
