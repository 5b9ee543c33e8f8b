"""The part of docs/performance.md that is written out of a results file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from suite.figures import INSTALLED, OURS, TUNED
from suite.page import BEGIN, END, PageError, newest, section, with_section

ROOT = Path(__file__).resolve().parents[2]
ROW = {
    "title": "32 streams",
    "measured": "2026-01-02T03:04:05",
    "sides": {
        OURS: {"output_tok_s": [500.0, 510.0, 505.0]},
        TUNED: {"output_tok_s": [400.0, 404.0, 402.0]},
        INSTALLED: {"output_tok_s": [202.0]},
    },
    "goals": [{"measure": "output_tok_s", "goal": ">= 1.3 x vllm tuned", "met": False, "ratio": 1.256, "why": ""}],
    "labels": {},
    "notes": ["a note"],
}
MACHINE = {"processor": "a processor", "features": ["avx2"], "python": "3.11", "packages": {"torch": "2"}}


def test_the_page_has_every_side_ratio_and_goal() -> None:
    text = section({"machine": MACHINE, "rows": {"w32": ROW}}, Path("r.json"), ["ratios.svg"])
    assert "| `w32` 32 streams | out tok/s | 500.0 / 505.0 / 510.0 | 400.0 / 402.0 / 404.0 (vllm tuned)" in text
    assert "<br>202.0 (vllm as installed) | 1.26<br>2.50 | >= 1.3 x vllm tuned: **not met** |" in text
    assert "![ratios](images/ratios.svg)" in text and "* `w32`: a note" in text and "measured 2026-01-02 (" in text


def test_it_goes_between_the_marks_of_the_page_and_can_be_written_again() -> None:
    page = (ROOT / "docs" / "performance.md").read_text("utf-8")
    once = with_section(page, "new text")
    assert f"{BEGIN}\n\nnew text\n\n{END}" in once
    assert with_section(once, "new text") == once
    assert once.partition(BEGIN)[0] == page.partition(BEGIN)[0] and once.partition(END)[2] == page.partition(END)[2]
    with pytest.raises(PageError, match="marks"):
        with_section("no marks", "x")


def test_a_row_that_the_table_lost_is_named() -> None:
    with pytest.raises(PageError, match="'w33'"):
        section({"machine": MACHINE, "rows": {"w33": ROW}}, Path("r.json"), [])


def test_the_newest_results_are_those_measured_last(tmp_path: Path) -> None:
    with pytest.raises(PageError, match="no results"):
        newest(tmp_path)
    for name, day in (("a", "2026-01-03"), ("b", "2026-01-01")):
        (tmp_path / f"versus-peer-{name}.json").write_text(json.dumps({"rows": {"w1": {**ROW, "measured": day}}}))
    assert newest(tmp_path).name == "versus-peer-a.json"


def test_kept_results_can_be_shown() -> None:
    files = sorted((ROOT / "benchmarks" / "results").glob("versus-peer-*.json"))
    assert files
    for path in files:
        assert section(json.loads(path.read_text()), path, [])
