"""The plain Prometheus configuration finds what the PodMonitor finds, under the same labels."""

import re
import shutil
import subprocess

import pytest
import yaml
from chart_render import ROOT

from dpi_operator.api.read import read_document
from dpi_operator.plan.network import Cluster
from dpi_operator.plan.podmonitor import build_pod_monitor, meta_label
from dpi_operator.plan.pods import plan_group
from dpi_operator.plan.podspec import build_pod

FILE = ROOT / "manifests/prometheus/scrape.yaml"
JOBS = {j["job_name"]: j for j in yaml.safe_load(FILE.read_text())["scrape_configs"]}


def demo(runtime):
    return read_document(
        {
            "apiVersion": "dpinference.dev/v1alpha1",
            "kind": "DataParallelInference",
            "metadata": {"name": "demo", "namespace": "ns"},
            "spec": {
                "model": {"name": "m"},
                "engine": {"image": "e", "runtime": runtime},
                "parallelism": {"dataParallelSize": 2},
                "metrics": {"podMonitor": {"enabled": True}},
            },
        },
        "test",
    )


def pods(dpi):
    return [build_pod(dpi, p, "abc") for p in plan_group(dpi, 0, Cluster("demo", "ns"), "abc")]


def targets(pod):
    """A target per declared port, as the discovery of pods gives them."""
    labels = {meta_label(k): v for k, v in pod["metadata"]["labels"].items()}
    for port in pod["spec"]["containers"][0]["ports"]:
        yield labels | {
            "__meta_kubernetes_namespace": pod["metadata"]["namespace"],
            "__meta_kubernetes_pod_name": pod["metadata"]["name"],
            "__meta_kubernetes_pod_phase": "Running",
            "__meta_kubernetes_pod_container_port_name": port["name"],
        }


def relabelled(target, rules):
    """Prometheus's relabeling with its defaults (separator `;`, whole match, replacement `$1`). None: dropped."""
    labels = dict(target)
    for rule in rules:
        value = ";".join(labels.get(name, "") for name in rule["source_labels"])
        found = re.fullmatch(rule.get("regex", "(.*)"), value)
        action = rule.get("action", "replace")
        if (action == "keep" and not found) or (action == "drop" and found):
            return None
        if action == "replace" and found:
            labels[rule["target_label"]] = found[1]
    return {k: v for k, v in labels.items() if not k.startswith("__")}


def monitored(dpi):
    """What the Prometheus operator makes of the PodMonitor: port name, then its own labels, then the relabelings."""
    monitor = build_pod_monitor(dpi)
    selector = monitor["spec"]["selector"]["matchLabels"]
    for pod in pods(dpi):
        assert selector.items() <= pod["metadata"]["labels"].items()
        for target in targets(pod):
            for endpoint in monitor["spec"]["podMetricsEndpoints"]:
                rules = [
                    {
                        "source_labels": ["__meta_kubernetes_pod_container_port_name"],
                        "regex": endpoint["port"],
                        "action": "keep",
                    },
                    {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
                    {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
                ]
                for given in endpoint["relabelings"]:
                    snake = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
                    rules.append({snake.get(k, k): v for k, v in given.items()})
                if (labels := relabelled(target, rules)) is not None:
                    yield labels


@pytest.mark.parametrize("runtime", ["dpi", "vllm"])
def test_both_ways_give_the_same_targets_and_labels(runtime):
    dpi, job = demo(runtime), JOBS["dpi-engines"]
    (discovery,) = job["kubernetes_sd_configs"]
    selector = dict(part.split("=") for part in discovery["selectors"][0]["label"].split(","))
    plain = []
    for pod in pods(dpi):
        assert selector.items() <= pod["metadata"]["labels"].items()
        plain += [found for t in targets(pod) if (found := relabelled(t, job["relabel_configs"])) is not None]
    assert plain == list(monitored(dpi))
    assert [p["pod"] for p in plain] == (["demo-abc-0-0", "demo-abc-0-1"] if runtime == "dpi" else ["demo-abc-0-0"])
    assert plain[0] == {"namespace": "ns", "pod": "demo-abc-0-0", "dpi": "demo", "group": "demo-abc-0"}


def test_ended_pods_are_no_targets():
    job = JOBS["dpi-engines"]
    for target in targets(pods(demo("dpi"))[0]):
        assert relabelled(target | {"__meta_kubernetes_pod_phase": "Failed"}, job["relabel_configs"]) is None


def test_the_page_shows_the_file():
    """The block in the page is the file without its comments on top."""
    text = FILE.read_text()
    jobs = text[text.index("scrape_configs:") :]
    assert f"```yaml\n{jobs}```" in (ROOT / "docs/how-to/monitor.md").read_text()


def _check(file):
    done = subprocess.run(
        ["promtool", "check", "config", "--syntax-only", str(file)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian package prometheus)")
def test_promtool_finds_no_fault(tmp_path):
    code, said = _check(FILE)
    if "field kubernetes_sd_configs not found" in said:  # Debian's build has no such discovery: the rest is checked
        for job in JOBS.values():
            static = {"targets": ["a:1"]}
            other = {k: v for k, v in job.items() if k != "kubernetes_sd_configs"} | {"static_configs": [static]}
            (tmp_path / "scrape.yaml").write_text(yaml.safe_dump({"scrape_configs": [other]}))
            code, said = _check(tmp_path / "scrape.yaml")
            assert code == 0, said
    assert code == 0, said
