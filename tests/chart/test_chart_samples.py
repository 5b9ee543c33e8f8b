"""Samples: every one is read, accepted, and shows what it says."""

from pathlib import Path

import pytest
import yaml
from chart_render import OTHERS, check_object

from dpi_operator.api.read import read_manifest
from dpi_operator.api.types import Architecture, Mode, Runtime, Strategy
from dpi_operator.api.validate import validate

SAMPLES = sorted((Path(__file__).parents[2] / "manifests/samples").glob("*.yaml"))
OBJECTS = {s.stem: read_manifest(str(s)) for s in SAMPLES}


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.stem)
def test_a_sample_is_accepted(sample):
    assert validate(OBJECTS[sample.stem]) == []


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.stem)
def test_a_sample_and_what_is_beside_it_fits_the_schemas(sample):
    for document in yaml.safe_load_all(sample.read_text()):
        check_object(document)


def test_every_mode_is_shown_for_both_kinds_of_model():
    shown = {
        (d.spec.model.architecture, d.spec.load_balancing.mode)
        for name, d in OBJECTS.items()
        if name.startswith(("gpu-dense", "gpu-moe"))
    }
    assert shown == {(a, m) for a in Architecture for m in Mode}


def test_the_other_runtime_and_strategy_are_shown():
    assert any(d.spec.engine.runtime is Runtime.VLLM for d in OBJECTS.values())
    assert any(d.spec.rollout.strategy is Strategy.BLUE_GREEN for d in OBJECTS.values())


def test_names_are_unique_so_that_all_can_be_applied():
    names = [d.metadata.name for d in OBJECTS.values()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", ["autoscale-hpa", "autoscale-keda"])
def test_autoscalers_scale_the_object_beside_them_and_own_its_replicas(name):
    file = next(s for s in SAMPLES if s.stem == name)
    dpi, scaler = yaml.safe_load_all(file.read_text())
    assert scaler["kind"] in OTHERS | {"HorizontalPodAutoscaler"}
    assert scaler["spec"]["scaleTargetRef"] == {
        "apiVersion": dpi["apiVersion"],
        "kind": dpi["kind"],
        "name": dpi["metadata"]["name"],
    }
    assert "replicas" not in dpi["spec"]
