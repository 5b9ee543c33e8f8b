"""Objects around the pods suit the groups of every revision that has some, not only those of the newest spec."""

import pytest
from operator_world import up


def child(world, kind, name="demo"):
    return world.children.get((kind, name))


def allowed_ports(world):
    return {p["port"] for rule in child(world, "NetworkPolicy")["spec"]["ingress"] for p in rule.get("ports", ())}


def finish(world, rounds=10):
    for _ in range(rounds):
        world.settle()
        world.all_ready()
        world.now += 120
    world.settle()
    assert world.condition("Progressing").reason == "RolloutComplete"


BLUE_GREEN = {"strategy": "BlueGreen", "scaleDownDelaySeconds": 60}
SURGE = {"maxSurge": 1, "maxUnavailable": 0}


@pytest.mark.parametrize("rollout", [BLUE_GREEN, SURGE])
def test_the_network_policy_lets_clients_reach_old_and_new_ports_during_a_rollout(rollout):
    world = up(rollout=rollout)
    world.change(engine={"ports": {"http": 9000, "management": 9001}})
    world.settle()
    assert allowed_ports(world) == {8000, 8081, 9000, 9001}
    finish(world)
    assert allowed_ports(world) == {9000, 9001}


@pytest.mark.parametrize("rollout", [BLUE_GREEN, SURGE])
def test_a_change_of_mode_leaves_the_old_pods_in_the_service(rollout):
    world = up(rollout=rollout, loadBalancing={"mode": "External", "perRankServices": True})
    (old,) = world.revisions()
    world.change(loadBalancing={"mode": "Internal"})
    world.settle()
    selector = child(world, "Service")["spec"]["selector"]
    server = world.pods[f"demo-{old}-0-1"].labels
    assert all(server.get(k) == v for k, v in selector.items())
    assert child(world, "Service", "demo-0-rank-1")
    finish(world)
    assert child(world, "Service")["spec"]["selector"]["dpinference.dev/role"] == "rank0"
    assert not child(world, "Service", "demo-0-rank-1")


@pytest.mark.parametrize("rollout", [BLUE_GREEN, SURGE])
def test_the_service_keeps_the_ports_of_ranks_that_serve(rollout):
    four = {"dataParallelSize": 4, "dataParallelSizeLocal": 4}
    world = up(rollout=rollout, loadBalancing={"mode": "MultiPort"}, parallelism=four)
    world.change(parallelism={"dataParallelSizeLocal": 2})
    world.settle()
    assert len(child(world, "Service")["spec"]["ports"]) == 4
    finish(world)
    assert len(child(world, "Service")["spec"]["ports"]) == 2


def test_the_pool_has_the_ports_of_the_revision_that_serves():
    pool = {"enabled": True, "endpointPickerRef": {"name": "picker"}}
    world = up(rollout=BLUE_GREEN, loadBalancing={"inferencePool": pool})
    world.change(engine={"ports": {"http": 9000}})
    world.settle()
    assert child(world, "InferencePool")["spec"]["targetPorts"] == [{"number": 8000}]
    finish(world)
    assert child(world, "InferencePool")["spec"]["targetPorts"] == [{"number": 9000}]


def test_the_pod_monitor_scrapes_pods_of_both_runtimes():
    world = up(rollout=BLUE_GREEN, metrics={"podMonitor": {"enabled": True}})
    world.change(engine={"runtime": "vllm"})
    world.settle()
    ports = [e["port"] for e in child(world, "PodMonitor")["spec"]["podMetricsEndpoints"]]
    assert sorted(ports) == ["http", "management"]


def test_the_account_stays_for_groups_that_keep_their_revision():
    world = up(replicas=2, rollout={"partition": 1})
    world.change(security={"serviceAccountName": "mine"})
    for _ in range(6):
        world.settle()
        world.all_ready()
    assert len(world.revisions()) == 2
    assert child(world, "ServiceAccount", "demo-engine")
    world.change(rollout={"partition": 0})
    finish(world)
    assert not child(world, "ServiceAccount", "demo-engine")


def test_the_account_is_there_when_the_api_server_is_asked_about_pods_that_need_it():
    world = up(security={"serviceAccountName": "mine"})

    def refuses(manifest):
        name = manifest["spec"]["serviceAccountName"]
        known = name == "mine" or child(world, "ServiceAccount", name)
        return "" if known else f'error looking up service account ns/{name}: serviceaccount "{name}" not found'

    world.refuses = refuses
    del world.doc["spec"]["security"]
    world.change()
    finish(world)
    assert child(world, "ServiceAccount", "demo-engine")


def test_the_account_stays_when_the_user_names_it():
    world = up()
    world.change(security={"serviceAccountName": "demo-engine"})
    finish(world)
    assert child(world, "ServiceAccount", "demo-engine")
