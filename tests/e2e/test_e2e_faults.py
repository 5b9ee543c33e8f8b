"""What breaks comes back by itself and says what happened."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from e2e_cluster import TOOLS, Cluster, NotInTime
from e2e_install import Install
from e2e_service import ENGINE_ARGS, Client, Service, object_of

pytestmark = pytest.mark.timeout(5400)

FAILING_S = 90
MOST_RECREATIONS = 4


class Failing(NamedTuple):
    """An object whose container always fails, the uids of its pods in the first 90 s, and who collects them."""

    service: Service
    made: set[str]
    collector: threading.Thread


@pytest.fixture(scope="module")
def failing(cluster: Cluster, install: Install, shared_namespace: str, engine_image: str) -> Iterator[Failing]:
    """It is left alone while the other tests run."""
    name = "broken"
    document = object_of(
        name,
        engine_image,
        engine={"command": ["python3", "-c", "import sys; sys.exit('the disk is on fire')"]},
        parallelism={"dataParallelSize": 1},
        failurePolicy={"backoff": {"baseSeconds": 10, "maxSeconds": 60}},
    )
    made: set[str] = set()
    # Every pod that there was in the first minute and a half, whatever became of it.
    watch = [cluster.binary, "--kubeconfig", str(cluster.kubeconfig), "get", "pods", "--namespace", shared_namespace]
    watch += ["-l", f"dpinference.dev/name={name}", "--watch", f"--request-timeout={FAILING_S}s"]
    process = subprocess.Popen([*watch, "-o", "jsonpath={.metadata.uid}{'\\n'}"], stdout=subprocess.PIPE, text=True)

    def collect() -> None:
        assert process.stdout is not None
        made.update(line.strip() for line in process.stdout)

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    cluster.apply(shared_namespace, [document])
    yield Failing(Service(cluster, shared_namespace, name), made, thread)
    process.kill()
    process.wait(10)


@pytest.fixture(scope="module")
def service(cluster: Cluster, install: Install, shared_namespace: str, engine_image: str, failing: Failing) -> Service:
    """Two ranks in two pods; every test finds them whole and leaves them so."""
    cluster.apply(shared_namespace, [object_of("faults", engine_image)])
    made = Service(cluster, shared_namespace, "faults")
    made.wait_whole()
    return made


@pytest.fixture
def whole(operator: Install, service: Service) -> Service:
    service.wait_whole()
    return service


def test_a_flag_that_differs_in_one_rank_is_named_and_no_pod_is_made(
    cluster: Cluster, operator: Install, namespace: str, engine_image: str
) -> None:
    document = object_of(
        "differs", engine_image, rankOverrides=[{"ranks": "1", "args": ["--max-num-batched-tokens", "4096"]}]
    )
    cluster.apply(namespace, [document])
    service = Service(cluster, namespace, "differs")
    found = service.wait_condition("ConfigConsistent", "False", 20, "FingerprintMismatch")
    for said in ("rank 1", "max_num_batched_tokens", "4096"):
        assert said in found["message"], found["message"]
    assert service.conditions()["Ready"]["reason"] == "FingerprintMismatch"
    assert service.pods() == []
    service.patch(rankOverrides=[])
    service.wait_condition("ConfigConsistent", "True", 20)
    cluster.wait("pods once ranks agree", lambda: len(service.pods()) == 2 or None, 20)


def test_a_bad_change_leaves_what_runs_alone(whole: Service, shared_client: Client) -> None:
    before = {p["metadata"]["uid"] for p in whole.pods()}
    whole.patch(engine={"args": ["--headless"]})
    found = whole.wait_condition("Accepted", "False", 20, "ReservedFlag")
    assert "--headless" in found["message"]
    assert {p["metadata"]["uid"] for p in whole.pods()} == before
    assert "Paris" in shared_client.complete(whole)
    whole.patch(engine={"args": ENGINE_ARGS})
    whole.wait_condition("Accepted", "True", 20)
    whole.wait_whole(30)
    assert {p["metadata"]["uid"] for p in whole.pods()} == before


@pytest.mark.parametrize("rank", [1, 0])
def test_a_killed_rank_is_started_again_in_its_pod(whole: Service, shared_client: Client, rank: int) -> None:
    pods = {p["metadata"]["uid"] for p in whole.pods()}
    name = whole.pod_of(rank)["metadata"]["name"]
    before = next(r for r in whole.engine_report(name)["ranks"] if r["rank"] == rank)
    whole.kill_process(name, before["pid"])

    def back() -> bool:
        now = next(r for r in whole.engine_report(name)["ranks"] if r["rank"] == rank)
        return now["state"] == "READY" and now["pid"] != before["pid"]

    whole.cluster.wait(f"rank {rank} under another process id", back, 60)
    assert "Paris" in shared_client.complete(whole, rank)
    whole.wait_whole(60)
    assert {p["metadata"]["uid"] for p in whole.pods()} == pods, "no pod was replaced"


@pytest.mark.parametrize("rank", [1, 0])
def test_a_killed_engine_container_is_replaced_alone_and_its_end_is_kept(
    whole: Service, shared_client: Client, rank: int
) -> None:
    lost, other = whole.pod_of(rank), whole.pod_of(1 - rank)
    other_name = other["metadata"]["name"]
    epochs = {r["rank"]: r["pid"] for r in whole.engine_report(other_name)["ranks"] if r["rank"] == 1 - rank}
    whole.kill_launcher(lost["metadata"]["name"])
    whole.wait_replaced(rank, lost)
    document = whole.wait_whole()
    assert whole.pod_of(1 - rank)["metadata"]["uid"] == other["metadata"]["uid"], "the other pod stays"
    now = {r["rank"]: r["pid"] for r in whole.engine_report(other_name)["ranks"] if r["rank"] == 1 - rank}
    assert now == epochs, "the other rank keeps its process, and with it its weights"
    ended = next(r for r in document["status"]["groups"][0]["ranks"] if r["rank"] == rank)["lastTermination"]
    assert ended["exitCode"] == 137
    assert any(f"rank {rank}" in said and "137" in said for said in whole.events("RankReplaced")), whole.events()
    assert "Paris" in shared_client.complete(whole, rank)


def test_a_deleted_pod_comes_back_and_its_requests_end_first(whole: Service, shared_client: Client) -> None:
    lost = whole.pod_of(1)
    with shared_client.load(whole) as load:
        load.go_on(3)
        whole.cluster.kubectl("delete", "pod", lost["metadata"]["name"], *whole.inside, "--wait=false")
        whole.wait_replaced(1, lost)
        whole.wait_whole()
    assert load.failed == []
    assert load.done > 3


def test_the_api_server_may_be_away_for_half_a_minute(whole: Service, shared_client: Client, operator: Install) -> None:
    if not whole.cluster.local:
        pytest.skip("stops the API server, which a test may do only to the cluster of this machine")
    before = {p["metadata"]["uid"] for p in whole.pods()}
    with shared_client.load(whole) as load:
        subprocess.run([TOOLS / "part", "stop", "apiserver"], check=True, timeout=60)
        try:
            load.go_on(30)
        finally:
            subprocess.run([TOOLS / "part", "start", "apiserver"], check=True, timeout=60)
        whole.cluster.wait("the API server again", lambda: whole.cluster.kubectl("get", "--raw", "/readyz"), 60)
        load.go_on(5)
    assert load.failed == []
    assert load.done > 5
    assert {p["metadata"]["uid"] for p in whole.pods()} == before, "nothing was replaced for it"
    # The operator still reconciles: by itself, or by the one that took over.
    whole.patch(metrics={"queueStats": {"intervalSeconds": 6}})
    generation = whole.get()["metadata"]["generation"]
    whole.cluster.wait(
        "the operator looks again", lambda: whole.get()["status"]["observedGeneration"] == generation or None, 90
    )
    whole.wait_whole(60)


def test_a_container_that_always_fails_is_recreated_seldom_and_says_why(failing: Failing) -> None:
    service = failing.service
    failing.collector.join(FAILING_S + 30)
    assert not failing.collector.is_alive()
    assert 2 <= len(failing.made) <= 1 + MOST_RECREATIONS, "the first pod and its recreations"
    found = service.wait_condition("Degraded", "True", 60, says="the disk is on fire")
    assert found["reason"] in ("CrashLoop", "RankLost")
    assert "exited 1" in found["message"]
    assert "attempt" in found["message"]
    document = service.get()
    assert service.events("RankReplaced"), service.events()
    assert document["status"]["groups"][0]["ranks"][0]["lastTermination"]["exitCode"] == 1


@pytest.fixture
def cut_node(cluster: Cluster) -> Iterator[Any]:
    """Takes a node off the network; every node is back at the end."""
    if not cluster.local or len(cluster.get("nodes")) < 2:
        pytest.skip("takes a node off the network, which a test may do only to the cluster of this machine")
    cut: list[str] = []

    def run(number: str) -> None:
        cut.append(number)
        subprocess.run([TOOLS / "node", "cut", number], check=True, timeout=20)

    yield run
    for number in cut:
        subprocess.run([TOOLS / "node", "join", number], check=True, timeout=20)
    cluster.wait("all nodes Ready", lambda: "NotReady" not in cluster.kubectl("get", "nodes", "--no-headers"), 60)


def test_a_lost_node_costs_its_ranks_only_and_they_run_elsewhere(
    cluster: Cluster, operator: Install, namespace: str, engine_image: str, cut_node: Any
) -> None:
    """Rank 0 stays on the node of the API server, rank 1 goes to the other one, which is cut off."""
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"dpinference.dev/name": "nodes"}},
    }
    document = object_of(
        "nodes",
        engine_image,
        template={"spec": {"topologySpreadConstraints": [spread]}},
        rankOverrides=[{"ranks": "0", "nodeSelector": {"kubernetes.io/hostname": "node0"}}],
    )
    cluster.apply(namespace, [document])
    service = Service(cluster, namespace, "nodes")
    service.wait_whole()
    head, lost = service.pod_of(0), service.pod_of(1)
    assert lost["spec"]["nodeName"] == "node1"
    cut_node("1")
    try:
        service.wait_condition("Degraded", "True", 60)
    except NotInTime as error:
        raise AssertionError(f"the head does not miss rank 1: {error}") from error

    service.wait_replaced(1, lost, 240)
    cluster.wait("its node", lambda: service.pod_of(1)["spec"].get("nodeName") == "node0", 30)
    service.wait_whole()
    assert service.pod_of(0)["metadata"]["uid"] == head["metadata"]["uid"]
    assert any("node1" in said for said in service.events("StuckTerminatingForced")), service.events()
