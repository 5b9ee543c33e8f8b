"""Reasons that objects, events and deletions carry: each is given somewhere, and explained."""

import re
from pathlib import Path

import pytest

from dpi_operator.api import reasons
from dpi_operator.api.status import CONDITION_TYPES

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


def test_every_reason_is_explained():
    assert listed(*CONDITION_TYPES) == {r.value for r in reasons.Reason}
    assert listed("Events") == {r.value for r in reasons.EventReason}
    assert listed("Deletions") == {r.value for r in reasons.DeleteReason}


def test_warnings_are_marked():
    text = (ROOT / "docs/reference/conditions.md").read_text()
    assert set(re.findall(r"`(\w+)` W", text)) == {r.value for r in reasons.WARNINGS}
