"""Metrics: names and labels, what feeds them, several processes, and the page that documents them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_harness import drive, echo_client, running

from dpi_engine.frontend.events import RankEvent
from dpi_engine.server.metrics import Metrics
from dpi_engine.server.metrics_table import METRICS, Kind, reference_page, token_buckets
from dpi_engine.wire.counters import WireCounters
from dpi_engine.wire.messages import (
    EngineCoreEvent,
    EventType,
    LoadRecord,
    PrefixCacheStats,
    RankInfo,
    RankState,
    ReadyResponse,
    SchedulerStats,
)

ROOT = Path(__file__).parents[2]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def samples(text: str) -> dict[str, float]:
    """`name{label="x",...}` (labels sorted) -> value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def value(metrics: Metrics, name: str, rank: int = 0, **labels: str) -> float | None:
    wanted = {"engine": str(rank), "model_name": metrics.model_name} | labels
    text = ",".join(f'{key}="{wanted[key]}"' for key in sorted(wanted))
    return samples(metrics.exposition().decode()).get(f"{name}{{{text}}}")


def test_the_reference_page_is_the_table() -> None:
    assert (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8") == reference_page()


def test_names_are_unique_and_counters_end_in_total() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"(vllm:|dpi_|http_)[a-z0-9_]+", metric.name)
        if metric.kind is Kind.COUNTER:
            assert metric.name.endswith("_total")
        assert metric.help.endswith(".")


def test_every_metric_of_the_table_is_exposed_with_its_type_for_each_rank() -> None:
    metrics = Metrics("m", 2048)
    ready = ReadyResponse(max_model_len=2048, num_gpu_blocks=10, block_size=16, dtype="bfloat16")
    for rank in (0, 1):
        metrics.on_ready(rank, ready)
        metrics.on_rank(RankInfo(rank=rank, state=RankState.READY, epoch=1))
    metrics.on_http("/v1/models", "GET", 200, 0.1)
    metrics.in_flight(1)
    counters = WireCounters()
    counters.count("output", "bad_msgpack")
    metrics.watch(counters)
    metrics.refresh([])
    families = {family.name: family for family in text_string_to_metric_families(metrics.exposition().decode())}
    for metric in METRICS:
        name = metric.name.removesuffix("_total") if metric.kind is Kind.COUNTER else metric.name
        family = families[name]
        assert family.type == metric.kind.value, metric.name
        assert family.samples, metric.name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels), metric.name
        if "engine" in metric.labels:
            assert {sample.labels["engine"] for sample in family.samples} == {"0", "1"}, metric.name
    assert not any(name.endswith("_created") for name in families)


def test_one_rank_costs_a_bounded_number_of_series() -> None:
    metrics = Metrics("m", 131072)
    before = len(samples(metrics.exposition().decode()))
    metrics.add_rank(0)
    metrics.on_rank(RankInfo(rank=0, state=RankState.READY))
    assert len(samples(metrics.exposition().decode())) - before < 500


def test_token_buckets_go_up_to_the_length_limit() -> None:
    assert token_buckets(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_buckets(99) == (1, 2, 5, 10, 20, 50)
    assert token_buckets(0) == (1,)


def test_counters_follow_totals_and_never_go_back() -> None:
    metrics = Metrics("m", 100)

    def load(epoch: int, seq: int, preemptions: int, queries: int = 0, hits: int = 0) -> None:
        record = LoadRecord(0, epoch, seq, 3, 2, 0.25, 100, preemptions, queries, hits)
        metrics.on_stats(0, record)

    load(1, 1, 5)  # what came before this process is not its to count
    assert value(metrics, "vllm:num_requests_running") == 2 and value(metrics, "vllm:num_requests_waiting") == 3
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.25
    load(1, 2, 7, 10, 4)
    load(1, 2, 100)  # again
    load(1, 1, 100)  # late
    assert value(metrics, "vllm:num_preemptions_total") == 2
    load(1, 3, 6, 12, 4)  # less than before: a fault of the rank, not a reason to count down
    assert value(metrics, "vllm:num_preemptions_total") == 2
    load(2, 1, 3, 1, 1)  # the rank restarted and counts from zero
    assert value(metrics, "vllm:num_preemptions_total") == 5
    assert value(metrics, "vllm:prefix_cache_queries_total") == 13
    assert value(metrics, "vllm:prefix_cache_hits_total") == 5
    metrics.on_stats(0, SchedulerStats(prefix_cache_stats=PrefixCacheStats(queries=50)))
    assert value(metrics, "vllm:prefix_cache_queries_total") == 13


def test_totals_count_whole_when_a_rank_restarts_before_anybody_looks() -> None:
    metrics = Metrics("m", 100)
    for epoch, seq, preemptions in ((1, 1, 5), (1, 2, 6), (1, 3, 9), (2, 1, 1), (2, 2, 3)):
        metrics.on_stats(0, LoadRecord(0, epoch, seq, 3, seq, 0.25, 100, preemptions))
    metrics.on_rank(RankInfo(rank=0, state=RankState.LOST, epoch=2))
    assert value(metrics, "vllm:num_preemptions_total") == 4 + 3
    assert value(metrics, "vllm:num_requests_running") == 0


def test_statistics_of_a_rank_that_only_sends_deltas() -> None:
    metrics = Metrics("m", 100)
    stats = SchedulerStats(
        num_running_reqs=1, num_waiting_reqs=2, num_skipped_waiting_reqs=3, kv_cache_usage=0.5,
        prefix_cache_stats=PrefixCacheStats(queries=8, hits=4),
    )  # fmt: skip
    metrics.on_stats(3, stats)
    metrics.on_stats(3, stats)
    assert value(metrics, "vllm:num_requests_waiting", 3) == 5
    assert value(metrics, "vllm:prefix_cache_queries_total", 3) == 16
    metrics.on_stats(3, SchedulerStats(prefix_cache_stats=PrefixCacheStats(queries=-5)))
    assert value(metrics, "vllm:prefix_cache_queries_total", 3) == 16


def test_only_the_primary_process_counts_totals() -> None:
    metrics = Metrics("m", 100, primary=False)
    metrics.add_rank(0)
    metrics.on_stats(0, LoadRecord(0, 1, 1, 1, 1, 0.1, 0, 0))
    metrics.on_stats(0, LoadRecord(0, 1, 2, 1, 4, 0.1, 0, 9))
    assert value(metrics, "vllm:num_preemptions_total") == 0
    assert value(metrics, "vllm:num_requests_running") == 4


def test_a_lost_rank_shows_no_load_and_its_state() -> None:
    metrics = Metrics("m", 100)
    metrics.on_rank(RankInfo(rank=0, state=RankState.READY, epoch=4))
    metrics.on_stats(0, LoadRecord(0, 4, 1, 3, 2, 0.25, 9))
    metrics.on_event(RankEvent(rank=0, state=RankState.SUSPECT, epoch=4))
    assert value(metrics, "vllm:num_requests_running") == 2
    metrics.on_event(RankEvent(rank=0, state=RankState.LOST, epoch=4, reason="no beat"))
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert value(metrics, name) == 0
    states = {state: value(metrics, "dpi_rank_state", state=state.value) for state in RankState}
    assert states == {state: float(state is RankState.LOST) for state in RankState}
    assert value(metrics, "dpi_rank_epoch") == 4


def test_a_request_gives_its_times_and_counts_once() -> None:
    clock = Clock()
    metrics = Metrics("m", 1000, clock=clock)
    timer = metrics.timer(num_prompt_tokens=30, n=2, max_tokens=50)
    clock.now += 0.5
    events = [EngineCoreEvent(EventType.QUEUED, 5.0), EngineCoreEvent(EventType.SCHEDULED, 5.2)]
    timer.events(events)
    timer.tokens(1, 1, 16)
    clock.now += 0.4
    timer.tokens(4, 1)
    timer.finished("length")
    timer.finished("stop")

    def got(name: str, **labels: str) -> float | None:
        return value(metrics, name, 1, **labels)

    assert got("vllm:prompt_tokens_total") == 30 and got("vllm:generation_tokens_total") == 5
    assert got("vllm:prompt_tokens_cached_total") == 16
    assert got("vllm:time_to_first_token_seconds_sum") == pytest.approx(0.5)
    assert got("vllm:inter_token_latency_seconds_count") == 4
    assert got("vllm:inter_token_latency_seconds_sum") == pytest.approx(0.4)
    assert got("vllm:e2e_request_latency_seconds_sum") == pytest.approx(0.9)
    assert got("vllm:request_queue_time_seconds_sum") == pytest.approx(0.2)
    assert got("vllm:request_prefill_time_seconds_sum") == pytest.approx(0.3)
    assert got("vllm:request_decode_time_seconds_sum") == pytest.approx(0.4)
    assert got("vllm:request_inference_time_seconds_sum") == pytest.approx(0.7)
    assert got("vllm:request_time_per_output_token_seconds_sum") == pytest.approx(0.1)
    assert got("vllm:request_success_total", finished_reason="length") == 1
    assert got("vllm:request_success_total", finished_reason="stop") is None
    assert got("vllm:request_params_n_sum") == 2 and got("vllm:request_params_max_tokens_sum") == 50


def test_a_clock_that_steps_back_harms_nothing() -> None:
    clock = Clock()
    metrics = Metrics("m", 1000, clock=clock)
    timer = metrics.timer(num_prompt_tokens=1, n=1, max_tokens=5)
    timer.tokens(1, 0)
    clock.now -= 3600
    timer.tokens(2, 0)
    timer.finished("stop")
    assert value(metrics, "vllm:inter_token_latency_seconds_sum") == 0
    assert value(metrics, "vllm:e2e_request_latency_seconds_sum") == 0


def test_requests_over_http_are_counted_by_rank_and_route() -> None:
    async def main() -> None:
        async with running(echo_client()) as server:
            body = {"prompt": "the cat", "max_tokens": 3, "temperature": 0}
            await server.post("/v1/completions", body | {"n": 2})
            await server.events("/v1/completions", body | {"stream": True}, headers={"X-data-parallel-rank": "1"})
            await server.post("/v1/completions", {})
            for number in range(50):
                await server.get(f"/v1/models/unknown-{number}")
                await server.post(f"/random/{number}")
                await server.http.request("PROPFIND", f"{server.url}/x{number}")
            status, text = await server.get("/metrics")
            assert status == 200
            found = samples(text)

            def got(name: str, labels: str) -> float | None:
                return found.get(f"{name}{{{labels}}}")

            assert got("vllm:generation_tokens_total", 'engine="0",model_name="echo"') == 6
            assert got("vllm:generation_tokens_total", 'engine="1",model_name="echo"') == 3
            ended = 'engine="0",finished_reason="length",model_name="echo"'
            assert got("vllm:request_success_total", ended) == 2
            route = 'handler="/v1/completions",method="POST"'
            assert got("http_requests_total", f'{route},status="2xx"') == 2
            assert got("http_requests_total", f'{route},status="4xx"') == 1
            assert got("http_requests_total", 'handler="unmatched",method="POST",status="4xx"') == 50
            assert got("http_requests_total", 'handler="unmatched",method="OTHER",status="4xx"') == 50
            assert got("http_requests_total", 'handler="/v1/models/{model}",method="GET",status="4xx"') == 50
            assert len([name for name in found if name.startswith("http_requests_total")]) <= 8
            assert got("dpi_http_requests_in_flight", 'model_name="echo"') == 0
            states = 'engine="1",model_name="echo",state="READY"'
            assert got("dpi_rank_state", states) == 1

    drive(main)


def test_departed_clients_count_as_aborted() -> None:
    async def main() -> None:
        async with running(echo_client(max_model_len=10**8)) as server:
            body = {"prompt": "x", "stream": True, "max_tokens": 10**7, "ignore_eos": True, "temperature": 0}
            async with server.http.post(server.url + "/v1/completions", json=body) as response:
                await response.content.readuntil(b"\n\n")
                response.close()
            for _ in range(5000):
                if not server.state.active:
                    break
                await server.get("/version")
            found = samples((await server.get("/metrics"))[1])
            ended = 'engine="0",finished_reason="abort",model_name="echo"'
            assert found[f"vllm:request_success_total{{{ended}}}"] == 1
            assert found['http_requests_total{handler="/v1/completions",method="POST",status="499"}'] == 1

    drive(main)


WORKER = """
import sys
from dpi_engine.server.metrics import Metrics
from dpi_engine.wire.messages import LoadRecord, RankInfo, RankState
index = int(sys.argv[1])
metrics = Metrics("m", 100, primary=index == 0)
metrics.on_rank(RankInfo(rank=0, state=RankState.READY, epoch=1))
for seq in range(1, 11):
    metrics.on_stats(0, LoadRecord(0, 1, seq, 1, seq, 0.5, 0, seq * 2))
timer = metrics.timer(num_prompt_tokens=10, n=1, max_tokens=5)
timer.tokens(5, 0)
timer.finished("length")
if index == 3:
    print(metrics.exposition().decode())
"""


def test_four_processes_make_one_page(tmp_path: Path) -> None:
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": str(ROOT / "engine")}
    page = ""
    for index in range(4):
        done = subprocess.run(
            [sys.executable, "-c", WORKER, str(index)], env=env, capture_output=True, text=True, timeout=240, check=True
        )
        page = done.stdout
    found = samples(page)
    labels = 'engine="0",model_name="m"'
    assert found[f"vllm:generation_tokens_total{{{labels}}}"] == 20
    assert found[f"vllm:num_preemptions_total{{{labels}}}"] == 18
    assert found[f"vllm:num_requests_running{{{labels}}}"] == 10
    assert found[f"vllm:e2e_request_latency_seconds_count{{{labels}}}"] == 4
    assert found['dpi_rank_state{engine="0",model_name="m",state="READY"}'] == 1
