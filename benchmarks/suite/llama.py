"""Job: one stream beside llama.cpp with the same weights in bfloat16, and the bound that memory sets to both."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from suite.context import Context, Row
from suite.figures import OURS, Goal
from suite.served import Side, play_all, texts_of
from suite.servers import KV_GIB, PEER, SMOLLM2, ServerFailed, free_ports, ours, serving
from suite.workload import ITL, OUTPUT_RATE, SERVED, NotSane, Shape, first_model

LLAMA = "llama.cpp bf16"
PYTHON = PEER / "llama" / "venv" / "bin" / "python"
GGUF = PEER / "llama" / "smollm2-135m-bf16.gguf"
START_S = 120
SHAPE = Shape(1, 128, 128)
ROWS = (
    Row(
        "llama",
        "1 stream beside llama.cpp, 128 tokens in, 128 out",
        SERVED,
        (Goal(ITL, 1.0, LLAMA, 1.0),),
        SHAPE,
        3,
    ),
)

READ = """
import time, torch
x = torch.ones(1 << 28, dtype=torch.float32)
best = min((lambda a: (x.sum(), time.perf_counter() - a)[1])(time.perf_counter()) for _ in range(12))
print(x.numel() * 4 / best / 1e9)
"""


def read_bandwidth() -> float:
    """GB/s of a sum over 1 GiB by all threads, the best of 12."""
    done = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, timeout=120, check=True)
    return float(done.stdout)


def run(context: Context, rows: Sequence[Row]) -> None:
    row = rows[0]
    if not PYTHON.exists() or not GGUF.exists():
        context.fail(row, f"no llama.cpp at {PEER / 'llama'}: run benchmarks/peer/llama.sh")
        return
    port = free_ports(1)
    command = [
        str(PYTHON),
        str(Path(__file__).parent / "llama_server.py"),
        str(GGUF),
        str(port),
        str(os.cpu_count() or 1),
    ]
    values: dict[str, dict[str, list[float]]] = {OURS: {}, LLAMA: {}}
    try:
        gigabytes = GGUF.stat().st_size / 1e9
        bandwidth = read_bandwidth()
        texts = texts_of(SMOLLM2)
        with (
            serving(LLAMA, command, port, f"http://127.0.0.1:{port}/health", {}, START_S) as theirs,
            ours(SMOLLM2, "--kv-cache-memory", f"{KV_GIB}GiB") as mine,
        ):
            sides = [Side(OURS, mine, first_model(mine)), Side(LLAMA, theirs, "smollm2")]
            play_all(sides, texts.take(1, 128), Shape(1, 128, 8), 0, True)
            for turn in range(context.rounds):
                outcomes = play_all(sides, texts.take(1, SHAPE.input_tokens), SHAPE, turn, True)
                for name, outcome in outcomes.items():
                    for key, value in outcome.values.items():
                        values[name].setdefault(key, []).append(value)
    except (ServerFailed, NotSane, TimeoutError, OSError, subprocess.SubprocessError) as e:
        context.fail(row, str(e) or type(e).__name__)
        return
    bound = 1e3 * gigabytes / bandwidth
    notes = [
        f"bound: {gigabytes * 1e3:.0f} MB of weights for each token, read at {bandwidth:.1f} GB/s: {bound:.1f} ms",
        f"{OUTPUT_RATE.label} has the prompt's time in it, {ITL.label} has not",
    ]
    labels = {LLAMA: "the wheel xllamacpp, built for AVX2; a build for this machine would be faster"}
    context.put(row, values, notes, labels)
