"""docs/reference/status.md and charts.md from the CRD and the charts: see tools/manifests.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "engine"), str(ROOT / "operator"), str(ROOT / "tools")]

import chart_docs  # noqa: E402

from dpi_operator.api.cel import RULES  # noqa: E402
from dpi_operator.api.crd import COLUMNS, open_api_schema  # noqa: E402

STATUS_HEAD = """# Columns, status and rules of a DataParallelInference

<!-- Generated from the types of the object by `python tools/manifests.py`; edit the types. -->

The fields of `spec` are in [the manifest's reference](manifest.md), and in a cluster with the CRD in
`kubectl explain dpi.spec`.
"""

CHARTS_HEAD = """# Values of the charts

<!-- Generated from the charts' values.yaml by `python tools/manifests.py`; edit those. -->
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, below in schema.get("properties", {}).items():
        here = f"{path}.{name}"
        yield here + ("[]" if below["type"] == "array" else ""), below
        inner = below.get("items", {}) if below["type"] == "array" else below
        yield from _fields(inner, here + ("[]" if below["type"] == "array" else ""))


def status_page() -> str:
    """docs/reference/status.md"""
    lines = [STATUS_HEAD, "## `kubectl get dpi`", "", "| column | shown | from | meaning |", "|---|---|---|---|"]
    for c in COLUMNS:
        shown = "with `-o wide`" if c.get("priority") else "always"
        lines.append(f"| {c['name'].upper()} | {shown} | `{_cell(c['jsonPath'])}` | {c['description']} |")
    lines += ["", "## `status`", "", "| field | type | meaning |", "|---|---|---|"]
    for path, schema in _fields(open_api_schema()["properties"]["status"], "status"):
        lines.append(f"| `{path}` | {schema['type']} | {_cell(schema.get('description', ''))} |")
    lines += [
        "",
        "## Rules over several fields",
        "",
        "The API server refuses an object that breaks one; `dpi up` and the operator refuse it with the same words.",
        "",
        "| field | refused with |",
        "|---|---|",
    ]
    lines += [f"| `{rule.path}` | {_cell(rule.message)} |" for rule in RULES]
    return "\n".join(lines) + "\n"


def charts_page() -> str:
    """docs/reference/charts.md"""
    parts = [CHARTS_HEAD]
    for chart, text in (
        ("dpi-operator", "The operator, its rights, metrics, alerts and dashboards."),
        ("dpi", "One object; every field of its spec is a key, see [the manifest's reference](manifest.md)."),
    ):
        source = (ROOT / f"charts/{chart}/values.yaml").read_text(encoding="utf-8")
        table = chart_docs.table(yaml.safe_load(source), chart_docs.comments(source))
        parts.append(f"\n## {chart}\n\n{text}\n\n{table}\n")
    return "".join(parts)
