"""Plots of docs/performance.md, out of the newest results under benchmarks/results. Needs the extra `bench`.

python benchmarks/plots.py [--results benchmarks/results/versus-peer-….json] [--out docs/images]
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

COLOURS = {"dpi": "#1b6ca8", "vllm tuned": "#c8553d", "vllm as installed": "#e0a890", "llama.cpp bf16": "#6b8e5a"}
STREAMS = (("w1", 1), ("w8", 8), ("w32", 32), ("w64", 64), ("w128", 128))
SHAPES = (("long-in", "1,024 in\n64 out"), ("long-out", "32 in\n512 out"), ("prefix", "prefix\ncold"))
SHAPES += (("prefix-warm", "prefix\nwarm"), ("dp2-dense", "2 ranks\ndense"), ("dp2-moe", "2 ranks\nexperts"))
Rows = dict[str, dict[str, Any]]


def spread(row: dict[str, Any], side: str, measure: str) -> tuple[float, float, float] | None:
    """Median, and how far below and above it the rounds went."""
    values = row["sides"].get(side, {}).get(measure)
    if not values:
        return None
    middle = statistics.median(values)
    return middle, middle - min(values), max(values) - middle


def by_streams(rows: Rows, measure: str, label: str, out: Path, title: str, log: bool) -> bool:
    """One line per side over the number of streams; bars show least and greatest. False without such rows."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    drawn = False
    for side, colour in COLOURS.items():
        points = [(n, s) for key, n in STREAMS if key in rows and (s := spread(rows[key], side, measure))]
        if not points:
            continue
        drawn = True
        x = [n for n, _ in points]
        y, below, above = zip(*(s for _, s in points), strict=True)
        axes.errorbar(x, y, yerr=(below, above), label=side, color=colour, marker="o", markersize=4, capsize=3)
    if drawn:
        axes.set_xscale("log", base=2)
        axes.set_xticks([n for _, n in STREAMS], [str(n) for _, n in STREAMS])
        if log:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlabel("streams")
        axes.set_ylabel(label)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        figure.savefig(out, metadata={"Date": None})
    plt.close(figure)
    return drawn


def ratios(rows: Rows, out: Path) -> bool:
    """Our median rate over the tuned peer's, all served rows; the goal of each as a mark. False without a peer."""
    keys = [(k, f"{n} streams" if n > 1 else "1 stream") for k, n in STREAMS] + list(SHAPES)
    bars: list[tuple[str, float, float | None]] = []
    for key, label in keys:
        if key not in rows:
            continue
        mine, theirs = (spread(rows[key], side, "output_tok_s") for side in ("dpi", "vllm tuned"))
        if not mine or not theirs:
            continue
        goal = next((g["goal"] for g in rows[key]["goals"] if g["measure"] == "output_tok_s"), "")
        bars.append((label, mine[0] / theirs[0], float(goal.split()[1]) if goal else None))
    if not bars:
        return False
    figure, axes = plt.subplots(figsize=(7.6, 3.6), layout="constrained")
    axes.bar(range(len(bars)), [b[1] for b in bars], color=COLOURS["dpi"], width=0.6)
    for i, (_, value, goal) in enumerate(bars):
        axes.text(i, value, f"{value:.2f}", ha="center", va="bottom", fontsize=8)
        if goal is not None:
            axes.plot([i - 0.4, i + 0.4], [goal, goal], color="black", linewidth=1.5, label="goal" if i == 0 else None)
    axes.axhline(1, color="gray", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(bars)), [b[0] for b in bars], fontsize=8)
    axes.set_ylabel("out tok/s, ours over the tuned peer's")
    if any(b[2] is not None for b in bars):
        axes.legend(frameon=False)
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)
    return True


def draw_all(whole: dict[str, Any], out: Path) -> list[str]:
    """Names of the files made in `out`."""
    rows, machine = whole["rows"], whole["machine"]["processor"]
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "dpinference"  # the same figures give the same file
    out.mkdir(parents=True, exist_ok=True)
    made = {
        "ratios.svg": lambda p: ratios(rows, p),
        "rate-by-streams.svg": lambda p: by_streams(rows, "output_tok_s", "out tok/s", p, machine, False),
        "ttft-by-streams.svg": lambda p: by_streams(rows, "ttft_p50_ms", "TTFT median, ms", p, machine, True),
    }
    return [name for name, draw in made.items() if draw(out / name)]
