"""The command line of the table: which rows, how often, where results go."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from dpi_engine.config.errors import ConfigError
from dpi_engine.tokenizer.errors import TokenizerError
from suite import front, generator, groups, limits, llama, rank, served, step
from suite.context import Context, Row
from suite.machine import describe, has_bf16, slug
from suite.results import Results, ResultsError
from suite.servers import stop_children
from suite.table import goals_text
from suite.texts import TextError

RESULTS = Path(__file__).resolve().parents[1] / "results"


class Job(NamedTuple):
    """Rows that are measured together. `start_s`: seconds of starting what it needs, alone and with the peer."""

    name: str
    rows: Sequence[Row]
    run: Callable[[Context, Sequence[Row]], None]
    start_s: tuple[float, float]
    needs_peer: bool = False
    on_request: bool = False
    """Only where --only names it."""


JOBS: tuple[Job, ...] = (
    Job("generator", generator.ROWS, generator.run, (1, 1)),
    Job("served", served.ROWS, served.run, (10, 400)),
    Job("llama", llama.ROWS, llama.run, (10, 10), needs_peer=True),
    Job("limits", limits.ROWS, limits.run, (500, 500), needs_peer=True, on_request=True),
    Job("groups", groups.ROWS, groups.run, (20, 200)),
    Job("front-end", front.ROWS, front.run, (10, 60)),
    Job("step", step.ROWS, step.run, (5, 5)),
    Job("rank", rank.ROWS, rank.run, (5, 5)),
)


def seconds_of(job: Job, rows: Sequence[Row], peer: bool, rounds: int) -> float:
    """About how long these rows of a job take."""
    if not rows:
        return 0.0
    total = job.start_s[peer]
    for row in rows:
        sides = 1 if not peer else 3 if row.key in served.WITH_INSTALLED else 2
        total += row.seconds * rounds * sides
    return total


def wanted(job: Job, only: Sequence[str], peer: bool) -> list[Row]:
    """Rows of `job` that are asked for; all that can be measured without `only`."""
    if job.needs_peer and not peer:
        return []
    return [r for r in job.rows if (not only and not job.on_request) or r.key in only or job.name in only]


def show(peer: bool, rounds: int) -> None:
    """All rows with their goals and times."""
    for job in JOBS:
        rows = wanted(job, (job.name,), peer)
        if rows:
            when = ", only on request" if job.on_request else ""
            print(f"{job.name}: about {seconds_of(job, rows, peer, rounds) / 60:.1f} minutes{when}")
        for row in rows:
            goals = "; ".join(f"{g.measure.label} {t}" for g in row.goals if (t := g.text(has_bf16())))
            print(f"  {row.key:<14} {row.title}" + (f"   [{goals}]" if goals else ""))


class Terminated(SystemExit):
    """SIGTERM came. Servers are stopped on its way up, as at any other error."""


def _terminate(signum: int, frame: FrameType | None) -> None:
    signal.signal(signum, signal.SIG_IGN)  # a second one would leave a server that is being stopped
    raise Terminated(128 + signum)


def main(argv: Sequence[str] | None = None) -> int:
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return _measured(argv)
    except Terminated as e:
        stop_children()  # one that was being started is nobody's yet
        print("bench: ended by SIGTERM; its servers are stopped", file=sys.stderr)
        return int(str(e.code))


def _measured(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="store_true", help="compare with vLLM (benchmarks/peer/setup.sh)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each row (5)")
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="rows or jobs by name (all)")
    parser.add_argument("--resume", action="store_true", help="leave out rows that the results file has")
    parser.add_argument("--results", type=Path, help="file to keep results in (benchmarks/results, by machine)")
    parser.add_argument("--no-results", action="store_true", help="only print")
    parser.add_argument("--model", default="", help="in place of SmolLM2, for a quick try; kept only in --results")
    parser.add_argument("--list", action="store_true", help="show rows, goals and times, measure nothing")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if args.list:
        show(args.peer, args.rounds)
        return 0
    known = {job.name for job in JOBS} | {row.key for job in JOBS for row in job.rows}
    unknown = [name for name in args.only if name not in known]
    if unknown:
        parser.error(f"--only: no row or job {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    machine = describe()
    kind = "versus-peer" if args.peer else "ours"
    path = args.results or (None if args.model else RESULTS / f"{kind}-{slug(machine)}.json")
    try:
        results = Results(None if args.no_results else path, machine)
    except ResultsError as e:
        print(f"bench: {e}", file=sys.stderr)
        return 2
    context = Context(args.rounds, args.peer, has_bf16(), results, args.model)
    print(f"{machine['processor']}, {' '.join(machine['features'])}, {machine['memory_gib']} GiB, {machine['commit']}")
    plan = [(job, wanted(job, args.only, args.peer)) for job in JOBS]
    if args.resume:
        plan = [(job, [r for r in rows if r.key not in results.rows]) for job, rows in plan]
    expected = sum(seconds_of(job, rows, args.peer, args.rounds) for job, rows in plan)
    print(
        f"{sum(len(rows) for _, rows in plan)} rows of {args.rounds} rounds, about {expected / 60:.0f} minutes",
        flush=True,
    )
    began = time.monotonic()
    for job, rows in plan:
        try:
            if rows:
                job.run(context, rows)
        except (ConfigError, TokenizerError, TextError) as e:  # the model cannot be read
            for row in rows:
                context.fail(row, str(e))
    measured = {row.key: results.rows[row.key] for _, rows in plan for row in rows if row.key in results.rows}
    print(goals_text(measured))
    print(f"\n{(time.monotonic() - began) / 60:.1f} minutes" + (f"; kept in {path}" if results.path else ""))
    for failure in context.failures:
        print(f"NOT measured: {failure.splitlines()[0]}", file=sys.stderr)
    return 1 if context.failures else 0
