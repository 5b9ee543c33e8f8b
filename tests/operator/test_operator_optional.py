"""Objects of kinds that not every cluster has: made where they are known, named where they are missing."""

import asyncio

import pytest
from operator_world import World, document, up
from test_operator_service import cluster, condition, operator, ready, until

from dpi_operator.api.read import read_document
from dpi_operator.apply.kinds import OPTIONAL_KINDS
from dpi_operator.plan.actions import kind_and_name
from dpi_operator.plan.needs import needs
from dpi_operator.plan.reconcile import reconcile

MONITORED = {"metrics": {"podMonitor": {"enabled": True, "labels": {"release": "prom"}, "intervalSeconds": 30}}}


def test_a_pod_monitor_selects_the_objects_pods_by_the_port_that_they_have():
    world = up(**MONITORED)
    monitor = world.children["PodMonitor", "demo"]
    assert monitor["metadata"]["labels"]["release"] == "prom"
    assert monitor["metadata"]["ownerReferences"][0]["uid"] == "object-uid"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["interval"] == "30s"
    for pod in world.manifests.values():
        assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert endpoint["port"] in {p["name"] for p in pod["spec"]["containers"][0]["ports"]}
    world.change(metrics={"podMonitor": {"enabled": False}})
    world.settle()
    assert ("PodMonitor", "demo") not in world.children


def test_labels_of_the_operator_are_not_the_users_to_change():
    world = up(metrics={"podMonitor": {"enabled": True, "labels": {"dpinference.dev/name": "another"}}})
    assert world.children["PodMonitor", "demo"]["metadata"]["labels"]["dpinference.dev/name"] == "demo"


def test_without_its_crd_the_object_serves_and_says_what_is_missing():
    world = World(document(**MONITORED), absent={"PodMonitor": "the cluster does not know podmonitors"})
    world.settle()
    assert world.condition("Degraded").reason == "MissingCRD"
    assert world.condition("Ready").reason != "MissingCRD"  # pods that start are the reason for that
    world.all_ready()
    world.settle()
    assert world.condition("Ready").status == "True"
    degraded = world.condition("Degraded")
    assert (degraded.status, degraded.reason) == ("True", "MissingCRD")
    assert degraded.message.startswith("spec.metrics.podMonitor.enabled: PodMonitor: the cluster does not know")
    world.absent.clear()
    world.settle()
    assert ("PodMonitor", "demo") in world.children
    assert world.condition("Degraded").status == "False"


def gang(provider, **fields):
    return {"scheduling": {"gang": {"provider": provider, **fields}}}


POOLED = {"loadBalancing": {"inferencePool": {"enabled": True, "endpointPickerRef": {"name": "picker"}}}}


@pytest.mark.parametrize("spec", [MONITORED, POOLED, gang("Volcano"), gang("SchedulerPlugins")])
def test_what_is_planned_is_what_is_said_to_be_needed(spec):
    """An object is never planned of a kind that `needs` does not name."""
    world = World(document(**spec))
    named = {n.kind for n in needs(read_document(world.doc, "test"))}
    assert named
    world.settle()
    assert {kind for kind, _ in world.children} & set(OPTIONAL_KINDS) == named
    assert {kind_and_name(a.manifest)[0] for a in world.plan().actions if hasattr(a, "manifest")} == set()
    lacking = World(document(**spec), absent=dict.fromkeys(OPTIONAL_KINDS, "not here"))
    plan = reconcile(lacking.snapshot(), lacking.now)
    assert not {kind_and_name(a.manifest)[0] for a in plan.actions if hasattr(a, "manifest")} & set(OPTIONAL_KINDS)


def test_a_crd_that_comes_later_is_used_and_watched(tmp_path, monkeypatch):
    async def main():
        async with cluster() as (model, _), operator(model, tmp_path, monkeypatch, resync_s=0.5):
            model.put(document(**MONITORED))
            await until(lambda: ready(model), "Ready")
            await until(lambda: condition(model, "Degraded")["reason"] == "MissingCRD", "MissingCRD")
            assert "does not know podmonitors.monitoring.coreos.com" in condition(model, "Degraded")["message"]
            model.installed.add("PodMonitor")
            await until(lambda: model.get("PodMonitor", "demo"), "the PodMonitor")
            await until(lambda: condition(model, "Degraded")["status"] == "False", "nothing missing")
            await until(
                lambda: any(plural == "podmonitors" for plural, *_ in model.watchers), "PodMonitors are watched"
            )
            model.remove("PodMonitor", "demo")
            await until(lambda: model.get("PodMonitor", "demo"), "the PodMonitor again")

    asyncio.run(main())


def test_a_crd_that_goes_is_noticed_at_once_and_the_rest_goes_on(tmp_path, monkeypatch):
    async def main():
        async with cluster() as (model, kubelet), operator(model, tmp_path, monkeypatch):  # looks every minute
            model.installed.add("PodMonitor")
            model.put(document(**MONITORED, failurePolicy={"backoff": {"baseSeconds": 1}}))
            await until(lambda: ready(model) and model.get("PodMonitor", "demo"), "Ready with a PodMonitor")
            model.installed.clear()
            model.remove("PodMonitor", "demo")  # objects go with their CRD, and then the watches end
            model.cut_watches()
            await until(lambda: condition(model, "Degraded")["reason"] == "MissingCRD", "MissingCRD")
            pod = next(p for p in model.all("Pod") if p["metadata"]["name"].endswith("-1"))["metadata"]
            kubelet.kill(pod["name"])
            await until(
                lambda: (p := model.get("Pod", pod["name"])) is not None and p["metadata"]["uid"] != pod["uid"],
                "a new pod",
            )

    asyncio.run(main())


def test_missing_rights_are_named_with_the_key_that_grants_them(tmp_path, monkeypatch):
    async def main():
        async with cluster() as (model, _), operator(model, tmp_path, monkeypatch):
            model.installed.add("PodMonitor")
            model.refuse["GET podmonitors"] = (403, "podmonitors is forbidden")
            model.put(document(**MONITORED))
            await until(lambda: ready(model), "Ready")
            key = "integrations.podMonitors"
            await until(lambda: key in condition(model, "Degraded")["message"], "the key in the message")

    asyncio.run(main())
