"""Reasons that objects, events and deletions carry: each is given somewhere, and explained."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from dpi_operator.api import reasons
from dpi_operator.api.status import CONDITION_TYPES
from dpi_operator.plan import judgement

ROOT = Path(__file__).parents[2]
CODE = Path(reasons.__file__).parents[1]
TEXT = "\n".join(f.read_text() for f in CODE.rglob("*.py") if f != Path(reasons.__file__))
USED = set(re.findall(r"\b(Reason|DeleteReason|EventReason)\.([A-Z0-9_]+)\b", TEXT))


@pytest.mark.parametrize("kind", [reasons.Reason, reasons.DeleteReason, reasons.EventReason], ids=lambda k: k.__name__)
def test_no_reason_is_only_a_name(kind):
    assert {r.name for r in kind} == {name for owner, name in USED if owner == kind.__name__}


def listed(*titles):
    """Words in the first column of the tables under these headings."""
    text = (ROOT / "docs/reference/conditions.md").read_text()
    found = {}
    for title, body in re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.M | re.S):
        rows = [line.split(" | ")[0] for line in body.splitlines() if line.startswith("| `")]
        found[title] = {word for row in rows for word in re.findall(r"`(\w+)`", row)} | (
            set(re.findall(r"`(\w+)`", body)) if title == "Ready" else set()
        )
    return set().union(*(found[t] for t in titles or found))


def given():
    """By condition, the reasons that its rules give; a spec is refused for those of the files that make findings."""
    tree = ast.parse(inspect.getsource(judgement))
    parts = {d.name: d for d in tree.body if isinstance(d, ast.FunctionDef)}
    parts |= {d.target.id: d for d in tree.body if isinstance(d, ast.AnnAssign)}

    def reached(node, seen):
        found = set()
        for n in ast.walk(node):
            if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "Reason":
                found.add(reasons.Reason[n.attr].value)
            elif isinstance(n, ast.Name) and n.id in parts and n.id not in seen:
                seen.add(n.id)
                found |= reached(parts[n.id], seen)
        return found

    (verdicts,) = [n for n in ast.walk(parts["judge"]) if isinstance(n, ast.Dict) and len(n.keys) > 1]
    by_condition = {k.value: reached(v, set()) for k, v in zip(verdicts.keys, verdicts.values, strict=True)}
    files = [t for f in CODE.rglob("*.py") if re.search(r"\bFinding\(", t := f.read_text())]
    refused = {reasons.Reason[n].value for t in files for n in re.findall(r"\bReason\.([A-Z0-9_]+)\b", t)}
    by_condition["Accepted"] |= refused - by_condition["ConfigConsistent"]
    return by_condition


GIVEN = given()


@pytest.mark.parametrize("condition", GIVEN)
def test_each_condition_lists_the_reasons_that_it_gives(condition):
    assert listed(condition) == GIVEN[condition]


def test_every_reason_is_explained():
    assert set(GIVEN) == set(CONDITION_TYPES) - {"Ready"}
    assert listed(*CONDITION_TYPES) == {r.value for r in reasons.Reason}
    assert listed("Events") == {r.value for r in reasons.EventReason}
    assert listed("Deletions") == {r.value for r in reasons.DeleteReason}


def test_warnings_are_marked():
    text = (ROOT / "docs/reference/conditions.md").read_text()
    assert set(re.findall(r"`(\w+)` W", text)) == {r.value for r in reasons.WARNINGS}
