"""Which tokens are found in place of computed, and which must not be."""

from __future__ import annotations

import pytest
from core_kv_model import Bench, config, counts, work_of

from dpi_engine.wire.messages import FinishReason


def hits(bench: Bench) -> int:
    return bench.scheduler.stats().prefix_hits


@pytest.mark.parametrize(
    ("second", "cached"),
    [
        (list(range(12)), 8),
        (list(range(13)), 12),
        (list(range(11)), 8),
        ([*range(8), 99, 99, 99, 99, 99], 8),
        ([99, *range(1, 13)], 0),
        (list(range(3)), 0),
    ],
    ids=["all of it: the last block is computed", "longer", "inside a block", "other tail", "other head", "no block"],
)
def test_only_full_blocks_hit_and_the_last_token_is_computed(second: list[int], cached: int) -> None:
    bench = Bench(config())
    bench.add_prompt("a", list(range(12)), max_tokens=2)
    bench.drain()
    record = bench.add_prompt("b", second, max_tokens=2)
    plan = bench.step()
    assert plan is not None and (plan.work[0].start, plan.work[0].count) == (cached, len(second) - cached)
    bench.drain()
    assert record.prefill is not None
    assert record.prefill.num_cached_tokens == record.prefill.num_local_cached_tokens == cached
    assert record.prefill.num_computed_tokens == len(second) - cached
    assert hits(bench) == cached
    assert bench.scheduler.stats().prefix_queries == 12 + len(second)


def test_samples_of_one_prompt_share_its_blocks_and_write_their_own() -> None:
    bench = Bench(config())
    bench.add_prompt("a", list(range(13)), max_tokens=6)
    bench.step()
    used = bench.scheduler.kv_usage
    for i in range(3):
        bench.add_prompt(f"n{i}", list(range(13)), max_tokens=6, seed=i)
    bench.step()
    assert round((bench.scheduler.kv_usage - used) * 64) == 3
    bench.drain()
    assert hits(bench) == 3 * 12


def test_outputs_are_found_too_so_a_conversation_goes_on_from_the_cache() -> None:
    bench = Bench(config())
    first = bench.add_prompt("a", list(range(6)), max_tokens=7)
    bench.drain()
    bench.add_prompt("b", [*range(6), *first.tokens, 1, 2], max_tokens=2)
    bench.drain()
    assert hits(bench) == 12


def test_two_equal_requests_in_one_step_do_not_read_what_is_not_computed() -> None:
    bench = Bench(config())
    for name in "ab":
        bench.add_prompt(name, list(range(12)), max_tokens=3)
    assert work_of(bench, bench.step()) == {"a": 12, "b": 12}
    assert hits(bench) == 0
    bench.drain()


def test_hits_that_are_free_blocks_are_not_counted_as_room_twice() -> None:
    bench = Bench(config(num_blocks=11))
    bench.add_prompt("a", list(range(20)), max_tokens=1)
    bench.drain()
    bench.add_prompt("c", [50] * 8, max_tokens=12)
    bench.step()
    # 10 blocks, 2 held. The second needs 8 (5 of them found free) and 2 to spare: free are 8.
    bench.add_prompt("b", [*range(20), *range(60, 72)], max_tokens=1)
    assert work_of(bench, bench.step()) == {"c": 1}
    bench.drain()
    assert hits(bench) == 20


@pytest.mark.parametrize(("salts", "hit"), [((None, None), 8), (("x", "x"), 8), (("x", "y"), 0), ((None, "x"), 0)])
def test_salts_separate(salts: tuple[str | None, str | None], hit: int) -> None:
    bench = Bench(config())
    for i, salt in enumerate(salts):
        bench.add_prompt(f"r{i}", list(range(9)), cache_salt=salt)
        bench.drain()
    assert hits(bench) == hit


@pytest.mark.parametrize(
    ("sampling", "hit"),
    [
        ({"prompt_logprobs": 0}, 0),
        ({"prompt_logprobs": 0, "skip_reading_prefix_cache": False}, 0),
        ({"skip_reading_prefix_cache": True}, 0),
        ({"skip_reading_prefix_cache": False}, 8),
    ],
)
def test_who_needs_the_prompts_logits_computes_them(sampling: dict[str, object], hit: int) -> None:
    bench = Bench(config(max_num_batched_tokens=8))
    bench.add_prompt("a", list(range(12)))
    bench.drain()
    record = bench.add_prompt("b", list(range(12)), **sampling)
    bench.drain()
    assert hits(bench) == hit
    if "prompt_logprobs" in sampling:
        assert record.prompt_logprobs is not None
        assert record.prompt_logprobs.token_ids == [[token] for token in range(1, 12)]


def test_a_prompt_of_one_token_has_no_log_probabilities_but_an_answer() -> None:
    bench = Bench(config())
    record = bench.add_prompt("a", [7], prompt_logprobs=0)
    bench.drain()
    assert record.prompt_logprobs is not None and record.prompt_logprobs.token_ids == []


def test_without_prefix_caching_nothing_is_found_or_counted() -> None:
    bench = Bench(config(enable_prefix_caching=False))
    for name in "ab":
        record = bench.add_prompt(name, list(range(12)))
        bench.drain()
    stats = bench.scheduler.stats()
    assert (stats.prefix_requests, stats.prefix_queries, stats.prefix_hits) == (0, 0, 0)
    assert record.prefill is not None and record.prefill.num_cache_creation_tokens == 0


def test_reset_refuses_while_blocks_are_held_and_forgets_when_free() -> None:
    bench = Bench(config())
    bench.add_prompt("a", list(range(12)), max_tokens=2)
    bench.step()
    assert bench.scheduler.reset_prefix_cache(bench.now) is False
    bench.drain()
    assert bench.scheduler.reset_prefix_cache(bench.now) is True
    bench.add_prompt("b", list(range(12)))
    bench.drain()
    assert hits(bench) == 0


def test_reset_can_make_running_sequences_start_over() -> None:
    bench = Bench(config())
    record = bench.add_prompt("a", list(range(12)), max_tokens=6)
    bench.step()
    plan = bench.plan()
    assert plan is not None
    assert bench.scheduler.reset_prefix_cache(bench.now, preempt_running=True) is False, "a plan is in flight"
    bench.finish(plan)
    assert bench.scheduler.reset_prefix_cache(bench.now, preempt_running=True) is True
    assert counts(bench) == (1, 0)
    bench.drain()
    assert len(record.tokens) == 6
    stats = bench.scheduler.stats()
    assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 14, 0)


def test_blocks_of_a_failed_request_are_not_found_again() -> None:
    bench = Bench(config(max_num_batched_tokens=8))
    bench.add_prompt("a", list(range(12)))
    bench.step()
    bench.step({"a": "logits are not numbers"})
    record = bench.records["a"]
    assert (record.reason, record.error) == (FinishReason.ERROR, "logits are not numbers")
    bench.add_prompt("b", list(range(12)))
    bench.drain()
    assert hits(bench) == 0
