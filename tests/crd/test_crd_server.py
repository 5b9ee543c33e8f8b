"""The CRD on a real API server: taken, explained, with our words for what it refuses."""

import json
from pathlib import Path

import pytest
from crd_objects import ACCEPTED, MALFORMED, REFUSED, defaulted, make
from test_crd_rules import refused_by_python

from api_server import kubectl, needs_api_server
from dpi_operator.api.crd import COLUMNS, NAME, open_api_schema

CRD = Path(__file__).parents[2] / "manifests/crd.yaml"

pytestmark = needs_api_server


def create(document):
    return kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", document=json.dumps(document), check=False)


@pytest.fixture(scope="module", autouse=True)
def crd():
    kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    kubectl("wait", "--for=condition=Established", f"crd/{NAME}", "--timeout=120s")


def test_the_schema_is_structural_and_its_names_are_free():
    conditions = json.loads(kubectl("get", "crd", NAME, "-o", "json").stdout)["status"]["conditions"]
    verdicts = {c["type"]: c["status"] for c in conditions}
    assert verdicts["Established"] == verdicts["NamesAccepted"] == "True"
    assert verdicts.get("NonStructuralSchema") != "True", conditions


@pytest.mark.parametrize(("name", "document"), REFUSED)
def test_a_rule_refuses_with_our_words(name, document):
    done = create(document)
    assert done.returncode != 0
    for field, message in refused_by_python(document):
        assert message in done.stderr, f"{field}: {message!r} is not in {done.stderr!r}"


@pytest.mark.parametrize(("name", "document"), ACCEPTED)
def test_what_is_accepted_gets_the_defaults_of_the_types(name, document):
    done = create(document)
    assert done.returncode == 0, done.stderr
    spec = json.loads(done.stdout)["spec"]
    assert spec == defaulted(json.loads(json.dumps(document)), open_api_schema())["spec"]


@pytest.mark.parametrize(("name", "document", "field"), MALFORMED)
def test_a_malformed_field_is_named(name, document, field):
    done = create(document)
    assert done.returncode != 0
    assert field in done.stderr


def test_a_field_that_does_not_exist_is_refused():
    done = create(make(parallelism={"dataParalelSize": 2}))
    assert done.returncode != 0
    assert 'unknown field "spec.parallelism.dataParalelSize"' in done.stderr


def test_null_means_unset_except_where_it_means_no_limit():
    document = make(parallelism={"dataParallelSizeLocal": None}, failurePolicy={"maxRestarts": None})
    done = create(document)
    assert done.returncode == 0, done.stderr
    spec = json.loads(done.stdout)["spec"]
    assert "dataParallelSizeLocal" not in spec["parallelism"]
    assert spec["failurePolicy"]["maxRestarts"] is None


def test_explain_gives_the_sentences():
    text = kubectl("explain", "dataparallelinferences.spec.loadBalancing.mode").stdout
    assert "External: one rank per pod, each with its own endpoint." in " ".join(text.split())


def test_short_name_category_and_columns_are_served():
    listed = json.loads(kubectl("get", "--raw", "/apis/dpinference.dev/v1alpha1").stdout)["resources"]
    resource = next(r for r in listed if r["name"] == "dataparallelinferences")
    assert resource["shortNames"] == ["dpi"]
    assert set(resource["categories"]) == {"all", "inference"}
    assert {r["name"].partition("/")[2] for r in listed} >= {"status", "scale"}
    columns = json.loads(kubectl("get", "crd", NAME, "-o", "json").stdout)["spec"]["versions"][0]
    assert columns["additionalPrinterColumns"] == list(COLUMNS)
