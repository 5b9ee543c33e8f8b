"""Whether all pods of a group would run the same configuration: compared before any exists, and as ranks report it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dpi_engine.config.errors import ConfigError
from dpi_engine.config.fingerprint import FieldDiff, declared, diff, digest
from dpi_engine.config.settings import parse_serve
from dpi_operator.api.reasons import Reason
from dpi_operator.api.types import Architecture, DataParallelInference, Runtime
from dpi_operator.api.validate import Finding
from dpi_operator.plan.facts import RankReport
from dpi_operator.plan.pods import PodPlan
from dpi_operator.plan.revisions import revision_hash, rolling_fields

RESOLVED = "wire_version"
"""A field that only ranks report which have read their model."""

SHORT = 12
"""Digits of a fingerprint that people are shown."""

SHOWN = 8
"""Pods of a mismatch that are named one by one."""

PER_POD_FLAGS = frozenset(
    {
        "--host",
        "--port",
        "--headless",
        "--api-server-count",
        "--data-parallel-size-local",
        "--data-parallel-start-rank",
        "--data-parallel-rank",
        "--data-parallel-address",
        "--data-parallel-rpc-port",
        "--data-parallel-supervisor-port",
        "--served-model-name",
        "--shutdown-timeout",
        "--numa-bind",
        "--numa-bind-nodes",
        "--numa-bind-cpus",
        "--download-dir",
        "--uvicorn-log-level",
        "--disable-log-stats",
        "--enable-log-requests",
    }
)
"""Flags of a foreign runtime that may differ from pod to pod."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Pods that would run, or ranks that do run, something else than the group's head."""

    who: str
    diffs: tuple[FieldDiff, ...]

    def __str__(self) -> str:
        listed = "; ".join(f"{d.field}: expected {d.expected!r}, got {d.got!r}" for d in self.diffs)
        return f"{self.who}: {listed}"


def flag_fields(args: Sequence[str]) -> dict[str, Any]:
    """Flags of any engine as name -> value (True without one, a list when given twice), per-pod ones left out."""
    fields: dict[str, Any] = {}
    i = 0
    while i < len(args):
        arg = args[i]
        i += 1
        if not arg.startswith("--"):
            fields.setdefault("model", arg)
            continue
        name, has_value, value = arg.partition("=")
        given: Any = value if has_value else True
        if not has_value and i < len(args) and not args[i].startswith("--"):
            given = args[i]
            i += 1
            while i < len(args) and not args[i].startswith("-"):
                given = f"{given} {args[i]}"
                i += 1
        if name not in PER_POD_FLAGS:
            fields[name] = given
    return fields


@lru_cache(maxsize=512)
def _declared_by(args: tuple[str, ...]) -> Mapping[str, Any] | str:
    """What our engine makes of its flags, or why it refuses them. Kept: an object's flags seldom change."""
    try:
        return declared(parse_serve(args))
    except ConfigError as e:
        return str(e)


PLACE_FLAGS = ("--data-parallel-start-rank", "--data-parallel-rank", "--data-parallel-address")
"""Flags in which pods of one group differ by design."""


def _apart_from_place(args: tuple[str, ...]) -> tuple[str, ...]:
    """Flags without the values that say only where in its group a pod stands."""
    return tuple("" if i and args[i - 1] in PLACE_FLAGS else arg for i, arg in enumerate(args))


def declared_fields(runtime: Runtime, args: tuple[str, ...]) -> Mapping[str, Any] | str:
    """What a pod's flags say of shared steps, or why our engine would refuse them."""
    return _declared_by(args) if runtime is Runtime.DPI else flag_fields(args)


def _foreign_diff(expected: Mapping[str, Any], got: Mapping[str, Any]) -> list[FieldDiff]:
    """As diff, but a flag that only one side has differs too."""
    names = sorted(expected.keys() | got.keys())
    pairs = [(n, expected.get(n, "unset"), got.get(n, "unset")) for n in names]
    return [FieldDiff(n, e, g) for n, e, g in pairs if e != g]


@dataclass(frozen=True, slots=True)
class Declared:
    """Outcome of comparing a group's planned pods. `digest`: the head's, `revision`: a mismatching spec's."""

    digest: str = ""
    refused: tuple[Finding, ...] = ()
    mismatches: tuple[Mismatch, ...] = ()
    revision: str = ""


def compare_declared(dpi: DataParallelInference, plans: Sequence[PodPlan]) -> Declared:
    """Compare all pods of one group with rank 0's."""
    runtime = dpi.spec.engine.runtime
    fields: list[Mapping[str, Any]] = []
    known: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for plan in plans:
        key = _apart_from_place(plan.args)
        if key not in known:
            found = declared_fields(runtime, plan.args)
            if isinstance(found, str):
                where = f"flags of {ranks_of(plan)} (spec.engine.args{', spec.rankOverrides' if plan.own_args else ''})"
                return Declared(refused=(Finding(Reason.INVALID_SPEC, where, found),))
            known[key] = found
        fields.append(known[key])
    head = fields[0]
    compare = diff if runtime is Runtime.DPI else _foreign_diff
    by_diff: dict[tuple[tuple[str, str, str], ...], list[PodPlan]] = {}
    kept: dict[tuple[tuple[str, str, str], ...], tuple[FieldDiff, ...]] = {}
    for plan, got in zip(plans[1:], fields[1:], strict=True):
        if got is not head and (diffs := tuple(compare(head, got))):
            what = tuple((d.field, repr(d.expected), repr(d.got)) for d in diffs)
            by_diff.setdefault(what, []).append(plan)
            kept[what] = diffs
    mismatches = []
    for what, pods in by_diff.items():  # no pod of these exists yet: ranks are what can be named
        more = f" and {len(pods) - SHOWN} pods more" if len(pods) > SHOWN else ""
        mismatches.append(Mismatch(", ".join(ranks_of(p) for p in pods[:SHOWN]) + more, kept[what]))
    revision = revision_hash(rolling_fields(dpi.spec)) if mismatches else ""
    return Declared(digest(head)[:SHORT], (), tuple(mismatches), revision)


def ranks_of(plan: PodPlan) -> str:
    last = plan.rank_start + plan.rank_count - 1
    return f"rank {last}" if plan.rank_count == 1 else f"ranks {plan.rank_start}-{last}"


def reported_architecture(fields: Mapping[str, Any]) -> Architecture | None:
    """What a rank found in its model: experts or none; None for a rank that does not say."""
    if any(name.startswith("spec.moe.") for name in fields) or fields.get("spec.moe") is not None:
        return Architecture.MOE
    return Architecture.DENSE if "spec.moe" in fields else None


def compare_reported(ranks: Sequence[RankReport]) -> list[Mismatch]:
    """Compare what ranks of one group found after reading the model, over fields that both know.

    A rank that still loads has only declared its flags: nothing is settled there yet.
    """
    known = [r for r in ranks if RESOLVED in r.fields]
    if len(known) < 2:
        return []
    found = []
    for rank in known[1:]:
        if diffs := diff(known[0].fields, rank.fields):
            found.append(Mismatch(f"rank {rank.rank}", tuple(diffs)))
    return found
