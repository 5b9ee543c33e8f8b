"""A mixture of experts in two pods that share its experts: tokens of all ranks, and a rank that is lost."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_cluster import ROOT, Cluster
from e2e_install import Install
from e2e_service import COMPLETE, Client, Service, object_of
from safetensors.numpy import load_file, save_file

sys.path.append(str(ROOT / "tests" / "process"))
from process_moe import make_moe_model

pytestmark = pytest.mark.timeout(5400)

MODEL = "tiny-moe"
FOLDER = "/model"


def config_map(folder: Path) -> dict[str, Any]:
    """A model of a few hundred kilobytes as an object of the cluster, which takes a mebibyte at most."""
    weights = folder / "model.safetensors"
    halves = {name: tensor.astype(np.float16) for name, tensor in load_file(weights).items()}
    save_file(halves, weights, metadata={"format": "pt"})
    files = {f.name: base64.b64encode(f.read_bytes()).decode() for f in sorted(folder.iterdir())}
    assert len(json.dumps(files)) < 1 << 20
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": MODEL}, "binaryData": files}


def test_two_pods_share_the_experts_and_the_others_wait_for_a_lost_one(
    cluster: Cluster, operator: Install, namespace: str, engine_image: str, client: Client, tmp_path: Path
) -> None:
    model = config_map(make_moe_model(tmp_path / "model"))
    # Not applied: the annotation that apply writes would hold all of it once more.
    cluster.kubectl("create", "--namespace", namespace, "-f", "-", stdin=json.dumps(model))
    engine = {
        "name": "engine",
        "volumeMounts": [{"name": "model", "mountPath": FOLDER, "readOnly": True}],
    }
    document = object_of(
        "experts",
        engine_image,
        model={"architecture": "MoE", "name": MODEL, "uri": f"file://{FOLDER}"},
        parallelism={"dataParallelSize": 4, "dataParallelSizeLocal": 2, "expertParallel": True},
        template={"spec": {"containers": [engine], "volumes": [{"name": "model", "configMap": {"name": MODEL}}]}},
    )
    document["spec"]["engine"]["args"] = ["--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory", "32MiB"]
    document["spec"]["engine"]["args"] += ["--cpu-threads", "1"]
    cluster.apply(namespace, [document])
    service = Service(cluster, namespace, "experts")
    service.wait_whole()

    def text(rank: int) -> str:
        return client.python(COMPLETE, service.endpoint, MODEL, str(rank))

    texts = [text(rank) for rank in range(4)]
    assert len(set(texts)) == 1, "every rank says the same, whichever computes which experts"

    head, lost = service.pod_of(0), service.pod_of(2)
    pids = {r["rank"]: r["pid"] for r in service.engine_report(head["metadata"]["name"])["ranks"] if r["rank"] < 2}
    service.kill_launcher(lost["metadata"]["name"])
    service.wait_replaced(2, lost)
    service.wait_whole()
    assert service.pod_of(0)["metadata"]["uid"] == head["metadata"]["uid"]
    now = {r["rank"]: r["pid"] for r in service.engine_report(head["metadata"]["name"])["ranks"] if r["rank"] < 2}
    assert now == pids, "the survivors keep their processes, and with them their weights"
    assert [text(rank) for rank in range(4)] == texts
