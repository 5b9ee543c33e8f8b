"""What the operator hears from a head, over real connections: long answers, endless ones, none."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from dpi_operator.api.types import Runtime
from dpi_operator.observe import heads
from dpi_operator.plan.facts import HeadReport
from small_server import http_server

RANKS = 1024


def ask(pages: dict[str, str], runtime: Runtime) -> HeadReport:
    async def run() -> HeadReport:
        async with http_server(pages.get) as port, aiohttp.ClientSession() as session:
            return await heads.ask_head(session, runtime, "uid", "127.0.0.1", [port], 5.0)

    return asyncio.run(run())


def test_a_long_metrics_page_is_read_to_its_end() -> None:
    """The queues may come after hundreds of kilobytes of other metrics."""
    others = "".join(f'vllm:other{{engine="0",le="{i}"}} {i}\n' for i in range(20_000))
    queues = "".join(f'vllm:num_requests_waiting{{engine="{r}",model_name="m"}} {r}.0\n' for r in range(2))
    report = ask({"/health": "", "/metrics": others + queues}, Runtime.VLLM)
    assert report.healthy and not report.error
    assert [(r.rank, r.waiting) for r in report.ranks] == [(0, 0), (1, 1)]


def test_a_table_of_many_ranks_is_read_to_its_end() -> None:
    ranks = [{"rank": r, "state": "READY", "fields": {"tp": 1, "note": "x" * 200}} for r in range(RANKS)]
    report = ask({"/ranks": json.dumps({"ready": {"ok": True}, "ranks": ranks})}, Runtime.DPI)
    assert report.healthy and [r.rank for r in report.ranks] == list(range(RANKS))


@pytest.mark.parametrize("runtime", list(Runtime))
def test_an_answer_without_end_is_given_up_by_name(runtime: Runtime) -> None:
    endless = " " * (heads.MAX_BODY + 1)
    report = ask({"/ranks": endless, "/health": endless, "/metrics": endless}, runtime)
    assert not report.healthy and not report.ranks
    assert "the answer is longer than 8 MiB" in report.error


def test_nobody_there_is_a_report_too() -> None:
    async def run() -> HeadReport:
        async with http_server({}.get) as port:
            pass
        async with aiohttp.ClientSession() as session:
            return await heads.ask_head(session, Runtime.DPI, "uid", "127.0.0.1", [port], 5.0)

    report = asyncio.run(run())
    assert not report.healthy and report.error.startswith("does not answer: ")
