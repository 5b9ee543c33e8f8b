"""A `dpi serve` process for the length of a block."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STOP_S = 20.0


class ServerFailed(RuntimeError):
    """The server ended or did not get ready; the text holds the last lines of its log."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server answers, its log, and the seconds from start to ready."""

    url: str
    management: str
    log: Path
    ready_s: float

    def log_lines(self, *words: str) -> list[str]:
        """Lines of the log that hold all of `words`."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if all(w in line for w in words)]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [int(s.getsockname()[1]) for s in sockets]


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def serving(model: Path, flags: list[str], ready_within_s: float) -> Iterator[Server]:
    """Serve `model` with random weights until the block ends. Raises ServerFailed.

    The process stays in this one's group: who kills the group leaves nothing behind, since its children follow it.
    """
    port, management = _free_ports(2)
    command = [sys.executable, "-m", "dpi_engine", "serve", str(model), "--load-format", "dummy"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--management-port", str(management), *flags]
    with tempfile.NamedTemporaryFile(prefix="gpu-check-", suffix=".log", delete=False) as output:
        log = Path(output.name)
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    probe = f"http://127.0.0.1:{management}"
    try:
        while not _ready(probe):
            waited = time.monotonic() - began
            if process.poll() is not None or waited > ready_within_s:
                why = f"ended with {process.returncode}" if process.poll() is not None else f"{waited:.0f} s, not ready"
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
                raise ServerFailed(f"dpi serve: {why}; the end of its log:\n{tail}")
            time.sleep(0.1)
        yield Server(f"http://127.0.0.1:{port}", probe, log, time.monotonic() - began)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(OSError):
            os.unlink(log)
