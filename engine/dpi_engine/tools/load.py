"""The load that `dpi bench` makes and what it measures."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dpi_engine.launch.exit_codes import EXIT_CRASHED, EXIT_OK
from dpi_engine.tools.endpoint import Endpoint, EndpointError
from dpi_engine.tools.prompts import text

PROGRESS_EVERY_S = 5.0


class BenchError(RuntimeError):
    """The endpoint answered, but not with what was asked for."""


@dataclass(slots=True)
class Sample:
    """One request: seconds since the round's start."""

    start: float
    times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


def percentile(values: Sequence[float], p: float) -> float:
    """Nearest-rank percentile of at least one value."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(p / 100 * len(ordered) + 0.5) - 1))]


def summary(samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    """Rates in tokens per second, times in milliseconds. ITL is the gap between chunks of one request."""
    good = [s for s in samples if not s.error]
    ttft = [1e3 * (s.times[0] - s.start) for s in good if s.times]
    itl = [1e3 * (b - a) for s in good for a, b in zip(s.times, s.times[1:], strict=False)]
    tpot = [1e3 * (s.times[-1] - s.times[0]) / (s.output_tokens - 1) for s in good if s.output_tokens > 1]
    e2e = [1e3 * (s.times[-1] - s.start) for s in good if s.times]

    def stats(values: list[float]) -> dict[str, float | None]:
        """None where no request gave a value."""
        if not values:
            return dict.fromkeys(("mean", "p50", "p90", "p99"))
        return {
            "mean": round(statistics.fmean(values), 2),
            **{f"p{p}": round(percentile(values, p), 2) for p in (50, 90, 99)},
        }

    out = sum(s.output_tokens for s in good)
    return {
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "seconds": round(seconds, 3),
        "output_tok_s": round(out / seconds, 1),
        "total_tok_s": round((out + sum(s.prompt_tokens for s in good)) / seconds, 1),
        "output_tokens": out,
        "prompt_tokens": sum(s.prompt_tokens for s in good),
        "ttft_ms": stats(ttft),
        "itl_ms": stats(itl),
        "tpot_ms": stats(tpot),
        "e2e_ms": stats(e2e),
    }


class Progress:
    """A line on standard error every few seconds, of work that takes so long; shorter work says nothing."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._next = time.monotonic() + PROGRESS_EVERY_S

    def step(self) -> None:
        """One more is done."""
        self._done += 1
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_EVERY_S
            print(f"dpi bench: {self._what}: {self._done:,} of {self._total:,}", file=sys.stderr, flush=True)


async def make_prompts(
    endpoint: Endpoint, model: str, rng: random.Random, count: int, tokens: int, progress: Progress
) -> list[Any]:
    """`count` prompts of exactly `tokens` tokens of real text, by the endpoint's own tokenizer."""
    prompts: list[Any] = []
    for _ in range(count):
        words = text(rng, tokens)
        try:
            answer = await endpoint.post("/tokenize", {"model": model, "prompt": words, "add_special_tokens": False})
            ids = list(answer["tokens"])
        except (KeyError, TypeError) as e:
            raise BenchError(f"{endpoint.base}/tokenize: unexpected answer: {e!r}") from e
        if len(ids) < tokens:
            raise BenchError(f"{tokens} words gave only {len(ids)} tokens")
        prompts.append(ids[:tokens])
        progress.step()
    return prompts


async def one_request(endpoint: Endpoint, model: str, prompt: Any, output_tokens: int, clock_zero: float) -> Sample:
    """Greedy, exactly `output_tokens` tokens, streamed. Errors are kept in the sample."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    sample = Sample(time.perf_counter() - clock_zero)
    try:
        async for event in endpoint.stream("/v1/completions", body):
            if event.get("choices"):
                sample.times.append(time.perf_counter() - clock_zero)
            if usage := event.get("usage"):
                sample.prompt_tokens, sample.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        if sample.output_tokens != output_tokens:
            sample.error = f"asked for {output_tokens} tokens, got {sample.output_tokens}"
    except EndpointError as e:
        sample.error = str(e)
    except (KeyError, TypeError) as e:
        sample.error = f"unexpected 'usage': {e!r}"
    return sample


async def run_round(
    endpoint: Endpoint, model: str, prompts: list[Any], streams: int, output_tokens: int, progress: Progress
) -> tuple[list[Sample], float]:
    """All prompts with `streams` in flight; samples and the seconds it took."""
    gate = asyncio.Semaphore(streams)
    zero = time.perf_counter()

    async def job(prompt: Any) -> Sample:
        async with gate:
            sample = await one_request(endpoint, model, prompt, output_tokens, zero)
        progress.step()
        return sample

    samples = await asyncio.gather(*(job(p) for p in prompts))
    return list(samples), time.perf_counter() - zero


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _print_table(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    from rich.table import Table

    from dpi_engine.tools.console import make_console

    title = f"{args.streams} streams, {args.input_tokens} tokens in, {args.output_tokens} out, milliseconds"
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", title=title, title_justify="left")
    for name in (
        "round",
        "out tok/s",
        "TTFT p50",
        "p99",
        "ITL p50",
        "p99",
        "TPOT",
        "e2e p50",
        "s",
        "failed",
    ):
        table.add_column(name, justify="right")
    for i, r in enumerate(results):
        table.add_row(
            str(i + 1),
            f"{r['output_tok_s']:.1f}",
            _cell(r["ttft_ms"]["p50"], 0),
            _cell(r["ttft_ms"]["p99"], 0),
            _cell(r["itl_ms"]["p50"], 1),
            _cell(r["itl_ms"]["p99"], 1),
            _cell(r["tpot_ms"]["mean"], 1),
            _cell(r["e2e_ms"]["p50"], 0),
            f"{r['seconds']:.2f}",
            str(r["failed"]),
        )
    if len(results) > 1:
        rates = sorted(r["output_tok_s"] for r in results)
        table.caption = f"out tok/s: min {rates[0]:.1f}, median {statistics.median(rates):.1f}, max {rates[-1]:.1f}"
    make_console().print(table)


async def _run_rounds(args: argparse.Namespace, results: list[dict[str, Any]], errors: list[str]) -> None:
    """Adds to `results` and `errors` after each round."""
    count = args.requests or args.streams
    async with Endpoint(args.url, args.api_key, timeout_s=args.timeout) as endpoint:
        model = args.model or await endpoint.first_model()
        for r in range(args.rounds):
            rng = random.Random(f"{args.seed}/{r}")
            of_round = f"round {r + 1} of {args.rounds}"
            making = Progress(f"{of_round}, prompts made", count)
            prompts = await make_prompts(endpoint, model, rng, count, args.input_tokens, making)
            if r == 0:
                for prompt in prompts[: args.warmup]:
                    warm = await one_request(endpoint, model, prompt[:8], 4, time.perf_counter())
                    if warm.error:
                        raise BenchError(f"the first request failed: {warm.error}")
            answering = Progress(f"{of_round}, requests done", count)
            samples, seconds = await run_round(endpoint, model, prompts, args.streams, args.output_tokens, answering)
            results.append(summary(samples, seconds))
            errors += [s.error for s in samples if s.error]
            if args.json:
                print(json.dumps(results[-1]), flush=True)


async def bench(args: argparse.Namespace) -> int:
    """Run the rounds and print them, those that are complete when it ends early. 0 when no request failed, else 1."""
    results: list[dict[str, Any]] = []
    errors: list[str] = []
    try:
        await _run_rounds(args, results, errors)
    finally:  # a Ctrl-C, or an endpoint that has gone, leaves what is known
        if results and not args.json:
            _print_table(results, args)
        for error in sorted(set(errors))[:5]:
            print(f"dpi bench: failed: {error}", file=sys.stderr)
    return EXIT_CRASHED if errors else EXIT_OK
