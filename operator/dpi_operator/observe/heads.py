"""What a group's head says of its ranks: `/ranks` of our engine, `/health` and `/metrics` of the other runtime."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import aiohttp

from dpi_operator.api.types import Runtime
from dpi_operator.plan.facts import HeadReport, RankReport

TIMEOUT_S = 5.0
MAX_BODY = 8 << 20
SAMPLE = re.compile(r"^(vllm:[a-z_]+)\{([^}]*)\}\s+(\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def ranks_from_document(document: Any) -> tuple[RankReport, ...]:
    """Ranks in an answer of `/ranks`; entries that make no sense are left out. Raises ValueError for no object."""
    if not isinstance(document, dict) or not isinstance(document.get("ranks"), list):
        raise ValueError("its /ranks is not an object with a list of ranks")
    found = []
    for entry in document["ranks"]:
        if not isinstance(entry, dict) or not isinstance(entry.get("rank"), int):
            continue
        fields = entry.get("fields")
        found.append(
            RankReport(
                rank=entry["rank"],
                state=str(entry.get("state", "Unknown")),
                stage=str(entry.get("stage") or ""),
                fingerprint=str(entry.get("fingerprint") or ""),
                fields=fields if isinstance(fields, dict) else {},
                waiting=_count(entry.get("waiting")),
                running=_count(entry.get("running")),
                kv_usage=_share(entry.get("kv_usage")),
                error=str(entry.get("error") or ""),
            )
        )
    return tuple(found)


def _count(value: Any) -> int | None:
    """Negative and missing numbers are unknown, never idle."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return int(value)


def _share(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return float(value)


def ranks_from_metrics(text: str) -> tuple[RankReport, ...]:
    """Queues per engine in a metrics page; every `engine` label is a rank of its own."""
    values: dict[int, dict[str, float]] = {}
    for line in text.splitlines():
        if not (m := SAMPLE.match(line)):
            continue
        labels = dict(LABEL.findall(m[2]))
        try:
            rank, value = int(labels["engine"]), float(m[3])
        except (KeyError, ValueError):
            continue
        values.setdefault(rank, {})[m[1]] = value
    return tuple(
        RankReport(
            rank=rank,
            state="READY",
            waiting=_count(known.get("vllm:num_requests_waiting")),
            running=_count(known.get("vllm:num_requests_running")),
            kv_usage=_share(known.get("vllm:kv_cache_usage_perc")),
        )
        for rank, known in sorted(values.items())
    )


async def _get(session: aiohttp.ClientSession, url: str) -> tuple[int, bytes]:
    async with session.get(url, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), allow_redirects=False) as response:
        parts, size = [], 0
        async for part in response.content.iter_any():
            size += len(part)
            if size > MAX_BODY:
                raise ValueError(f"{url}: the answer is longer than {MAX_BODY >> 20} MiB")
            parts.append(part)
        return response.status, b"".join(parts)


def _host(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip


async def ask_head(
    session: aiohttp.ClientSession, runtime: Runtime, uid: str, ip: str, ports: Sequence[int], now: float
) -> HeadReport:
    """Ask one pod: ours on its management port, another runtime on each of its HTTP ports.

    Never raises for one that does not answer: the report says why. `now`: epoch seconds.
    """
    bases = [f"http://{_host(ip)}:{port}" for port in ports]
    try:
        if runtime is Runtime.DPI:
            status, body = await _get(session, f"{bases[0]}/ranks")
            if status != 200:
                return HeadReport(uid, now, False, error=f"/ranks answered {status}")
            document = json.loads(body)
            ready = document.get("ready") if isinstance(document, dict) else None
            healthy = bool(ready.get("ok")) if isinstance(ready, dict) else False
            return HeadReport(uid, now, healthy, ranks_from_document(document))
        ranks: dict[int, RankReport] = {}
        for base in bases:
            status, _ = await _get(session, f"{base}/health")
            if status != 200:
                return HeadReport(uid, now, False, error=f"{base}/health answered {status}")
            status, body = await _get(session, f"{base}/metrics")
            found = ranks_from_metrics(body.decode(errors="replace")) if status == 200 else ()
            ranks.update((rank.rank, rank) for rank in found)
        return HeadReport(uid, now, True, tuple(ranks[r] for r in sorted(ranks)))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as e:
        return HeadReport(uid, now, False, error=f"does not answer: {type(e).__name__}" + (f": {e}" if str(e) else ""))
