"""Validation of whole objects and the plan of pods, as tables and properties."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpi_operator.api.read import read_document
from dpi_operator.api.reasons import Reason
from dpi_operator.api.validate import validate
from dpi_operator.local.ignored import CLUSTER_ONLY, ignored_fields
from dpi_operator.local.runner import LocalRunner, UpOptions, unusable_ports
from dpi_operator.plan.network import Cluster, Local
from dpi_operator.plan.pods import NotPlannable, Role, plan_group
from dpi_operator.plan.services import build_client_service


def make(**spec):
    base = {"model": {"name": "m"}, "engine": {"image": "engine:1"}}
    for key, value in spec.items():
        base[key] = {**base.get(key, {}), **value} if isinstance(value, dict) else value
    return read_document(
        {
            "apiVersion": "dpinference.dev/v1alpha1",
            "kind": "DataParallelInference",
            "metadata": {"name": "demo", "namespace": "ns"},
            "spec": copy.deepcopy(base),
        },
        "test",
    )


def flag(args, name):
    return args[args.index(name) + 1]


MULTI_PORT = {
    "parallelism": {"dataParallelSize": 4, "dataParallelSizeLocal": 2},
    "loadBalancing": {"mode": "MultiPort"},
}


@pytest.mark.parametrize(
    ("spec", "reason", "field"),
    [
        (
            {"parallelism": {"dataParallelSize": 3, "dataParallelSizeLocal": 2}},
            Reason.INVALID_SPEC,
            "dataParallelSizeLocal",
        ),
        ({"parallelism": {"expertParallel": True}}, Reason.INVALID_SPEC, "expertParallel"),
        ({"parallelism": {"pipelineParallelSize": 2}}, Reason.NOT_SUPPORTED, "pipelineParallelSize"),
        (
            {"model": {"architecture": "MoE"}, "parallelism": {"expertParallel": True, "tensorParallelSize": 2}},
            Reason.NOT_SUPPORTED,
            "spec.parallelism.tensorParallelSize",
        ),
        (
            {
                "model": {"architecture": "MoE"},
                "parallelism": {"dataParallelSize": 2},
                "rankOverrides": [{"ranks": "1", "image": "engine:2"}],
            },
            Reason.INVALID_SPEC,
            "spec.rankOverrides",
        ),
        (
            {**MULTI_PORT, "engine": {"apiServerCount": 2}},
            Reason.INVALID_SPEC,
            "spec.engine.apiServerCount",
        ),
        ({"engine": {"args": ["--port=1"]}}, Reason.RESERVED_FLAG, "spec.engine.args"),
        ({"engine": {"args": ["-dp", "4"]}}, Reason.RESERVED_FLAG, "spec.engine.args"),
        ({"engine": {"args": ["--management_port=9"]}}, Reason.RESERVED_FLAG, "spec.engine.args"),
        ({"engine": {"args": ["--help"]}}, Reason.INVALID_SPEC, "spec.engine.args"),
        ({"engine": {"runtime": "vllm", "args": ["-h"]}}, Reason.INVALID_SPEC, "spec.engine.args"),
        ({"rankOverrides": [{"ranks": "0", "args": ["--config=x"]}]}, Reason.NOT_SUPPORTED, "rankOverrides[0].args"),
        ({"lifecycle": {"terminationGracePeriodSeconds": 60}}, Reason.INVALID_SPEC, "terminationGracePeriodSeconds"),
        ({"replicas": 1000, "parallelism": {"dataParallelSize": 5}}, Reason.INVALID_SPEC, "spec.replicas"),
        ({"rankOverrides": [{"ranks": "4"}]}, Reason.INVALID_SPEC, "rankOverrides[0]"),
        (
            {"parallelism": {"dataParallelSize": 4}, "rankOverrides": [{"ranks": "0-2"}, {"ranks": "2"}]},
            Reason.RANK_OVERRIDE_OVERLAP,
            "rankOverrides[1]",
        ),
        (
            {
                "parallelism": {"dataParallelSize": 4, "dataParallelSizeLocal": 2},
                "rankOverrides": [{"ranks": "1"}],
            },
            Reason.INVALID_SPEC,
            "rankOverrides[0]",
        ),
        (
            {"failurePolicy": {"backoff": {"baseSeconds": 10, "maxSeconds": 5}}},
            Reason.INVALID_SPEC,
            "maxSeconds",
        ),
    ],
)
def test_what_cannot_be_planned_is_found(spec, reason, field):
    found = validate(make(**spec))
    assert any(f.reason is reason and field in f.field for f in found), found


def test_what_differs_between_images_is_named():
    dpi = make(
        model={"architecture": "MoE"},
        parallelism={"dataParallelSize": 3},
        rankOverrides=[{"ranks": "0", "image": "engine:1"}, {"ranks": "1", "image": "engine:2"}],
    )
    (found,) = validate(dpi)
    assert found.message.endswith("; rankOverrides[1] has engine:2, engine.image is engine:1")


def test_a_plain_object_has_no_findings():
    assert validate(make(parallelism={"dataParallelSize": 4, "dataParallelSizeLocal": 2})) == []


FOUR = {"dataParallelSize": 4, "dataParallelSizeLocal": 2}


@pytest.mark.parametrize(
    ("mode", "parallelism", "roles", "ports", "flags", "absent"),
    [
        (
            "Hybrid",
            FOUR,
            ["rank0", "server"],
            [(8000,), (8000,)],
            {"--data-parallel-start-rank": ["0", "2"], "--data-parallel-size-local": ["2", "2"]},
            ["--headless", "--data-parallel-rank"],
        ),
        (
            "External",
            {"dataParallelSize": 2},
            ["rank0", "server"],
            [(8000,), (8000,)],
            {"--data-parallel-rank": ["0", "1"], "--data-parallel-size": ["2", "2"]},
            ["--headless", "--data-parallel-size-local", "--data-parallel-start-rank"],
        ),
        (
            "MultiPort",
            FOUR,
            ["rank0", "server"],
            [(8000, 8001), (8000, 8001)],
            {
                "--data-parallel-start-rank": ["0", "2"],
                "--data-parallel-supervisor-port": ["9256", "9256"],
                "--data-parallel-supervisor-policy": ["fail-together", "fail-together"],
            },
            ["--headless", "--data-parallel-rank"],
        ),
    ],
)
def test_in_other_modes_every_pod_has_endpoints(mode, parallelism, roles, ports, flags, absent):
    dpi = make(parallelism=parallelism, loadBalancing={"mode": mode})
    plans = plan_group(dpi, 0, Cluster("demo", "ns"), revision="abc")
    assert [p.role.value for p in plans] == roles
    assert [p.http_ports for p in plans] == ports
    for name, values in flags.items():
        assert [flag(p.args, name) for p in plans] == values
    for name in absent:
        assert all(name not in p.args for p in plans)
    assert flag(plans[0].args, "--data-parallel-address") == "$(DPI_POD_IP)"
    assert flag(plans[1].args, "--data-parallel-address") == "demo-abc-0-0.demo-internal.ns.svc.cluster.local"
    service = build_client_service(dpi)["spec"]
    assert service["selector"] == {"dpinference.dev/name": "demo"}
    assert [(p["port"], p["targetPort"]) for p in service["ports"]] == [
        (80 + i, "http" if i == 0 else f"http-{i}") for i in range(len(ports[0]))
    ]


def test_dense_servers_of_the_other_runtime_know_nothing_of_each_other():
    dpi = make(
        engine={"image": "e", "runtime": "vllm"},
        parallelism={"dataParallelSize": 2},
        loadBalancing={"mode": "External"},
    )
    for plan in plan_group(dpi, 0, Cluster("demo", "ns")):
        assert not any("data-parallel" in arg for arg in plan.args)


@given(pods=st.integers(1, 8), local=st.integers(1, 8), group=st.integers(0, 3))
def test_pods_cover_every_rank_once_and_agree_on_the_group(pods, local, group):
    dpi = make(parallelism={"dataParallelSize": pods * local, "dataParallelSizeLocal": local})
    plans = plan_group(dpi, group, Local())
    assert plans == plan_group(dpi, group, Local())
    assert [r for p in plans for r in range(p.rank_start, p.rank_start + p.rank_count)] == list(range(pods * local))
    assert [p.role for p in plans] == [Role.RANK0] + [Role.HEADLESS] * (pods - 1)
    if pods * local > 1:
        for p in plans:
            assert flag(p.args, "--data-parallel-size") == str(pods * local)
            assert flag(p.args, "--data-parallel-size-local") == str(local)
            assert flag(p.args, "--data-parallel-rpc-port") == str(plans[0].ports.rpc)
            assert ("--headless" in p.args) == (p.role is Role.HEADLESS)
    used = [x for p in plans for x in (p.ports.http, p.ports.management, p.ports.rpc)]
    assert len(set(used)) == len(used)


def test_a_cluster_gives_rank_0_its_own_address_and_the_others_its_name():
    plans = plan_group(make(parallelism={"dataParallelSize": 2}), 0, Cluster("demo", "ns"), revision="abc")
    assert [p.name for p in plans] == ["demo-abc-0-0", "demo-abc-0-1"]
    assert flag(plans[0].args, "--data-parallel-address") == "$(DPI_POD_IP)"
    assert flag(plans[1].args, "--data-parallel-address") == "demo-abc-0-0.demo-internal.ns.svc.cluster.local"
    assert flag(plans[0].args, "--host") == "0.0.0.0"


def test_overrides_reach_only_their_ranks():
    dpi = make(
        parallelism={"dataParallelSize": 3},
        engine={"args": ["--seed", "1"]},
        rankOverrides=[{"ranks": "1-2", "args": ["--cpu-threads", "3"], "image": "other:2"}],
    )
    plans = plan_group(dpi, 0, Local())
    assert ["--cpu-threads" in p.args for p in plans] == [False, True, True]
    assert [p.image for p in plans] == ["engine:1", "other:2", "other:2"]
    assert all("--seed" in p.args for p in plans)


def test_fields_without_meaning_here_are_listed():
    dpi = make(engine={"resources": {"limits": {"cpu": "1"}}}, rollout={"maxSurge": 1})
    assert ignored_fields(dpi) == ["engine.image", "engine.resources", "rollout"]
    assert len(set(CLUSTER_ONLY)) == len(CLUSTER_ONLY)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"model": {"revision": "abc"}}, r"spec\.model\.revision"),
        ({"security": {"controlChannel": "Curve"}}, r"spec\.security\.controlChannel"),
    ],
)
def test_what_the_engine_cannot_take_is_refused_before_it_starts(spec, field):
    with pytest.raises(NotPlannable, match=field):
        plan_group(make(**spec), 0, Local())


def test_another_runtime_does_not_run_without_its_image(tmp_path):
    with pytest.raises(NotPlannable, match=r"spec\.engine\.runtime: vllm"):
        LocalRunner(make(engine={"runtime": "vllm"}), UpOptions(state_dir=tmp_path))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            {"parallelism": {"dataParallelSize": 60, "dataParallelSizeLocal": 1}},
            "port 66081 for spec.engine.ports.management of demo-0-58 is above 65535: lower it, or run fewer pods here",
        ),
        (
            {"replicas": 2, "engine": {"ports": {"http": 8000, "management": 9000}}},
            "port 9000 is wanted twice: for spec.engine.ports.management of demo-0-0 and for spec.engine.ports.http "
            "of demo-1-0; change one of them",
        ),
    ],
)
def test_ports_that_pods_on_one_machine_cannot_have_are_named(tmp_path, monkeypatch, spec, words):
    monkeypatch.setattr("dpi_operator.local.runner.port_is_free", lambda host, port: True)
    assert words in unusable_ports(LocalRunner(make(**spec), UpOptions(state_dir=tmp_path)).plans)


def test_a_suspended_object_runs_nothing(tmp_path):
    assert LocalRunner(make(suspend=True), UpOptions(state_dir=tmp_path)).plans == []
