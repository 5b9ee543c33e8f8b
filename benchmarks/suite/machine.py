"""What the table was measured on: processor, memory, versions, and what other work took of it meanwhile."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dpi_engine.config.machine import cpu_features, usable_cpus

SHOWN = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
PACKAGES = ("torch", "numpy", "pyzmq", "aiohttp", "uvloop", "tokenizers")


def _field(path: str, name: str) -> str:
    """Value of the first line `name : value`; empty without one."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((l.split(":", 1)[1].strip() for l in lines if l.startswith(name)), "")


def _commit(folder: Path) -> str:
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def has_bf16() -> bool:
    """The processor multiplies bfloat16, so that both sides' best type is bfloat16; else it is float32."""
    return bool({"avx512_bf16", "amx_bf16"} & set(cpu_features()))


def describe() -> dict[str, Any]:
    """JSON-able; `processor` tells machines apart."""
    family, model = _field("/proc/cpuinfo", "cpu family"), _field("/proc/cpuinfo", "model\t")
    name = _field("/proc/cpuinfo", "model name") or platform.processor()
    return {
        "processor": f"{name} (family {family}, model {model}), {usable_cpus()} cores",
        "features": [f for f in SHOWN if f in cpu_features()],
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {p: _version(p) for p in PACKAGES},
        "commit": _commit(Path(__file__).parent),
    }


def slug(machine: dict[str, Any]) -> str:
    """Part of a file name: maker, best instruction set, cores."""
    maker = "epyc" if "EPYC" in machine["processor"] else "xeon" if "Xeon" in machine["processor"] else "cpu"
    best = next((f for f in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if f in machine["features"]), "plain")
    return f"{maker}-{best.replace('_', '-')}-{usable_cpus()}cores"


QUIET_SHARE, QUIET_S = 0.1, 0.3
QUIET_PATIENCE_S = float(os.environ.get("DPI_BENCH_PATIENCE", "10"))
"""Of each round, in seconds. Less where the values do not matter and others use the machine."""


def _busy() -> float:
    """Seconds of all processors so far that were not idle."""
    values = [int(v) for v in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(values) - values[3] - values[4]) / os.sysconf("SC_CLK_TCK")


def until_quiet() -> None:
    """Wait until the processors are idle for QUIET_S, so that a round meets nothing of the one before: teams of threads
    spin for a while when their work is done, on the cores of whoever comes next. Gives up after QUIET_PATIENCE_S: what
    others take from the round is measured anyway.
    """
    end = time.monotonic() + QUIET_PATIENCE_S
    while time.monotonic() < end:
        at, busy = time.monotonic(), _busy()
        time.sleep(QUIET_S)
        if (_busy() - busy) / (time.monotonic() - at) <= QUIET_SHARE * (os.cpu_count() or 1):
            return


class Others:
    """Share of the processors that processes other than those of the benchmark used, 0 to 1, over a with block.

    Counts all time of the machine that was not idle, less the time of `mine()` (seconds so far).
    """

    def __init__(self, mine: Any) -> None:
        self._mine = mine
        self.share = 0.0

    def __enter__(self) -> Others:
        self._start = time.monotonic(), _busy(), self._mine()
        return self

    def __exit__(self, *exc: object) -> None:
        at, busy, mine = self._start
        seconds = (time.monotonic() - at) * (os.cpu_count() or 1)
        self.share = max(0.0, (_busy() - busy - (self._mine() - mine)) / seconds)
