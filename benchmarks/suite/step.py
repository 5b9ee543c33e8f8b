"""Job: what a step costs beside the model: scheduler, batch, sampling and outputs in the rank, and the front end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from suite.context import Context, Row
from suite.figures import OURS, Goal, Measure
from suite.front import heads_up, until_served
from suite.served import texts_of
from suite.servers import REPOSITORY, SMOLLM2, ServerFailed, our_environment
from suite.workload import NotSane, Shape, play

STREAMS = 32
TOTAL = Measure("overhead_ms", "all beside forward", "ms", digits=3)
PARTS = (
    Measure("schedule_ms", "schedule", "ms", digits=3),
    Measure("prepare_ms", "prepare the batch", "ms", digits=3),
    Measure("sample_ms", "sample", "ms", digits=3),
    Measure("apply_ms", "apply results", "ms", digits=3),
    Measure("front_ms", "front end, CPU", "ms", digits=3),
    Measure("forward_ms", "forward", "ms", digits=2),
)
OFFLINE_S = 300
STEP_MS = 40.0

ROWS = (
    Row(
        "overhead",
        f"a decode step of {STREAMS} streams of SmolLM2: scheduler and server beside the forward pass",
        (TOTAL, *PARTS),
        (Goal(TOTAL, 1.0, "", 1.0),),
        Shape(STREAMS, 128, 128),
        20,
    ),
)


def rank_parts(model: str) -> dict[str, float]:
    """Milliseconds by part of a rank's step, without sockets. Raises ServerFailed."""
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "offline.py"), "--model", model]
    command += ["--streams", str(STREAMS), "--rounds", "1", "--json"]
    environment = {**os.environ, **our_environment()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=OFFLINE_S)
    if done.returncode:
        raise ServerFailed(f"benchmarks/offline.py ended with code {done.returncode}: {done.stderr[-1500:]}")
    return json.loads(done.stdout.splitlines()[-1])["step_ms"]


def run(context: Context, rows: Sequence[Row]) -> None:
    row = rows[0]
    model = context.model or SMOLLM2
    values: dict[str, list[float]] = {}
    alone = Context(context.rounds, False, context.bf16, context.results, context.model)
    try:
        texts = texts_of(model)
        with heads_up(alone, STEP_MS) as sides:
            until_served(sides[0], texts.take(8, 128))
            for _ in range(context.rounds):
                prompts = texts.take(STREAMS, 128)
                front = play(sides[0].server, sides[0].model, prompts, row.shape, real_model=False)
                parts = rank_parts(model)
                found = {f"{name}_ms": value for name, value in parts.items()}
                found["front_ms"] = front.values["cpu_s_per_1000"] * STREAMS
                found["overhead_ms"] = sum(v for k, v in found.items() if k != "forward_ms")
                for key, value in found.items():
                    values.setdefault(key, []).append(round(value, 4))
    except (ServerFailed, NotSane, TimeoutError, OSError, subprocess.TimeoutExpired) as e:
        context.fail(row, str(e) or type(e).__name__)
        return
    context.put(row, {OURS: values}, ["the front end's part is processor time, on whichever core is free"])
