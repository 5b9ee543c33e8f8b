"""The table as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from suite.figures import OURS, Measure, Spread, ratio


def _number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}"


def spread_text(values: Sequence[float], digits: int) -> str:
    """min / median / max; one number for one round."""
    if len(values) == 1:
        return _number(values[0], digits)
    spread = Spread.of(values)
    return " / ".join(_number(v, digits) for v in (spread.least, spread.median, spread.greatest))


def row_text(key: str, row: Mapping[str, Any], measures: Sequence[Measure]) -> str:
    """One row: a line per measure with every side, ratios of medians (ours over theirs), goals, notes."""
    sides: dict[str, dict[str, list[float]]] = row["sides"]
    names = list(sides)
    head = f"  {'':<22}" + "".join(f"{name:>34}" + ("" if name == OURS else f"{'ratio':>8}") for name in names)
    lines = ["", f"{key}  {row['title']}", head.rstrip()]
    for measure in measures:
        if not any(measure.key in values for values in sides.values()):
            continue
        line = f"  {measure.label:<22}"
        for name in names:
            values = sides[name].get(measure.key)
            cell = spread_text(values, measure.digits) if values else "-"
            line += f"{cell:>34}"
            if name != OURS:
                of = ratio(sides, measure.key, name)
                line += f"{'' if of is None else f'{of:.2f}':>8}"
        lines.append(line.rstrip())
    known = {m.key: m for m in measures}
    for goal in row["goals"]:
        met = {True: "met", False: "NOT met", None: "not judged"}[goal["met"]]
        detail = f" ({goal['why']})" if goal["why"] else ""
        detail = f" ({goal['ratio']:.2f} x)" if goal["ratio"] is not None else detail
        label = known[goal["measure"]].label if goal["measure"] in known else goal["measure"]
        lines.append(f"  goal: {label} {goal['goal']}: {met}{detail}")
    for name, label in row["labels"].items():
        lines.append(f"  {name}: {label}")
    lines += [f"  {note}" for note in row["notes"]]
    return "\n".join(lines)


def goals_text(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """All goals in the order of the rows."""
    lines = ["", "goals"]
    for key, row in rows.items():
        for goal in row["goals"]:
            met = {True: "met", False: "NOT met", None: "not judged"}[goal["met"]]
            value = "" if goal["ratio"] is None else f"{goal['ratio']:.2f} x"
            why = goal["why"] if goal["met"] is None else ""
            lines.append(f"  {key:<16}{goal['measure']:<26}{goal['goal']:<28}{value:>8}  {met} {why}".rstrip())
    return "\n".join(lines)
