"""New revisions and other numbers of groups, under load, without a request lost."""

from __future__ import annotations

from typing import Any

import pytest
from e2e_cluster import Cluster
from e2e_install import Install
from e2e_service import ENGINE_ARGS, Client, Service, made

pytestmark = pytest.mark.timeout(5400)

NEW_ARGS = [*ENGINE_ARGS, "--max-num-seqs", "8"]


def args_of(service: Service) -> list[bool]:
    """Of every pod: whether it has the new flags."""
    return ["--max-num-seqs" in p["spec"]["containers"][0]["args"] for p in service.pods()]


def test_a_rolling_update_with_surge_loses_no_request_though_the_operator_is_killed_in_it(
    cluster: Cluster, operator: Install, namespace: str, engine_image: str, client: Client
) -> None:
    service = made(cluster, namespace, engine_image, "rolls", rollout={"maxSurge": 1, "maxUnavailable": 0})
    old = service.get()["status"]["currentRevision"]
    with client.load(service) as load:
        load.go_on(2)
        service.patch(engine={"args": NEW_ARGS})
        cluster.wait("pods of the new revision beside the old ones", lambda: len(service.pods()) == 4 or None, 60)
        killed = operator.kill_active()
        document = service.wait_whole()
        cluster.wait("pods of the new revision alone", lambda: args_of(service) == [True, True] or None, 120)
        load.go_on(2)
    assert load.failed == []
    assert load.done > 5
    assert document["status"]["currentRevision"] != old
    assert operator.active() != killed, "the operator that stood by has taken over"
    assert service.events("RolloutCompleted"), service.events()
    revisions = cluster.get("controllerrevisions", *service.inside)
    assert len([r for r in revisions if r["metadata"]["labels"]["dpinference.dev/name"] == "rolls"]) == 2


def test_blue_green_moves_the_traffic_at_once_and_loses_no_request(
    cluster: Cluster, operator: Install, namespace: str, engine_image: str, client: Client
) -> None:
    service = made(
        cluster,
        namespace,
        engine_image,
        "colours",
        rollout={"strategy": "BlueGreen", "scaleDownDelaySeconds": 5},
        parallelism={"dataParallelSize": 1},
    )

    def selected() -> str:
        return cluster.get("service", "colours", *service.inside)["spec"]["selector"]["dpinference.dev/revision"]

    blue = selected()
    with client.load(service) as load:
        load.go_on(2)
        service.patch(engine={"args": NEW_ARGS})
        cluster.wait("a green pod", lambda: len(service.pods()) == 2 or None, 60)
        assert selected() == blue, "traffic stays until all green groups are ready"
        cluster.wait("traffic on the green groups", lambda: selected() != blue or None, 120)
        cluster.wait("blue pods gone", lambda: args_of(service) == [True] or None, 120)
        load.go_on(2)
    assert load.failed == []
    assert load.done > 5
    service.wait_whole()
    assert service.events("TrafficSwitched"), service.events()


def test_groups_are_scaled_to_three_to_none_and_back(
    cluster: Cluster, operator: Install, namespace: str, engine_image: str, client: Client
) -> None:
    service = made(cluster, namespace, engine_image, "scales", parallelism={"dataParallelSize": 1})
    first = service.pod_of(0)

    def scale(replicas: int) -> dict[str, Any]:
        cluster.kubectl("scale", "dpi", service.name, *service.inside, f"--replicas={replicas}")
        return service.wait_whole()

    grown = scale(3)
    assert service.pod_of(0)["metadata"]["uid"] == first["metadata"]["uid"], "a ready group is not touched"
    assert grown["status"]["rankSummary"] == "3/3"
    budget = cluster.get("poddisruptionbudget", "scales", *service.inside)
    assert budget["spec"]["minAvailable"] == 2
    subresource = cluster.kubectl(
        "get",
        "--raw",
        f"/apis/dpinference.dev/v1alpha1/namespaces/{namespace}/dataparallelinferences/scales/scale",
    )
    assert '"replicas":3' in subresource
    assert "dpinference.dev/role=rank0" in subresource
    pods = {p["metadata"]["name"] for p in service.pods()}
    assert len(pods) == 3

    cluster.kubectl("scale", "dpi", service.name, *service.inside, "--replicas=0")
    cluster.wait("no pods", lambda: not service.pods(), 90)
    gone = service.wait_condition("Available", "False", 20, "ScaledToZero")
    assert "no pods run" in gone["message"]

    scale(1)
    assert "Paris" in client.complete(service)


def test_suspend_takes_the_pods_and_keeps_the_number(
    cluster: Cluster, operator: Install, namespace: str, engine_image: str
) -> None:
    service = made(cluster, namespace, engine_image, "rests", parallelism={"dataParallelSize": 1})
    service.patch(suspend=True)
    cluster.wait("no pods", lambda: not service.pods(), 90)
    service.wait_condition("Available", "False", 20, "Suspended")
    assert service.get()["spec"]["replicas"] == 1
    service.patch(suspend=False)
    service.wait_whole()
