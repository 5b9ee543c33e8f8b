"""A real `vllm serve` on this machine: head, headless, or with an endpoint of its own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psutil
from process_pods import PORTS, ROOT, Answer, ask, end_with_this_process, parse_metrics, until

PEER = Path(os.environ.get("DPI_PEER", Path.home() / ".cache" / "dpinference" / "peer"))
PYTHON = PEER / "venv" / "bin" / "python"
COLLECTIVES = ROOT / "benchmarks" / "peer" / "collectives"
VERSION = "0.32.0"

START_S = 240.0
"""Seconds that a vLLM process may take to be there: it imports for ten seconds on a machine that does nothing else."""

STOP_S = 60.0

FLAGS = ("--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "16")


class Vllm:
    """One launch, as a context manager. `rpc`: handshake port of the group. With `headless` it has no endpoint.

    On leaving, it and its processes are stopped; its log is shown when something failed.
    """

    def __init__(
        self, model: Path, *args: str, rpc: int, name: str, headless: bool = False, collectives: bool = False
    ) -> None:
        self.name, self.headless, self.rpc = name, headless, rpc
        self.port = 0 if headless else PORTS.take(1)
        self.folder = Path(tempfile.mkdtemp(prefix="dpiv"))
        self.log_file = self.folder / "log"
        where = ["--headless"] if headless else ["--host", "127.0.0.1", "--port", str(self.port)]
        group = ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(rpc)]
        self.command = [str(PYTHON), "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        self.command += [*FLAGS, *where, *group, *args]
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("DPI_", "VLLM_", "PYTHON"))},
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB per rank
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_RPC_BASE_PATH": str(self.folder),
            **({"PYTHONPATH": str(COLLECTIVES)} if collectives else {}),
        }
        self.process: subprocess.Popen[bytes] | None = None
        self._seen: set[psutil.Process] = set()

    def __enter__(self) -> Vllm:
        self.start()
        return self

    def start(self) -> None:
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                preexec_fn=end_with_this_process,
            )

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            print(f"===== log of {self.name} ({' '.join(self.command[3:])}) =====\n{self.log[-15000:]}")
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def stop(self) -> int:
        """SIGTERM, and SIGKILL for what does not go. Returns the exit code."""
        assert self.process is not None
        family = self.family()
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for process in [*family, *self.family()]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        until(lambda: not self.family(), f"all processes of {self.name} end")
        return self.process.wait(STOP_S)

    def family(self) -> list[psutil.Process]:
        """The launch and all that it started, as far as they live; of a launch that has ended what was seen before."""
        if self.process is not None:
            with contextlib.suppress(psutil.Error):
                launch = psutil.Process(self.process.pid)
                self._seen |= {launch, *launch.children(recursive=True)}
        found = []
        for process in self._seen:
            with contextlib.suppress(psutil.Error):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def engines(self) -> list[psutil.Process]:
        """The living processes that run ranks, in the order in which they came; vLLM's log names them."""
        named = dict.fromkeys(int(pid) for pid in re.findall(r"EngineCore\w* pid=(\d+)", self.log))
        alive = {process.pid: process for process in self.family()}
        return [alive[pid] for pid in named if pid in alive]

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def until_ready(self) -> None:
        """Until its endpoint answers."""

        def ready() -> bool:
            assert self.running, f"{self.name} ended with code {self.process and self.process.returncode}"
            try:
                return self.get("/health").status == 200
            except OSError:
                return False

        until(ready, f"{self.name} is ready", START_S, every=0.2)

    # -- its endpoint ------------------------------------------------------------------------------------------------

    def get(self, path: str) -> Answer:
        return ask(f"http://127.0.0.1:{self.port}{path}")

    def complete(self, prompt: Any, *, rank: int | None = None, **fields: Any) -> Answer:
        """In hybrid balancing `rank` counts vLLM's local ranks."""
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True, **fields}
        return ask(f"http://127.0.0.1:{self.port}/v1/completions", body, headers, timeout=120)

    def text(self, prompt: Any, **fields: Any) -> str:
        answer = self.complete(prompt, **fields)
        assert answer.status == 200, answer.text
        return answer.json["choices"][0]["text"]

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of that name and those labels."""
        samples = parse_metrics(self.get("/metrics").text)
        return sum(v for n, have, v in samples if n == name and labels.items() <= have.items())
