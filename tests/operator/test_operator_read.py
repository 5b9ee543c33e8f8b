"""Manifests: what is accepted, and what each fault is called."""

import copy

import pytest
import yaml

from dpi_operator.api.read import ManifestError, read_document, read_manifest
from dpi_operator.api.types import Mode, Runtime

MINIMAL = {
    "apiVersion": "dpinference.dev/v1alpha1",
    "kind": "DataParallelInference",
    "metadata": {"name": "demo"},
    "spec": {"model": {"name": "m"}, "engine": {"image": "engine:1"}},
}


def with_spec(path: str, value: object) -> dict:
    """MINIMAL with one field of spec set, by a dotted path."""
    document = copy.deepcopy(MINIMAL)
    node = document["spec"]
    *parents, last = path.split(".")
    for key in parents:
        node = node.setdefault(key, {})
    node[last] = value
    return document


def test_a_name_a_model_and_an_image_are_enough():
    dpi = read_document(MINIMAL, "x.yaml")
    assert dpi.spec.parallelism.data_parallel_size == 1
    assert dpi.spec.load_balancing.mode is Mode.INTERNAL
    assert dpi.spec.engine.runtime is Runtime.DPI
    assert dpi.spec.engine.ports.rpc == 29550


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("parallelism.dataParalelSize", 2, ["spec.parallelism", "dataParalelSize", "did you mean `dataParallelSize`"]),
        ("parallelism.dataParallelSize", 0, ["spec.parallelism.dataParallelSize", ">= 1", "got 0"]),
        ("parallelism.dataParallelSize", "2", ["spec.parallelism.dataParallelSize", "int", "got '2'"]),
        ("parallelism.dataParallelSize", "two", ["spec.parallelism.dataParallelSize: expected `int`, got 'two'"]),
        ("loadBalancing.mode", "Round", ["mode: expected one of Internal, Hybrid, External, MultiPort, got 'Round'"]),
        ("engine.device", "tpu", ["spec.engine.device: expected one of auto, cpu, cuda, got 'tpu'"]),
        ("security.controlChannel", "TLS", ["expected one of Plaintext, Curve, got 'TLS'"]),
        ("model.uri", "s3://bucket/x", ["spec.model.uri", "got 's3://bucket/x'"]),
        ("engine.ports.http", 70000, ["spec.engine.ports.http", "65535", "got 70000"]),
        ("rankOverrides", [{"ranks": "a"}], ["spec.rankOverrides", "got 'a'"]),
    ],
)
def test_a_bad_field_is_named_with_what_was_expected_and_found(path, value, words):
    with pytest.raises(ManifestError) as e:
        read_document(with_spec(path, value), "x.yaml")
    for word in ["x.yaml", *words]:
        assert word in str(e.value)


def test_missing_fields_are_named():
    document = copy.deepcopy(MINIMAL)
    del document["spec"]["engine"]
    with pytest.raises(ManifestError, match="spec: `engine` is required"):
        read_document(document, "x.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "not YAML"),
        ("a: " + "[" * 3000 + "]" * 3000, "not YAML"),
        ("a: 2026-02-31", "not YAML: day is out of range"),
        (yaml.safe_dump(MINIMAL) + "kind: DataParallelInference\n", "key 'kind' is given twice"),
        (yaml.safe_dump({**MINIMAL, "sepc": {}}), "the object: there is no field `sepc`; did you mean `spec`?"),
        ("", "expected one DataParallelInference, got 0"),
        ("apiVersion: v1\nkind: Pod\n", "apiVersion: expected dpinference.dev/v1alpha1"),
        ("- 1\n", "got list"),
        (yaml.safe_dump(MINIMAL) + "---\n" + yaml.safe_dump(MINIMAL), "got 2"),
    ],
)
def test_files_that_hold_no_object(tmp_path, text, words):
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(ManifestError) as e:
        read_manifest(str(file))
    assert words in str(e.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ManifestError, match=r"nowhere\.yaml: cannot be read: No such file"):
        read_manifest(str(tmp_path / "nowhere.yaml"))


def test_other_kinds_in_the_file_are_left_alone(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("apiVersion: v1\nkind: Secret\n---\n" + yaml.safe_dump(MINIMAL))
    assert read_manifest(str(file)).metadata.name == "demo"
