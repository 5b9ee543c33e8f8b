"""What the planner does with one object, step by step in a model of a cluster."""

import dataclasses
from collections import Counter

import pytest
from operator_world import START, World, document, up

from dpi_operator.api.reasons import EventReason, Reason
from dpi_operator.plan.actions import Apply, Create, Delete, EmitEvent, Try
from dpi_operator.plan.facts import HeadReport, RankReport
from dpi_operator.plan.reconcile import reconcile


def test_an_object_becomes_services_first_then_pods_and_its_status_says_ready():
    world = World(document())
    plan = world.plan()
    kinds = [a.manifest["kind"] for a in plan.actions if isinstance(a, Apply | Create)]
    assert kinds[0] == "ConfigMap"
    assert kinds.index("Service") < kinds.index("Pod")
    assert kinds.count("Pod") == 2
    world.settle()
    assert world.condition("Ready").status == "False"
    assert world.status.groups[0].phase == "Scheduling"
    world.start(world.pod(0, 0))
    world.start(world.pod(0, 1))
    world.settle()
    assert world.status.groups[0].phase == "Handshake"
    handshake = world.condition("HandshakeComplete")
    assert handshake.reason == "RanksMissing"
    assert world.pod(0, 1) in handshake.message
    world.all_ready()
    world.settle()
    assert world.condition("Ready").status == "True"
    assert world.status.rank_summary == "2/2"
    assert world.status.ready_replicas == world.status.available_replicas == world.status.updated_replicas == 1
    assert world.condition("Progressing").reason == "RolloutComplete"
    reasons = [e.reason for e in world.events]
    assert reasons.count(EventReason.GROUP_CREATED) == reasons.count(EventReason.GROUP_READY) == 1


def test_missing_ranks_are_named_with_what_they_are_doing():
    world = World(document())
    world.settle()
    head, rank1 = world.pod(0, 0), world.pod(0, 1)
    world.start(head)
    world.start(rank1)
    ranks = (RankReport(0, "READY"), RankReport(1, "LOADING", stage="reading weights 40%"))
    world.reports[head] = HeadReport(world.pods[head].uid, START, False, ranks)
    world.settle()
    said = world.condition("HandshakeComplete").message
    assert f"ranks 1 ({rank1}, reading weights 40%) have not joined." in said
    ranked = world.status.groups[0].ranks
    assert [(r.state, r.stage) for r in ranked] == [("READY", ""), ("LOADING", "reading weights 40%")]
    # All have joined, and the kubelet has yet to probe.
    ranks = (RankReport(0, "READY"), RankReport(1, "READY"))
    world.reports[head] = HeadReport(world.pods[head].uid, START, True, ranks)
    world.settle()
    pods = f"0 ({head}, its pod is not ready); 1 ({rank1}, its pod is not ready)"
    assert f"ranks {pods} have joined and are not ready yet." in world.condition("HandshakeComplete").message
    assert world.status.groups[0].message == f"ranks {pods}"
    world.now += 10_000
    world.settle()
    assert f"ranks {pods} were not ready within" in world.condition("HandshakeComplete").message


@pytest.mark.parametrize("mode", ["Internal", "External"])
def test_a_rank_that_is_slower_to_start_is_on_its_way_and_not_lost(mode):
    world = World(document(loadBalancing={"mode": mode}))
    world.settle()
    head, slow = world.pod(0, 0), world.pod(0, 1)
    world.make_ready(head)
    world.start(slow)
    world.settle()
    assert (world.status.groups[0].phase, world.status.groups[0].reason) == ("Handshake", "RanksMissing")
    assert world.condition("Degraded").reason == "Healthy"
    assert world.condition("HandshakeComplete").reason == "RanksMissing"
    world.make_ready(slow)
    world.settle()
    assert world.status.groups[0].phase == "Ready"
    world.remove(slow)  # once all have served, it is a loss
    world.settle()
    assert world.status.groups[0].phase == "Recovering"
    assert world.condition("Degraded").reason == "RankLost"


def test_an_answer_of_an_earlier_head_says_nothing_of_this_one():
    world = up()
    head = world.pod(0, 0)
    world.reports[head] = HeadReport("another-uid", START, True, (RankReport(1, "LOST"),))
    world.settle()
    assert world.status.ready_ranks == 2


def test_a_rank_that_the_head_has_lost_degrades_but_does_not_take_the_endpoint_away():
    world = up()
    head = world.pod(0, 0)
    ranks = (RankReport(0, "READY"), RankReport(1, "LOST", stage="no beats for 3 s"))
    world.reports[head] = HeadReport(world.pods[head].uid, START, True, ranks)
    world.settle()
    assert world.status.rank_summary == "1/2"
    assert world.condition("Ready").status == "True"
    degraded = world.condition("Degraded")
    assert (degraded.status, degraded.reason) == ("True", "RankLost")
    assert "no beats for 3 s" in degraded.message
    assert not world.deleted


@pytest.mark.parametrize(
    ("spec", "condition", "reason", "words"),
    [
        (
            {"rankOverrides": [{"ranks": "1", "args": ["--max-num-seqs", "8"]}]},
            "ConfigConsistent",
            Reason.FINGERPRINT_MISMATCH,
            ["Revision ", " of the spec: rank 1: max_num_seqs: expected 64, got 8.", "No pod was made"],
        ),
        ({"engine": {"args": ["--no-such-flag", "1"]}}, "Accepted", Reason.INVALID_SPEC, ["--no-such-flag"]),
        ({"engine": {"args": ["--port", "1"]}}, "Accepted", Reason.RESERVED_FLAG, ["--port"]),
        ({"engine": {"args": ["--help"]}}, "Accepted", Reason.INVALID_SPEC, ["--help", "remove it"]),
        ({"engine": {"env": [{"name": "DPI_MODEL"}]}}, "Accepted", Reason.RESERVED_FIELD, ["DPI_MODEL"]),
        (
            {"template": {"spec": {"containers": [{"name": "engine", "env": [{"name": "DPI_POD_IP"}]}]}}},
            "Accepted",
            Reason.RESERVED_FIELD,
            ["spec.template.spec.containers[engine].env", "DPI_POD_IP"],
        ),
        (
            {"template": {"spec": {"hostname": "x"}}},
            "Accepted",
            Reason.RESERVED_FIELD,
            ["spec.template.spec.hostname"],
        ),
        (
            {"template": {"metadata": {"labels": {"app": "mine", "dpinference.dev/role": "rank0"}}}},
            "Accepted",
            Reason.RESERVED_FIELD,
            ["spec.template.metadata.labels[dpinference.dev/role]: is set by the operator; remove it"],
        ),
        (
            {"template": {"metadata": {"labels": ["app"]}}},
            "Accepted",
            Reason.RESERVED_FIELD,
            ["spec.template.metadata.labels: is an object of texts"],
        ),
        (
            {
                "engine": {"device": "cuda", "resources": {"limits": {"nvidia.com/gpu": 3}}},
                "parallelism": {"tensorParallelSize": 2},
            },
            "Accepted",
            Reason.GPU_REQUEST_MISMATCH,
            ["expected 2", "got 3"],
        ),
        ({"rollout": {"maxSurge": "many"}}, "Accepted", Reason.INVALID_SPEC, ["spec.rollout"]),
        ({"parallelism": {"dataParallelSize": "2"}}, "Accepted", Reason.INVALID_SPEC, ["dataParallelSize", "'2'"]),
    ],
)
def test_a_spec_that_cannot_be_used_is_named_and_makes_nothing(spec, condition, reason, words):
    world = World(document(**spec))
    world.settle()
    found = world.condition(condition)
    assert (found.status, found.reason) == ("False", reason)
    for word in words:
        assert word in found.message
    assert world.condition("Ready").reason == reason
    assert not world.pods
    assert not world.children


def test_a_bad_edit_leaves_what_runs_alone_and_still_looks_after_it():
    world = up()
    before = dict(world.pods)
    world.change(rankOverrides=[{"ranks": "1", "args": ["--seed", "7"]}])
    world.settle()
    assert world.pods == before
    assert world.condition("ConfigConsistent").status == "False"
    assert "seed" in world.condition("Ready").message
    world.fail(world.pod(0, 1))
    world.settle()
    world.now += 31
    world.settle()
    assert world.names() == ["0-0", "0-1"]
    world.change(rankOverrides=[])
    world.settle()
    world.all_ready()
    world.settle()
    assert world.condition("Ready").status == "True"


def test_an_object_that_cannot_be_read_keeps_its_pods():
    world = up()
    before = dict(world.pods)
    world.change(engine={"surprise": 1})
    world.settle()
    assert world.pods == before
    assert "surprise" in world.condition("Accepted").message
    assert world.status.ready_ranks == 2


def test_ranks_that_report_another_configuration_are_named():
    world = up()
    head = world.pod(0, 0)
    ranks = (
        RankReport(0, "READY", fields={"dtype": "bfloat16", "wire_version": 1}),
        RankReport(1, "READY", fields={"dtype": "float32", "wire_version": 1, "new_field": 2}),
        RankReport(2, "LOADING", fields={"dtype": "auto"}),
    )
    world.reports[head] = HeadReport(world.pods[head].uid, START, True, ranks)
    world.settle()
    consistent = world.condition("ConfigConsistent")
    assert consistent.reason == "HashMismatch"
    assert "rank 1: dtype: expected 'bfloat16', got 'float32'" in consistent.message
    assert "rank 2" not in consistent.message


def test_queue_numbers_are_written_once_a_minute_and_times_alone_never():
    world = up()
    head = world.pod(0, 0)

    def hear(waiting, after):
        world.now += after
        ranks = tuple(RankReport(r, "READY", waiting=waiting, running=1, kv_usage=0.5) for r in (0, 1))
        world.reports[head] = HeadReport(world.pods[head].uid, world.now, True, ranks)
        plan = world.plan()
        assert not plan.actions
        before = world.status
        world.carry_out(plan)
        return world.status != before, plan.requeue_at

    assert hear(3, 5) == (True, None)
    assert world.status.waiting == 6
    assert hear(3, 15) == (False, None)
    changed, due = hear(4, 15)
    assert not changed
    assert due == world.now + 30
    assert hear(4, 30)[0]
    assert world.status.groups[0].ranks[1].kv_cache_usage == "0.50"


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
@pytest.mark.parametrize("rollout", [{}, {"maxUnavailable": 2}, {"partition": 1}])
def test_evictions_take_whole_groups_while_groups_of_two_sizes_serve(rollout, before, after):
    world = up(replicas=3, parallelism={"dataParallelSize": before}, rollout=rollout)

    def budget():
        return world.children[("PodDisruptionBudget", "demo")]["spec"]["minAvailable"]

    def serving():
        """Pods of each group that serves."""
        return sorted(Counter((p.revision, p.group) for p in world.pods.values() if p.ready).values())

    assert budget() == 2 * before
    world.change(parallelism={"dataParallelSize": after})
    for _ in range(5):
        world.settle()
        assert sum(serving()) - budget() <= serving()[0]
        world.all_ready()
    world.settle()
    assert serving() == (sorted([before, after, after]) if "partition" in rollout else [after] * 3)
    assert budget() == sum(serving()[1:])


def test_an_object_without_pods_of_one_group_gets_no_budget_for_disruptions_and_two_get_one():
    world = up()
    assert ("PodDisruptionBudget", "demo") not in world.children
    world.change(replicas=3)
    world.settle()
    assert world.children[("PodDisruptionBudget", "demo")]["spec"]["minAvailable"] == 4
    world.change(replicas=1)
    world.settle()
    assert ("PodDisruptionBudget", "demo") not in world.children


def test_a_child_that_was_changed_or_removed_by_hand_comes_back():
    world = up()
    service = world.children[("Service", "demo")]
    service["spec"]["selector"] = {"app": "x"}
    service["spec"]["sessionAffinity"] = "None"  # the API server's default, not ours
    del world.children[("Service", "demo-internal")]
    world.settle()
    assert world.children[("Service", "demo")]["spec"]["selector"] != {"app": "x"}
    assert ("Service", "demo-internal") in world.children


def test_annotations_taken_from_the_spec_are_taken_from_the_service():
    world = up(loadBalancing={"service": {"annotations": {"a": "1"}}})
    assert world.children[("Service", "demo")]["metadata"]["annotations"]["a"] == "1"
    world.change(loadBalancing={"service": {"annotations": {}}})
    world.settle()
    assert "a" not in world.children[("Service", "demo")]["metadata"]["annotations"]


def test_a_name_that_another_holds_is_reported_and_nothing_is_made_beside_it():
    world = World(document())
    snapshot = dataclasses.replace(world.snapshot(), foreign=frozenset({("Service", "demo")}))
    plan = reconcile(snapshot, START)
    assert not [a for a in plan.actions if isinstance(a, Create)]
    assert not [
        a
        for a in plan.actions
        if isinstance(a, Apply) and a.manifest["metadata"]["name"] == "demo" and a.manifest["kind"] == "Service"
    ]
    accepted = next(c for c in plan.status.conditions if c.type == "Accepted")
    assert (accepted.reason, accepted.status) == ("NameTaken", "False")
    assert "Service demo" in accepted.message
    assert [a.reason for a in plan.actions if isinstance(a, EmitEvent)][:1] == [EventReason.NAME_TAKEN]


def test_a_name_that_is_taken_later_keeps_what_runs_and_holds_a_rollout():
    world = up()
    world.change(engine={"image": "engine:2"})
    (asked,) = [a for a in world.plan().actions if isinstance(a, Try)]
    world.trials = {asked.revision: ""}  # the API server would take the new pods
    snapshot = dataclasses.replace(world.snapshot(), foreign=frozenset({("Service", "demo")}))
    plan = reconcile(snapshot, world.now)
    assert not [a for a in plan.actions if isinstance(a, Create)]
    assert not [a for a in plan.actions if isinstance(a, Delete) and a.kind == "Pod"]
    assert any(isinstance(a, Delete) and a.kind == "Pod" for a in world.plan().actions)  # without it


def test_a_name_that_is_not_needed_may_be_anothers():
    world = World(document())
    snapshot = dataclasses.replace(world.snapshot(), foreign=frozenset({("Service", "demo-0-rank-7")}))
    plan = reconcile(snapshot, START)
    assert [a for a in plan.actions if isinstance(a, Create)]
    assert next(c for c in plan.status.conditions if c.type == "Accepted").status == "True"


def hear(world, *ranks, error="", at=None):
    """Let the head say this of its ranks."""
    head = world.pod(0, 0)
    world.reports[head] = HeadReport(world.pods[head].uid, world.now if at is None else at, True, ranks, error)
    world.settle()


def test_one_long_queue_is_said_and_stays_said_until_the_queues_are_close():
    world = up()

    def degraded(a, b):
        world.now += 61
        hear(world, RankReport(0, "READY", waiting=a), RankReport(1, "READY", waiting=b))
        return world.condition("Degraded").reason

    assert degraded(9, 0) == "Healthy"
    assert degraded(30, 30) == "Healthy"
    assert degraded(20, 1) == "QueueImbalance"
    assert degraded(20, 5) == "QueueImbalance"
    assert "rank 0" in world.condition("Degraded").message
    assert degraded(20, 15) == "Healthy"
    assert degraded(20, 5) == "Healthy"


def test_a_head_that_serves_and_cannot_be_asked_is_said_after_a_while():
    world = up()
    hear(world, error="does not answer: TimeoutError")
    assert world.condition("Degraded").status == "False"
    plan = world.settle()
    assert plan.requeue_at == world.now + 60
    world.now += 60
    world.settle()
    assert world.condition("Degraded").reason == "StaleMetrics"
    assert "NetworkPolicy" in world.condition("Degraded").message
    assert world.condition("Ready").status == "True"
    assert not world.deleted


def test_ranks_that_say_nothing_of_their_configuration_leave_it_unknown_and_serve():
    world = up()
    hear(world, RankReport(0, "READY", fields={"wire_version": 1}), RankReport(1, "READY"))
    consistent = world.condition("ConfigConsistent")
    assert (consistent.status, consistent.reason) == ("Unknown", "HashUnknown")
    assert "1 (demo-" in consistent.message
    assert world.condition("Ready").status == "True"
    world.change(handshake={"requireConfigHash": False})
    world.settle()
    assert world.condition("ConfigConsistent").status == "True"


@pytest.mark.parametrize(
    ("hint", "fields", "found"),
    [
        ("Dense", {"spec.moe": None}, None),
        ("Dense", {"spec.moe.num_experts": 8}, "MoE"),
        ("MoE", {"spec.moe.num_experts": 8}, None),
        ("MoE", {"spec.moe": None}, "Dense"),
        ("MoE", {}, None),  # an engine that does not say
    ],
)
def test_a_model_that_is_not_what_the_spec_says_is_named_and_set_right_without_a_rollout(hint, fields, found):
    world = up(model={"architecture": hint})
    before = dict(world.pods)
    reports = [RankReport(r, "READY", fields={"wire_version": 1, **fields}) for r in (0, 1)]
    hear(world, *reports)
    consistent = world.condition("ConfigConsistent")
    if found is None:
        assert consistent.status == "True"
        return
    assert (consistent.status, consistent.reason) == ("False", "ArchitectureMismatch")
    assert f"reports a model that is {found}, spec.model.architecture says {hint}" in consistent.message
    assert not world.deleted
    world.change(model={"architecture": found})
    world.settle()
    assert world.condition("ConfigConsistent").status == "True"
    assert world.pods == before


@pytest.mark.parametrize(
    ("said", "reason", "names"),
    [
        ('secret "hub" not found', "MissingSecret", "Create the Secret hub;"),
        ("couldn't find key HF_TOKEN in Secret ns/hub", "MissingSecret", "Create the Secret hub;"),
        ('configmap "settings" not found', "ContainerConfigError", 'configmap "settings" not found'),
    ],
)
def test_a_container_that_cannot_be_made_says_what_is_missing(said, reason, names):
    world = World(document())
    world.settle()
    head = world.pod(0, 0)
    waiting = {"waiting_reason": "CreateContainerConfigError", "waiting_message": said}
    world.pods[head] = dataclasses.replace(world.pods[head], scheduled=True, node="n", **waiting)
    world.settle()
    handshake = world.condition("HandshakeComplete")
    assert (handshake.status, handshake.reason) == ("False", reason)
    assert head in handshake.message and names in handshake.message


def test_no_file_of_the_operators_is_read_for_an_object(tmp_path):
    secret = tmp_path / "token"
    secret.write_text("hunter2")
    world = World(document(engine={"args": ["--config", str(secret)]}))
    world.settle()
    found = world.condition("Accepted")
    assert (found.status, found.reason) == ("False", Reason.NOT_SUPPORTED)
    assert "hunter2" not in found.message and "--config" in found.message
