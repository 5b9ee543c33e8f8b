"""Metrics of the operator itself and of every rank it looks after."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dpi_operator.plan.groups import Group

REGISTRY = CollectorRegistry(auto_describe=True)

API_REQUESTS = Counter(
    "dpi_api_requests_total", "Calls of the Kubernetes API.", ["verb", "resource", "code"], registry=REGISTRY
)
RECONCILES = Counter("dpi_reconcile_total", "Reconciliations by outcome.", ["result"], registry=REGISTRY)
RECONCILE_SECONDS = Histogram(
    "dpi_reconcile_duration_seconds",
    "Time from the snapshot to the last write.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60),
    registry=REGISTRY,
)
RESTARTS = Counter(
    "dpi_group_restarts_total",
    "Recreations of pods and groups after failures.",
    ["namespace", "name", "reason"],
    registry=REGISTRY,
)
MISMATCHES = Counter(
    "dpi_config_mismatch_total",
    "Specs refused because their pods would not agree.",
    ["namespace", "name"],
    registry=REGISTRY,
)
HANDSHAKE_SECONDS = Histogram(
    "dpi_handshake_duration_seconds",
    "Time from the start of a group's last container until all its ranks serve.",
    buckets=(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600),
    registry=REGISTRY,
)
STARTUP_SECONDS = Histogram(
    "dpi_startup_phase_seconds",
    "Time that a group spends in a phase of its start.",
    ["phase"],
    buckets=(0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600),
    registry=REGISTRY,
)
LAST_EVENT = Gauge("dpi_last_event_timestamp_seconds", "When the last watch event came.", registry=REGISTRY)
LAST_LIST = Gauge(
    "dpi_last_list_timestamp_seconds",
    "When all objects were last listed, which happens every minute: the sign that the API server answers.",
    registry=REGISTRY,
)
LEADER = Gauge("dpi_operator_leader", "1 while this process holds the lease.", registry=REGISTRY)

PHASES = ("Pending", "Scheduling", "Starting", "Handshake", "Ready", "Draining", "Recovering", "Failed")


class RankCollector(Collector):
    """Groups and ranks as they were last seen, by (namespace, name) of their object."""

    def __init__(self) -> None:
        self._objects: dict[tuple[str, str], list[tuple[Group, str]]] = {}

    def set(self, namespace: str, name: str, groups: Iterable[tuple[Group, str]]) -> None:
        """`groups` with their phases."""
        self._objects[(namespace, name)] = list(groups)

    def forget(self, namespace: str, name: str) -> None:
        self._objects.pop((namespace, name), None)

    def collect(self) -> Iterator[Metric]:
        rank_labels = ("namespace", "name", "group", "rank")
        state = GaugeMetricFamily(
            "dpi_group_state", "1 for the phase a group is in.", labels=("namespace", "name", "group", "state")
        )
        ready = GaugeMetricFamily("dpi_rank_ready", "1 while a rank serves.", labels=rank_labels)
        waiting = GaugeMetricFamily("dpi_rank_requests_waiting", "Requests that wait in a rank.", labels=rank_labels)
        running = GaugeMetricFamily("dpi_rank_requests_running", "Requests that run in a rank.", labels=rank_labels)
        usage = GaugeMetricFamily(
            "dpi_rank_kv_cache_usage_ratio", "Share of a rank's KV cache blocks in use.", labels=rank_labels
        )
        imbalance = GaugeMetricFamily(
            "dpi_rank_queue_imbalance_ratio",
            "Longest queue of a group divided by the mean of its queues.",
            labels=("namespace", "name", "group"),
        )
        for (namespace, name), groups in list(self._objects.items()):
            for group, phase in groups:
                where = [namespace, name, group.name]
                for known in PHASES:
                    state.add_metric([*where, known], float(known == phase))
                reports, missing = group.rank_reports(), set(group.missing())
                for rank in range(group.size):
                    ready.add_metric([*where, str(rank)], float(rank not in missing))
                    report = reports.get(rank)
                    if report is None or report.waiting is None:
                        continue
                    waiting.add_metric([*where, str(rank)], report.waiting)
                    running.add_metric([*where, str(rank)], report.running or 0)
                    if report.kv_usage is not None:
                        usage.add_metric([*where, str(rank)], report.kv_usage)
                queues = [r.waiting + (r.running or 0) for r in reports.values() if r.waiting is not None]
                if queues:
                    mean = sum(queues) / len(queues)
                    imbalance.add_metric(where, max(queues) / mean if mean else 1.0)
        return iter((state, ready, waiting, running, usage, imbalance))


RANKS = RankCollector()
REGISTRY.register(RANKS)
ProcessCollector(registry=REGISTRY)


def render() -> bytes:
    """Everything in Prometheus's text format."""
    return generate_latest(REGISTRY)
