"""The part of docs/performance.md that comes out of a results file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from suite.command import JOBS
from suite.figures import OURS, Measure, ratio
from suite.table import spread_text

BEGIN, END = "<!-- results: begin, written by benchmarks/docs.py -->", "<!-- results: end -->"
SHOWN = 3
"""Measures of a row on the page; all of them are in the file."""


class PageError(RuntimeError):
    """There is nothing to write, or no place for it."""


def newest(folder: Path) -> Path:
    """The results file with a peer whose rows were measured last. Raises PageError."""
    found = []
    for path in folder.glob("versus-peer-*.json"):
        rows = json.loads(path.read_text())["rows"]
        found.append((max(row["measured"] for row in rows.values()), path))
    if not found:
        raise PageError(f"{folder}: no results of `benchmarks/run.py --peer`")
    return max(found)[1]


def _measures(key: str) -> Sequence[Measure]:
    for job in JOBS:
        for row in job.rows:
            if row.key == key:
                return row.measures
    raise PageError(f"row {key!r} is not one of the table; measure it anew, or take it out of the results file")


def _cells(row: Mapping[str, Any], measure: Measure) -> str:
    """Ours, the others', the ratio to each, and the goal."""
    sides = row["sides"]
    goal = next((g for g in row["goals"] if g["measure"] == measure.key), None)
    mine = sides.get(OURS, {}).get(measure.key)
    others = [name for name in sides if name != OURS and sides[name].get(measure.key)]
    theirs = "<br>".join(f"{spread_text(sides[n][measure.key], measure.digits)} ({n})" for n in others)
    ratios = "<br>".join(f"{r:.2f}" for n in others if (r := ratio(sides, measure.key, n)) is not None)
    word = ""
    if goal is not None:
        word = f"{goal['goal']}: " + {True: "met", False: "**not met**", None: "not judged"}[goal["met"]]
    unit = f"{measure.label}, {measure.unit}" if measure.unit and measure.unit not in measure.label else measure.label
    return f"{unit} | {spread_text(mine, measure.digits) if mine else ''} | {theirs} | {ratios} | {word}"


def section(whole: Mapping[str, Any], path: Path, plots: Sequence[str]) -> str:
    """Markdown: the machine, plots, a table of the rows in the order of the command."""
    machine, rows = whole["machine"], whole["rows"]
    days = sorted(row["measured"][:10] for row in rows.values())
    packages = ", ".join(f"{k} {v}" for k, v in machine["packages"].items() if v)
    lines = [
        f"{machine['processor']}, {' '.join(machine['features'])}, Python {machine['python']}"
        + (f", {packages}" if packages else "")
        + f"; measured {' to '.join(dict.fromkeys((days[0], days[-1])))} (`{path}`).",
        "",
    ]
    lines += [f"![{name.removesuffix('.svg')}](images/{name})" for name in plots]
    lines += ["", "| row | measure | ours | others | ratio | goal |", "|---|---|---|---|---|---|"]
    order = [row.key for job in JOBS for row in job.rows]
    for key in sorted(rows, key=lambda k: order.index(k) if k in order else len(order)):
        row = rows[key]
        measures = _measures(key)
        goals = {g["measure"] for g in row["goals"]}
        shown = [m for m in measures if any(m.key in values for values in row["sides"].values())]
        shown = [m for i, m in enumerate(shown) if i < SHOWN or m.key in goals or m.key == "cpu_s_per_1000"]
        for i, measure in enumerate(shown):
            name = f"`{key}` {row['title']}" if i == 0 else ""
            lines.append(f"| {name} | {_cells(row, measure)} |")
    notes = [f"* `{key}`: {note}" for key, row in rows.items() for note in (*row["labels"].values(), *row["notes"])]
    return "\n".join([*lines, "", *dict.fromkeys(notes)])


def with_section(page: str, text: str) -> str:
    """The page with `text` between its marks. Raises PageError without them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise PageError(f"docs/performance.md lacks the marks {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"
