"""Scaling and rollouts by whole groups, in a model of a cluster and as properties over random orders of events."""

import random

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from operator_world import START, World, document, up

from dpi_operator.api.reasons import EventReason
from dpi_operator.api.types import Rollout
from dpi_operator.plan.rollout import count_of, limits


def image(world, tag):
    world.change(engine={"image": f"engine:{tag}"})


def run_down(world, rounds=20):
    """Let the cluster do what it does until nothing more happens; how few groups served at the worst."""
    least = 10**9
    for _ in range(rounds):
        world.settle()
        least = min(least, world.status.available_replicas)
        world.all_ready()
        world.now += 1
    world.settle()
    return least


@pytest.mark.parametrize(
    ("value", "up_", "count"), [(2, False, 2), ("25%", False, 1), ("25%", True, 2), ("0%", True, 0), ("100%", False, 7)]
)
def test_percentages_are_rounded_down_for_what_may_be_away_and_up_for_the_surge(value, up_, count):
    assert count_of(value, 7, up=up_) == count


def test_never_both_zero():
    assert limits(Rollout(max_unavailable="10%", max_surge=0), 3) == (1, 0)


def test_scaling_up_touches_no_pod_that_exists():
    world = up()
    before = dict(world.pods)
    world.change(replicas=3)
    world.settle()
    assert {n: p for n, p in world.pods.items() if n in before} == before
    assert world.names() == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]
    assert len(world.revisions()) == 1


def test_scaling_down_takes_groups_that_do_not_serve_first_then_the_highest():
    world = up(replicas=4)
    world._change(world.pod(1, 0), ready=False, ready_since=None)
    world.change(replicas=2)
    world.settle()
    assert world.names() == ["0-0", "0-1", "2-0", "2-1"]
    assert {d[2] for d in world.deleted} == {"ScaledDown"}
    world.change(replicas=3)
    world.settle()
    assert world.names() == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]


def test_to_zero_and_back():
    world = up(replicas=2)
    world.change(replicas=0)
    world.settle()
    assert not world.pods
    assert world.condition("Ready").reason == "ScaledToZero"
    assert world.status.replicas == 0
    world.change(replicas=1)
    world.settle()
    world.all_ready()
    world.settle()
    assert world.condition("Ready").status == "True"


def test_the_way_to_zero_says_how_many_pods_are_left():
    world = up(replicas=2)
    world.instant = False
    world.change(replicas=0)
    world.settle()
    for left in (4, 3, 2, 1):
        progress = world.condition("Progressing")
        what = "last pod" if left == 1 else f"last {left} pods"
        assert (progress.status, progress.reason) == ("True", "Scaling")
        assert progress.message == f"spec.replicas is 0: it waits for the {what} to end."
        world.remove(min(world.pods))
        world.settle()
    assert world.condition("Progressing").message == "spec.replicas is 0: there are no groups."


@pytest.mark.parametrize("above", [0, 1])
def test_a_group_of_a_former_scale_that_does_not_end_is_waited_for_only_without_surge(above):
    world = up(replicas=2, rollout={"maxSurge": above})
    world.instant = False
    world.change(replicas=0)
    world.settle()
    for name in world.names():
        if name.startswith("0-"):
            world.remove(world.pod(0, int(name[2:])))
    world.change(replicas=1)
    world.settle()
    hanging = ["1-0", "1-1"]
    assert world.names() == (["0-0", "0-1", *hanging] if above else hanging)
    for name in [n for n, p in world.pods.items() if p.deleting is not None]:
        world.remove(name)
    run_down(world)
    assert world.names() == ["0-0", "0-1"]
    assert world.condition("Ready").status == "True"


def test_a_group_that_failed_comes_back_where_it_was_though_it_may_surge():
    world = up(replicas=2, rollout={"maxSurge": 1}, failurePolicy={"action": "RecreateGroup"})
    world._change(world.pod(0, 0), ready=False, ready_since=None)
    world.change(replicas=1)
    world.settle()
    assert world.names() == ["1-0", "1-1"]
    world.instant = False
    world.fail(world.pod(1, 0))
    world.settle()
    world.now += 3600
    world.settle()
    assert all(p.deleting is not None or p.failed for p in world.pods.values())
    assert world.names() == ["1-0", "1-1"]


def test_suspend_takes_the_pods_and_keeps_the_rest():
    world = up(replicas=2)
    world.change(suspend=True)
    world.settle()
    assert not world.pods
    assert world.condition("Ready").reason == "Suspended"
    assert ("Service", "demo") in world.children
    assert {d[2] for d in world.deleted} == {"Suspended"}
    world.change(suspend=False)
    world.settle()
    assert len(world.pods) == 4


@pytest.mark.parametrize(
    ("rollout", "least", "most"),
    [({}, 2, 6), ({"maxUnavailable": 2}, 1, 6), ({"maxUnavailable": 0, "maxSurge": 1}, 3, 8)],
    ids=["one away", "two away", "surge"],
)
def test_a_new_image_rolls_group_by_group_within_its_limits(rollout, least, most):
    world = up(replicas=3, rollout=rollout)
    (old,) = world.revisions()
    image(world, 2)
    peak, worst = 0, 10**9
    for _ in range(20):
        world.settle()
        peak, worst = max(peak, len(world.pods)), min(worst, world.status.available_replicas)
        world.all_ready()
        world.settle()
        peak = max(peak, len(world.pods))
    assert (worst, peak) == (least, most)
    assert world.revisions() == {world.status.update_revision}
    assert old not in world.revisions()
    assert world.status.current_revision == world.status.update_revision
    reasons = [e.reason for e in world.events]
    assert reasons.count(EventReason.ROLLOUT_STARTED) == 1
    assert reasons.count(EventReason.ROLLOUT_COMPLETED) == 1


def test_one_group_with_surge_gets_its_successor_before_it_goes():
    world = up(rollout={"maxSurge": 1, "maxUnavailable": 0})
    image(world, 2)
    assert run_down(world) == 1
    assert world.names() == ["0-0", "0-1"]


def test_without_surge_a_new_group_waits_until_the_old_one_is_gone():
    world = up()
    world.instant = False
    image(world, 2)
    world.settle()
    assert len(world.revisions()) == 1
    for name in list(world.pods):
        world.remove(name)
    world.settle()
    assert world.names() == ["0-0", "0-1"]
    assert world.revisions() == {world.status.update_revision}


def test_groups_that_wait_for_their_old_pods_to_end_have_not_joined():
    world = up(replicas=2, rollout={"maxUnavailable": 2})
    world.instant = False
    image(world, 2)
    world.settle()
    assert all(p.deleting is not None for p in world.pods.values())
    scheduled, joined = world.condition("Scheduled"), world.condition("HandshakeComplete")
    assert (scheduled.status, scheduled.reason) == ("False", "PodsPending")
    assert scheduled.message == "0 of 4 pods exist. 2 groups wait until their old pods have ended."
    assert (joined.status, joined.reason) == ("False", "Rank0NotReady")
    assert joined.message == "2 groups have no pods yet."
    for name in list(world.pods):
        world.remove(name)
    run_down(world)
    assert world.condition("HandshakeComplete").status == "True"


def test_a_rollout_stops_at_a_group_that_does_not_come_up_and_goes_on_when_the_image_is_mended():
    world = up(replicas=3)
    image(world, "bad")
    for _ in range(5):
        world.settle()
    assert sum(p.ready for p in world.pods.values()) == 4
    assert world.condition("Ready").status == "True"
    image(world, "good")
    run_down(world)
    assert world.condition("Progressing").reason == "RolloutComplete"
    assert len(world.revisions()) == 1


@pytest.mark.parametrize("strategy", ["RollingUpdate", "BlueGreen"])
def test_a_rollout_names_the_revision_that_serves_as_the_one_that_is_replaced(strategy):
    world = up(replicas=2, rollout={"strategy": strategy})
    (first,) = world.revisions()
    image(world, "broken")
    world.settle()
    broken = world.status.update_revision
    image(world, "mended")
    world.settle()
    mended = world.status.update_revision
    image(world, "broken")
    world.settle()
    image(world, 1)
    world.settle()
    told = [e.message for e in world.events if e.reason in (EventReason.ROLLOUT_STARTED, EventReason.ROLLED_BACK)]
    assert told == [
        f"Revision {broken} replaces {first} ({strategy}).",
        f"Revision {mended} replaces {first} ({strategy}).",
        f"Revision {broken}, number 2 before, comes back in place of {first} ({strategy}).",
        f"Revision {first}, number 1 before, comes back in place of {broken} ({strategy}).",
    ]


def test_two_edits_in_a_row_replace_each_group_once():
    world = up()
    world.created.clear()
    image(world, 2)
    world.change(engine={"args": ["--seed", "3"]})
    run_down(world)
    assert len(world.created) == 2


def test_only_fields_that_pods_depend_on_roll_groups():
    world = up()
    before = dict(world.pods)
    world.change(
        replicas=1,
        rollout={"maxSurge": 1},
        disruption={"maxUnavailableGroups": 2},
        failurePolicy={"maxRestarts": 5},
        loadBalancing={"service": {"port": 8080}},
        metrics={"queueStats": {"intervalSeconds": 30}},
        parallelism={"dataParallelSize": 2, "dataParallelSizeLocal": None},
    )
    world.settle()
    assert world.pods == before
    assert world.children[("Service", "demo")]["spec"]["ports"][0]["port"] == 8080


def test_partition_keeps_groups_below_it():
    world = up(replicas=3, rollout={"partition": 1})
    (old,) = world.revisions()
    image(world, 2)
    run_down(world)
    assert {p.group for p in world.pods.values() if p.revision == old} == {0}
    assert world.status.updated_replicas == 2


@pytest.mark.parametrize(("partition", "updated"), [(0, 3), (1, 2), (3, 0), (9, 0)])
def test_a_complete_rollout_says_which_groups_it_left_as_they_are(partition, updated):
    world = up(replicas=3, rollout={"partition": partition})
    image(world, 2)
    run_down(world)
    progress, new = world.condition("Progressing"), world.status.update_revision
    held = f"{updated} of 3 groups are of revision {new}; the others stay below spec.rollout.partition."
    said = held if partition else f"All groups are of revision {new}."
    assert (progress.status, progress.reason, progress.message) == ("True", "RolloutComplete", said)
    told = [e.message for e in world.events if e.reason is EventReason.ROLLOUT_COMPLETED]
    assert told == ([said] if updated else [])


@pytest.mark.parametrize("partition", [2, 9])
def test_no_rollout_starts_where_the_partition_keeps_every_group(partition):
    world = up(replicas=2, rollout={"partition": partition})
    world._change(world.pod(1, 0), ready=False, ready_since=None)
    image(world, 2)
    run_down(world)
    told = (EventReason.ROLLOUT_STARTED, EventReason.ROLLOUT_COMPLETED)
    assert not [e for e in world.events if e.reason in told]
    world.change(rollout={"partition": 1})
    run_down(world)
    assert [e.reason for e in world.events if e.reason in told] == list(told)
    world._change(world.pod(0, 0), ready=False, ready_since=None)  # a group that stays as it is
    run_down(world)
    assert len([e for e in world.events if e.reason in told]) == 2


NONE = [({"replicas": 0}, {"replicas": 2}), ({"suspend": True}, {"suspend": False})]


@pytest.mark.parametrize("strategy", ["RollingUpdate", "OnDelete", "BlueGreen"])
@pytest.mark.parametrize(("away", "back"), NONE, ids=["zero", "suspend"])
@pytest.mark.parametrize("edit_first", [True, False])
def test_a_paused_object_comes_back_by_the_revision_that_served(strategy, away, back, edit_first):
    world = up(replicas=2, revisionHistoryLimit=0, rollout={"strategy": strategy})
    (old,) = world.revisions()
    world.change(paused=True)
    for edit in ({"engine": {"image": "engine:2"}}, away) if edit_first else (away, {"engine": {"image": "engine:2"}}):
        world.change(**edit)
        world.settle()
    assert not world.pods
    world.change(**back)
    world.settle()
    assert world.revisions() == {old} and len(world.pods) == 4
    assert world.condition("Progressing").reason == "Paused"
    world.all_ready()
    world.settle()
    world.change(paused=False)
    run_down(world)
    world.now += 1000
    run_down(world)
    by_hand = strategy == "OnDelete"
    assert world.revisions() == {old if by_hand else world.status.update_revision}
    assert world.condition("Progressing").reason == ("WaitingForDelete" if by_hand else "RolloutComplete")


@pytest.mark.parametrize(("away", "back"), NONE, ids=["zero", "suspend"])
def test_groups_below_the_partition_come_back_as_they_were(away, back):
    world = up(replicas=2, revisionHistoryLimit=0, rollout={"partition": 1})
    (old,) = world.revisions()
    image(world, 2)
    world.change(**away)
    world.settle()
    world.change(**back)
    run_down(world)
    assert {p.group for p in world.pods.values() if p.revision == old} == {0}
    assert world.condition("Progressing").reason == "RolloutComplete"
    world.change(**away)
    world.settle()
    world.change(rollout={"partition": 0})
    world.settle()
    world.change(**back)
    run_down(world)
    assert world.revisions() == {world.status.update_revision}


def test_what_held_a_revision_back_cannot_bring_back_one_that_is_forgotten():
    world = up(replicas=2)
    (old,) = world.revisions()
    world.change(paused=True, replicas=0, engine={"image": "engine:2"})
    world.settle()
    del world.children[("ControllerRevision", f"demo-{old}")]
    world.change(replicas=2)
    run_down(world)
    assert world.revisions() == {world.status.update_revision}


def test_a_failed_group_of_the_old_revision_comes_back_as_it_was():
    world = up(replicas=3, rollout={"partition": 3})
    (old,) = world.revisions()
    image(world, 2)
    world.settle()
    name = world.pod(1, 1)
    world.fail(name)
    world.settle()
    world.now += 30
    world.settle()
    assert world.pods[name].revision == old
    engine = world.manifests[name]["spec"]["containers"][0]
    assert engine["image"] == "engine:1"


def test_paused_holds_a_rollout_but_not_scaling_and_recovery():
    world = up(replicas=2)
    (old,) = world.revisions()
    world.change(paused=True, engine={"image": "engine:2"})
    world.settle()
    assert world.condition("Progressing").reason == "Paused"
    world.change(replicas=3)
    world.settle()
    assert world.revisions() == {old}
    world.all_ready()
    world.settle()
    world.change(paused=False)
    run_down(world)
    assert world.revisions() == {world.status.update_revision}


def test_on_delete_waits_for_hands():
    world = up(replicas=2, rollout={"strategy": "OnDelete"})
    (old,) = world.revisions()
    image(world, 2)
    run_down(world)
    assert world.revisions() == {old}
    assert world.condition("Progressing").reason == "WaitingForDelete"
    for index in (0, 1):
        world.remove(world.pod(1, index))
    run_down(world)
    assert {p.revision for p in world.pods.values() if p.group == 1} == {world.status.update_revision}
    assert {p.revision for p in world.pods.values() if p.group == 0} == {old}


def selector(world):
    return world.children[("Service", "demo")]["spec"]["selector"].get("dpinference.dev/revision")


def test_blue_green_switches_traffic_only_when_every_new_group_serves():
    world = up(replicas=2, rollout={"strategy": "BlueGreen", "scaleDownDelaySeconds": 60})
    (blue,) = world.revisions()
    assert selector(world) == blue
    image(world, 2)
    world.settle()
    assert len(world.pods) == 8
    green = world.status.update_revision
    assert selector(world) == blue
    for name in [n for n, p in world.pods.items() if p.revision == green and p.group == 0]:
        world.make_ready(name)
    world.settle()
    assert selector(world) == blue
    world.all_ready()
    plan = world.settle()
    assert selector(world) == green
    assert len(world.pods) == 8
    assert plan.requeue_at == world.now + 60
    assert any(e.reason is EventReason.TRAFFIC_SWITCHED for e in world.events)
    world.now += 60
    world.settle()
    assert world.revisions() == {green}
    assert {d[2] for d in world.deleted} == {"OldColour"}
    assert world.condition("Progressing").reason == "RolloutComplete"


def test_a_green_that_is_given_up_goes_and_blue_never_stops_serving():
    world = up(replicas=2, rollout={"strategy": "BlueGreen"})
    (blue,) = world.revisions()
    before = dict(world.pods)
    image(world, "bad")
    world.settle()
    image(world, 1)
    world.settle()
    assert world.pods == before
    assert selector(world) == blue
    assert {d[2] for d in world.deleted} == {"NewRevision"}


def test_going_back_uses_the_old_revision_again():
    world = up()
    (first,) = world.revisions()
    image(world, 2)
    run_down(world)
    image(world, 1)
    run_down(world)
    assert world.revisions() == {first}
    numbers = {k[1]: c["revision"] for k, c in world.children.items() if k[0] == "ControllerRevision"}
    assert numbers[f"demo-{first}"] == 3
    assert len(numbers) == 2


def test_history_is_bounded_and_keeps_what_is_in_use():
    world = up(revisionHistoryLimit=2)
    for tag in range(2, 8):
        image(world, tag)
        run_down(world, 4)
    kept = [k for k in world.children if k[0] == "ControllerRevision"]
    assert len(kept) == 3
    assert ("ControllerRevision", f"demo-{world.status.update_revision}") in kept


def test_a_rollout_without_progress_is_reported_at_its_deadline():
    world = up(rollout={"progressDeadlineSeconds": 100})
    image(world, 2)
    world.settle()
    began = world.now
    plan = world.settle()
    assert plan.requeue_at <= began + 100
    world.now = began + 100
    world.settle()
    assert world.condition("Progressing").reason == "ProgressDeadlineExceeded"


def test_min_ready_seconds_counts_before_the_next_group_goes():
    world = up(replicas=2, rollout={"minReadySeconds": 30})
    world.now += 30
    world.settle()
    image(world, 2)
    world.settle()
    world.all_ready()
    plan = world.settle()
    assert len(world.revisions()) == 2
    assert plan.requeue_at == world.now + 30
    world.now += 30
    world.settle()
    assert world.revisions() == {world.status.update_revision}


def test_scaling_down_keeps_the_group_that_has_been_ready_for_long_enough():
    world = up(replicas=2, rollout={"minReadySeconds": 30})
    world.now += 30
    world._change(world.pod(0, 0), ready_since=world.now)
    world.settle()
    world.change(replicas=1)
    world.settle()
    assert world.names() == ["1-0", "1-1"]
    assert world.status.available_replicas == 1


@pytest.mark.parametrize("tags", [(2, 3), (3, 2)])
def test_of_two_old_groups_at_an_index_the_one_that_is_available_stays(tags):
    world = up(replicas=2, rollout={"partition": 1, "maxSurge": 1, "maxUnavailable": 0, "minReadySeconds": 30})
    world.now += 30
    for tag in tags:  # the first one is through, the second one serves for no time yet
        image(world, tag)
        world.settle()
        world.all_ready()
        world.settle()
        world.now += 30 if tag == tags[0] else 1
        world.settle()
    kept = {n for n, p in world.pods.items() if p.group == 1 and world.now - p.ready_since >= 30}
    assert len(kept) == 2 and len(world.pods) == 6
    image(world, "broken")
    world.settle()
    assert kept <= set(world.pods)


def test_new_defaults_roll_nothing_and_a_written_default_does_not_either():
    world = up()
    before = dict(world.pods)
    world.change(lifecycle={"preStopSeconds": 15}, storage={"sharedMemory": "8Gi"}, template={})
    world.settle()
    assert world.pods == before


def test_a_hash_that_another_spec_has_is_stepped_over(monkeypatch):
    from dpi_operator.plan import revisions

    monkeypatch.setattr(revisions, "revision_hash", lambda fields, collisions=0: f"hash{collisions}")
    world = up()
    image(world, 2)
    run_down(world)
    assert world.status.collision_count == 1
    assert world.revisions() == {"hash1"}


# -- properties ----------------------------------------------------------------------------------------------------

NO_SHRINK = (Phase.explicit, Phase.reuse, Phase.generate)
"""Seeds do not shrink to anything simpler, they only cost minutes."""

STRATEGIES = st.sampled_from(["RollingUpdate", "BlueGreen", "OnDelete"])


@settings(max_examples=15, deadline=None, phases=NO_SHRINK, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    strategy=STRATEGIES,
    away=st.integers(0, 3),
    above=st.integers(0, 2),
    coupled=st.booleans(),
    instant=st.booleans(),
)
def test_whatever_happens_plans_come_to_rest_and_keep_their_promises(seed, strategy, away, above, coupled, instant):
    """Random lives of pods, edits and operator restarts. Every settle() proves that planning rests; the world itself
    refuses deletions by a wrong uid and creations over a living name."""
    assume(away or above)
    rng = random.Random(seed)
    most = rng.choice([0, 2, 5])
    world = World(
        document(
            replicas=rng.randint(1, 3),
            rollout={"strategy": strategy, "maxUnavailable": away, "maxSurge": above, "scaleDownDelaySeconds": 5},
            failurePolicy={
                "maxRestarts": most,
                "backoff": {"baseSeconds": 1, "maxSeconds": 4, "resetAfterSeconds": 100_000},
                "stuckTerminatingSeconds": 20,
                "action": "RecreateGroup" if coupled else "Auto",
            },
        ),
        instant=instant,
    )
    failures: dict[str, int] = {}
    recreated: dict[str, int] = {}
    tag = 1
    for _ in range(40):
        world.settle()
        for _, name, reason in world.deleted:
            if reason in ("Failed", "GroupBroken"):
                recreated[name] = recreated.get(name, 0) + 1
        world.deleted.clear()
        what = rng.random()
        pods = sorted(world.pods)
        alive = [n for n in pods if world.pods[n].deleting is None and not world.pods[n].failed]
        if what < 0.35:
            world.all_ready()
        elif what < 0.55 and alive:
            name = rng.choice(alive)
            world.start(name)
            world.fail(name)
            failures[name] = failures.get(name, 0) + 1
        elif what < 0.62 and alive:
            world.kubectl_delete(rng.choice(alive))
        elif what < 0.72:
            for name in pods:
                if world.pods[name].deleting is not None:
                    world.remove(name)
        elif what < 0.80:
            world.change(replicas=rng.randint(0, 4))
        elif what < 0.86:
            tag += 1
            image(world, rng.randint(1, 3))
        elif what < 0.9:
            world.change(paused=rng.random() < 0.5)
        world.now += rng.choice([0, 1, 2, 10, 100])
    allowed = dict.fromkeys(recreated, most + 1)
    if not coupled:
        assert all(recreated[n] <= min(allowed[n], failures.get(n, 0)) for n in recreated), (recreated, failures)
    # Left alone, with room in the budget, it heals.
    world.change(paused=False, replicas=2, failurePolicy={"maxRestarts": None}, rollout={"strategy": "RollingUpdate"})
    for _ in range(40):
        world.settle()
        for name in list(world.pods):
            if world.pods[name].deleting is not None:
                world.remove(name)
        world.settle()
        world.all_ready()
        world.now += 30
    world.settle()
    assert world.status.ready_replicas == 2, world.status
    assert world.condition("Ready").status == "True"
    assert {p.revision for p in world.pods.values()} == {world.status.update_revision}
    assert len(world.pods) == 4


@settings(max_examples=10, deadline=None, phases=NO_SHRINK)
@given(replicas=st.integers(2, 5), away=st.integers(0, 3), above=st.integers(0, 3), seed=st.integers(0, 1000))
def test_a_rollout_alone_never_takes_more_groups_away_than_it_may(replicas, away, above, seed):
    assume(away or above)
    rng = random.Random(seed)
    world = up(replicas=replicas, rollout={"maxUnavailable": away, "maxSurge": above})
    image(world, 2)
    allowed = limits(Rollout(max_unavailable=away, max_surge=above), replicas)
    for _ in range(60):
        world.settle()
        serving = {p.group for p in world.pods.values() if p.index == 0 and p.ready}
        assert len(serving) >= replicas - allowed[0]
        groups = {(p.revision, p.group) for p in world.pods.values()}
        assert len(groups) <= replicas + allowed[1]
        waiting = sorted(n for n, p in world.pods.items() if not p.ready)
        if waiting:
            world.make_ready(rng.choice(waiting))
        world.now += 1
    world.settle()
    assert world.condition("Progressing").reason == "RolloutComplete"


@settings(max_examples=25, deadline=None, phases=NO_SHRINK)
@given(
    replicas=st.integers(1, 4),
    away=st.integers(0, 2),
    above=st.integers(0, 2),
    gap=st.booleans(),
    instant=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_groups_that_are_lost_during_a_rollout_make_no_room_for_more(replicas, away, above, gap, instant, seed):
    """Groups of either revision lose all their pods at any time, and edits come on top; nobody scales."""
    assume(away or above)
    rng = random.Random(seed)
    world = up(replicas=replicas + gap, rollout={"maxUnavailable": away, "maxSurge": above})
    if gap:  # the indexes that are left need not be the lowest
        world._change(world.pod(0, 0), ready=False, ready_since=None)
        world.change(replicas=replicas)
        world.settle()
    world.instant = instant
    image(world, 2)
    most = replicas + limits(Rollout(max_unavailable=away, max_surge=above), replicas)[1]
    for _ in range(40):
        world.settle()
        groups = sorted({(p.revision, p.group) for p in world.pods.values()})
        assert len(groups) <= most, groups
        what, lost = rng.random(), rng.choice(groups)
        for name in [n for n, p in world.pods.items() if (p.revision, p.group) == lost]:
            if what < 0.25:
                world.remove(name)
            elif what < 0.35 and world.pods[name].deleting is None:
                world.kubectl_delete(name)
            elif what < 0.6 and world.pods[name].deleting is None and not world.pods[name].ready:
                world.make_ready(name)
        if what > 0.95:
            image(world, rng.randint(1, 3))
        elif what > 0.75:
            for name in [n for n, p in world.pods.items() if p.deleting is not None]:
                world.remove(name)
        world.now += rng.choice([0, 1, 30])


@settings(max_examples=8, deadline=None, phases=NO_SHRINK)
@given(first=st.integers(1, 4), more=st.integers(1, 4))
def test_ready_groups_are_never_touched_by_a_scale_up(first, more):
    world = up(replicas=first)
    before = dict(world.pods)
    world.change(replicas=first + more)
    world.settle()
    assert before.items() <= world.pods.items()
    assert not world.deleted
    assert world.now == START


HALF_WAY = [{"maxUnavailable": 1}, {"maxSurge": 1, "maxUnavailable": 0}, {"strategy": "BlueGreen"}]
UNUSABLE = {"args": ["--port", "9"]}


def half_way(rollout):
    """A world of two revisions: the second has some groups, and is not through."""
    world = up(replicas=3, rollout=rollout)
    image(world, 2)
    world.settle()
    if rollout.get("maxUnavailable"):
        world.all_ready()
        world.settle()
    assert len(world.revisions()) == 2
    return world


@pytest.mark.parametrize("rollout", HALF_WAY)
@pytest.mark.parametrize("edit", [{"paused": True}, {"engine": UNUSABLE}, {"rankOverrides": "differ"}])
def test_a_hold_or_an_unusable_edit_half_way_through_a_rollout_touches_no_pod(rollout, edit):
    world = half_way(rollout)
    pods, gone = set(world.pods), len(world.deleted)
    if "rankOverrides" in edit:
        edit = {"rankOverrides": [{"ranks": "1", "args": ["--max-model-len", "64"]}]}
    world.change(**edit)
    run_down(world, rounds=6)
    assert set(world.pods) == pods
    assert world.deleted[gone:] == []
    progress = world.condition("Progressing")
    assert (progress.status, progress.reason) == ("False", "Paused" if "paused" in edit else "InvalidSpec")
    # A lost pod of either revision comes back as it was.
    for revision in sorted(world.revisions()):
        world.remove(min(n for n in pods if revision in n))
    run_down(world, rounds=4)
    assert set(world.pods) == pods


@pytest.mark.parametrize("rollout", HALF_WAY)
def test_a_rollout_goes_on_where_an_unusable_edit_stopped_it(rollout):
    world = half_way(rollout)
    made = len(world.created)
    world.change(engine=UNUSABLE)
    run_down(world, rounds=3)
    world.change(engine={"args": []})
    world.now += 100
    run_down(world)
    world.now += 100
    run_down(world)
    assert world.condition("Progressing").reason == "RolloutComplete"
    (newest,) = world.revisions()
    assert all(newest in name for _, name in world.created[made:])
    assert [e.reason for e in world.events].count(EventReason.ROLLED_BACK) == 0


@pytest.mark.parametrize(("replicas", "rollout"), [(1, {"maxSurge": 1, "maxUnavailable": 0}), (3, {})])
def test_what_served_comes_back_when_it_is_lost_beside_a_revision_that_never_does(replicas, rollout):
    world = up(replicas=replicas, rollout=rollout)
    (good,) = world.revisions()
    image(world, "broken")
    world.settle()
    kept = {n for n in world.pods if good in n}
    assert kept and len(world.revisions()) == 2
    world.remove(max(n for n in kept if n.endswith("-0")))  # a head
    for _ in range(4):
        world.settle()
        for name in world.pods:
            if good in name and not world.pods[name].ready:
                world.make_ready(name)
        world.now += 60
    world.settle()
    assert {n for n in world.pods if good in n} == kept
    assert world.status.available_replicas == max(1, replicas - 1)
    image(world, "mended")
    run_down(world)
    assert world.condition("Progressing").reason == "RolloutComplete"


@pytest.mark.parametrize("coupling", ["Auto", "Coupled"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("rollout", [{"maxSurge": 1, "maxUnavailable": 0}, {"strategy": "BlueGreen"}])
def test_a_whole_group_that_served_comes_back_beside_a_revision_that_never_does(rollout, size, coupling):
    world = up(rollout=rollout, parallelism={"dataParallelSize": size, "coupling": coupling})
    (good,) = world.revisions()
    image(world, "broken")
    world.settle()
    kept = {n for n in world.pods if good in n}
    assert len(kept) == size and len(world.revisions()) == 2
    for name in kept:
        world.fail(name)
    for _ in range(8):
        world.settle()
        for name in world.pods:
            if good in name and not world.pods[name].failed and not world.pods[name].ready:
                world.make_ready(name)
        world.now += 60
    world.settle()
    assert {n for n in world.pods if good in n} == kept
    assert world.status.available_replicas == 1
    image(world, "mended")
    run_down(world)
    world.now += 100
    run_down(world)
    assert world.condition("Progressing").reason == "RolloutComplete"
    assert len(world.revisions()) == 1
