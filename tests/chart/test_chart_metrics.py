"""Dashboards and alerts ask only for metrics that exist; alerts fire when they should."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import ProcessCollector

from dpi_operator.telemetry import REGISTRY

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/dpi-operator"
ALERTS = CHART / "files/alerts.yaml"
DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))


def documented():
    """{metric: labels} of the references."""
    found = {}
    for page in ("docs/reference/metrics.md", "docs/reference/operator-metrics.md"):
        for name, kind, labels in re.findall(r"^\| `([\w:]+)` \| (\w+) \| (.*?) \|", (ROOT / page).read_text(), re.M):
            names = [name] + [name + s for s in ("_bucket", "_sum", "_count") if kind == "histogram"]
            for each in names:
                found[each] = set(re.findall(r"`(\w+)`", labels))
    if any(isinstance(c, ProcessCollector) for c in REGISTRY._collector_to_names):
        found |= {"process_cpu_seconds_total": set(), "process_resident_memory_bytes": set()}
    return found


METRICS = documented()
ENGINE = ("vllm:", "dpi_engine", "dpi_lockstep", "dpi_rank_epoch", "dpi_requests_replayed")
"""Names that engines give: `dpi` and `group` are labels of the pod then."""


def expressions():
    for file in DASHBOARDS:
        dashboard = json.loads(file.read_text())
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                yield f"{file.stem}: {panel['title']}", target["expr"]
        for variable in dashboard["templating"]["list"]:
            if m := re.match(r"label_values\((.*), \w+\)$", str(variable.get("definition", ""))):
                yield f"{file.stem}: ${variable['name']}", m[1]
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def selectors(expr):
    """(metric, its label matchers) of every selector in an expression."""
    for name, matchers in re.findall(
        r"\b((?:dpi|vllm|http|process)[\w:]*)(\{[^}]*\})?", re.sub(r'"[^"]*"', '""', expr)
    ):
        if name != "dpi":
            yield name, set(re.findall(r"(\w+)\s*[=!]~?", matchers))


@pytest.mark.parametrize(("where", "expr"), list(expressions()))
def test_metrics_and_labels_exist(where, expr):
    found = list(selectors(expr))
    assert found, "no metric at all"
    for name, labels in found:
        assert name in METRICS, name
        scraped = {"pod", "namespace", "instance", "job"}
        scraped |= {"dpi", "group"} if name.startswith(ENGINE) else set()
        assert labels <= METRICS.get(name, set()) | scraped, name


def test_dashboards_are_whole():
    assert len(DASHBOARDS) == 3
    uids = set()
    for file in DASHBOARDS:
        dashboard = json.loads(file.read_text())
        uids.add(dashboard["uid"])
        ids = [p["id"] for p in dashboard["panels"]]
        assert len(set(ids)) == len(ids)
        taken = set()
        for panel in dashboard["panels"]:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert at["x"] + at["w"] <= 24 and not cells & taken, f"{file.stem}: {panel['title']} overlaps"
            taken |= cells
            if panel["type"] != "row":
                assert panel["description"].endswith("."), panel["title"]
                assert panel["datasource"]["uid"] == "${datasource}"
    assert len(uids) == 3


def test_every_rule_tells_what_happened_and_what_to_do():
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in {"critical", "warning"}
            assert set(rule["annotations"]) == {"summary", "description"}


def test_every_alert_has_a_case():
    cases = (Path(__file__).parent / "alerts_test.yaml").read_text()
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            assert f'"{rule["alert"]}"' in cases or f"alertname: {rule['alert']}\n" in cases, rule["alert"]


promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian package prometheus)")


@promtool
def test_promtool_finds_no_fault_in_the_rules():
    done = subprocess.run(["promtool", "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_alerts_fire_when_they_should_and_only_then(tmp_path):
    text = (Path(__file__).parent / "alerts_test.yaml").read_text()
    case = tmp_path / "alerts_test.yaml"
    case.write_text(text.replace("[RULES]", f"[{json.dumps(str(ALERTS))}]"))
    done = subprocess.run(["promtool", "test", "rules", str(case)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_expressions_of_dashboards_are_promql(tmp_path):
    groups = [
        {"record": f"x:{i}", "expr": expr.replace("$__rate_interval", "5m")}
        for i, (_, expr) in enumerate(expressions())
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "x", "rules": groups}]}))
    done = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
