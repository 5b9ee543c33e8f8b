"""Services per rank and InferencePools: which pods and ports they lead to in each mode, and through rollouts."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_world import World, document, up
from test_operator_service import cluster, condition, operator, ready, until

from dpi_operator.api.read import read_document
from dpi_operator.api.reasons import Reason
from dpi_operator.api.validate import MAX_RANK_SERVICES, validate
from dpi_operator.handlers import workers as workers_module
from dpi_operator.plan.services import build_rank_services

OWN = "dpinference.dev/"
MOE = {"engine": {"runtime": "vllm", "device": "auto"}, "model": {"architecture": "MoE"}}  # has every mode
PAIRS = {"parallelism": {"dataParallelSize": 4, "dataParallelSizeLocal": 2}}
SHAPES = {
    "Internal": {},
    "Hybrid": {**MOE, **PAIRS, "loadBalancing": {"mode": "Hybrid"}},
    "External": {**MOE, "loadBalancing": {"mode": "External"}},
    "MultiPort": {**MOE, **PAIRS, "loadBalancing": {"mode": "MultiPort"}},
}
POOL = {"enabled": True, "endpointPickerRef": {"name": "picker", "port": 9002}}


def with_lb(spec, **fields):
    return {**spec, "loadBalancing": {**spec.get("loadBalancing", {}), **fields}}


def per_rank(mode, **spec):
    return {**with_lb(SHAPES[mode], perRankServices=True), **spec}


def rank_services(world):
    return {n: s for (k, n), s in world.children.items() if k == "Service" and "-rank-" in n}


def leads_to(world, service):
    """(pod, port number) of every pod that the Service selects."""
    selector, (port,) = service["spec"]["selector"], service["spec"]["ports"]
    found = []
    for pod in (world.manifests[name] for name in world.pods):
        if selector.items() <= pod["metadata"]["labels"].items():
            numbers = {p["name"]: p["containerPort"] for p in pod["spec"]["containers"][0]["ports"]}
            found.append((pod["metadata"]["labels"], numbers[port["targetPort"]]))
    return found


@pytest.mark.parametrize(
    ("mode", "ranks"), [("Internal", [0]), ("Hybrid", [0, 2]), ("External", [0, 1]), ("MultiPort", [0, 1, 2, 3])]
)
def test_every_rank_with_an_endpoint_has_one_and_it_leads_there_alone(mode, ranks):
    world = up(**per_rank(mode, replicas=2))
    services = rank_services(world)
    assert sorted(services) == sorted(f"demo-{g}-rank-{r}" for g in (0, 1) for r in ranks)
    for name, service in services.items():
        _, group, _, rank = name.split("-")
        ((labels, port),) = leads_to(world, service)
        assert labels[OWN + "group-index"] == group
        start, count = int(labels[OWN + "rank-start"]), int(labels[OWN + "rank-count"])
        assert start <= int(rank) < start + count
        assert port == 8000 + (int(rank) - start if mode == "MultiPort" else 0)
        assert all(key.startswith(OWN) for key in service["spec"]["selector"])
        assert service["spec"]["publishNotReadyAddresses"] is False


def test_names_and_addresses_stay_through_a_rollout_and_go_with_the_group():
    world = up(**per_rank("External", replicas=2))
    before = {n: s["metadata"]["uid"] for n, s in rank_services(world).items()}
    world.instant = False
    world.change(engine={"image": "engine:2"})
    for _ in range(8):
        world.settle()
        assert {n: s["metadata"]["uid"] for n, s in rank_services(world).items()} == before
        for name in [n for n, p in world.pods.items() if p.deleting is not None]:
            world.remove(name)
        world.all_ready()
    world.settle()
    assert world.condition("Progressing").reason == "RolloutComplete"
    world.instant = True
    world.change(replicas=1)
    world.settle()
    assert sorted(rank_services(world)) == ["demo-0-rank-0", "demo-0-rank-1"]
    world.change(loadBalancing={"perRankServices": False})
    world.settle()
    assert rank_services(world) == {}


def test_blue_green_moves_them_with_the_traffic():
    world = up(**per_rank("External", rollout={"strategy": "BlueGreen"}))
    (old,) = world.revisions()
    world.change(engine={"image": "engine:2"})
    world.settle()
    assert {s["spec"]["selector"][OWN + "revision"] for s in rank_services(world).values()} == {old}
    world.all_ready()
    world.settle()
    (new,) = {s["spec"]["selector"][OWN + "revision"] for s in rank_services(world).values()}
    assert new != old and new == world.status.current_revision


@given(st.sampled_from(sorted(SHAPES)), st.integers(1, 16), st.sampled_from([1, 2, 4]), st.integers(0, 999))
def test_names_are_unique_and_fit_and_no_label_is_too_long(mode, pods, local, group):
    local = 1 if mode == "External" else max(2, local) if mode == "MultiPort" else local
    doc = document(
        parallelism={"dataParallelSize": pods * local, "dataParallelSizeLocal": local},
        loadBalancing={"mode": mode, "perRankServices": True},
    )
    doc["metadata"]["name"] = "x" * 40
    names = [s["metadata"]["name"] for s in build_rank_services(read_document(doc, "test"), group)]
    assert len(set(names)) == len(names) and all(len(n) <= 63 for n in names)
    assert len(names) == {"Internal": 1, "Hybrid": pods, "External": pods, "MultiPort": pods * local}[mode]


def test_there_is_a_bound_over_all_groups():
    most = MAX_RANK_SERVICES // 2
    assert validate(read_document(document(**per_rank("Internal", replicas=most)), "test")) == []
    (found,) = validate(read_document(document(**per_rank("Internal", replicas=most + 1)), "test"))
    assert found.field == "spec.loadBalancing.perRankServices" and "at most 256" in found.message


@pytest.mark.parametrize(
    ("mode", "ports"), [("Internal", [8000]), ("Hybrid", [8000]), ("External", [8000]), ("MultiPort", [8000, 8001])]
)
def test_a_pool_has_the_pods_and_ports_that_serve(mode, ports):
    world = up(**with_lb(SHAPES[mode], inferencePool=POOL))
    pool = world.children["InferencePool", "demo"]["spec"]
    assert [p["number"] for p in pool["targetPorts"]] == ports
    assert pool["endpointPickerRef"] == {"kind": "Service", "name": "picker", "port": {"number": 9002}}
    for pod in world.manifests.values():
        serves = {p["containerPort"] for p in pod["spec"]["containers"][0]["ports"]} >= set(ports)
        assert (pool["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()) is serves


def test_a_pool_follows_blue_green_and_goes_when_it_is_not_wanted():
    world = up(**with_lb(SHAPES["External"], inferencePool=POOL), rollout={"strategy": "BlueGreen"})
    world.change(engine={"image": "engine:2"})
    world.settle()
    before = world.children["InferencePool", "demo"]["spec"]["selector"]["matchLabels"][OWN + "revision"]
    world.all_ready()
    world.settle()
    after = world.children["InferencePool", "demo"]["spec"]["selector"]["matchLabels"][OWN + "revision"]
    assert before != after == world.status.current_revision
    world.change(loadBalancing={"inferencePool": {"enabled": False}})
    world.settle()
    assert ("InferencePool", "demo") not in world.children


def test_a_pool_of_more_ports_than_it_may_have_is_refused_by_name():
    spec = {
        "parallelism": {"dataParallelSize": 18, "dataParallelSizeLocal": 9},
        "loadBalancing": {"mode": "MultiPort", "inferencePool": POOL},
    }
    world = World(document(**spec))
    world.settle()
    accepted = world.condition("Accepted")
    assert (accepted.status, accepted.reason) == ("False", Reason.POOL_PORT_LIMIT)
    assert "at most 8 ports per pod: got 9" in accepted.message
    assert not world.pods


def test_without_its_crd_nothing_is_made():
    world = World(document(**with_lb({}, inferencePool=POOL)), absent={"InferencePool": "the cluster does not know it"})
    world.settle()
    assert world.condition("Ready").reason == "MissingCRD"
    assert "spec.loadBalancing.inferencePool.enabled" in world.condition("Ready").message
    assert not world.pods


def test_a_pool_that_the_api_refuses_is_named_and_holds_up_no_pod(tmp_path, monkeypatch):
    """Early releases of the CRD allow one port only: an object of MultiPort still serves."""
    monkeypatch.setattr(workers_module, "REFUSED_RETRY_S", 0.5)

    async def main():
        async with cluster() as (model, _), operator(model, tmp_path, monkeypatch):
            model.installed.add("InferencePool")
            model.refuse["PATCH inferencepools"] = (422, "spec.targetPorts: Too many: 2: must have at most 1 items")
            model.put(document(**with_lb(SHAPES["MultiPort"], inferencePool=POOL)))
            await until(lambda: ready(model), "Ready")
            await until(lambda: condition(model, "Degraded")["reason"] == "ObjectRefused", "the refusal in the status")
            assert "InferencePool demo: spec.targetPorts: Too many: 2" in condition(model, "Degraded")["message"]
            model.refuse.clear()
            await until(lambda: model.get("InferencePool", "demo"), "the pool once it is taken")
            await until(lambda: condition(model, "Degraded")["status"] == "False", "nothing refused")

    asyncio.run(main())
