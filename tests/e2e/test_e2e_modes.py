"""The other load-balancing modes: endpoints in every pod, ports per rank, Services per rank."""

from __future__ import annotations

import json

import pytest
from e2e_cluster import Cluster, KubectlFailed
from e2e_install import Install
from e2e_service import MODEL, Client, Service, made

pytestmark = pytest.mark.timeout(5400)

# Completions on new connections until every pod behind the Service has answered; prints who did.
SPREAD = """
import json, sys, time, urllib.request as u
url, model, wanted = sys.argv[1], sys.argv[2], int(sys.argv[3])
body = json.dumps({"model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}).encode()
texts, n, end = set(), 0, time.monotonic() + 60
while n < wanted and time.monotonic() < end:
    request = u.Request(url + "/v1/completions", body, {"Content-Type": "application/json", "Connection": "close"})
    with u.urlopen(request, timeout=30) as answer:
        texts.add(json.load(answer)["choices"][0]["text"])
    n += 1
print(json.dumps({"texts": sorted(texts), "requests": n}))
"""
GET = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=10).status)"


def steps(service: Service) -> dict[int, int]:
    """Steps that every rank has computed, as its own pod says."""
    found: dict[int, int] = {}
    for pod in service.pods():
        labels = pod["metadata"]["labels"]
        first, count = int(labels["dpinference.dev/rank-start"]), int(labels["dpinference.dev/rank-count"])
        report = service.engine_report(pod["metadata"]["name"])
        found |= {r["rank"]: r["steps"] for r in report["ranks"] if first <= r["rank"] < first + count}
    return found


def ask(client: Client, url: str, wanted: int = 1) -> str:
    """The one text of `wanted` requests, each on a connection of its own."""
    answer = json.loads(client.python(SPREAD, url, MODEL, str(wanted)))
    assert answer["requests"] == wanted
    assert len(answer["texts"]) == 1, answer
    return answer["texts"][0]


def test_external_every_rank_has_an_endpoint_and_a_service_and_is_replaced_alone(
    cluster: Cluster, operator: Install, namespace: str, engine_image: str, client: Client
) -> None:
    service = made(
        cluster, namespace, engine_image, "external", loadBalancing={"mode": "External", "perRankServices": True}
    )
    services = cluster.get("services", *service.inside, "-l", "dpinference.dev/name=external")
    per_rank = sorted(s["metadata"]["name"] for s in services if "rank" in s["metadata"]["name"])
    assert len(per_rank) == 2
    before = steps(service)
    texts = [ask(client, f"http://{name}.{namespace}.svc.cluster.local", 2) for name in per_rank]
    assert texts[0] == texts[1]
    assert "Paris" in texts[0]
    after = steps(service)
    assert all(after[rank] > before[rank] for rank in (0, 1)), "each rank has computed its own requests"
    ask(client, service.endpoint, 20)
    spread = steps(service)
    assert all(spread[rank] > after[rank] for rank in (0, 1)), "the client Service spreads over both"

    # Rank 0 is nobody's master here: the other endpoint answers all the while.
    lost, other = service.pod_of(0), service.pod_of(1)
    service.kill_launcher(lost["metadata"]["name"])
    service.wait_replaced(0, lost)
    assert ask(client, f"http://{per_rank[1]}.{namespace}.svc.cluster.local") == texts[0]
    service.wait_whole()
    assert service.pod_of(1)["metadata"]["uid"] == other["metadata"]["uid"]


def test_hybrid_every_pod_spreads_over_its_own_ranks(
    cluster: Cluster, operator: Install, namespace: str, engine_image: str, client: Client
) -> None:
    service = made(
        cluster,
        namespace,
        engine_image,
        "hybrid",
        loadBalancing={"mode": "Hybrid"},
        parallelism={"dataParallelSize": 4, "dataParallelSizeLocal": 2},
    )
    before = steps(service)
    assert sorted(before) == [0, 1, 2, 3]
    assert "Paris" in ask(client, service.endpoint, 40)
    after = steps(service)
    assert all(after[rank] > before[rank] for rank in range(4)), (before, after)


def test_multi_port_every_rank_of_a_pod_has_a_port(
    cluster: Cluster, operator: Install, namespace: str, engine_image: str, client: Client
) -> None:
    service = made(
        cluster,
        namespace,
        engine_image,
        "ports",
        loadBalancing={"mode": "MultiPort", "supervisorPolicy": "RestartOne"},
        parallelism={"dataParallelSize": 2, "dataParallelSizeLocal": 2},
    )
    ports = cluster.get("service", "ports", *service.inside)["spec"]["ports"]
    assert [p["port"] for p in ports] == [80, 81]
    before = steps(service)
    texts = [ask(client, f"{service.endpoint}:{p['port']}", 2) for p in ports]
    assert texts[0] == texts[1]
    after = steps(service)
    assert all(after[rank] > before[rank] for rank in (0, 1))
    pod = service.pod_of(0)
    supervisor = f"http://{pod['status']['podIP']}:9256/health"
    assert client.python(GET, supervisor).strip() == "200"

    # One rank is killed: the other's port goes on, and the pod stays.
    report = next(r for r in service.engine_report(pod["metadata"]["name"])["ranks"] if r["rank"] == 1)
    service.kill_process(pod["metadata"]["name"], report["pid"])
    assert ask(client, f"{service.endpoint}:80") == texts[0]

    def second() -> bool:
        try:
            return ask(client, f"{service.endpoint}:81") == texts[0]
        except KubectlFailed:
            return False

    cluster.wait("the killed rank's port again", second, 60)
    assert service.pod_of(0)["metadata"]["uid"] == pod["metadata"]["uid"]
