"""Job: SmolLM2 through the servers, all up at once, every round on each of them before the next."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dpi_engine.config.machine import cpu_features
from dpi_engine.config.sources import default_cache_dir, resolve_model
from dpi_engine.tokenizer.bundle import load_tokenizer
from suite.context import Context, Row
from suite.figures import INSTALLED, OURS, TUNED, Goal
from suite.machine import has_bf16
from suite.servers import KV_GIB, SMOLLM2, STREAMS_MAX, Server, ServerFailed, ours, peer
from suite.texts import Texts
from suite.workload import (
    FIRST,
    OUTPUT_RATE,
    SERVED,
    TTFT,
    NotSane,
    Outcome,
    Shape,
    agreement,
    first_model,
    play,
)

PREFIX_TOKENS, SUFFIX_TOKENS = 1000, 32


def _row(key: str, shape: Shape, seconds: float, *goals: Goal) -> Row:
    streams = "1 stream" if shape.streams == 1 else f"{shape.streams} streams"
    title = f"{streams}, {shape.input_tokens:,} tokens in, {shape.output_tokens} out"
    return Row(key, title, SERVED, goals, shape, seconds)


def _rate(limit: float, avx2: float | None = None) -> Goal:
    return Goal(OUTPUT_RATE, limit, TUNED, limit if avx2 is None else avx2)


ROWS = (
    _row("w32", Shape(32, 128, 128), 10, _rate(1.3, 1.8), Goal(TTFT, 0.45, TUNED, 0.45), Goal(FIRST, 400.0, "", 400.0)),
    _row("w1", Shape(1, 128, 128), 3, _rate(1.2, 3.0)),
    _row("w8", Shape(8, 128, 128), 5, _rate(1.2)),
    _row("w64", Shape(64, 128, 128), 18, _rate(1.2)),
    _row("w128", Shape(128, 128, 128), 35, _rate(1.2)),
    _row("long-in", Shape(32, 1024, 64), 24, _rate(1.2)),
    _row("long-out", Shape(32, 32, 512), 38, _rate(1.2)),
    Row(
        "w32-int8",
        "32 streams, 128 tokens in, 128 out, ours with --quantization int8",
        SERVED,
        (Goal(OUTPUT_RATE, 1.6, TUNED),),
        Shape(32, 128, 128),
        9,
    ),
    Row(
        "prefix",
        f"32 users, one prefix of {PREFIX_TOKENS:,} tokens that no cache has, {SUFFIX_TOKENS} of their own, 64 out",
        SERVED,
        (_rate(1.5),),
        Shape(32, PREFIX_TOKENS + SUFFIX_TOKENS, 64),
        7,
    ),
    Row(
        "prefix-warm",
        f"the same when the caches have the prefix: {SUFFIX_TOKENS} other tokens of their own",
        SERVED,
        (),
        Shape(32, PREFIX_TOKENS + SUFFIX_TOKENS, 64),
        6,
    ),
)

INT8 = "dpi int8"
INT8_FEATURES = {"avx512_vnni", "avx512_bf16"}
"""Without these the processor has no kernels for int8."""

WITH_INSTALLED = ("w32", "w1")
"""Rows in which the peer as installed takes part too: it is up only for these."""


@dataclass(slots=True)
class Side:
    """A server in the comparison, and the name it has for its model."""

    name: str
    server: Server
    model: str


@contextlib.contextmanager
def sides_up(context: Context, installed: bool, int8: bool) -> Iterator[list[Side]]:
    """Ours and, where wanted, the peer's; started one after the other, so that none starts slower for another."""
    with contextlib.ExitStack() as stack:
        found = []
        starts: list[tuple[str, Callable[[], Any]]] = []
        if context.peer:
            dtype = "bfloat16" if has_bf16() else "float32"
            starts.append((TUNED, lambda: peer(dtype=dtype)))
            if installed:
                starts.append((INSTALLED, lambda: peer(tuned=False)))
        flags = ("--max-num-seqs", str(STREAMS_MAX), "--kv-cache-memory", f"{KV_GIB}GiB")
        starts.append((OURS, lambda: ours(context.model or SMOLLM2, *flags)))
        if int8:
            starts.append((INT8, lambda: ours(context.model or SMOLLM2, *flags, "--quantization", "int8")))
        for name, start in starts:
            print(f"starting {name}", end="", flush=True)
            server = stack.enter_context(start())
            print(f": ready in {server.ready_s:.1f} s", flush=True)
            found.append(Side(name, server, first_model(server)))
        yield sorted(found, key=lambda s: (OURS, INT8, TUNED, INSTALLED).index(s.name))


def sides_of(row: Row, sides: Sequence[Side]) -> list[Side]:
    """Those that take part in a row: where int8 does, it is our side."""
    if row.key != "w32-int8":
        return [side for side in sides if side.name != INT8]
    changed = [
        Side(OURS, side.server, side.model) if side.name == INT8 else side for side in sides if side.name != OURS
    ]
    return [side for side in changed if side.name != INSTALLED]


def texts_of(model: str) -> Texts:
    """Windows of this repository's text in the tokens of `model`."""
    import os
    from pathlib import Path

    return Texts(load_tokenizer(resolve_model(model, default_cache_dir(os.environ, Path.home()))).tokenizer)


def warm(sides: Sequence[Side], texts: Texts) -> None:
    """A few requests of each kind of step, so that nothing is built or compiled in a round."""
    for shape in (Shape(8, 128, 8), Shape(1, 512, 4)):
        prompts = texts.take(shape.count, shape.input_tokens)
        for side in sides:
            play(side.server, side.model, prompts, shape, real_model=False)


def prompts_of(row: Row, texts: Texts) -> Iterator[list[list[int]]]:
    """Prompts of each round; for the rows of one prefix a new prefix each time."""
    while True:
        if row.key == "prefix":
            prefix = texts.take(1, PREFIX_TOKENS)[0]
            yield [prefix + suffix for suffix in texts.take(row.shape.count, SUFFIX_TOKENS)]
        else:
            yield texts.take(row.shape.count, row.shape.input_tokens)


class Tally:
    """Values of the rounds by side, and how far answers agree."""

    def __init__(self, sides: Sequence[Side]) -> None:
        self.values: dict[str, dict[str, list[float]]] = {side.name: {} for side in sides}
        self.agreement: list[float] = []

    def add(self, outcomes: dict[str, Outcome]) -> None:
        for name, outcome in outcomes.items():
            for key, value in outcome.values.items():
                self.values[name].setdefault(key, []).append(value)
        if TUNED in outcomes:
            self.agreement.append(agreement(outcomes[OURS].texts, outcomes[TUNED].texts))

    def notes(self) -> list[str]:
        shares = [v for values in self.values.values() for v in values["others_share"]]
        found = [f"other work took {max(shares):.0%} of the cores in the worst round"]
        if self.agreement:
            found.append(
                f"answers whose first 16 characters are the same on both sides: {min(self.agreement):.0%} at the least"
            )
        return found


def play_all(
    sides: Sequence[Side], prompts: list[list[int]], shape: Shape, turn: int, real_model: bool
) -> dict[str, Outcome]:
    """The same prompts on each side; who begins changes from round to round."""
    order = [sides[(i + turn) % len(sides)] for i in range(len(sides))]
    return {side.name: play(side.server, side.model, prompts, shape, real_model) for side in order}


def measure(context: Context, row: Row, sides: Sequence[Side], texts: Texts, warm_row: Row | None = None) -> None:
    """All rounds of a row. `warm_row` is measured in between, on the prefix that the round before it left."""
    real = not context.model
    tally, warm_tally = Tally(sides), Tally(sides)
    for turn, prompts in enumerate(itertools.islice(prompts_of(row, texts), context.rounds)):
        tally.add(play_all(sides, prompts, row.shape, turn, real))
        if warm_row is not None:
            prefix = prompts[0][:PREFIX_TOKENS]
            again = [prefix + suffix for suffix in texts.take(warm_row.shape.count, SUFFIX_TOKENS)]
            warm_tally.add(play_all(sides, again, warm_row.shape, turn, real))
    context.put(row, tally.values, tally.notes())
    if warm_row is not None:
        context.put(warm_row, warm_tally.values, warm_tally.notes())


def run(context: Context, rows: Sequence[Row]) -> None:
    """Those of ROWS that are wanted. The peer as installed is stopped when its rows are done."""
    texts = texts_of(context.model or SMOLLM2)
    by_key = {row.key: row for row in rows}
    if "w32-int8" in by_key and not set(cpu_features()) >= INT8_FEATURES:
        print(f"w32-int8 is left out: this processor lacks {' or '.join(sorted(INT8_FEATURES))}", flush=True)
        rows = [row for row in rows if row.key != "w32-int8"]
    with_installed = [r for r in rows if context.peer and r.key in WITH_INSTALLED]
    others = [r for r in rows if r not in with_installed and r.key != "prefix-warm"]
    if "prefix-warm" in by_key and "prefix" not in by_key:
        others.append(next(r for r in ROWS if r.key == "prefix"))
    for batch, installed in ((with_installed, True), (others, False)):
        if not batch:
            continue
        try:
            with sides_up(context, installed, any(r.key == "w32-int8" for r in batch)) as sides:
                warm(sides, texts)
                for row in batch:
                    warm_row = by_key.get("prefix-warm") if row.key == "prefix" else None
                    try:
                        measure(context, row, sides_of(row, sides), texts, warm_row)
                    except (NotSane, TimeoutError, OSError) as e:
                        context.fail(row, str(e) or type(e).__name__)
        except ServerFailed as e:
            for row in batch:
                context.fail(row, str(e))
