"""The CRD: structural, the same as its file, every field explained, and its defaults those of the types."""

import re
from pathlib import Path

import msgspec
import pytest
import yaml
from crd_objects import ACCEPTED, MALFORMED, REFUSED, defaulted, make

from dpi_operator.api import crd
from dpi_operator.api.read import ManifestError, read_document

ROOT = Path(__file__).parents[2]
SCHEMA = crd.open_api_schema()
SPEC = SCHEMA["properties"]["spec"]


def nodes(schema, path=""):
    """Every schema below this one with its path."""
    yield path, schema
    for name, below in schema.get("properties", {}).items():
        yield from nodes(below, f"{path}.{name}".lstrip("."))
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], f"{path}[]")


@pytest.mark.parametrize("file", ["manifests/crd.yaml", "charts/dpi-operator/files/crd.yaml"])
def test_files_are_what_the_types_give(file):
    assert (ROOT / file).read_text() == crd.manifest_yaml(), "run `make manifests`"


def test_the_yaml_is_the_manifest_and_small_enough_for_kubectl_apply():
    text = crd.manifest_yaml()
    assert yaml.safe_load(text) == crd.manifest()
    assert "&" not in re.sub(r"'[^']*'|\n\s+rule:.*|&&", "", text)  # no anchors
    # client-side apply keeps the object in an annotation, of which the API server takes 262144 bytes
    assert len(text.encode()) < 200_000


def test_every_field_is_explained_by_sentences():
    for path, node in nodes(SPEC, "spec"):
        if path.endswith("[]") or path.startswith(("spec.template.metadata.",)):
            continue
        text = node.get("description", "")
        assert re.match(r"^[A-Z]", text) and text.endswith("."), f"{path}: {text!r}"


def test_every_value_of_an_enum_is_explained():
    for path, node in nodes(SPEC, "spec"):
        for value in node.get("enum", []):
            assert value in node["description"], f"{path} does not say what {value} means"


def test_the_schema_is_structural():
    for path, node in nodes(SCHEMA):
        if node.get("x-kubernetes-int-or-string"):
            assert "type" not in node and node["anyOf"] == [{"type": "integer"}, {"type": "string"}], path
        else:
            assert node.get("type") in {"object", "array", "string", "integer", "boolean"}, path
        assert not (node.get("properties") and node.get("additionalProperties")), path
        if node.get("x-kubernetes-list-type") == "map":
            keys = node["x-kubernetes-list-map-keys"]
            assert set(keys) <= set(node["items"]["required"]), path
            assert all(node["items"]["properties"][k]["type"] in {"string", "integer"} for k in keys), path


def test_unknown_fields_are_kept_only_where_kubernetes_types_are_embedded():
    kept = {path for path, node in nodes(SCHEMA) if node.get("x-kubernetes-preserve-unknown-fields")}
    assert kept == {
        "spec.template.spec",
        "spec.engine.env[]",
        "spec.engine.envFrom[]",
        "spec.rankOverrides[].env[]",
        "spec.rankOverrides[].tolerations[]",
    }


def test_status_has_no_defaults():
    assert [path for path, node in nodes(SCHEMA["properties"]["status"]) if "default" in node] == []


@pytest.mark.parametrize(("name", "document"), ACCEPTED)
def test_defaults_of_the_schema_are_those_of_the_types(name, document):
    bare = read_document(document, name)
    full = defaulted(make() | {"spec": msgspec.json.decode(msgspec.json.encode(document["spec"]))}, SCHEMA)
    assert read_document(full | {"metadata": document["metadata"]}, name).spec == bare.spec


@pytest.mark.parametrize(("name", "document", "field"), MALFORMED)
def test_the_reader_refuses_what_single_fields_exclude(name, document, field):
    with pytest.raises(ManifestError) as e:
        read_document(document, name)
    assert field.rsplit(".", 1)[-1] in str(e.value)


def test_columns_and_scale_read_fields_that_exist():
    paths = {path for path, _ in nodes(SCHEMA)}
    version = crd.manifest()["spec"]["versions"][0]
    wanted = [c["jsonPath"] for c in version["additionalPrinterColumns"]] + list(
        version["subresources"]["scale"].values()
    )
    for path in wanted:
        plain = re.sub(r"\[\?\(.*?\)\]", "[]", path).lstrip(".")
        assert plain in paths or plain == "metadata.creationTimestamp", path
    names = [c["name"] for c in version["additionalPrinterColumns"] if not c.get("priority")]
    assert names == ["Mode", "Groups", "Ready", "Updated", "Ranks", "GPUs", "Available", "Reason", "Age"]


def test_refused_objects_are_well_formed():
    """So that it is the rules that refuse them."""
    for name, document in REFUSED:
        if "name" not in name:
            read_document(document, name)
