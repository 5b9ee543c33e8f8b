"""Prometheus metrics of an API server process, fed by requests, load records and the wire."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.multiprocess import MultiProcessCollector

from dpi_engine.frontend.events import RankEvent
from dpi_engine.server.metrics_table import METRICS, Kind, Metric, token_buckets
from dpi_engine.server.tally import BatchHistogram, TokenTally
from dpi_engine.wire.counters import WireCounters
from dpi_engine.wire.messages import (
    EngineCoreEvent,
    EventType,
    LoadRecord,
    RankInfo,
    RankState,
    ReadyResponse,
    SchedulerStats,
)

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
KNOWN_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST


class Metrics:
    """All metrics of one process.

    With PROMETHEUS_MULTIPROC_DIR set before this module is imported, processes share their values through files there
    and any of them answers for all. Then only one process may be `primary`: load records carry totals and reach every
    process, so only one may turn them into counters.
    """

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        *,
        primary: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        prometheus_client.disable_created_metrics()
        self.model_name = model_name
        self.clock = clock
        self._primary = primary
        self._shared_dir = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        self._registry = CollectorRegistry()
        self._by_name: dict[str, Any] = {m.name: self._make(m, token_buckets(max_model_len)) for m in METRICS}
        self._children: dict[tuple[str, ...], Any] = {}
        self._totals: dict[int, LoadRecord] = {}
        self._news: dict[int, LoadRecord] = {}  # load records that are not in the metrics yet
        self._tallies: dict[int, TokenTally] = {}
        self._wire: list[tuple[WireCounters, dict[tuple[str, str], int]]] = []
        if not self._shared_dir:
            prometheus_client.ProcessCollector(registry=self._registry)
            prometheus_client.PlatformCollector(registry=self._registry)
            prometheus_client.GCCollector(registry=self._registry)

    def _make(self, metric: Metric, length_buckets: tuple[float, ...]) -> Any:
        if metric.kind is Kind.GAUGE:
            mode: Any = "livesum" if metric.sums else "mostrecent"
            return Gauge(metric.name, metric.help, metric.labels, registry=self._registry, multiprocess_mode=mode)
        if metric.kind is Kind.COUNTER:
            return Counter(metric.name, metric.help, metric.labels, registry=self._registry)
        buckets = metric.buckets or length_buckets
        return BatchHistogram(metric.name, metric.help, metric.labels, registry=self._registry, buckets=buckets)

    def flush(self) -> None:
        """Put into the metrics what comes with every step and token, and is only kept until now.

        Whoever reads them sees all of this process, and of others that share the folder what they have flushed.
        """
        for tally in self._tallies.values():
            tally.flush()
        news, self._news = self._news, {}
        for rank, record in news.items():
            self._show_load(rank, record)

    def tally(self, rank: int) -> TokenTally:
        """Where tokens of a rank are counted."""
        tally = self._tallies.get(rank)
        if tally is None:
            tally = self._tallies[rank] = TokenTally(
                self.of("vllm:generation_tokens_total", rank), self.of("vllm:inter_token_latency_seconds", rank)
            )
        return tally

    def exposition(self) -> bytes:
        """The text that /metrics serves, over all processes that share the folder."""
        self.flush()
        if not self._shared_dir:
            return prometheus_client.generate_latest(self._registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=self._shared_dir)
        return prometheus_client.generate_latest(registry)

    def of(self, name: str, rank: int, *labels: str) -> Any:
        """The child of an engine metric for a rank."""
        key = (name, str(rank), *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._by_name[name].labels(self.model_name, str(rank), *labels)
        return child

    # -- ranks ------------------------------------------------------------------------------------------------------

    def add_rank(self, rank: int) -> None:
        """Show the rank's series at 0 before anything happens to it, so that rates have a start."""
        for metric in METRICS:
            if metric.labels == ("model_name", "engine"):
                self.of(metric.name, rank)
        for reason in FINISH_REASONS:
            self.of("vllm:request_success_total", rank, reason)
        self.on_sleep(rank, "awake")

    def on_ready(self, rank: int, ready: ReadyResponse) -> None:
        """A rank told what it has."""
        self.add_rank(rank)
        self.of("vllm:cache_config_info", rank, str(ready.block_size), str(ready.num_gpu_blocks), ready.dtype).set(1)

    def on_rank(self, info: RankInfo) -> None:
        """A rank's state. One that may not get work shows no requests and no KV use: its old numbers mean nothing."""
        for state in RankState:
            self.of("dpi_rank_state", info.rank, state.value).set(1 if state is info.state else 0)
        self.of("dpi_rank_epoch", info.rank).set(info.epoch)
        if info.state not in (RankState.READY, RankState.SUSPECT):
            if (news := self._news.pop(info.rank, None)) is not None:
                self._show_load(info.rank, news)
            for name in (
                "vllm:num_requests_running",
                "vllm:num_requests_waiting",
                "vllm:kv_cache_usage_perc",
                "dpi_rank_waiting_tokens",
            ):
                self.of(name, info.rank).set(0)

    def on_sleep(self, rank: int, state: str) -> None:
        """A rank fell asleep or woke: `awake`, `weights_offloaded` or `discard_all`."""
        for known in SLEEP_STATES:
            self.of("vllm:engine_sleep_state", rank, known).set(1 if known == state else 0)

    def on_event(self, event: RankEvent) -> None:
        """A rank changed its state."""
        self.on_rank(RankInfo(rank=event.rank, state=event.state, epoch=event.epoch))

    def on_stats(self, rank: int, stats: LoadRecord | SchedulerStats) -> None:
        """News of a rank's load."""
        if isinstance(stats, LoadRecord):
            self._on_load(rank, stats)
        elif rank not in self._totals:  # a rank that sends load records has told all of it there
            self._on_deltas(rank, stats)

    def _on_load(self, rank: int, record: LoadRecord) -> None:
        """A numbered record of absolute numbers. Late ones, by epoch and sequence number, are ignored."""
        last = self._news.get(rank) or self._totals.get(rank)
        if last is not None and (record.epoch, record.seq) <= (last.epoch, last.seq):
            return
        if last is None or record.epoch != last.epoch:  # totals of two lives do not add up
            if (news := self._news.pop(rank, None)) is not None:
                self._show_load(rank, news)
            self._show_load(rank, record)
        else:
            self._news[rank] = record

    def _show_load(self, rank: int, record: LoadRecord) -> None:
        last = self._totals.get(rank)
        self._totals[rank] = record
        self.of("vllm:num_requests_running", rank).set(record.running)
        self.of("vllm:num_requests_waiting", rank).set(record.waiting)
        self.of("vllm:kv_cache_usage_perc", rank).set(record.kv_usage)
        self.of("dpi_rank_waiting_tokens", rank).set(record.waiting_tokens)
        self.on_sleep(rank, SLEEP_STATES[min(record.sleep_level, 2)])
        # The first record of all is where counting starts: another process may have counted what came before.
        if not self._primary or last is None:
            return
        restarted = record.epoch != last.epoch
        for name, now, before in (
            ("vllm:num_preemptions_total", record.preemptions, last.preemptions),
            ("vllm:prefix_cache_queries_total", record.prefix_queries, last.prefix_queries),
            ("vllm:prefix_cache_hits_total", record.prefix_hits, last.prefix_hits),
        ):
            self.of(name, rank).inc(max(now if restarted else now - before, 0))

    def _on_deltas(self, rank: int, stats: SchedulerStats) -> None:
        """Statistics as a vLLM engine sends them: changes since the last, each to one process only."""
        self.of("vllm:num_requests_running", rank).set(stats.num_running_reqs)
        self.of("vllm:num_requests_waiting", rank).set(stats.num_waiting_reqs + stats.num_skipped_waiting_reqs)
        self.of("vllm:kv_cache_usage_perc", rank).set(stats.kv_cache_usage)
        self.of("vllm:prefix_cache_queries_total", rank).inc(max(stats.prefix_cache_stats.queries, 0))
        self.of("vllm:prefix_cache_hits_total", rank).inc(max(stats.prefix_cache_stats.hits, 0))

    def on_iteration(self, rank: int, num_tokens: int) -> None:
        """An engine step computed this many tokens."""
        self.of("vllm:iteration_tokens_total", rank).observe(num_tokens)

    def watch(self, counters: WireCounters) -> None:
        """Show the counts of a wire client; `refresh` takes them over."""
        self._wire.append((counters, {}))

    def refresh(self, ranks: Iterable[RankInfo]) -> None:
        """Take over what is kept elsewhere: wire counts and the states of ranks. Called often, and before a scrape."""
        self.flush()
        for info in ranks:
            self.on_rank(info)
        for counters, seen in self._wire:
            for (socket, reason), count in counters.snapshot().items():
                new = count - seen.get((socket, reason), 0)
                if new > 0:
                    self._by_name["dpi_wire_malformed_frames_total"].labels(socket, reason).inc(new)
                    seen[socket, reason] = count

    # -- HTTP -------------------------------------------------------------------------------------------------------

    def on_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """An HTTP request was answered. `handler` is a route's template, or "unmatched"."""
        method = method if method in KNOWN_METHODS else "OTHER"
        group = "499" if status == 499 else f"{status // 100}xx"
        self._by_name["http_requests_total"].labels(handler, method, group).inc()
        self._by_name["http_request_duration_seconds"].labels(handler, method).observe(max(seconds, 0.0))

    def in_flight(self, change: int) -> None:
        """One more (+1) or less (-1) request for completions is being answered."""
        self._by_name["dpi_http_requests_in_flight"].labels(self.model_name).inc(change)

    def timer(self, *, num_prompt_tokens: int, n: int, max_tokens: int, arrival: float | None = None) -> RequestTimer:
        """A timer for one sequence, started now or at `arrival` (this object's clock)."""
        return RequestTimer(self, num_prompt_tokens, n, max_tokens, self.clock() if arrival is None else arrival)


class RequestTimer:
    """What one sequence contributes to the metrics. Durations are of this process's monotonic clock, in seconds.

    Queue, prefill and inference time need to know when the engine took the request up; they are only observed when the
    engine's events say so.
    """

    __slots__ = (
        "_arrival",
        "_done",
        "_first",
        "_last",
        "_max_tokens",
        "_metrics",
        "_n",
        "_num_prompt",
        "_num_tokens",
        "_queue",
        "_rank",
        "_tally",
    )

    def __init__(self, metrics: Metrics, num_prompt_tokens: int, n: int, max_tokens: int, arrival: float) -> None:
        self._metrics = metrics
        self._num_prompt = num_prompt_tokens
        self._n = n
        self._max_tokens = max_tokens
        self._arrival = arrival
        self._first: float | None = None
        self._last = arrival
        self._num_tokens = 0
        self._rank = 0
        self._queue: float | None = None
        self._done = False
        self._tally: TokenTally | None = None

    def tokens(self, count: int, rank: int, cached_tokens: int | None = None) -> None:
        """`count` tokens arrived from `rank`."""
        if count <= 0:
            self._rank = rank
            return
        metrics, now = self._metrics, self._metrics.clock()
        tally = self._tally
        if tally is None or rank != self._rank:
            tally = self._tally = metrics.tally(rank)
        self._rank = rank
        if self._first is None:
            self._first = now
            metrics.of("vllm:prompt_tokens_total", rank).inc(self._num_prompt)
            if cached_tokens:
                metrics.of("vllm:prompt_tokens_cached_total", rank).inc(max(cached_tokens, 0))
            metrics.of("vllm:time_to_first_token_seconds", rank).observe(max(now - self._arrival, 0.0))
        else:
            # Merged deltas: the time is shared out, so that the count of intervals stays the count of tokens.
            tally.interval(max(now - self._last, 0.0) / count, count)
        self._last = now
        self._num_tokens += count
        tally.tokens += count

    def events(self, events: list[EngineCoreEvent]) -> None:
        """The engine's own marks; only their distances are used, since its clock may be another machine's."""
        queued = next((e.timestamp for e in events if e.type is EventType.QUEUED), None)
        scheduled = next((e.timestamp for e in events if e.type is EventType.SCHEDULED), None)
        if self._queue is None and queued is not None and scheduled is not None:
            self._queue = max(scheduled - queued, 0.0)

    def discard(self) -> None:
        """The sequence never reached a rank: it counts for none."""
        self._done = True

    def finished(self, reason: str) -> None:
        """The sequence ended; only the first call counts."""
        if self._done:
            return
        self._done = True
        metrics, rank = self._metrics, self._rank
        metrics.flush()
        metrics.of("vllm:request_success_total", rank, reason if reason in FINISH_REASONS else "error").inc()
        metrics.of("vllm:request_params_n", rank).observe(self._n)
        metrics.of("vllm:request_params_max_tokens", rank).observe(self._max_tokens)
        metrics.of("vllm:request_prompt_tokens", rank).observe(self._num_prompt)
        metrics.of("vllm:request_generation_tokens", rank).observe(self._num_tokens)
        metrics.of("vllm:request_max_num_generation_tokens", rank).observe(self._num_tokens)
        if self._first is None:
            return
        e2e = max(self._last - self._arrival, 0.0)
        decode = max(self._last - self._first, 0.0)
        metrics.of("vllm:e2e_request_latency_seconds", rank).observe(e2e)
        metrics.of("vllm:request_decode_time_seconds", rank).observe(decode)
        if self._num_tokens > 1:
            per_token = decode / (self._num_tokens - 1)
            metrics.of("vllm:request_time_per_output_token_seconds", rank).observe(per_token)
        if self._queue is not None:
            prefill = max(self._first - self._arrival - self._queue, 0.0)
            metrics.of("vllm:request_queue_time_seconds", rank).observe(self._queue)
            metrics.of("vllm:request_prefill_time_seconds", rank).observe(prefill)
            metrics.of("vllm:request_inference_time_seconds", rank).observe(prefill + decode)


def forget_process(pid: int) -> None:
    """An API server process ended: its gauges are withdrawn from the shared folder, its counts stay."""
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        prometheus_client.multiprocess.mark_process_dead(pid)
