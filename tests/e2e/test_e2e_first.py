"""The first way through: Helm, one YAML, Ready, tokens; and everything that then tells of it."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e_cluster import ROOT, Cluster, program
from e2e_install import NAMESPACE, Install
from e2e_service import ENGINE_ARGS, READY_S, Client, Service

from dpi_operator.handlers.service import EXIT_LEASE_LOST

pytestmark = pytest.mark.timeout(5400)

SAMPLE = ROOT / "manifests" / "samples" / "smollm2.yaml"
SCRAPE = ROOT / "manifests" / "prometheus" / "scrape.yaml"


@pytest.fixture(scope="module")
def sample(cluster: Cluster, install: Install, shared_namespace: str, engine_image: str) -> dict[str, Any]:
    """The sample as it is, but for the image and what two pods on one small machine need."""
    document = yaml.safe_load(SAMPLE.read_text())
    document["spec"]["engine"] |= {"image": engine_image, "args": ENGINE_ARGS}
    document["spec"]["storage"] = {"sharedMemory": "256Mi"}
    return document


def test_what_helm_installed_works(operator: Install) -> None:
    said = operator.helm("test", "dpi", "--namespace", NAMESPACE, "--timeout", "120s", "--logs")
    assert "Succeeded" in said
    assert "FAILED" not in said
    pods = operator.pods()
    assert len(pods) == 2
    for pod in pods:
        container = pod["spec"]["containers"][0]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        ended = pod["status"]["containerStatuses"][0].get("lastState", {}).get("terminated")
        # A test before may have stopped the API server.
        assert ended is None or ended["exitCode"] == EXIT_LEASE_LOST, ended


def test_one_yaml_gives_tokens_through_the_service(
    cluster: Cluster,
    operator: Install,
    shared_namespace: str,
    sample: dict[str, Any],
    shared_client: Client,
    record_property: pytest.RecordProperty,
) -> None:
    service = Service(cluster, shared_namespace, sample["metadata"]["name"])
    began = time.monotonic()
    cluster.apply(shared_namespace, [sample])
    cluster.kubectl(
        "wait",
        "--for=condition=Ready",
        f"dpi/{service.name}",
        *service.inside,
        f"--timeout={READY_S}s",
        timeout_s=READY_S + 5,
    )
    text = shared_client.complete(service)
    took = time.monotonic() - began
    record_property("apply_to_first_tokens_s", round(took, 1))
    print(f"apply to first tokens: {took:.1f} s")
    assert "Paris" in text
    assert {shared_client.complete(service, rank) for rank in (0, 1)} == {text}
    pods = service.pods()
    assert [p["metadata"]["labels"]["dpinference.dev/role"] for p in pods] == ["rank0", "headless"]
    for condition, status in (("Accepted", "True"), ("ConfigConsistent", "True"), ("HandshakeComplete", "True")):
        assert service.conditions()[condition]["status"] == status
    assert service.wait_whole(60)["status"]["endpoint"] == f"http://smollm2.{shared_namespace}.svc:80"


def test_kubectl_answers_what_runs(
    cluster: Cluster, operator: Install, shared_namespace: str, sample: dict[str, Any]
) -> None:
    service = Service(cluster, shared_namespace, sample["metadata"]["name"])
    service.wait_whole()
    header, row = cluster.kubectl("get", "dpi", service.name, *service.inside, "-o", "wide").splitlines()
    for column in ("MODE", "GROUPS", "RANKS", "WAITING", "ENDPOINT", "REASON"):
        assert column in header
    waiting = cluster.wait("the queue's length", lambda: "waiting" in service.get()["status"] or None, 60)
    assert waiting
    assert "2/2" in row
    assert "Internal" in row
    described = cluster.kubectl("describe", "dpi", service.name, *service.inside)
    for said in ("GroupCreated", "GroupReady", "Config Consistent", "All ranks have joined"):
        assert said.replace(" ", "") in described.replace(" ", ""), described
    assert "How requests reach" in cluster.kubectl("explain", "dpi.spec.loadBalancing.mode")
    for rank in service.ranks():
        assert rank["state"] == "READY"
        assert rank["waiting"] == 0


def test_nothing_is_written_while_nothing_happens(
    cluster: Cluster, operator: Install, shared_namespace: str, sample: dict[str, Any]
) -> None:
    service = Service(cluster, shared_namespace, sample["metadata"]["name"])
    service.wait_whole()

    def versions() -> dict[str, str]:
        objects = cluster.get("pods,services,configmaps,networkpolicies,serviceaccounts", *service.inside)
        mine = [o for o in objects if o["metadata"].get("labels", {}).get("dpinference.dev/name") == service.name]
        mine.append(service.get())
        return {f"{o['kind']}/{o['metadata']['name']}": o["metadata"]["resourceVersion"] for o in mine}

    def settled() -> dict[str, str] | None:
        """What is there, once ten seconds have changed nothing of it: becoming ready has its last writes then."""
        first = versions()
        time.sleep(10)
        return first if versions() == first else None

    before = cluster.wait("no more writes", settled, 120)
    assert len(before) >= 7
    time.sleep(30)
    assert versions() == before


@contextlib.contextmanager
def prometheus(cluster: Cluster, folder: Path, config: dict[str, Any]) -> Iterator[str]:
    """A real Prometheus with this configuration; its URL."""
    binary = program("prometheus")
    if binary is None:
        pytest.skip("no prometheus in PATH (Debian: prometheus)")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    command = [binary, f"--config.file={file}", f"--storage.tsdb.path={folder}/data"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def discovered(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Targets with the labels that Prometheus's discovery of pods gives: Debian's is built without that."""

    def label(name: str) -> str:
        return re.sub(r"[^a-zA-Z0-9_]", "_", name)

    found = []
    for pod in pods:
        of_pod = {"namespace": pod["metadata"]["namespace"], "pod_name": pod["metadata"]["name"]}
        of_pod |= {f"pod_label_{label(k)}": v for k, v in pod["metadata"]["labels"].items()}
        of_pod["pod_phase"] = pod["status"]["phase"]
        for container in pod["spec"]["containers"]:
            for port in container.get("ports", []):
                labels = of_pod | {"pod_container_port_name": port["name"]}
                address = f"{pod['status']['podIP']}:{port['containerPort']}"
                meta = {f"__meta_kubernetes_{key}": value for key, value in labels.items()}
                found.append({"targets": [address], "labels": meta})
    return found


def test_a_real_prometheus_gets_the_queue_of_every_rank(
    cluster: Cluster, operator: Install, shared_namespace: str, sample: dict[str, Any], tmp_path: Path
) -> None:
    if not cluster.local:
        pytest.skip("Prometheus runs beside the cluster and reaches its pods only where the cluster is of this machine")
    service = Service(cluster, shared_namespace, sample["metadata"]["name"])
    service.wait_whole()
    config = yaml.safe_load(SCRAPE.read_text())
    for job in config["scrape_configs"]:
        job |= {"scrape_interval": "2s", "scrape_timeout": "2s"}
        (discovery,) = job.pop("kubernetes_sd_configs")
        (selector,) = discovery["selectors"]
        pods = cluster.get("pods", "--all-namespaces", "-l", selector["label"])
        file = tmp_path / f"{job['job_name']}.json"
        file.write_text(json.dumps(discovered(pods)))
        job["file_sd_configs"] = [{"files": [str(file)]}]
    with prometheus(cluster, tmp_path, config) as url:

        def ask(query: str) -> list[dict[str, Any]]:
            wanted = f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
            try:
                with urllib.request.urlopen(wanted, timeout=5) as answer:
                    return json.load(answer)["data"]["result"]
            except OSError:
                return []

        def all_ranks() -> bool:
            here = f'namespace="{shared_namespace}"'
            operators = ask(f'dpi_rank_requests_waiting{{name="{service.name}",{here}}}')
            engines = ask(f'vllm:num_requests_waiting{{dpi="{service.name}",{here}}}')
            by_operator = {r["metric"]["rank"] for r in operators}
            by_engine = {r["metric"]["engine"] for r in engines}
            return by_operator == by_engine == {"0", "1"}

        cluster.wait("queues of ranks 0 and 1, from the operator and from the engines", all_ranks, 90)
        cluster.wait("all engines scraped", lambda: ask("up") and not ask('up{job="dpi-engines"} == 0'), 60)


def test_deleting_the_object_leaves_nothing_of_it(
    cluster: Cluster, operator: Install, shared_namespace: str, sample: dict[str, Any]
) -> None:
    service = Service(cluster, shared_namespace, sample["metadata"]["name"])
    cluster.kubectl("delete", "dpi", service.name, *service.inside, "--timeout=60s", timeout_s=70)
    kinds = "pods,services,configmaps,networkpolicies,serviceaccounts,poddisruptionbudgets,controllerrevisions"
    kinds += ",endpointslices"

    def gone() -> bool:
        return not cluster.get(kinds, *service.inside, "-l", f"dpinference.dev/name={service.name}")

    cluster.wait("all that was made for the object is gone", gone, 90)
