"""Rules in CEL and their twins in Python judge every object alike: same field, same words."""

import copy
import json

import pytest
from crd_objects import ACCEPTED, REFUSED, defaulted, make
from hypothesis import given, settings
from hypothesis import strategies as st

from dpi_operator.api.cel import RULES
from dpi_operator.api.crd import open_api_schema
from dpi_operator.api.read import ManifestError, read_document
from dpi_operator.api.validate import validate

cel = pytest.importorskip("cel", reason="needs the package common-expression-language")

SCHEMA = open_api_schema()


def refused_by_rules(document):
    """{(field, message)} of every rule that is not true of the object, as an API server evaluates them."""
    document = defaulted(json.loads(json.dumps(document)), SCHEMA)
    found = set()
    for rule in RULES:
        value = document
        for key in rule.at.split(".") if rule.at else ():
            value = value.get(key) if value is not None else None
        if value is None:
            continue
        verdict = cel.evaluate(rule.cel, {"self": value})
        assert isinstance(verdict, bool), rule
        if not verdict:
            found.add((rule.path, rule.message))
    return found


def without_values(finding):
    """The message of the rule that this finding is the twin of; the finding's own where there is none."""
    twins = [r.message for r in RULES if r.path == finding.field and finding.message.startswith(r.message)]
    return twins[0] if twins else finding.message


def refused_by_python(document):
    """{(field, message)} of all findings, without the values that a message ends with."""
    try:
        return {(f.field, without_values(f)) for f in validate(read_document(document, "x"))}
    except ManifestError as e:
        assert "metadata.name" in str(e), e
        return {(r.path, r.message) for r in RULES if r.path == "metadata.name"}


@pytest.mark.parametrize(("name", "document"), REFUSED)
def test_what_one_refuses_the_other_refuses_with_the_same_words(name, document):
    found = refused_by_rules(document)
    assert found, "no rule refuses this"
    assert found == refused_by_python(document)


@pytest.mark.parametrize(("name", "document"), ACCEPTED)
def test_what_one_accepts_the_other_accepts(name, document):
    assert refused_by_rules(document) == refused_by_python(document) == set()


def test_every_rule_refuses_something_in_the_table():
    refused = {found for _, document in REFUSED for found in refused_by_rules(document)}
    assert refused == {(rule.path, rule.message) for rule in RULES}


sizes = st.sampled_from([1, 2, 3, 4, 7, 8, 9, 16, 64])
objects = st.fixed_dictionaries(
    {
        "replicas": st.sampled_from([0, 1, 3, 64, 65, 1000]),
        "model": st.fixed_dictionaries({"name": st.just("m"), "architecture": st.sampled_from(["Dense", "MoE"])}),
        "engine": st.fixed_dictionaries(
            {"image": st.just("e"), "runtime": st.sampled_from(["dpi", "vllm"])},
            optional={
                "apiServerCount": st.sampled_from([1, 2]),
                "ports": st.fixed_dictionaries(
                    {
                        "supervisor": st.sampled_from([7999, 8000, 8003, 8008, 9256]),
                        "management": st.sampled_from([8001, 8007, 8081]),
                    }
                ),
            },
        ),
        "parallelism": st.fixed_dictionaries(
            {"dataParallelSize": sizes | st.just(65), "expertParallel": st.booleans()},
            optional={
                "dataParallelSizeLocal": sizes,
                "pipelineParallelSize": st.sampled_from([1, 2]),
                "tensorParallelSize": st.sampled_from([1, 2]),
                "coupling": st.sampled_from(["Auto", "Coupled", "Independent"]),
            },
        ),
        "loadBalancing": st.fixed_dictionaries(
            {"mode": st.sampled_from(["Internal", "Hybrid", "External", "MultiPort"])},
            optional={
                "perRankServices": st.booleans(),
                "inferencePool": st.fixed_dictionaries(
                    {"enabled": st.booleans()}, optional={"endpointPickerRef": st.just({"name": "picker"})}
                ),
            },
        ),
        "failurePolicy": st.fixed_dictionaries(
            {"action": st.sampled_from(["Auto", "RecreateGroup", "RecreateRank"])},
            optional={"backoff": st.fixed_dictionaries({"baseSeconds": st.integers(0, 1000)})},
        ),
        "lifecycle": st.fixed_dictionaries(
            {},
            optional={
                "preStopSeconds": st.integers(0, 40),
                "shutdownTimeoutSeconds": st.integers(0, 40),
                "terminationGracePeriodSeconds": st.integers(1, 90),
            },
        ),
        "rollout": st.fixed_dictionaries(
            {"strategy": st.sampled_from(["RollingUpdate", "BlueGreen", "OnDelete"])},
            optional={
                "maxUnavailable": st.sampled_from([0, 1, "0%", "50%"]),
                "maxSurge": st.sampled_from([0, 1, "0%", "50%"]),
            },
        ),
        "rankOverrides": st.just([]) | st.sampled_from(["", "e", "f"]).map(lambda image: [{"image": image}]),
    }
)


@settings(max_examples=150, deadline=None)
@given(spec=objects)
def test_any_object_is_judged_alike(spec):
    document = make() | {"spec": copy.deepcopy(spec)}
    for override in document["spec"]["rankOverrides"]:
        override["ranks"] = f"0-{spec['parallelism']['dataParallelSize'] - 1}"  # whole pods, whatever their size
    assert refused_by_rules(document) == refused_by_python(document)
