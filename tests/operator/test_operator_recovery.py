"""Lost pods: replaced alone or with their group, with back-off and budget, evidence first."""

import msgspec
import pytest
from operator_world import World, document, up

from dpi_operator.api.reasons import EventReason
from dpi_operator.observe.pods import pod_facts
from dpi_operator.plan.actions import Apply, Create, Delete
from dpi_operator.plan.state import STATE_KEY

MOE = {"model": {"architecture": "MoE"}, "engine": {"runtime": "vllm"}}


def test_a_failed_rank_of_a_dense_model_is_replaced_alone_after_its_back_off():
    world = up()
    rank1, head_uid = world.pod(0, 1), world.pods[world.pod(0, 0)].uid
    world.fail(rank1, exit_code=137, reason="OOMKilled", message="last words")
    plan = world.settle()
    assert plan.requeue_at == world.now + 30
    assert rank1 in world.pods
    ended = world.status.groups[0].ranks[1].last_termination
    assert (ended.exit_code, ended.reason, ended.message) == (137, "OOMKilled", "last words")
    assert world.condition("Degraded").reason == "OOMKilled"
    assert world.status.groups[0].phase == "Recovering"
    assert world.status.groups[0].next_restart_time
    assert world.condition("Ready").status == "True"
    world.now += 30
    world.settle()
    assert world.pods[rank1].phase == "Pending"
    assert world.pods[world.pod(0, 0)].uid == head_uid
    assert [d[2] for d in world.deleted] == ["Failed"]
    (event,) = [e for e in world.events if e.reason is EventReason.RANK_REPLACED]
    assert "Rank 1" in event.message
    assert "137 OOMKilled" in event.message
    assert "attempt 1 of 10" in event.message
    assert event.pod[0] == rank1
    world.all_ready()
    world.settle()
    assert world.condition("Degraded").status == "False"


def test_evidence_is_written_before_the_pod_is_deleted():
    world = up(failurePolicy={"backoff": {"baseSeconds": 0}})
    world.fail(world.pod(0, 1), message="why it died")
    actions = world.plan().actions
    (state,) = [i for i, a in enumerate(actions) if isinstance(a, Apply) and STATE_KEY in a.manifest.get("data", {})]
    (delete,) = [i for i, a in enumerate(actions) if isinstance(a, Delete)]
    assert state < delete
    assert "why it died" in actions[state].manifest["data"][STATE_KEY]


def test_the_head_of_a_dense_group_is_replaced_alone_and_the_others_stay():
    world = up()
    rank1 = world.pods[world.pod(0, 1)]
    world.fail(world.pod(0, 0))
    world.settle()
    assert world.condition("Ready").status == "False"
    world.now += 30
    world.settle()
    assert world.pods[world.pod(0, 1)] == rank1
    assert world.pods[world.pod(0, 0)].phase == "Pending"


@pytest.mark.parametrize(("mode", "local"), [("Internal", 2), ("Hybrid", 2), ("External", 1), ("MultiPort", 2)])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_pod_of_ranks_that_share_experts_is_replaced_alone_and_the_others_wait_for_it(mode, local, lost):
    sizes = {"dataParallelSize": 2 * local, "dataParallelSizeLocal": local, "expertParallel": True}
    world = up(model={"architecture": "MoE"}, parallelism=sizes, loadBalancing={"mode": mode})
    assert world.condition("Ready").status == "True"
    for manifest in world.manifests.values():
        args = manifest["spec"]["containers"][0]["args"]
        assert "--enable-expert-parallel" in args and "--reform-timeout" in args
    other = world.pods[world.pod(0, 1 - lost)]
    world.fail(world.pod(0, lost))
    world.settle()
    world.now += 30
    world.settle()
    assert world.pods[world.pod(0, 1 - lost)] == other
    assert world.pods[world.pod(0, lost)].phase == "Pending"
    world.all_ready()
    world.settle()
    assert world.condition("Ready").status == "True"


@pytest.mark.parametrize(
    "spec",
    [
        MOE,
        {"engine": {"runtime": "vllm"}},
        {"failurePolicy": {"action": "RecreateGroup"}},
        {"parallelism": {"coupling": "Coupled"}},
    ],
    ids=["vllm-moe", "vllm", "RecreateGroup", "Coupled"],
)
def test_a_coupled_group_goes_as_a_whole_and_comes_back_as_a_whole(spec):
    world = up(**spec)
    world.settle()
    world.all_ready()
    world.instant = False
    old = {p.uid for p in world.pods.values()}
    world.fail(world.pod(0, 1))
    world.settle()
    assert not world.deleted
    world.now += 30
    world.settle()
    assert {d[2] for d in world.deleted} == {"GroupBroken"}
    assert len(world.deleted) == 2
    world.remove(world.pod(0, 1))
    world.settle()
    assert world.names() == ["0-0"]  # none comes back before all are gone
    world.remove(world.pod(0, 0))
    world.settle()
    assert world.names() == ["0-0", "0-1"]
    assert not old & {p.uid for p in world.pods.values()}
    assert sum(e.reason is EventReason.GROUP_RECREATED for e in world.events) == 1


def test_before_a_coupled_group_has_formed_a_failure_takes_nobody_with_it():
    world = World(document(**MOE))
    world.settle()
    for name in list(world.pods):
        world.start(name)
    rank1 = world.pods[world.pod(0, 1)]
    world.fail(world.pod(0, 0))
    world.settle()
    world.now += 30
    world.settle()
    assert world.pods[world.pod(0, 1)] == rank1


def test_waits_double_and_the_budget_ends_in_failed_with_the_pod_kept():
    world = up(failurePolicy={"maxRestarts": 3, "backoff": {"baseSeconds": 10, "maxSeconds": 25}})
    waits = []
    for _ in range(4):
        world.make_ready(world.pod(0, 1))
        world.fail(world.pod(0, 1), exit_code=3)
        plan = world.settle()
        if plan.requeue_at is None or world.status.groups[0].phase == "Failed":
            break
        waits.append(plan.requeue_at - world.now)
        world.now = plan.requeue_at
        world.settle()
    assert waits == [10, 20, 25]
    assert world.status.groups[0].phase == "Failed"
    degraded = world.condition("Degraded")
    assert degraded.reason == "RestartBudgetExhausted"
    assert "exited 3" in degraded.message
    kept = world.pod(0, 1)
    world.now += 10_000
    world.settle()
    assert world.pods[kept].failed
    world.change(failurePolicy={"maxRestarts": 5})
    world.settle()
    assert not world.pods[kept].failed


def test_a_new_restart_time_gives_a_failed_group_a_new_start():
    world = up(failurePolicy={"maxRestarts": 0})
    world.fail(world.pod(0, 1))
    world.settle()
    assert world.status.groups[0].phase == "Failed"
    old = world.revisions()
    world.change(restartedAt="2026-11-29T10:00:00Z")
    for _ in range(3):
        world.settle()
        world.all_ready()
    world.settle()
    assert world.condition("Ready").status == "True"
    assert not world.revisions() & old


def test_a_long_good_run_forgets_failures():
    world = up(failurePolicy={"backoff": {"baseSeconds": 10, "maxSeconds": 100, "resetAfterSeconds": 500}})
    for _ in range(2):
        world.fail(world.pod(0, 1))
        world.now = world.settle().requeue_at
        world.settle()
        world.all_ready()
    assert world.settle().requeue_at == world.now + 500
    assert world.status.restarts == 2
    world.now += 500
    world.settle()
    assert world.status.restarts == 0
    world.fail(world.pod(0, 1))
    assert world.settle().requeue_at == world.now + 10


def test_a_pod_deleted_by_hand_comes_back_as_soon_as_its_name_is_free_and_costs_nothing():
    world = up()
    rank1 = world.pod(0, 1)
    world.kubectl_delete(rank1)
    world.settle()
    assert rank1 in world.pods
    world.remove(rank1)
    world.settle()
    assert world.names() == ["0-0", "0-1"]
    assert world.status.restarts == 0
    assert sum(e.reason is EventReason.RANK_REPLACED for e in world.events) == 1


def test_a_pod_on_a_dead_node_is_removed_by_force_once_its_time_is_over():
    world = up(failurePolicy={"stuckTerminatingSeconds": 60})
    rank1 = world.pod(0, 1)
    world._change(rank1, disruption="DeletionByTaintManager")
    world.kubectl_delete(rank1)
    world.settle()
    assert world.status.groups[0].ranks[1].last_termination.reason == "NodeLost"
    world.now += 76
    world.settle()
    assert world.condition("Degraded").reason == "StuckTerminating"
    assert "node-1" in world.condition("Degraded").message
    world.now += 59
    world.settle()
    (deleted,) = world.deleted
    assert deleted[1:] == (rank1, "StuckTerminating")
    assert world.names() == ["0-0", "0-1"]
    assert world.pods[rank1].deleting is None


def test_zero_means_never_by_force():
    world = up(failurePolicy={"stuckTerminatingSeconds": 0})
    world.kubectl_delete(world.pod(0, 1))
    world.now += 100_000
    world.settle()
    assert not world.deleted


def test_an_evicted_pod_is_replaced_at_once_the_first_time():
    world = up()
    rank1 = world.pod(0, 1)
    world.fail(rank1, exit_code=None, reason="Evicted", message="The node was low on resource: ephemeral-storage.")
    world.settle()
    assert not world.pods[rank1].failed
    assert "ephemeral-storage" in next(e for e in world.events if e.reason is EventReason.RANK_REPLACED).message


def test_a_handshake_that_never_ends_is_named_and_a_coupled_group_tries_again():
    world = World(document(**MOE, handshake={"timeoutSeconds": 60}))
    world.settle()
    for name in list(world.pods):
        world.start(name)
    plan = world.settle()
    assert plan.requeue_at == world.now + 90
    world.now += 60
    world.settle()
    handshake = world.condition("HandshakeComplete")
    assert handshake.reason == "HandshakeTimeout"
    assert "0 (demo-" in handshake.message
    world.now += 30
    world.settle()
    assert any(e.reason is EventReason.HANDSHAKE_TIMEOUT for e in world.events)
    old = {p.uid for p in world.pods.values()}
    world.now += 30
    world.settle()
    assert world.names() == ["0-0", "0-1"]
    assert not old & {p.uid for p in world.pods.values()}


def test_a_pod_that_waits_for_a_node_is_never_restarted():
    world = World(document())
    world.settle()
    world._change(world.pod(0, 1), scheduling_message="0/2 nodes are available: 2 Insufficient nvidia.com/gpu.")
    world.settle()
    world.now += 100_000
    world.settle()
    scheduled = world.condition("Scheduled")
    assert scheduled.reason == "InsufficientCapacity"
    assert world.pod(0, 1) in scheduled.message
    assert not world.deleted


def test_an_image_that_cannot_be_pulled_is_said_at_once():
    world = World(document())
    world.settle()
    rank1 = world.pod(0, 1)
    world._change(rank1, scheduled=True, node="n", waiting_reason="ImagePullBackOff", waiting_message="no such image")
    world.settle()
    assert world.condition("HandshakeComplete").reason == "ImagePullFailed"
    assert "no such image" in world.condition("HandshakeComplete").message


def test_gates_of_a_runtime_without_probes_open_when_the_head_serves_and_are_never_closed():
    world = World(document(engine={"runtime": "vllm"}))
    world.settle()
    head, rank1 = world.pod(0, 0), world.pod(0, 1)
    assert world.pods[rank1].gated
    assert not world.pods[head].gated
    world.start(rank1)
    world.settle()
    assert not world.pods[rank1].gate_open
    world.make_ready(head)
    world.settle()
    assert world.pods[rank1].gate_open
    assert world.condition("ConfigConsistent").reason == "DeclaredOnly"


def test_a_state_that_cannot_be_read_is_said_and_does_not_stop_anything():
    world = up()
    from dpi_operator.plan.state import read_state

    _, error = read_state("{not json")
    assert "cannot be read" in error
    world.children[("ConfigMap", "demo-state")]["data"][STATE_KEY] = "{not json"
    world.fail(world.pod(0, 1))
    world.settle()
    world.now += 31
    world.settle()
    assert not world.pods[world.pod(0, 1)].failed


def test_a_create_never_comes_before_the_name_is_free():
    world = up()
    world.instant = False
    world.fail(world.pod(0, 1))
    world.settle()
    world.now += 30
    world.settle()
    assert not [a for a in world.plan().actions if isinstance(a, Create)]
    world.remove(world.pod(0, 1))
    world.settle()
    assert world.names() == ["0-0", "0-1"]


# -- containers beside the engine --------------------------------------------------------------------------------------


def a_pod(engine, beside, phase="Running", first=None, **metadata):
    """As the API holds it: states of the engine, of a container beside it, and of one that ran before them."""

    def one(name, code):
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "startedAt": "2027-01-15T08:00:00Z"}
        return {"name": name, "state": {"running": {}} if code is None else {"terminated": ended}}

    status = {
        "phase": phase,
        "containerStatuses": [one("engine", engine), one("side", beside)],
        "initContainerStatuses": [one("fetch", first)] if first is not None else [],
    }
    return pod_facts(
        {"metadata": {"name": "demo-0123456789-0-1", "uid": "u", "labels": {}, **metadata}, "status": status}
    )


@pytest.mark.parametrize(
    ("engine", "beside", "container", "code"),
    [(137, None, "", 137), (None, 9, "side", 9), (None, 0, "side", 0), (0, 9, "side", 9), (1, 9, "", 1)],
)
def test_a_pod_of_which_one_container_ended_is_lost_though_another_runs(engine, beside, container, code):
    facts = a_pod(engine, beside, first=0)
    assert facts.failed and not facts.running
    assert (facts.termination.container, facts.termination.exit_code) == (container, code)


def test_containers_that_run_or_were_told_to_end_are_no_failure():
    assert not a_pod(None, None).failed
    assert not a_pod(None, None, first=0).failed
    assert not a_pod(0, None, deletionTimestamp="2027-01-15T08:01:15Z").failed


def test_a_container_that_fails_before_the_engine_is_named():
    facts = a_pod(None, None, phase="Failed", first=7)
    assert (facts.failed, facts.termination.container, facts.termination.exit_code) == (True, "fetch", 7)


def test_a_rank_whose_companion_ended_is_replaced_and_the_companion_named():
    world = up()
    rank1 = world.pod(0, 1)
    uid = world.pods[rank1].uid
    ended = a_pod(None, 137)
    end = msgspec.structs.replace(ended.termination, pod=rank1, uid=uid, reason="OOMKilled", rank_start=1)
    world._change(rank1, ready=False, ready_since=None, ended=ended.ended, termination=end)
    world.settle()
    degraded = world.condition("Degraded")
    assert (degraded.reason, "Container side of rank 1 (pod " in degraded.message) == ("RankLost", True)
    assert "engine.resources" not in degraded.message
    assert world.status.groups[0].ranks[1].last_termination.message == "container side: no last words"
    world.now += 30
    world.settle()
    assert world.pods[rank1].uid != uid
    (event,) = [e for e in world.events if e.reason is EventReason.RANK_REPLACED]
    assert "Container side of rank 1" in event.message
    assert event.message.endswith("; raise that container's limits.memory in spec.template.")
