"""One round of one shape on one server: rates, latencies, processor time, and whether the answers make sense."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import uvloop

from dpi_engine.tools.load import summary
from suite.client import completion_body, run_round
from suite.figures import Measure
from suite.machine import Others, until_quiet
from suite.servers import Server

OUTPUT_RATE = Measure("output_tok_s", "out tok/s", "tok/s", higher=True)
TTFT = Measure("ttft_p50_ms", "TTFT median", "ms", digits=0)
FIRST = Measure("first_answer_ms", "first answer", "ms", digits=0)
ITL = Measure("itl_p50_ms", "ITL median", "ms")
TPOT = Measure("tpot_mean_ms", "TPOT mean", "ms")
CPU = Measure("cpu_s_per_1000", "CPU s per 1,000 tok", "s", digits=2)
GENERATOR = Measure("generator_cpu_s_per_1000", "of the generator", "s", digits=3)
SERVED = (OUTPUT_RATE, TTFT, FIRST, ITL, TPOT, CPU, GENERATOR)

AGREE_CHARACTERS = 16
"""Greedy answers of two engines in bfloat16 part sooner or later; so much of the beginnings is compared."""

DULL_CHARACTERS = 6
"""An answer with fewer different characters says nothing."""


class NotSane(RuntimeError):
    """A server answered, but not as it should: too few tokens, no text, or text that cannot be real."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is asked for. `requests`: as many as streams where 0."""

    streams: int
    input_tokens: int
    output_tokens: int
    requests: int = 0

    @property
    def count(self) -> int:
        return self.requests or self.streams


@dataclass(slots=True)
class Outcome:
    """Values by measure, and the texts in the order of the prompts."""

    values: dict[str, float]
    texts: list[str] = field(default_factory=list)


def check_texts(name: str, texts: Sequence[str], real_model: bool) -> None:
    """Raises NotSane for an answer of a real model that is empty or not text, or when most say nothing.

    A small model may well repeat a line for ever; that most answers do is the server's fault. One with random weights
    may give special tokens only, which have no text.
    """
    if not real_model:
        return
    for i, text in enumerate(texts):
        if not text:
            raise NotSane(f"{name}: answer {i} of {len(texts)} has no text")
        if text.count("�") > len(text) / 10:
            raise NotSane(f"{name}: answer {i} is not text: {text[:80]!r}")
    dull = [text for text in texts if len(set(text)) < DULL_CHARACTERS]
    if len(dull) > max(1, len(texts) / 2):
        raise NotSane(f"{name}: {len(dull)} of {len(texts)} answers say nothing, one is {dull[0][:80]!r}")


def agreement(mine: Sequence[str], theirs: Sequence[str], characters: int = AGREE_CHARACTERS) -> float:
    """Share of the answers, 0 to 1, whose first characters are the same on both sides."""
    if len(mine) != len(theirs) or not mine:
        raise NotSane(f"{len(mine)} answers of one side, {len(theirs)} of the other")
    return sum(a[:characters] == b[:characters] for a, b in zip(mine, theirs, strict=True)) / len(mine)


def play(server: Server, model: str, prompts: Sequence[Any], shape: Shape, real_model: bool = True) -> Outcome:
    """Send the prompts, `shape.streams` at a time. Raises NotSane for any failed or senseless answer."""
    bodies = [completion_body(model, prompt, shape.output_tokens) for prompt in prompts]
    until_quiet()
    before = server.cpu_seconds()

    def mine() -> float:
        return server.cpu_seconds() + time.process_time()

    with Others(mine) as others:
        done = uvloop.run(run_round("127.0.0.1", server.port, bodies, shape.output_tokens, shape.streams))
        spent = server.cpu_seconds() - before
    errors = [r.sample.error for r in done.replies if r.sample.error]
    if errors:
        raise NotSane(f"{server.name}: {len(errors)} of {len(prompts)} requests failed, one with: {errors[0]}")
    for reply, prompt in zip(done.replies, prompts, strict=True):
        if not isinstance(prompt, str) and reply.sample.prompt_tokens != len(prompt):
            raise NotSane(f"{server.name}: counted {reply.sample.prompt_tokens} prompt tokens, sent {len(prompt)}")
    texts = [r.text for r in done.replies]
    check_texts(server.name, texts, real_model)
    samples = [r.sample for r in done.replies]
    found = summary(samples, done.seconds)
    thousands = found["output_tokens"] / 1000
    values = {
        OUTPUT_RATE.key: found["output_tok_s"],
        TTFT.key: found["ttft_ms"]["p50"],
        FIRST.key: 1e3 * min(s.times[0] - s.start for s in samples),
        ITL.key: found["itl_ms"]["p50"] or 0.0,
        TPOT.key: found["tpot_ms"]["mean"] or 0.0,
        CPU.key: spent / thousands,
        GENERATOR.key: done.generator_cpu_s / thousands,
        "events": float(sum(len(s.times) for s in samples)),
        "seconds": done.seconds,
        "others_share": others.share,
    }
    return Outcome({k: round(v, 4) for k, v in values.items()}, texts)


def first_model(server: Server) -> str:
    """Name under which the server knows its model."""
    from dpi_engine.tools.endpoint import Endpoint

    async def ask() -> str:
        async with Endpoint(f"http://127.0.0.1:{server.port}") as endpoint:
            return await endpoint.first_model()

    return asyncio.run(ask())
