"""Gang scheduling: PodGroups and membership, what is said while places are missing, places that are given back."""

import asyncio
import dataclasses

import pytest
from operator_world import START, World, document, up
from test_operator_service import cluster, condition, operator, until

from dpi_operator.api.reasons import EventReason

GROUP = "dpinference.dev/group-index"


def gang(provider, **fields):
    return {"scheduling": {"gang": {"provider": provider, **fields}}}


def placed(world, *names):
    """These pods have a node, the others of the object have none."""
    for name, pod in world.pods.items():
        if name in names:
            world.pods[name] = dataclasses.replace(pod, scheduled=True, node="node-1")
        else:
            why = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
            world.pods[name] = dataclasses.replace(pod, scheduling_reason="Unschedulable", scheduling_message=why)


def test_volcano_has_a_pod_group_per_group_before_its_pods():
    world = World(document(replicas=2, **gang("Volcano", queue="q", priorityClassName="high")))
    plan = world.plan()
    kinds = [a.manifest["kind"] for a in plan.actions if hasattr(a, "manifest")]
    assert max(i for i, k in enumerate(kinds) if k == "PodGroup") < kinds.index("Pod")
    world.settle()
    for pod in world.manifests.values():
        name = pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"]
        made = world.children["PodGroup.scheduling.volcano.sh", name]
        assert made["spec"] == {"minMember": 2, "queue": "q", "priorityClassName": "high"}
        assert name.endswith("-" + pod["metadata"]["labels"][GROUP])
        assert pod["spec"]["schedulerName"] == "volcano" and pod["spec"]["priorityClassName"] == "high"
    assert len({p["metadata"]["annotations"]["scheduling.k8s.io/group-name"] for p in world.manifests.values()}) == 2


def test_the_scheduler_plugins_know_members_by_a_label():
    world = World(document(scheduling={"schedulerName": "own", "gang": {"provider": "SchedulerPlugins"}}))
    world.settle()
    for pod in world.manifests.values():
        name = pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"]
        spec = world.children["PodGroup.scheduling.x-k8s.io", name]["spec"]
        assert spec == {"minMember": 2, "scheduleTimeoutSeconds": 300}
        assert pod["spec"]["schedulerName"] == "own"


def test_kueue_needs_no_object_but_a_queue_and_takes_the_group_as_a_whole():
    refused = World(document(**gang("Kueue")))
    refused.settle()
    assert "spec.scheduling.gang.queue: is required with Kueue" in refused.condition("Accepted").message
    world = up(**gang("Kueue", queue="team"))
    assert not [k for k, _ in world.children if k.startswith("PodGroup")]
    for pod in world.manifests.values():
        labels = pod["metadata"]["labels"]
        assert labels["kueue.x-k8s.io/queue-name"] == "team"
        assert labels["kueue.x-k8s.io/pod-group-name"] == pod["metadata"]["name"].rpartition("-")[0]
        assert pod["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "2"
    world.fail(world.pod(0, 1))
    world.settle()
    world.now += 31
    world.settle()
    assert {reason for _, _, reason in world.deleted} == {"GroupBroken"}
    assert len(world.deleted) == 2


def test_pods_behind_a_queue_are_queued_not_short_of_nodes():
    world = World(document(**gang("Kueue", queue="team")))
    world.settle()
    for name, pod in world.pods.items():
        world.pods[name] = dataclasses.replace(pod, scheduling_reason="SchedulingGated", scheduling_message="gated")
    world.settle()
    scheduled = world.condition("Scheduled")
    assert (scheduled.status, scheduled.reason) == ("False", "Queued")
    assert "queue team" in scheduled.message


@pytest.mark.parametrize("provider", ["None", "SchedulerPlugins"])
def test_a_queue_that_nobody_reads_is_refused(provider):
    world = World(document(**gang(provider, queue="q")))
    world.settle()
    assert "has no queues; leave it out" in world.condition("Accepted").message
    assert not world.pods


def test_disabling_it_removes_the_pod_groups_with_the_groups_that_had_them():
    world = up(**gang("Volcano"))
    world.change(scheduling={"gang": {"provider": "None"}})
    for _ in range(4):
        world.settle()
        world.all_ready()
    world.settle()
    assert world.condition("Progressing").reason == "RolloutComplete"
    assert not [k for k, _ in world.children if k.startswith("PodGroup")]


def test_a_partial_gang_is_named_gives_its_places_back_and_tries_again_with_growing_waits():
    world = World(document(**gang("Volcano", timeoutSeconds=60)))
    world.settle()
    placed(world, world.pod(0, 0))
    world.settle()
    scheduled = world.condition("Scheduled")
    assert (scheduled.status, scheduled.reason) == ("False", "GangIncomplete")
    assert "1 of 2 pods have a node" in scheduled.message and "Insufficient nvidia.com/gpu" in scheduled.message
    assert not world.deleted
    waits = []
    for _ in range(2):
        world.now += 60
        world.settle()
        assert not world.pods
        assert {reason for _, _, reason in world.deleted} == {"GangIncomplete"}
        assert "tries again at" in world.condition("Scheduled").message
        went = world.now
        while not world.pods:
            at = world.plan().requeue_at
            assert at is not None and at > world.now
            world.now = at
            world.settle()
        waits.append(world.now - went)
        placed(world, world.pod(0, 0))
        world.settle()
    assert waits == [30, 60]
    told = [e for e in world.events if e.reason is EventReason.GANG_RELEASED]
    assert len(told) == 2 and told[0].warning
    assert world.status.restarts == 0  # nothing of the budget was spent
    world.all_ready()
    world.settle()
    assert world.condition("Ready").status == "True"


def test_a_gang_of_which_no_pod_has_a_place_holds_nothing_and_waits():
    world = World(document(**gang("Volcano", timeoutSeconds=60)))
    world.settle()
    placed(world)
    world.now += 1000
    world.settle()
    assert not world.deleted
    assert world.condition("Scheduled").reason == "GangIncomplete"


def test_a_gang_that_serves_keeps_its_places_when_one_rank_finds_none():
    world = up(**gang("Volcano", timeoutSeconds=60))
    world.fail(world.pod(0, 1))
    world.settle()
    world.now += 31
    world.settle()
    kept = world.pod(0, 0)
    placed(world, kept)
    world.pods[kept] = dataclasses.replace(world.pods[kept], ready=True)
    world.now += 1000
    world.settle()
    assert kept in world.pods
    assert "GangIncomplete" not in {reason for _, _, reason in world.deleted}


def test_without_the_scheduler_nothing_is_made_and_its_name_is_told():
    why = "the cluster does not know podgroups.scheduling.volcano.sh"
    world = World(document(**gang("Volcano")), absent={"PodGroup.scheduling.volcano.sh": why})
    world.settle()
    accepted = world.condition("Accepted")
    assert (accepted.status, accepted.reason) == ("False", "MissingCRD")
    assert accepted.message.startswith(f"spec.scheduling.gang.provider: PodGroup: {why}")
    assert world.condition("Ready").reason == "MissingCRD"
    assert not world.pods
    world.absent.clear()
    world.settle()
    assert len(world.pods) == 2 and world.condition("Accepted").status == "True"
    world.all_ready()
    world.settle()
    world.absent["PodGroup.scheduling.volcano.sh"] = why
    world.fail(world.pod(0, 1))
    world.settle()
    world.now += 31
    world.settle()
    assert world.names() == ["0-0", "0-1"]  # what runs is looked after


def test_groups_keep_apart_from_every_other_group():
    world = World(document(scheduling={"exclusiveTopologyKey": "block"}))
    world.settle()
    (pod, _) = world.manifests.values()
    own = pod["metadata"]["labels"]
    terms = pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]

    def avoided(labels):
        def holds(e):
            value = labels.get(e["key"])
            return {
                "Exists": value is not None,
                "In": value in e.get("values", ()),
                "NotIn": value not in e.get("values", ()),
            }[e["operator"]]

        return any(all(holds(e) for e in t["labelSelector"]["matchExpressions"]) for t in terms)

    assert not avoided(own)
    for label in ("name", "group-index", "revision"):
        assert avoided({**own, f"dpinference.dev/{label}": "another"})
    assert not avoided({"app": "something else"})


def test_kueue_is_known_by_its_api_group(tmp_path, monkeypatch):
    async def main():
        async with cluster() as (model, _), operator(model, tmp_path, monkeypatch, resync_s=0.5):
            model.put(document(**gang("Kueue", queue="team")))
            await until(lambda: condition(model, "Accepted")["reason"] == "MissingCRD", "MissingCRD")
            assert "install Kueue" in condition(model, "Accepted")["message"]
            model.groups.add("kueue.x-k8s.io")
            await until(lambda: len(model.all("Pod")) == 2, "pods")

    asyncio.run(main())


def test_the_clock_of_a_gang_begins_with_its_last_pod():
    world = World(document(**gang("Volcano", timeoutSeconds=60)))
    world.settle()
    placed(world, world.pod(0, 0))
    late = world.pod(0, 1)
    world.pods[late] = dataclasses.replace(world.pods[late], created=START + 30)
    world.now += 60
    world.settle()
    assert not world.deleted
    assert world.plan().requeue_at == START + 90
