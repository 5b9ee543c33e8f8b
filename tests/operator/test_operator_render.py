"""What is made of objects: whole manifests against files, and `dpi render` and `dpi status` as commands.

DPI_UPDATE_GOLDEN=1 writes the files anew; the difference is then to be read in the change.
"""

import os
from pathlib import Path

import pytest
import yaml
from operator_world import START, World, document, up

from dpi_engine.cli import main
from dpi_engine.config.settings import parse_serve
from dpi_operator.local.render import RenderError, rendered
from dpi_operator.local.status import tree_lines
from dpi_operator.plan.template import merge

GOLDEN = Path(__file__).parent / "golden"

TEMPLATE = {
    "metadata": {"labels": {"team": "x", "app.kubernetes.io/component": "mine"}, "annotations": {"note": "y"}},
    "spec": {
        "nodeSelector": {"disk": "fast"},
        "tolerations": [
            {
                "key": "node.kubernetes.io/unreachable",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": 9,
            }
        ],
        "containers": [
            {
                "name": "engine",
                "env": [{"name": "EXTRA", "value": "1"}],
                "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
            },
            {"name": "sidecar", "image": "sidecar:1"},
        ],
        "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
    },
}

OVERRIDES = {
    "parallelism": {"dataParallelSize": 4, "dataParallelSizeLocal": 2},
    "engine": {
        "image": "engine:1",
        "args": ["--seed", "1"],
        "env": [{"name": "A", "value": "1"}],
        "resources": {"limits": {"cpu": "2"}},
        "ports": {"http": 9000, "rpc": 30000},
    },
    "rankOverrides": [
        {
            "ranks": "2-3",
            "image": "engine:2",
            "env": [{"name": "A", "value": "2"}],
            "resources": {"limits": {"cpu": "4"}},
            "nodeSelector": {"zone": "b"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
        }
    ],
    "template": TEMPLATE,
    "lifecycle": {"preStopSeconds": 0},
    "probes": {"startup": {"periodSeconds": 10, "failureThreshold": 6}},
    "storage": {"sharedMemory": "0", "modelCache": {"pvc": {"claimName": "cache"}}},
    "security": {"serviceAccountName": "mine", "networkPolicy": {"enabled": False}},
    "credentials": {
        "huggingFaceTokenSecretRef": {"name": "hub"},
        "apiKeySecretRef": {"name": "keys", "key": "token"},
    },
    "scheduling": {"topology": {"key": "rack", "mode": "Required"}, "exclusiveTopologyKey": "block"},
    "replicas": 2,
}

CASES = {
    "dpi-plain": {},
    "dpi-one-pod": {"parallelism": {"dataParallelSize": 2, "dataParallelSizeLocal": 2}},
    "dpi-overrides": OVERRIDES,
    "dpi-gang": {
        "scheduling": {"gang": {"provider": "Volcano", "queue": "q"}, "topology": {"key": "rack"}},
        "metrics": {"podMonitor": {"enabled": True}},
    },
    "vllm-endpoints": {
        "engine": {"runtime": "vllm", "device": "auto"},
        "model": {"architecture": "MoE"},
        "parallelism": {"dataParallelSize": 4, "dataParallelSizeLocal": 2},
        "loadBalancing": {
            "mode": "MultiPort",
            "perRankServices": True,
            "inferencePool": {"enabled": True, "endpointPickerRef": {"name": "picker"}},
        },
    },
    "vllm-plain": {"engine": {"runtime": "vllm", "device": "auto"}},
    "vllm-tp": {
        "model": {"uri": "hf://org/m"},
        "engine": {"runtime": "vllm", "device": "auto"},
        "parallelism": {"tensorParallelSize": 4},
    },
    "vllm-moe": {
        "engine": {"runtime": "vllm", "device": "auto"},
        "model": {"architecture": "MoE"},
        "parallelism": {"dataParallelSize": 16, "dataParallelSizeLocal": 8, "expertParallel": True},
    },
    **{
        f"{runtime}-{shape}-{mode.lower()}": {
            "engine": {"runtime": runtime, "device": "cuda"},
            "model": {"architecture": "MoE" if shape == "moe" else "Dense"},
            "parallelism": {
                "dataParallelSize": 4,
                "dataParallelSizeLocal": 1 if mode == "External" else 2,
                "expertParallel": shape == "moe",
            },
            "loadBalancing": {"mode": mode},
        }
        for runtime in ("dpi", "vllm")
        for shape in ("dense", "moe")
        for mode in ("Internal", "Hybrid", "External", "MultiPort")
        if (runtime, shape, mode) != ("vllm", "dense", "MultiPort")
    },
    "dpi-multiport-restarts-one": {
        "parallelism": {"dataParallelSize": 2, "dataParallelSizeLocal": 2},
        "loadBalancing": {"mode": "MultiPort", "supervisorPolicy": "RestartOne"},
    },
    "vllm-overrides": {**OVERRIDES, "engine": {**OVERRIDES["engine"], "runtime": "vllm"}},
}


class Plain(yaml.SafeDumper):
    def ignore_aliases(self, data):
        return True


@pytest.mark.parametrize("name", CASES)
def test_manifests_are_those_in_the_files(name):
    text = yaml.dump_all(rendered(document(**CASES[name])), Dumper=Plain, sort_keys=False, width=120)
    file = GOLDEN / f"{name}.yaml"
    if os.environ.get("DPI_UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text(), f"{file.name} differs; DPI_UPDATE_GOLDEN=1 writes it anew"


def pods(**spec):
    return [m for m in rendered(document(**spec)) if m["kind"] == "Pod"]


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith("dpi")])
def test_our_engine_takes_the_flags_of_every_pod(name):
    for pod in pods(**CASES[name]):
        settings = parse_serve(pod["spec"]["containers"][0]["args"])
        assert settings.model == "m"
        assert settings.headless == (pod["metadata"]["labels"]["dpinference.dev/role"] == "headless")


def test_only_rank_0_binds_the_control_ports_and_only_the_others_know_its_name():
    head, rank1 = pods()
    container = head["spec"]["containers"][0]
    assert "29550" in str(container["ports"])
    assert "29550" not in str(rank1["spec"]["containers"][0]["ports"])
    assert "$(DPI_POD_IP)" in container["args"]
    name = f"{head['metadata']['name']}.demo-internal.ns.svc.cluster.local"
    assert name in rank1["spec"]["containers"][0]["args"]
    assert (head["spec"]["hostname"], head["spec"]["subdomain"]) == (head["metadata"]["name"], "demo-internal")


def test_labels_of_the_operator_win_over_the_users_and_names_fit():
    long = document(template=TEMPLATE, parallelism={"dataParallelSize": 64})
    long["metadata"]["name"] = "x" * 40
    long["spec"]["replicas"] = 1000 // 64
    for manifest in rendered(long):
        assert len(manifest["metadata"]["name"]) <= 63
    roles = {p["metadata"]["labels"]["app.kubernetes.io/component"] for p in pods(template=TEMPLATE)}
    assert roles == {"rank0", "headless"}


def test_the_users_toleration_takes_the_place_of_ours():
    (pod, _) = pods(template=TEMPLATE)
    times = {t["key"]: t["tolerationSeconds"] for t in pod["spec"]["tolerations"]}
    assert times == {"node.kubernetes.io/unreachable": 9, "node.kubernetes.io/not-ready": 30}


def test_gpus_are_derived_where_the_engine_runs_on_them():
    def gpus(**engine):
        spec = pods(engine=engine, parallelism={"dataParallelSize": 4, "dataParallelSizeLocal": 2})[0]["spec"]
        return spec["containers"][0].get("resources", {}).get("limits", {})

    assert gpus(device="cuda") == {"nvidia.com/gpu": "2"}
    assert gpus(runtime="vllm", device="auto") == {"nvidia.com/gpu": "2"}
    assert gpus(device="auto") == gpus(device="cpu") == gpus(device="cuda", gpuResourceName="") == {}
    assert gpus(device="cuda", gpuResourceName="amd.com/gpu") == {"amd.com/gpu": "2"}


def test_merging_keeps_what_nobody_mentions():
    ours = {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}], "x": [1], "deep": {"a": 1}}
    users = {"env": [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}], "x": [2], "deep": {"b": 2}}
    assert merge(ours, users) == {
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "3"}, {"name": "C", "value": "4"}],
        "x": [1, 2],
        "deep": {"a": 1, "b": 2},
    }
    assert ours["env"][1]["value"] == "2"


def test_a_refusal_is_a_render_error():
    said = r"FingerprintMismatch: Revision [0-9a-f]{10} of the spec: rank 1: seed: expected 0, got 7"
    with pytest.raises(RenderError, match=said):
        rendered(document(rankOverrides=[{"ranks": "1", "args": ["--seed", "7"]}]))


def test_the_command_prints_yaml_or_says_why_not(tmp_path, capsys):
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(document()))
    assert main(["render", "-f", str(file)]) == 0
    kinds = [d["kind"] for d in yaml.safe_load_all(capsys.readouterr().out)]
    assert kinds.count("Pod") == 2
    assert "ConfigMap" not in kinds
    file.write_text(yaml.safe_dump(document(engine={"port": 1})))
    assert main(["render", "-f", str(file)]) == 2
    assert "there is no field `port`" in capsys.readouterr().err


def test_the_tree_of_a_status_says_what_is_wrong_and_what_comes_next():
    world = up(replicas=2)
    world.fail(world.pod(1, 1), exit_code=137, reason="OOMKilled", message="no more memory")
    world.settle()
    world.doc["metadata"]["namespace"] = "ns"
    text = "\n".join(tree_lines(world.doc, START + 5))
    assert "ns/demo  Ready  ranks 3/4" in text
    assert "! Degraded=True OOMKilled for 5 s: Rank 1" in text
    assert "next in 25 s" in text
    assert "last ended: OOMKilled 137" in text
    assert "no more memory" in text
    fresh = World(document())
    assert "not seen by an operator yet" in "\n".join(tree_lines(fresh.doc, START))
