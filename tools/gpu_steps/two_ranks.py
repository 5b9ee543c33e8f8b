"""Two dense ranks on one device behind one endpoint: what is pinned to either gives the same greedy tokens."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpi_engine.server.context import RANK_HEADER
from dpi_engine.tools.endpoint import Endpoint, EndpointError
from dpi_engine.tools.prompts import text
from gpu_steps.server import ServerFailed, serving
from gpu_steps.shapes import make_model

STREAMS = 64
OUTPUT_TOKENS = 32
TIE = 1e-3
"""Log probabilities as near as this may swap places when a batch is cut otherwise; float32 is far finer."""


@dataclass(slots=True)
class Answer:
    """Tokens of one stream and the two best log probabilities at each."""

    tokens: list[str] = field(default_factory=list)
    best: list[list[float]] = field(default_factory=list)
    error: str = ""


@dataclass(slots=True)
class Comparison:
    """How many streams agree to the end, part at a tie, or differ; `first` describes one that differs."""

    same: int = 0
    ties: int = 0
    different: int = 0
    first: str = ""


def compare(one: list[Answer], other: list[Answer]) -> Comparison:
    """Stream by stream. After a tie the rest of two streams says nothing."""
    found = Comparison()
    for i, (a, b) in enumerate(zip(one, other, strict=True)):
        at = next((k for k, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y), None)
        if a.error or b.error or len(a.tokens) != len(b.tokens):
            at = min(len(a.tokens), len(b.tokens))
        elif at is None:
            found.same += 1
            continue
        elif all(values[0] - values[1] < TIE for values in (a.best[at], b.best[at])):
            found.ties += 1
            continue
        found.different += 1
        found.first = found.first or (
            f"stream {i} at token {at}: {a.tokens[at : at + 3]} {a.error} against {b.tokens[at : at + 3]} {b.error}"
        )
    return found


async def ask(endpoint: Endpoint, model: str, prompt: str) -> Answer:
    """One greedy stream of OUTPUT_TOKENS tokens."""
    answer = Answer()
    body: dict[str, Any] = {
        "model": model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True,
        "logprobs": 2, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    try:
        async for event in endpoint.stream("/v1/completions", body):
            for choice in event.get("choices", ()):
                shown = choice.get("logprobs")
                if shown:
                    answer.tokens += shown["tokens"]
                    answer.best += [sorted(top.values(), reverse=True) for top in shown["top_logprobs"]]
    except EndpointError as error:
        answer.error = str(error)
    if not answer.error and len(answer.tokens) != OUTPUT_TOKENS:
        answer.error = f"{len(answer.tokens)} tokens in place of {OUTPUT_TOKENS}"
    return answer


async def check(url: str, management: str, streams: int) -> bool:
    """All prompts to both ranks at once, `streams` to each; prints what came of it. True when all is well."""
    rng = random.Random(1)
    prompts = [text(rng, rng.randrange(5, 120)) for _ in range(streams)]
    began = time.perf_counter()
    async with (
        Endpoint(url, timeout_s=60, headers={RANK_HEADER: "0"}) as zero,
        Endpoint(url, timeout_s=60, headers={RANK_HEADER: "1"}) as one,
        Endpoint(management, timeout_s=10) as manager,
    ):
        model = await zero.first_model()
        answers = await asyncio.gather(*(ask(rank, model, prompt) for rank in (zero, one) for prompt in prompts))
        seconds = time.perf_counter() - began
        ranks = (await manager.get("/ranks"))["ranks"]
    found = compare(answers[:streams], answers[streams:])
    worked = [r["rank"] for r in ranks if r["state"] == "READY" and r["steps"] > 0]
    print(
        f"{2 * streams} streams of {OUTPUT_TOKENS} tokens in {seconds:.1f} s: {found.same} pairs the same, "
        f"{found.ties} part at a tie, {found.different} differ"
    )
    print("steps: " + ", ".join(f"rank {r['rank']} {r['state']} {r['steps']}" for r in ranks))
    if found.first:
        print(f"DIFFERENT: {found.first}")
    if worked != [0, 1]:
        print(f"ranks that computed: {worked}, expected [0, 1]")
    few = found.same < streams // 2
    if few:
        print("too few streams agree to the end for the others to be ties")
    return not found.different and not few and worked == [0, 1]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    device = parser.parse_args().device
    shape = "qwen2-0.5b" if device == "cuda" else "tiny"
    flags = ["--device", device, "-dp", "2", "--dtype", "float32", "--max-model-len", "1024"]
    flags += ["--max-num-batched-tokens", "1024", "--api-server-count", "1"]
    if device == "cpu":
        flags += ["--ops", "torch", "--kv-cache-memory", "64MiB", "--cpu-threads", "1"]
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        model = make_model(Path(folder) / shape, shape)
        try:
            with serving(model, flags, 75) as server:
                print(f"{shape}, float32, two ranks ready in {server.ready_s:.1f} s")
                for line in server.log_lines("KV cache", "blocks"):
                    print("  " + line[line.index("KV cache") :])
                good = asyncio.run(check(server.url, server.management, STREAMS))
                if not good:
                    print("\n".join(server.log_lines("ERROR")[-20:]))
        except ServerFailed as error:
            print(error)
            good = False
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
