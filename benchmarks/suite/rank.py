"""Job: what a rank costs before its first token: seconds to ready, import of the command line, memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from dpi_engine.config.sources import default_cache_dir, resolve_model
from suite.context import Context, Row
from suite.figures import OURS, Goal, Measure
from suite.served import texts_of
from suite.servers import SMOLLM2, Server, ServerFailed, our_environment, ours
from suite.workload import NotSane, Shape, first_model, play

READY = Measure("ready_s", "ready from start", "s", digits=2)
IMPORT = Measure("cli_import_s", "import of dpi", "s", digits=3)
HELP = Measure("cli_help_s", "dpi --help, whole", "s", digits=3)
RSS = Measure("rss_ratio", "RSS over its parts", "x", digits=2)
RSS_MB = Measure("rss_mb", "RSS", "MB", digits=0)
PARTS = (
    Measure("weights_mb", "weights", "MB", digits=0),
    Measure("kv_mb", "KV cache", "MB", digits=0),
    Measure("torch_mb", "torch import", "MB", digits=0),
)
KV_MIB = 256
SHAPE = Shape(16, 1024, 8)
LIMIT_S = 120

ROWS = (
    Row("ready", "start to ready, SmolLM2, warm cache", (READY,), (Goal(READY, 4.0, "", 4.0),), None, 5),
    Row(
        "import",
        "the command line without torch",
        (IMPORT, HELP),
        (Goal(IMPORT, 0.2, "", 0.2),),
        None,
        1,
    ),
    Row(
        "rss",
        f"memory of a rank of SmolLM2 after its KV cache of {KV_MIB} MiB was filled",
        (RSS, RSS_MB, *PARTS),
        (Goal(RSS, 1.3, "", 1.3),),
        None,
        15,
    ),
)


def _python(code: str) -> str:
    """Output of a new interpreter with this clone's packages. Raises ServerFailed."""
    environment = {**os.environ, **our_environment()}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    if done.returncode:
        raise ServerFailed(f"python -c {code[:60]!r} ended with code {done.returncode}: {done.stderr[-800:]}")
    return done.stdout.strip()


def import_seconds() -> tuple[float, float]:
    """Of importing the command line and building its parser, and of `dpi --help` from start to end."""
    timed = (
        "import sys, time; a = time.perf_counter(); import dpi_engine.cli; b = time.perf_counter() - a; "
        "assert 'torch' not in sys.modules, 'the command line imports torch'; print(b)"
    )
    whole = (
        "import subprocess, sys, time; a = time.perf_counter(); "
        "subprocess.run([sys.executable, '-m', 'dpi_engine', '--help'], check=True, stdout=subprocess.DEVNULL); "
        "print(time.perf_counter() - a)"
    )
    return float(_python(timed)), float(_python(whole))


def torch_mb() -> float:
    """RSS of an interpreter that has imported torch and numpy, in MB."""
    code = (
        "import torch, numpy, os; print(int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE'))"
    )
    return int(_python(code)) / 1e6


def weights_mb(model: str) -> float:
    """Of the parameters in bfloat16, as the weight cache holds them or the model's own safetensors; MB."""
    files = resolve_model(model, default_cache_dir(os.environ, Path.home()))
    if files.format != "gguf":
        return sum(f.stat().st_size for f in files.weights) / 1e6
    from gguf import GGUFReader

    return sum(int(t.n_elements) for t in GGUFReader(files.weights[0]).tensors) * 2 / 1e6


def engine_of(server: Server) -> psutil.Process:
    """The process of rank 0. Raises ServerFailed."""
    for process in server.family():
        if any("engine_process" in part for part in process.cmdline()):
            return process
    raise ServerFailed("none of the server's processes is a rank's")


def _rss_round(context: Context, values: dict[str, list[float]]) -> None:
    model = context.model or SMOLLM2
    with ours(model, "--kv-cache-memory", f"{KV_MIB}MiB") as server:
        texts = texts_of(model)
        # More tokens than the cache has room for: every page of it is written.
        for _ in range(2):
            play(server, first_model(server), texts.take(16, SHAPE.input_tokens), SHAPE, real_model=False)
        rss = engine_of(server).memory_info().rss / 1e6
    parts = {"weights_mb": weights_mb(model), "kv_mb": KV_MIB * 2**20 / 1e6, "torch_mb": torch_mb()}
    for key, value in {**parts, "rss_mb": rss, "rss_ratio": rss / sum(parts.values())}.items():
        values.setdefault(key, []).append(round(value, 3))


def run(context: Context, rows: Sequence[Row]) -> None:
    for row in rows:
        values: dict[str, list[float]] = {}
        try:
            if row.key == "ready":
                with ours(context.model or SMOLLM2):
                    pass  # fills the caches
            for _ in range(context.rounds if row.key != "rss" else min(2, context.rounds)):
                if row.key == "ready":
                    with ours(context.model or SMOLLM2) as server:
                        values.setdefault("ready_s", []).append(round(server.ready_s, 3))
                elif row.key == "import":
                    imported, whole = import_seconds()
                    values.setdefault("cli_import_s", []).append(round(imported, 4))
                    values.setdefault("cli_help_s", []).append(round(whole, 4))
                else:
                    _rss_round(context, values)
            context.put(row, {OURS: values})
        except (ServerFailed, NotSane, OSError, subprocess.TimeoutExpired) as e:
            context.fail(row, str(e) or type(e).__name__)
