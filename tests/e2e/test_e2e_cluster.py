"""The cluster itself works: nodes, pods of our image, Services, names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from e2e_cluster import Cluster, is_ready

pytestmark = pytest.mark.timeout(5400)

GET = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=10).read().decode())"
SERVE = """
import http.server, os

class Name(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.uname().nodename.encode())

http.server.ThreadingHTTPServer(("", 8000), Name).serve_forever()
"""


def test_nodes_are_ready(cluster: Cluster) -> None:
    nodes = cluster.get("nodes")
    assert nodes and all(is_ready(node) for node in nodes)
    if cluster.local:
        assert len(nodes) >= 2, "the local cluster is made of several nodes"


def test_pods_of_our_image_on_all_nodes_answer_behind_a_service(
    cluster: Cluster, namespace: str, operator_image: str, client_pod: Callable[..., str]
) -> None:
    replicas = 2
    labels = {"app": "names"}
    container = {
        "name": "names",
        "image": operator_image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", SERVE],
        "ports": [{"containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1},
        "securityContext": {
            "runAsNonRoot": True,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
    }
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels},
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "names"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "terminationGracePeriodSeconds": 0,
                    "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
                    "topologySpreadConstraints": [spread],
                    "containers": [container],
                },
            },
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "names"},
        "spec": {"selector": labels, "ports": [{"port": 80, "targetPort": 8000}]},
    }
    cluster.apply(namespace, [deployment, service])
    cluster.kubectl("rollout", "status", "deployment/names", "--namespace", namespace, "--timeout=90s", timeout_s=100)
    pods = cluster.get("pods", "--namespace", namespace, "-l", "app=names")
    if cluster.local:
        assert len({pod["spec"]["nodeName"] for pod in pods}) == replicas

    names = {pod["metadata"]["name"] for pod in pods}
    seen: set[str] = set()

    def all_answered() -> bool:
        seen.add(client_pod(GET, f"http://names.{namespace}.svc.cluster.local/").strip())
        return seen == names

    cluster.wait("an answer of every pod through the Service's name", all_answered, deadline_s=60)
