"""`dpi status NAME`: an object of the cluster as a tree: groups, ranks, queues, the last fault and what comes next."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dpi_operator.local.names import object_name

MARKS = {"Ready": "✓", "Failed": "✗", "Draining": "−"}


def tree_lines(document: Mapping[str, Any], now: float, revisions: Iterable[Mapping[str, Any]] = ()) -> Iterator[str]:
    """The tree, a line at a time. `now`: epoch seconds, for ages. `revisions`: its ControllerRevisions."""
    from dpi_operator.api.status import condition, read_status
    from dpi_operator.plan.history import past_revisions
    from dpi_operator.plan.times import in_words, to_seconds

    metadata, status = document["metadata"], read_status(document.get("status"))
    ready = condition(status, "Ready")
    verdict = "not seen by an operator yet" if ready is None else ("Ready" if ready.status == "True" else ready.reason)
    yield f"{metadata['namespace']}/{metadata['name']}  {verdict}  ranks {status.rank_summary or '?'}"
    if status.endpoint:
        yield f"  endpoint  {status.endpoint}"
    if status.update_revision:
        rolling = "" if status.current_revision == status.update_revision else f", serving {status.current_revision}"
        yield f"  revision  {status.update_revision}{rolling}"
    if past := past_revisions(revisions):
        yield f"  history   {', '.join(map(str, past))}"
    if (metadata.get("generation") or 0) > status.observed_generation:
        yield "  the spec was changed since; this is the state before"
    for c in status.conditions:
        wrong = c.status == ("True" if c.type == "Degraded" else "False")
        if wrong and c.type != "Ready":
            since = to_seconds(c.last_transition_time)
            age = f" for {in_words(now - since)}" if since is not None else ""
            yield f"  ! {c.type}={c.status} {c.reason}{age}: {c.message}"
    for i, group in enumerate(status.groups):
        last_group = i == len(status.groups) - 1
        branch, mark = "└─" if last_group else "├─", MARKS.get(group.phase, "…")
        yield f"  {branch} {mark} group {group.index} {_group_note(group, now)}"
        stem = "     " if last_group else "  │  "
        for j, rank in enumerate(group.ranks):
            yield f"{stem}{'└─' if j == len(group.ranks) - 1 else '├─'} {_rank_note(rank)}"
    if status.truncated:
        yield "  (more than the status lists; metrics carry all)"


def _group_note(group: Any, now: float) -> str:
    from dpi_operator.plan.times import in_words, to_seconds

    note = f"{group.phase}  revision {group.revision}"
    if group.reason and group.phase != "Ready":
        note += f"  {group.reason}"
    if group.message:
        note += f": {group.message}"
    if group.restarts:
        note += f"  restarts {group.restarts}"
    due = to_seconds(group.next_restart_time)
    return note + (f"  next in {in_words(due - now)}" if due is not None and due > now else "")


def _rank_note(rank: Any) -> str:
    note = f"rank {rank.rank}  {rank.state}  {rank.pod}" + (f" on {rank.node}" if rank.node else "")
    if rank.waiting is not None:
        note += f"  waiting {rank.waiting}  running {rank.running}  kv {float(rank.kv_cache_usage or 0):.0%}"
    if rank.stage:
        note += f"  {rank.stage}"
    if (end := rank.last_termination) is not None:
        code = f" {end.exit_code}" if end.exit_code is not None else ""
        note += f"  last ended: {end.reason}{code} at {end.finished_at}"
        if end.message:
            note += f": {end.message.splitlines()[-1][:120]}"
    return note


class StatusCommand:
    name = "status"
    help = "show a DataParallelInference of the cluster as a tree of groups and ranks"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("object", metavar="NAME", type=object_name, help="name of the object")
        parser.add_argument("-n", "--namespace", default="", metavar="NS", help="its namespace (the context's)")

    def run(self, args: argparse.Namespace) -> int:
        import asyncio

        return asyncio.run(_show(args.namespace, args.object))


async def _show(namespace: str, name: str) -> int:
    from dpi_operator.api.types import KIND
    from dpi_operator.apply.client import Api, ApiError

    try:
        api = await Api.connect()
        namespace = namespace or api.namespace
        try:
            document = await api.get(KIND, namespace, name)
            revisions = await _revisions(api, namespace, name)
        finally:
            await api.close()
    except ApiError as e:
        print(f"dpi status: {e}", file=sys.stderr)
        return 1
    if document is None:
        print(f"dpi status: there is no {KIND} {namespace}/{name}", file=sys.stderr)
        return 1
    for line in tree_lines(document, time.time(), revisions):
        print(line)
    return 0


async def _revisions(api: Any, namespace: str, name: str) -> list[dict[str, Any]]:
    """None of them where the user may not list them: the tree says enough without."""
    from dpi_operator.apply.client import ApiError
    from dpi_operator.plan.names import child_selector

    try:
        found: list[dict[str, Any]] = await api.list_all("ControllerRevision", namespace, child_selector(name))
    except ApiError as e:
        if e.status != 403:
            raise
        print("dpi status: no right to list ControllerRevisions, so no history", file=sys.stderr)
        return []
    return found


COMMAND = StatusCommand()
