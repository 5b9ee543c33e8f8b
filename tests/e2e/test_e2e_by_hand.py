"""Two ranks in two pods without an operator: what a pod of the engine needs, and tokens through the Service.

The flags are the planner's; the pods and Services around them are written out here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from e2e_cluster import ROOT, Cluster, KubectlFailed

from dpi_operator.api.read import read_manifest
from dpi_operator.plan import network
from dpi_operator.plan.pods import PodPlan, Role, plan_group

pytestmark = pytest.mark.timeout(5400)

SAMPLE = ROOT / "manifests" / "samples" / "smollm2.yaml"
FIRST_TOKENS_S = 240
WRITABLE = {"tmp": "/tmp", "cache": "/var/cache/dpi", "shm": "/dev/shm"}

STREAM = """
import json, sys, urllib.request as u
body = {"model": sys.argv[2], "prompt": "The capital of France is", "max_tokens": 12, "temperature": 0, "stream": True}
request = u.Request(sys.argv[1] + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
text, pieces = "", 0
with u.urlopen(request, timeout=60) as answer:
    for line in answer:
        line = line.decode().strip()
        if line.startswith("data: ") and line != "data: [DONE]":
            text += json.loads(line[6:])["choices"][0]["text"]
            pieces += 1
print(json.dumps({"text": text, "pieces": pieces}))
"""
GET = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=10).read().decode())"


def probe(path: str, period_s: int, failures: int) -> dict[str, Any]:
    http = {"path": path, "port": "management"}
    return {"httpGet": http, "periodSeconds": period_s, "timeoutSeconds": 5, "failureThreshold": failures}


def pod_of(plan: PodPlan, name: str, image: str) -> dict[str, Any]:
    def field(variable: str, path: str) -> dict[str, Any]:
        return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}

    ports = [{"name": "management", "containerPort": plan.ports.management}]
    if plan.role is Role.RANK0:
        ports.append({"name": "http", "containerPort": plan.ports.http})
    engine = {
        "name": "engine",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        # The KV cache is bounded: both nodes may be on one machine.
        "args": [*plan.args, "--kv-cache-memory", "128MiB", "--cpu-threads", "1"],
        "env": [
            field("DPI_POD_IP", "status.podIP"),
            field("DPI_POD_NAME", "metadata.name"),
            field("DPI_POD_NAMESPACE", "metadata.namespace"),
        ],
        "ports": ports,
        "startupProbe": probe("/startupz", 1, 600),
        "readinessProbe": probe("/readyz", 1, 3),
        "livenessProbe": probe("/livez", 5, 3),
        "lifecycle": {"preStop": {"sleep": {"seconds": 2}}},
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "3Gi"}},
        "securityContext": {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in WRITABLE.items()],
    }
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"dpi": name}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": plan.name, "labels": {"dpi": name, "role": plan.role.value}},
        "spec": {
            "hostname": plan.name,
            "subdomain": f"{name}-internal",
            "restartPolicy": "Never",
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 15,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "topologySpreadConstraints": [spread],
            "containers": [engine],
            "volumes": [
                {"name": "tmp", "emptyDir": {}},
                {"name": "cache", "emptyDir": {}},
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}},
            ],
        },
    }


def services_of(name: str, rpc: int) -> list[dict[str, Any]]:
    internal = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"dpi": name},
        "ports": [{"name": "rpc", "port": rpc}],
    }
    client = {
        "selector": {"dpi": name, "role": Role.RANK0.value},
        "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
    }
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": f"{name}-internal"}, "spec": internal},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": client},
    ]


def test_two_pods_join_over_the_network_and_stream_tokens_through_the_service(
    cluster: Cluster, namespace: str, engine_image: str, client_pod: Callable[..., str]
) -> None:
    dpi = read_manifest(str(SAMPLE))
    name = dpi.metadata.name
    plans = plan_group(dpi, 0, network.Cluster(name, namespace))
    pods = [pod_of(plan, name, engine_image) for plan in plans]
    cluster.apply(namespace, [*services_of(name, plans[0].ports.rpc), *pods])
    cluster.wait_ready(namespace, *(plan.name for plan in plans), deadline_s=FIRST_TOKENS_S)

    placed = [cluster.get("pod", plan.name, "--namespace", namespace) for plan in plans]
    if cluster.local:
        assert len({pod["spec"]["nodeName"] for pod in placed}) == len(plans)

    for folder in ("/", "/opt/dpinference", "/models"):
        with pytest.raises(KubectlFailed, match="Read-only file system"):
            cluster.exec(namespace, plans[0].name, "touch", f"{folder}/written")

    endpoint = f"http://{name}.{namespace}.svc.cluster.local"
    served = dpi.spec.model.served_name or dpi.spec.model.name
    answers = [json.loads(client_pod(STREAM, endpoint, served, timeout_s=90)) for _ in range(4)]
    assert {answer["text"] for answer in answers} == {answers[0]["text"]}, "greedy answers of both ranks are equal"
    assert "Paris" in answers[0]["text"]
    assert answers[0]["pieces"] > 3, "the answer came as a stream"

    ranks = json.loads(
        client_pod(GET, f"http://{plans[0].name}.{name}-internal.{namespace}:{plans[0].ports.management}/ranks")
    )["ranks"]
    assert [(rank["rank"], rank["state"], rank["pod"]) for rank in ranks] == [
        (plan.rank_start, "READY", plan.name) for plan in plans
    ]
    assert all(rank["steps"] > 0 for rank in ranks), "every rank has computed"
