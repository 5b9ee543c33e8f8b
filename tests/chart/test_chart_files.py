"""What is made from other files is up to date, and the schemas of values say what the templates take."""

import json
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import chart_docs  # noqa: E402
import manifests  # noqa: E402

VALUES = {c: yaml.safe_load((ROOT / f"charts/{c}/values.yaml").read_text()) for c in ("dpi-operator", "dpi")}
SCHEMAS = {c: json.loads((ROOT / f"charts/{c}/values.schema.json").read_text()) for c in VALUES}


def test_made_files_are_up_to_date():
    assert manifests.stale(manifests.files()) == [], "run `make manifests`"


@pytest.mark.parametrize("chart", VALUES)
def test_defaults_fit_their_schema(chart):
    jsonschema.Draft7Validator.check_schema(SCHEMAS[chart])
    jsonschema.validate(VALUES[chart], SCHEMAS[chart])


@pytest.mark.parametrize(
    ("chart", "values", "words"),
    [
        ("dpi-operator", {"replicas": 2}, "'replicas' was unexpected"),
        ("dpi-operator", {"image": {"name": "x"}}, "'name' was unexpected"),
        ("dpi-operator", {"image": {"digest": "abc"}}, "does not match"),
        ("dpi-operator", {"watch": {"scope": "everything"}}, "is not one of"),
        ("dpi-operator", {"metrics": {"port": 80}}, "less than the minimum"),
        ("dpi", {"model": {"name": "m"}, "paralelism": {}}, "'paralelism' was unexpected"),
        ("dpi", {"model": {"name": "m"}, "parallelism": {"dataParallelSize": 0}}, "less than the minimum"),
        ("dpi", {"model": {"name": "m"}, "loadBalancing": {"mode": "Round"}}, "is not one of"),
        ("dpi", {"model": {}}, "'name' is a required property"),
    ],
)
def test_values_that_mean_nothing_are_refused(chart, values, words):
    with pytest.raises(jsonschema.ValidationError) as e:
        jsonschema.validate(values, SCHEMAS[chart])
    assert words in e.value.message


def test_open_parts_stay_open():
    values = {
        "model": {"name": "m"},
        "failurePolicy": {"maxRestarts": None},
        "rollout": {"maxSurge": "50%"},
        "engine": {
            "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
            "resources": {"limits": {"nvidia.com/gpu": 4, "memory": "64Gi"}},
        },
        "template": {"spec": {"containers": [{"name": "sidecar", "image": "s"}], "hostIPC": True}},
    }
    jsonschema.validate(values, SCHEMAS["dpi"])


def test_values_without_a_comment_are_an_error():
    docs = chart_docs.comments("# -- Known.\na: 1\nb: 2\n")
    with pytest.raises(chart_docs.ValuesError, match="b: no comment"):
        list(chart_docs.leaves({"a": 1, "b": 2}, docs))


def test_comments_are_read_with_their_continuation_and_schema():
    docs = chart_docs.comments("x:\n  # -- One\n  # two.\n  # @schema enum: [a, b]\n  y: a\n\n# unrelated\nz: 1\n")
    assert docs == {"x.y": chart_docs.Doc("One two.", {"enum": ["a", "b"]})}
    assert chart_docs.schema({"x": {"y": "a"}}, docs)["properties"]["x"] == {
        "type": "object",
        "additionalProperties": False,
        "properties": {"y": {"type": "string", "description": "One two.", "enum": ["a", "b"]}},
    }


def test_images_carry_no_host():
    assert "/" not in VALUES["dpi-operator"]["image"]["repository"].replace("dpinference/operator", "", 1)
    assert VALUES["dpi-operator"]["image"]["registry"] == ""


def test_charts_have_the_version_of_the_distribution():
    version = next(
        line.split('"')[1] for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("version")
    )
    for chart in VALUES:
        meta = yaml.safe_load((ROOT / f"charts/{chart}/Chart.yaml").read_text())
        assert meta["appVersion"] == version
        assert meta["kubeVersion"] == ">= 1.30.0-0"


def test_charts_are_small():
    for chart in VALUES:
        assert sum(f.stat().st_size for f in (ROOT / f"charts/{chart}").rglob("*") if f.is_file()) < 1_000_000
