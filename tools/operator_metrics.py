"""docs/reference/operator-metrics.md from the operator's registry of metrics: `python tools/operator_metrics.py`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "engine"), str(ROOT / "operator")]

from prometheus_client import ProcessCollector  # noqa: E402
from prometheus_client.metrics import MetricWrapperBase  # noqa: E402

from dpi_operator.telemetry import REGISTRY  # noqa: E402

HEAD = """# Metrics of the operator

<!-- Generated from the operator's registry by `python tools/operator_metrics.py`; edit dpi_operator/telemetry.py. -->

Served at `/metrics` on the operator's metrics port. `namespace` and `name` are those of a DataParallelInference, not
of the operator: scrape with `honor_labels: true`, as the chart's ServiceMonitor does. `group` is the name of a group:
object, revision and index. The usual `process_*` metrics of a Linux process are there too.

| name | type | labels | meaning |
|---|---|---|---|
"""


def page() -> str:
    """The page; metrics in the order of their names."""
    rows = []
    for collector in list(REGISTRY._collector_to_names):
        if isinstance(collector, ProcessCollector):  # what it has depends on the machine
            continue
        for family in collector.collect():
            labels = (collector if isinstance(collector, MetricWrapperBase) else family)._labelnames
            name = family.name + ("_total" if family.type == "counter" else "")
            listed = ", ".join(f"`{label}`" for label in labels)
            rows.append(f"| `{name}` | {family.type} | {listed} | {family.documentation} |\n")
    return HEAD + "".join(sorted(rows))


if __name__ == "__main__":
    sys.stdout.write(page())
