"""Pods that the API server does not take, and pods that somebody changed: what serves goes on serving."""

import asyncio
import json
import time

import pytest
import yaml
from operator_world import START, World, document, up
from test_operator_service import cluster, operator, ready, until

from api_server import kubeconfig, kubectl, needs_api_server
from dpi_operator.api.crd import manifest
from dpi_operator.api.reasons import EventReason
from dpi_operator.apply.client import Api
from dpi_operator.apply.events import Events
from dpi_operator.handlers import workers as workers_module
from dpi_operator.handlers.service import Options, run
from dpi_operator.observe.pods import pod_facts
from dpi_operator.plan.actions import EmitEvent
from dpi_operator.plan.facts import HeadReport, RankReport
from dpi_operator.plan.names import L_GROUP, L_NAME, L_RANK_START, L_REVISION, L_ROLE
from dpi_operator.plan.reconcile import TRY_AGAIN_S
from dpi_operator.plan.refusals import is_quota, is_terminating
from dpi_operator.plan.times import to_text

BAD = 'Pod is invalid: metadata.labels: Invalid value: "a b!".'
QUOTA = 'pods "x" is forbidden: exceeded quota: small, requested: pods=1, used: pods=2, limited: pods=2'


def bad_label(pod):
    return BAD if (pod["metadata"].get("labels") or {}).get("team") == "a b!" else ""


def labelled(world, value):
    world.change(template={"metadata": {"labels": {"team": value}}})


def told(world, reason):
    return [e for e in world.events if e.reason is reason]


# -- a revision that is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rollout", [{}, {"strategy": "BlueGreen"}, {"maxSurge": 1, "maxUnavailable": 0}])
@pytest.mark.parametrize("size", [1, 4])
def test_a_refused_revision_replaces_nothing(rollout, size):
    world = up(replicas=2, rollout=rollout, parallelism={"dataParallelSize": size})
    world.refuses = bad_label
    before, made = dict(world.pods), len(world.created)
    labelled(world, "a b!")
    world.settle()
    assert world.pods == before
    assert (world.deleted, len(world.created), len(world.tried)) == ([], made, 1)
    assert world.condition("Accepted").reason == world.condition("Progressing").reason == "ObjectRefused"
    assert BAD in world.condition("Accepted").message
    assert world.condition("Available").status == "True"
    assert [e.warning for e in told(world, EventReason.SPEC_REJECTED)] == [True]
    assert not told(world, EventReason.ROLLOUT_STARTED)
    for _ in range(5):
        world.now += 10
        world.settle()
    assert len(world.tried) == 1  # not on every look
    # What runs is looked after: scaled and mended by its own revision.
    old = world.revisions()
    world.change(replicas=3)
    world.remove(world.pod(0, 0))
    for _ in range(3):
        world.settle()
        world.all_ready()
        world.now += 60
    assert world.revisions() == old
    assert len({p.group for p in world.pods.values()}) == 3
    # A policy that refused it is mended: it is tried again, and rolled out.
    world.refuses = lambda pod: ""
    world.now += TRY_AGAIN_S
    for _ in range(12):
        world.settle()
        world.all_ready()
        world.now += 1000
    assert world.condition("Accepted").status == "True"
    assert world.revisions().isdisjoint(old)


def test_going_back_from_a_refused_revision_is_told():
    world = up()
    world.refuses = bad_label
    labelled(world, "a b!")
    world.settle()
    world.change(template={"metadata": {}})
    world.settle()
    assert world.condition("Ready").status == "True"
    (event,) = told(world, EventReason.ROLLED_BACK)
    assert "was refused and never rolled out" in event.message
    assert world.state.refusal == world.state.tried == ""


def test_going_back_from_a_rollout_that_is_stuck_is_told():
    world = up(replicas=2)
    first = world.revisions()
    world.change(engine={"image": "engine:2"})
    world.settle()  # its first group never becomes ready
    assert len(world.revisions()) == 2
    world.change(engine={"image": "engine:1"})
    for _ in range(3):
        world.settle()
        world.all_ready()
    world.settle()
    assert world.revisions() == first
    (event,) = told(world, EventReason.ROLLED_BACK)
    assert "number 1 before, comes back in place of" in event.message
    assert event.message.count(next(iter(first))) == 1


def test_an_override_of_a_later_rank_is_tried_too():
    world = up(parallelism={"dataParallelSize": 4})
    before = dict(world.pods)
    world.refuses = lambda pod: BAD if pod["spec"]["containers"][0]["image"] == " " else ""
    world.change(rankOverrides=[{"ranks": "3", "image": " "}])
    world.settle()
    assert world.pods == before
    assert world.condition("Accepted").reason in ("ObjectRefused", "InvalidSpec")


def test_no_answer_is_waited_for_and_changes_nothing():
    world = up()
    world.change(engine={"image": "engine:2"})
    before = dict(world.pods)
    for _ in range(3):
        plan = world.plan()
        world.carry_out(plan)
        world.trials = {}  # the API server was away
    assert world.pods == before
    assert plan.requeue_at is not None and plan.requeue_at <= world.now + 15
    assert world.condition("Progressing").reason == "RollingOut"


# -- a new object ----------------------------------------------------------------------------------------------------


def test_a_new_object_whose_pods_are_refused_says_so():
    world = World(document(template={"metadata": {"labels": {"team": "a b!"}}}), refuses=bad_label)
    for _ in range(4):
        world.carry_out(world.plan())
    assert not world.pods
    assert (world.condition("Accepted").status, world.condition("Accepted").reason) == ("False", "ObjectRefused")
    assert BAD in world.condition("Accepted").message
    assert world.condition("Ready").reason == "ObjectRefused"
    assert told(world, EventReason.SPEC_REJECTED) and not told(world, EventReason.GROUP_CREATED)
    world.refuses = lambda pod: ""
    for _ in range(3):
        world.carry_out(world.plan())
    assert len(told(world, EventReason.GROUP_CREATED)) == 1
    assert world.condition("Accepted").status == "True"


def test_a_quota_is_no_fault_of_the_spec():
    world = World(document(), refuses=lambda pod: QUOTA)
    for _ in range(3):
        world.carry_out(world.plan())
    assert world.condition("Accepted").status == "True"
    assert world.condition("Scheduled").reason == "QuotaExceeded"
    assert not told(world, EventReason.GROUP_CREATED)


@pytest.mark.parametrize(
    "message, quota, ends",
    [
        (QUOTA, True, False),
        ("failed quota: q: must specify limits.cpu", False, False),
        ("unable to create new content in namespace ns because it is being terminated", False, True),
    ],
)
def test_what_a_refusal_means(message, quota, ends):
    assert (is_quota(message), is_terminating(message)) == (quota, ends)


# -- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [L_ROLE, L_NAME, L_GROUP, L_RANK_START, L_REVISION])
def test_labels_of_ours_are_put_back(key):
    world = up()
    name = world.pod(0, 0)
    right = dict(world.pods[name].labels)
    world._change(name, labels={**right, key: "x", "mine": "stays"})
    world.carry_out(world.plan())
    assert world.condition("Ready").status == "False" and name in world.condition("Ready").message
    world.settle()
    assert world.pods[name].labels == {**right, "mine": "stays"}
    assert world.condition("Ready").status == "True"
    assert not world.deleted


def test_a_pod_is_known_by_its_name_whatever_its_labels_say():
    name = "demo-0123456789-3-12"
    pod = {"metadata": {"name": name, "uid": "u", "labels": {L_GROUP: "7", L_REVISION: "x"}}}
    facts = pod_facts(pod)
    assert (facts.revision, facts.group, facts.index) == ("0123456789", 3, 12)
    assert pod_facts({"metadata": {"name": "stranger", "uid": "u", "labels": {}}}) is None


@pytest.mark.parametrize("labels", [{L_ROLE: "x"}, {L_NAME: None}, {L_NAME: "other"}, {L_GROUP: "9"}])
def test_the_running_operator_puts_labels_back(tmp_path, monkeypatch, labels):
    async def main():
        async with cluster() as (model, _), operator(model, tmp_path, monkeypatch):
            model.put(document())
            await until(lambda: ready(model), "Ready")
            pod = model.all("Pod")[0]
            right = pod["metadata"]["labels"]
            uids = {p["metadata"]["uid"] for p in model.all("Pod")}
            model.put({**pod, "metadata": {**pod["metadata"], "labels": {**right, **labels}}})
            await until(lambda: model.get("Pod", pod["metadata"]["name"])["metadata"]["labels"] == right, "labels")
            await until(lambda: ready(model), "Ready again")
            assert {p["metadata"]["uid"] for p in model.all("Pod")} == uids

    asyncio.run(main())


# -- what the operator does itself, and what is said -------------------------------------------------------------------


@pytest.mark.parametrize("coupling", ["Lockstep", "Coupled"])
def test_what_the_operator_let_go_is_no_loss(coupling):
    world = up(replicas=2)
    if coupling == "Coupled":
        world = up(replicas=2, failurePolicy={"action": "RecreateGroup"})
    world.instant = False
    for replicas in (0, 1, 2, 0, 2, 1, 2):
        world.change(replicas=replicas)
        world.settle()
        assert world.condition("Degraded").status == "False"
    for name in [n for n, p in world.pods.items() if p.deleting is not None]:
        world.remove(name)
    for _ in range(3):
        world.settle()
        world.all_ready()
    world.settle()
    assert world.names() == ["0-0", "0-1", "1-0", "1-1"]
    assert world.condition("Ready").status == "True"
    assert not told(world, EventReason.RANK_REPLACED) and not told(world, EventReason.GROUP_RECREATED)
    assert world.state.dismissed == ()


@pytest.mark.parametrize(
    "message",
    [
        '0/1 nodes are available: persistentvolumeclaim "cache" not found.',
        "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
    ],
)
def test_a_missing_claim_is_no_lack_of_nodes(message):
    world = World(document())
    world.settle()
    for name in world.pods:
        world._change(name, scheduling_reason="Unschedulable", scheduling_message=message)
    world.settle()
    assert world.condition("Scheduled").reason == "VolumeClaimMissing"
    assert (
        message in world.condition("Scheduled").message and "Create the claim" in world.condition("Scheduled").message
    )


def test_one_is_not_many_and_hints_come_before_last_words():
    world = World(document(parallelism={"dataParallelSize": 1}))
    world.carry_out(world.plan())
    assert told(world, EventReason.GROUP_CREATED)[0].message.endswith(": 1 pod, 1 rank.")
    assert world.condition("HandshakeComplete").message == "1 group has no pods yet."
    world.settle()
    world.start(world.pod(0, 0))
    world.now += 5
    world.fail(world.pod(0, 0), 137, "OOMKilled", "the last words")
    world.settle()
    message = world.condition("Degraded").message
    assert message.endswith("Raise engine.resources.limits.memory. Last words: the last words")


def test_a_rank_without_a_pod_has_no_queue():
    world = up(parallelism={"dataParallelSize": 2})
    head = world.pods[world.pod(0, 0)]
    ranks = tuple(RankReport(r, state="READY" if r == 0 else "LOST", waiting=0, running=0) for r in (0, 1))
    world.reports[head.name] = HeadReport(head.uid, world.now, True, ranks)
    world.remove(world.pod(0, 1))
    plan = world.plan()
    first, second = plan.status.groups[0].ranks
    assert (first.waiting, first.running) == (0, 0)
    assert (second.waiting, second.running, second.state) == (None, None, "LOST")


@pytest.mark.parametrize("why, said", [("because it is being terminated", False), ("no right", True)])
def test_nothing_is_said_of_a_namespace_that_goes(tmp_path, monkeypatch, caplog, why, said):
    caplog.set_level("INFO")

    async def main():
        async with cluster() as (model, _):
            model.use(tmp_path, monkeypatch)
            api = await Api.connect()
            model.refuse["POST events"] = (403, f"events is forbidden: {why}")
            event = EmitEvent(EventReason.RANK_REPLACED, "Rank 0 went away.", "k", ("pod", "u"))
            await Events(api, "me").emit(event, {"uid": "u", "name": "demo", "namespace": "ns"})
            await api.close()

    asyncio.run(main())
    lines = [r.message for r in caplog.records if r.name.startswith("dpi_operator")]
    assert [any(text in line for line in lines) for text in ("went away", "not posted")] == [said, said]


# -- a real API server -------------------------------------------------------------------------------------------------


def lives(space, name="demo"):
    return json.loads(kubectl("get", "dpi", name, "-n", space, "-o", "json").stdout)


def of(space, kind, name="demo"):
    found = (lives(space, name).get("status") or {}).get("conditions") or []
    return next((c for c in found if c["type"] == kind), {"status": "", "reason": "", "message": ""})


def pods_of(space, name="demo"):
    items = json.loads(kubectl("get", "pods", "-n", space, "-l", f"{L_NAME}={name}", "-o", "json").stdout)["items"]
    return {p["metadata"]["name"]: p for p in items}


def make_ready(space):
    now = to_text(time.time())
    status = {
        "phase": "Running",
        "podIP": "127.0.0.1",
        "conditions": [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "True", "lastTransitionTime": now},
        ],
        "containerStatuses": [
            {
                "name": "engine", "image": "i", "imageID": "i", "ready": True, "restartCount": 0,
                "state": {"running": {"startedAt": now}},
            }
        ],
    }  # fmt: skip
    for pod in pods_of(space):
        kubectl("patch", "pod", pod, "-n", space, "--subresource=status", "-p", json.dumps({"status": status}))


@needs_api_server
def test_a_real_api_server_refuses_and_what_serves_goes_on(monkeypatch):
    space = f"dpi-refused-{int(START)}"
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig()))
    monkeypatch.setattr(workers_module, "REFUSED_RETRY_S", 1.0)
    kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", document=yaml.safe_dump(manifest()))
    kubectl("wait", "--for=condition=Established", "crd", manifest()["metadata"]["name"], "--timeout=120s")
    kubectl("create", "namespace", space)

    def put(name, **spec):
        one = document(parallelism={"dataParallelSize": 1}, **spec)
        one["metadata"] = {"name": name, "namespace": space}
        kubectl("apply", "-f", "-", document=json.dumps(one))

    async def ask(what, *args):
        """Until `what(*args)`; kubectl must not hold up the operator, which runs in this loop."""
        end = time.monotonic() + 120
        while not (found := await asyncio.to_thread(what, *args)):
            assert time.monotonic() < end, (what, args)
            await asyncio.sleep(0.2)
        return found

    async def main():
        stop = asyncio.Event()
        task = asyncio.create_task(run(Options(namespaces=(space,), metrics_port=0, lease_namespace=space), stop))
        try:
            await asyncio.to_thread(put, "demo")
            before = await ask(pods_of, space)
            await asyncio.to_thread(make_ready, space)
            await ask(lambda: of(space, "Ready")["status"] == "True")
            for bad, says in (
                ({"template": {"metadata": {"labels": {"team": "a b!"}}}}, "a b!"),
                ({"engine": {"resources": {"limits": {"bad key!": "1"}}}}, "bad key!"),
            ):
                await asyncio.to_thread(put, "demo", **bad)
                await ask(lambda says=says: says in of(space, "Accepted")["message"])
                assert of(space, "Accepted")["reason"] in ("ObjectRefused", "InvalidSpec")
                now = await asyncio.to_thread(pods_of, space)
                assert {n: p["metadata"]["uid"] for n, p in now.items()} == {
                    n: p["metadata"]["uid"] for n, p in before.items()
                }
            events = json.loads(kubectl("get", "events", "-n", space, "-o", "json").stdout)["items"]
            assert [e["type"] for e in events if e["reason"] == "SpecRejected"][:1] == ["Warning"]

            await asyncio.to_thread(put, "new", template={"metadata": {"labels": {"team": "a b!"}}})
            await ask(lambda: of(space, "Accepted", "new")["reason"] == "ObjectRefused")
            assert not pods_of(space, "new")
            await asyncio.to_thread(put, "slip", template={"spec": {"nodeSelctor": {"gpu": "yes"}}})
            await ask(lambda: "nodeSelctor" in of(space, "Accepted", "slip")["message"])
            assert of(space, "Accepted", "slip")["reason"] == "ObjectRefused"
            assert not pods_of(space, "slip")

            await asyncio.to_thread(put, "demo")
            await ask(lambda: of(space, "Ready")["status"] == "True")
            (pod,) = before
            kubectl("label", "pod", pod, "-n", space, f"{L_ROLE}=x", "--overwrite")
            right = before[pod]["metadata"]["labels"]
            await ask(lambda: pods_of(space).get(pod, {}).get("metadata", {}).get("labels") == right)
            kubectl("label", "pod", pod, "-n", space, f"{L_NAME}-", "app.kubernetes.io/managed-by-")
            await ask(lambda: pods_of(space).get(pod, {}).get("metadata", {}).get("labels") == right)
            await ask(lambda: of(space, "Ready")["status"] == "True")
        finally:
            stop.set()
            async with asyncio.timeout(60):
                assert await task == 0

    try:
        asyncio.run(main())
    finally:
        kubectl("delete", "namespace", space, "--wait=false")
