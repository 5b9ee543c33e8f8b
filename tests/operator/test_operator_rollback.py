"""Going back to an earlier revision: the change of the spec, the command, and what the operator makes of it."""

import asyncio
import copy
import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from operator_world import document, up
from test_operator_service import cluster, condition, operator, ready, until

from api_server import kubeconfig, kubectl, needs_api_server
from dpi_engine.cli import main as dpi
from dpi_operator.api.crd import manifest, open_api_schema
from dpi_operator.api.read import read_document
from dpi_operator.api.reasons import EventReason
from dpi_operator.plan.history import NoSuchRevision, choose, past_revisions, patch_to
from dpi_operator.plan.revisions import Revision, controller_revision, rolling_fields

SPECS = [
    {},
    {"engine": {"image": "engine:2"}},
    {"engine": {"args": ["--seed", "1"], "env": [{"name": "A", "value": "1"}]}},
    {"engine": {"resources": {"limits": {"cpu": "2"}}, "ports": {"http": 9000}}},
    {"parallelism": {"dataParallelSize": 4, "dataParallelSizeLocal": 2, "coupling": "Coupled"}},
    {"rankOverrides": [{"ranks": "1", "image": "other:1"}]},
    {"template": {"metadata": {"labels": {"a": "b"}}, "spec": {"nodeSelector": {"disk": "fast"}}}},
    {"storage": {"sharedMemory": "0", "modelCache": {"pvc": {"claimName": "c"}}}},
    {"restartedAt": "2026-01-01T00:00:00Z", "lifecycle": {"preStopSeconds": 0}},
    {"credentials": {"apiKeySecretRef": {"name": "keys"}}, "handshake": {"timeoutSeconds": 60}},
    {"scheduling": {"gang": {"provider": "Volcano"}}, "replicas": 3, "paused": True},
    {"model": {"uri": "file:///m", "architecture": "MoE"}, "probes": {"startup": {"periodSeconds": 3}}},
]


def merge_patch(value, patch):
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    out = dict(value) if isinstance(value, dict) else {}
    for key, new in patch.items():
        if new is None:
            out.pop(key, None)
        else:
            out[key] = merge_patch(out.get(key), new)
    return out


def defaulted(value, schema):
    """With the schema's defaults, as the API server stores an object."""
    if isinstance(value, dict):
        for key, below in schema.get("properties", {}).items():
            if key not in value and "default" in below:
                value[key] = copy.deepcopy(below["default"])
            if key in value:
                value[key] = defaulted(value[key], below)
    return value


def spec_of(doc):
    return read_document(doc, "test").spec


@given(st.sampled_from(SPECS), st.sampled_from(SPECS), st.booleans())
def test_the_change_brings_back_the_pods_of_then_and_nothing_else(then, now, stored):
    old, doc = document(**then), document(**now)
    if stored:
        doc["spec"] = defaulted(doc["spec"], open_api_schema()["properties"]["spec"])
    fields, before = rolling_fields(spec_of(old)), spec_of(doc)
    patch = patch_to(before, fields)
    after = spec_of({**doc, "spec": merge_patch(doc["spec"], patch)})
    assert rolling_fields(after) == fields
    assert (after.replicas, after.paused, after.parallelism.coupling) == (
        before.replicas,
        before.paused,
        before.parallelism.coupling,
    )
    assert patch_to(after, fields) == {}
    assert stored or patch_to(before, rolling_fields(before)) == {}


def revisions(*specs):
    """ControllerRevisions of these specs, numbered from 1."""
    found = []
    for number, spec in enumerate(specs, 1):
        one = read_document(document(**spec), "test")
        found.append(controller_revision(one, Revision(f"hash{number}", number, rolling_fields(one.spec), one)))
    return found


def test_which_revision_is_meant():
    past = past_revisions(revisions(*SPECS[:3]))
    assert [r.number for r in past] == [3, 2, 1]
    spec = spec_of(document(**SPECS[2]))
    assert choose(past, spec).number == 2
    assert choose(past, spec, "1").number == choose(past, spec, "hash1").number == 1
    assert choose(past, spec_of(document(**SPECS[4]))).number == 3  # a spec of which no revision was made
    with pytest.raises(NoSuchRevision, match=r"no revision 7; there are: 3 \(hash3\), 2 \(hash2\), 1 \(hash1\)"):
        choose(past, spec, "7")
    with pytest.raises(NoSuchRevision, match="no other revision"):
        choose(past_revisions(revisions({})), spec_of(document()))


def test_going_back_uses_the_revision_of_then_and_says_so():
    world = up()
    first = world.revisions()
    world.change(engine={"image": "engine:2"})
    for _ in range(3):
        world.settle()
        world.all_ready()
    world.settle()
    assert world.revisions() != first
    past = past_revisions(o for (k, _), o in world.children.items() if k == "ControllerRevision")
    target = choose(past, spec_of(world.doc))
    world.doc["spec"] = merge_patch(world.doc["spec"], patch_to(spec_of(world.doc), target.fields))
    world.doc["metadata"]["generation"] += 1
    for _ in range(3):
        world.settle()
        world.all_ready()
    world.settle()
    assert world.revisions() == first
    (told,) = [e for e in world.events if e.reason is EventReason.ROLLED_BACK]
    assert f"Revision {target.hash}, number 1 before, comes back" in told.message
    assert [e.reason for e in world.events].count(EventReason.ROLLOUT_STARTED) == 1
    numbers = {r.hash: r.number for r in past_revisions(o for o in world.children.values() if "data" in o)}
    assert numbers[target.hash] == 3  # the newest again


def test_the_command_goes_back_and_forth(tmp_path, monkeypatch, capsys):
    def images(model):
        return {p["spec"]["containers"][0]["image"] for p in model.all("Pod")}

    def settled(model, image):
        return images(model) == {image} and condition(model, "Progressing")["reason"] == "RolloutComplete"

    async def main():
        async with cluster() as (model, _), operator(model, tmp_path, monkeypatch):
            assert await asyncio.to_thread(dpi, ["rollback", "demo", "-n", "ns"]) == 1
            assert "there is no DataParallelInference ns/demo" in capsys.readouterr().err
            model.put(document())
            await until(lambda: ready(model), "Ready")
            assert await asyncio.to_thread(dpi, ["rollback", "demo", "-n", "ns"]) == 1
            assert "no other revision to go back to" in capsys.readouterr().err
            model.put(document(engine={"image": "engine:2", "args": ["--seed", "1"]}))
            await until(lambda: settled(model, "engine:2"), "the second revision")
            assert await asyncio.to_thread(dpi, ["status", "demo", "-n", "ns"]) == 0
            assert ", 1 (" in capsys.readouterr().out
            before = copy.deepcopy(model.get("DataParallelInference", "demo")["spec"])
            assert await asyncio.to_thread(dpi, ["rollback", "demo", "-n", "ns", "--dry-run"]) == 0
            out = capsys.readouterr().out
            assert 'spec.engine.image: "engine:2" -> "engine:1"' in out
            assert 'spec.engine.args: ["--seed", "1"] -> its default' in out
            assert model.get("DataParallelInference", "demo")["spec"] == before
            assert await asyncio.to_thread(dpi, ["rollback", "demo", "-n", "ns"]) == 0
            await until(lambda: settled(model, "engine:1"), "the first revision again")
            assert await asyncio.to_thread(dpi, ["rollback", "demo", "-n", "ns", "--to-revision", "2"]) == 0
            await until(lambda: settled(model, "engine:2"), "the second revision again")
            assert await asyncio.to_thread(dpi, ["rollback", "demo", "-n", "ns", "--to-revision", "4"]) == 0
            assert "at revision 4" in capsys.readouterr().out

    asyncio.run(main())


@needs_api_server
def test_a_real_api_server_takes_the_change_and_fills_in_its_defaults(tmp_path, monkeypatch, capsys):
    space = "dpi-rollback-test"
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig()))
    kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", document=yaml.safe_dump(manifest()))
    kubectl("wait", "--for=condition=Established", "crd", manifest()["metadata"]["name"], "--timeout=120s")
    kubectl("create", "namespace", space)
    try:
        now = document(**SPECS[4] | SPECS[8] | {"engine": {"image": "engine:2", "args": ["--seed", "1"]}})
        now["metadata"] = {"name": "demo", "namespace": space}
        kubectl("apply", "-f", "-", document=json.dumps(now))
        live = json.loads(kubectl("get", "dpi", "demo", "-n", space, "-o", "json").stdout)
        for number, spec in enumerate(SPECS[:2], 1):
            then = document(**spec)
            then["metadata"] = live["metadata"]
            one = read_document(then, "test")
            made = controller_revision(one, Revision(f"hash{number}", number, rolling_fields(one.spec), one))
            kubectl("apply", "-f", "-", document=json.dumps(made))
        assert dpi(["rollback", "demo", "-n", space, "--to-revision", "1"]) == 0
        after = json.loads(kubectl("get", "dpi", "demo", "-n", space, "-o", "json").stdout)
        assert rolling_fields(spec_of(after)) == rolling_fields(spec_of(document()))
        assert after["spec"]["parallelism"]["coupling"] == "Coupled"
        assert dpi(["rollback", "demo", "-n", space, "--to-revision", "1"]) == 0
        assert "is at revision 1 (hash1) already" in capsys.readouterr().out
    finally:
        kubectl("delete", "namespace", space, "--wait=false")


@pytest.mark.parametrize("spec", SPECS)
def test_defaults_that_the_api_server_writes_make_no_other_revision(spec):
    doc = document(**spec)
    stored = {**doc, "spec": defaulted(copy.deepcopy(doc["spec"]), open_api_schema()["properties"]["spec"])}
    assert rolling_fields(spec_of(json.loads(json.dumps(stored)))) == rolling_fields(spec_of(doc))
