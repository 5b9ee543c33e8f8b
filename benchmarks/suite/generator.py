"""Job: the load generator's own ceiling, against a server that answers at once. Printed before everything else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from suite.context import Context, Row
from suite.figures import Measure
from suite.servers import ServerFailed, free_ports, serving
from suite.workload import GENERATOR, OUTPUT_RATE, NotSane, Shape, play

CEILING = Measure("generator_tok_s_per_core", "generator tok/s core", "tok/s", higher=True, digits=0)
SHAPE = Shape(64, 128, 512)
SIDE = "instant server"
ROWS = (
    Row(
        "generator",
        "ceiling of the load generator: 64 streams of 512 tokens from a server that answers at once",
        (OUTPUT_RATE, GENERATOR, CEILING),
        (),
        SHAPE,
        1,
    ),
)


def run(context: Context, rows: Sequence[Row]) -> None:
    port = free_ports(1)
    command = [sys.executable, str(Path(__file__).parent / "instant_server.py"), "--port", str(port)]
    values: dict[str, list[float]] = {}
    row = rows[0]
    try:
        with serving(SIDE, command, port, f"http://127.0.0.1:{port}/", {}, 60) as server:
            for _ in range(context.rounds):
                prompts = [list(range(SHAPE.input_tokens))] * SHAPE.count
                outcome = play(server, "none", prompts, SHAPE, real_model=False)
                outcome.values[CEILING.key] = round(1000 / outcome.values[GENERATOR.key], 1)
                for key, value in outcome.values.items():
                    values.setdefault(key, []).append(value)
    except (ServerFailed, NotSane, TimeoutError, OSError) as e:
        context.fail(row, str(e) or type(e).__name__)
        return
    context.put(row, {SIDE: values}, ["its processor time is beside the rates of every row below"])
