"""Asks every pod's management API for its ranks and merges the answers into one view of the group."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from dpi_operator.plan.pods import PodPlan, Role

if TYPE_CHECKING:  # its import takes a quarter of a second, in which the pods can start
    import aiohttp


@dataclass(frozen=True, slots=True)
class PodAnswer:
    """`/ranks` and `/readyz` of one pod, or why there was none."""

    plan: PodPlan
    document: dict[str, Any] = field(default_factory=dict)
    ready: bool = False
    error: str = ""
    silent: bool = False  # something listens there, and does not answer


async def ask_pod(session: aiohttp.ClientSession, plan: PodPlan, timeout_s: float = 2.0) -> PodAnswer:
    """Never raises for a pod that does not answer."""
    import aiohttp

    base = f"http://127.0.0.1:{plan.ports.management}"
    limit = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.get(f"{base}/ranks", timeout=limit) as response:
            document = await response.json()
        async with session.get(f"{base}/readyz", timeout=limit) as response:
            ready = response.status == 200
    except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError, OSError) as e:
        silent = isinstance(e, TimeoutError)
        return PodAnswer(plan, error=f"{type(e).__name__}: {e}" if str(e) else type(e).__name__, silent=silent)
    if not isinstance(document, dict):
        return PodAnswer(plan, error="its /ranks is not an object")
    return PodAnswer(plan, document, ready)


async def ask_pods(session: aiohttp.ClientSession, plans: Sequence[PodPlan]) -> list[PodAnswer]:
    return list(await asyncio.gather(*(ask_pod(session, plan) for plan in plans)))


def rank_rows(answers: Sequence[PodAnswer]) -> list[dict[str, Any]]:
    """One row per rank of every group, as the pod says that routes to it: its own where that has an endpoint."""
    rows = []
    by_name = {answer.plan.name: answer for answer in answers}
    for answer in answers:
        if answer.plan.role is not Role.RANK0:
            continue
        owners = {
            rank: other.plan
            for other in answers
            if other.plan.place.group == answer.plan.place.group
            for rank in range(other.plan.rank_start, other.plan.rank_start + other.plan.rank_count)
        }
        for rank, owner in sorted(owners.items()):
            asked = by_name[owner.name] if owner.http_ports else answer
            known = {r.get("rank"): r for r in asked.document.get("ranks", ())}
            away = f"{'pod' if owner.http_ports else 'head'} not up"
            unknown = {"rank": rank, "state": "NEW", "stage": asked.error and away}
            if asked.silent:
                unknown = {"rank": rank, "state": "?", "stage": f"management port of {asked.plan.name} does not answer"}
            row = dict(known.get(rank, unknown))
            row["group"], row["pod"] = owner.place.group, owner.name
            rows.append(row)
    return rows


def rank_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows as a table for a person."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    groups = len({r["group"] for r in rows}) > 1
    for name in (["group"] if groups else []) + ["rank", "pod", "state", "epoch", "waiting", "running", "kv", "steps"]:
        table.add_column(name, justify="left" if name in ("pod", "state") else "right")
    table.add_column("note", overflow="fold")
    colours = {"READY": "green", "SUSPECT": "yellow", "LOST": "red"}
    for r in rows:
        state = str(r.get("state", "?"))
        cells = [str(r["group"])] if groups else []
        cells += [
            str(r.get("rank")),
            escape(str(r.get("pod", ""))),
            f"[{colours.get(state, 'cyan')}]{escape(state)}[/]",
        ]
        cells += [str(r.get("epoch", 0)), str(r.get("waiting", 0)), str(r.get("running", 0))]
        cells += [f"{100 * float(r.get('kv_usage', 0.0)):.0f}%", str(r.get("steps", 0))]
        note = r.get("error") or ("" if state == "READY" else r.get("stage", ""))
        table.add_row(*cells, escape(str(note or "")))  # errors have brackets of their own
    return table
