"""Spreads, ratios, goals, the table's text, and what is kept of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from suite import served
from suite.command import JOBS, main, wanted
from suite.context import Context, Row
from suite.figures import OURS, TUNED, Goal, Measure, Spread, judge, ratio
from suite.results import Results, ResultsError
from suite.table import goals_text, row_text, spread_text
from suite.texts import BLOCK, TextError, Texts
from tokenizers import Tokenizer, models, pre_tokenizers

RATE = Measure("rate", "out tok/s", "tok/s", higher=True)
DELAY = Measure("delay", "TTFT", "ms")
SIDES = {
    OURS: {"rate": [120, 130, 150], "delay": [40, 44, 90]},
    TUNED: {"rate": [90, 100, 104], "delay": [100, 101, 99]},
}
MACHINE = {"processor": "a processor", "features": ["avx2"]}


def test_a_spread_is_least_median_and_greatest() -> None:
    assert Spread.of([3, 1, 2]) == Spread(1, 2, 3)
    assert Spread.of([4, 1, 2, 3]) == Spread(1, 2.5, 4)
    assert Spread.of([7]) == Spread(7, 7, 7)
    with pytest.raises(ValueError, match="no rounds"):
        Spread.of([])


def test_a_ratio_is_of_medians_and_absent_without_both_sides() -> None:
    assert ratio(SIDES, "rate", TUNED) == pytest.approx(1.3)
    assert ratio(SIDES, "delay", TUNED) == pytest.approx(0.44)
    assert ratio({OURS: SIDES[OURS]}, "rate", TUNED) is None
    assert ratio({OURS: {"rate": [1]}, TUNED: {"rate": [0]}}, "rate", TUNED) is None


@pytest.mark.parametrize(
    ("goal", "bf16", "met", "text"),
    [
        (Goal(RATE, 1.3, TUNED, 1.8), True, True, ">= 1.3 x vllm tuned"),
        (Goal(RATE, 1.3, TUNED, 1.8), False, False, ">= 1.8 x vllm tuned"),
        (Goal(RATE, 1.31, TUNED), True, False, ">= 1.31 x vllm tuned"),
        (Goal(DELAY, 0.45, TUNED), True, True, "<= 0.45 x vllm tuned"),
        (Goal(DELAY, 0.43, TUNED), True, False, "<= 0.43 x vllm tuned"),
        (Goal(DELAY, 44), True, True, "<= 44 ms"),
        (Goal(DELAY, 43.9), True, False, "<= 43.9 ms"),
        (Goal(RATE, 1.3, "another"), True, None, ">= 1.3 x another"),
        (Goal(RATE, 1.3, TUNED), False, None, ""),
    ],
)
def test_goals_are_judged_by_medians_in_the_right_direction(
    goal: Goal, bf16: bool, met: bool | None, text: str
) -> None:
    verdict = judge(goal, SIDES, bf16)
    assert (verdict.met, verdict.goal) == (met, text)
    assert verdict.met is not None or verdict.why


def test_nothing_of_ours_is_no_success() -> None:
    assert judge(Goal(DELAY, 1e9), {TUNED: SIDES[TUNED]}, True).met is None


def put(path: Path | None, goals: tuple[Goal, ...] = (Goal(RATE, 1.3, TUNED), Goal(DELAY, 43.0))) -> Results:
    results = Results(path, MACHINE)
    Context(3, True, True, results).put(Row("w", "a row", (RATE, DELAY), goals), SIDES, ["a note"])
    return results


def test_the_table_shows_spreads_ratios_and_goals(capsys: pytest.CaptureFixture[str]) -> None:
    results = put(None)
    text = capsys.readouterr().out
    assert text.strip() == row_text("w", results.rows["w"], (RATE, DELAY)).strip()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "out tok/s 120.0 / 130.0 / 150.0 90.0 / 100.0 / 104.0 1.30" in lines
    assert "TTFT 40.0 / 44.0 / 90.0 99.0 / 100.0 / 101.0 0.44" in lines
    assert "goal: out tok/s >= 1.3 x vllm tuned: met (1.30 x)" in lines
    assert "goal: TTFT <= 43 ms: NOT met" in lines
    assert "a note" in lines
    summary = [" ".join(line.split()) for line in goals_text(results.rows).splitlines()]
    assert "w rate >= 1.3 x vllm tuned 1.30 x met" in summary
    assert "w delay <= 43 ms NOT met" in summary
    assert spread_text([1234.5], 1) == "1,234.5"


def test_rows_of_several_runs_come_together_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "r.json"
    put(path)
    again = Results(path, MACHINE)
    assert again.rows["w"]["sides"] == SIDES
    again.put("other", {"title": "", "sides": {}, "goals": []})
    assert set(Results(path, MACHINE).rows) == {"w", "other"}
    assert json.loads(path.read_text())["machine"] == MACHINE


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not a results file"),
        ("[]", "not a results file"),
        ('{"version": 0}', "not a results file"),
        (None, "this is"),
    ],
)
def test_a_file_of_something_else_is_refused_by_name(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "r.json"
    machine: dict[str, Any] = MACHINE
    if content is None:
        put(path)
        machine = {**MACHINE, "processor": "another"}
    else:
        path.write_text(content)
    with pytest.raises(ResultsError, match=says) as caught:
        Results(path, machine)
    assert str(path) in str(caught.value)


def test_rows_have_names_of_their_own_and_unknown_ones_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [row.key for job in JOBS for row in job.rows] + [job.name for job in JOBS]
    names = [k for k in keys if keys.count(k) > 1]
    assert set(names) <= {job.name for job in JOBS if [r.key for r in job.rows] == [job.name]}, names
    with pytest.raises(SystemExit):
        main(["--only", "w33"])
    assert "no row or job w33" in capsys.readouterr().err


def test_what_needs_the_peer_is_left_out_without_it() -> None:
    chosen = {job.name: [r.key for r in wanted(job, (), False)] for job in JOBS}
    assert chosen["llama"] == [] and chosen["limits"] == []
    assert chosen["served"] == [row.key for row in served.ROWS]
    beside = {job.name: [r.key for r in wanted(job, (), True)] for job in JOBS}
    assert beside["llama"] == ["llama"] and beside["limits"] == []
    limits = next(job for job in JOBS if job.name == "limits")
    assert [r.key for r in wanted(limits, ("limits",), True)] == ["limits"]


def words(text: str) -> Tokenizer:
    vocabulary = {w: i for i, w in enumerate(dict.fromkeys(text.split()))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=next(iter(vocabulary))))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def test_no_two_prompts_begin_alike_even_when_the_text_is_used_up() -> None:
    text = " ".join(f"w{i}" for i in range(400))
    texts = Texts(words(text), text)
    prompts = texts.take(30, 40)
    assert all(len(p) == 40 for p in prompts)
    assert len({tuple(p[:BLOCK]) for p in prompts}) == 30
    assert prompts[:9] == [list(range(i * 40, i * 40 + 40)) for i in range(9)]
    with pytest.raises(TextError, match="used up"):
        texts.take(10_000, 40)
    with pytest.raises(TextError, match="400 tokens"):
        texts.take(1, 401)
