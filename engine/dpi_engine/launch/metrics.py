"""`/metrics` of a pod's management port: what its front ends count, its own ranks, and the launcher's own numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import prometheus_client
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector, CollectorRegistry

from dpi_engine.launch.view import PodState
from dpi_engine.server import metrics_table as table
from dpi_engine.wire.counters import WireCounters
from dpi_engine.wire.errors import Refusal
from dpi_engine.wire.messages import LoadRecord, RankState

MALFORMED = "dpi_wire_malformed_frames_total"
REFUSALS = "dpi_handshake_refusals_total"
REFUSAL_REASONS = {r.value for r in Refusal} - {Refusal.BAD_MESSAGE.value, Refusal.BAD_IDENTITY.value}
"""Well-formed messages of ranks that may not join; what is no message at all counts as malformed."""

RANK_GAUGES = (
    ("vllm:num_requests_running", lambda load: load.running),
    ("vllm:num_requests_waiting", lambda load: load.waiting),
    ("vllm:kv_cache_usage_perc", lambda load: load.kv_usage),
    ("dpi_rank_waiting_tokens", lambda load: load.waiting_tokens),
)
RANK_COUNTERS = (
    ("vllm:num_preemptions_total", lambda load: load.preemptions),
    ("vllm:prefix_cache_queries_total", lambda load: load.prefix_queries),
    ("vllm:prefix_cache_hits_total", lambda load: load.prefix_hits),
)

LOCKSTEP_GAUGES = (("dpi_lockstep_group", lambda report: report.group),)
LOCKSTEP_COUNTERS = (
    ("dpi_lockstep_waves_total", lambda report: report.waves),
    ("dpi_lockstep_syncs_total", lambda report: report.syncs),
    ("dpi_lockstep_dummy_steps_total", lambda report: report.dummy_steps),
    ("dpi_lockstep_group_breaks_total", lambda report: report.breaks),
    ("dpi_lockstep_groups_formed_total", lambda report: report.formed),
    ("dpi_lockstep_exchange_seconds_total", lambda report: report.exchange_s),
)

HELP = {m.name: m.help for m in (*table.METRICS, *table.POD_METRICS)}


def _gauge(name: str, labels: tuple[str, ...]) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, HELP[name], labels=labels)


def _counter(name: str, labels: tuple[str, ...]) -> CounterMetricFamily:
    return CounterMetricFamily(name.removesuffix("_total"), HELP[name], labels=labels)


class PodMetrics(Collector):
    """Collects from the pod's state at each scrape."""

    def __init__(self, state: PodState, counters: WireCounters, model: str, restarts: dict[str, int]) -> None:
        self._state, self._counters, self._model, self._restarts = state, counters, model, restarts
        self._folder: Path | None = None

    def render(self, folder: Path | None) -> tuple[bytes, str]:
        """Body and content type. `folder`: where the API servers keep their values, or have folders of their own."""
        self._folder = folder if folder is not None and folder.is_dir() else None
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        prometheus_client.ProcessCollector(registry=registry)
        return prometheus_client.generate_latest(registry), prometheus_client.CONTENT_TYPE_LATEST

    def forget_process(self, pid: int | None) -> None:
        """An API server ended: its gauges go, its counts stay."""
        if pid is not None and self._folder is not None:
            for folder in [self._folder, *(f for f in self._folder.iterdir() if f.is_dir())]:
                with contextlib.suppress(OSError):
                    mark_process_dead(pid, path=str(folder))

    def collect(self) -> Iterable[Metric]:
        yield from self._front_ends()
        if self._state.headless:
            yield from self._own_ranks(self._state.loads())
        yield from self._pod()

    def _front_ends(self) -> Iterator[Metric]:
        files = [] if self._folder is None else [str(f) for f in self._folder.rglob("*.db")]
        for family in MultiProcessCollector.merge(files, accumulate=True) if files else ():
            # Counted below over all processes of the pod, the API servers included.
            if family.name != MALFORMED.removesuffix("_total"):
                yield family

    def _own_ranks(self, loads: dict[int, LoadRecord]) -> Iterator[Metric]:
        """A headless pod's ranks under the names that the head's front ends use."""
        labels = table.ENGINE_LABELS
        for name, value in RANK_GAUGES:
            gauge = _gauge(name, labels)
            for rank in self._state.local:
                load = loads.get(rank)
                gauge.add_metric([self._model, str(rank)], value(load) if load else 0)
            yield gauge
        for name, value in RANK_COUNTERS:
            counter = _counter(name, labels)
            for rank, load in sorted(loads.items()):
                counter.add_metric([self._model, str(rank)], value(load))
            yield counter
        states = _gauge("dpi_rank_state", (*labels, "state"))
        epochs = _gauge("dpi_rank_epoch", labels)
        for info in self._state.rank_infos():
            for state in RankState:
                states.add_metric([self._model, str(info.rank), state.value], float(state is info.state))
            epochs.add_metric([self._model, str(info.rank)], info.epoch)
        yield states
        yield epochs

    def _pod(self) -> Iterator[Metric]:
        ready = _gauge("dpi_pod_ready", ())
        ready.add_metric([], float(self._state.ready().ok))
        yield ready
        restarts = _counter("dpi_process_restarts_total", ("process",))
        for process, n in sorted(self._restarts.items()):
            restarts.add_metric([process], n)
        yield restarts
        if self._state.member:
            connected = _gauge("dpi_rank_head_connected", table.ENGINE_LABELS)
            for rank, (_, report) in sorted(self._state.engines.items()):
                joined = report.group_epoch > 0 and not report.head_lost
                connected.add_metric([self._model, str(rank)], float(joined))
            yield connected
        steps = _counter("dpi_engine_steps_total", table.ENGINE_LABELS)
        ages = _gauge("dpi_engine_step_age_seconds", table.ENGINE_LABELS)
        for rank, (_, report) in sorted(self._state.engines.items()):
            steps.add_metric([self._model, str(rank)], report.steps)
            ages.add_metric([self._model, str(rank)], report.step_age_s or 0.0)
        yield steps
        yield ages
        yield from self._lockstep()
        malformed = _counter(MALFORMED, ("socket", "reason"))
        total = self._state.malformed()
        for (socket, reason), n in self._counters.snapshot().items():
            total[f"{socket}:{reason}"] = total.get(f"{socket}:{reason}", 0) + n
        refused = _counter(REFUSALS, ("reason",))
        for key, n in sorted(total.items()):
            socket, reason = key.split(":", 1)
            if reason in REFUSAL_REASONS:
                refused.add_metric([reason], n)
            else:
                malformed.add_metric([socket, reason], n)
        yield malformed
        yield refused

    def _lockstep(self) -> Iterator[Metric]:
        """Of local ranks that share experts with others."""
        ranks = [(rank, r.lockstep) for rank, (_, r) in sorted(self._state.engines.items()) if r.lockstep is not None]
        if not ranks:
            return
        families = [(_gauge, *entry) for entry in LOCKSTEP_GAUGES] + [(_counter, *entry) for entry in LOCKSTEP_COUNTERS]
        for make, name, value in families:
            family = make(name, table.ENGINE_LABELS)
            for rank, report in ranks:
                family.add_metric([self._model, str(rank)], float(value(report)))
            yield family
