"""Pods as real processes: started on free ports, asked over HTTP, and checked to leave nothing behind."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from dpi_engine.config.sources import default_cache_dir
from dpi_engine.ops import build
from dpi_engine.ops.interface import OpsUnavailable
from free_ports import PORTS, is_free

ROOT = Path(__file__).parents[2]
PATIENCE = 300.0
"""Seconds until a test gives up on what must happen: a bound for what hangs, far beyond what a loaded machine takes."""

CONTROL_PORTS = 31
"""From the handshake port on: what a head binds for itself and up to ten API servers."""


def until(condition: Callable[[], Any], what: str, patience: float = PATIENCE, every: float = 0.03) -> Any:
    """Wait for a true value and return it; fail by name."""
    end = time.monotonic() + patience
    while not (value := condition()):
        assert time.monotonic() < end, f"did not happen within {patience:.0f} s: {what}"
        time.sleep(every)
    return value


def end_with_this_process() -> None:
    """For a child between fork and exec: SIGTERM when the tests end, however they do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


class Answer:
    """Status, body and headers of one HTTP answer."""

    def __init__(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.status, self.body, self.headers = status, body, headers

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    url: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None, timeout: float = 60.0
) -> Answer:
    """GET, or POST with a JSON body. Raises OSError when there is no answer."""
    data = None if body is None else json.dumps(body).encode()
    given = {**({"Content-Type": "application/json"} if data is not None else {}), **(headers or {})}
    request = urllib.request.Request(url, data=data, headers=given, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return Answer(response.status, response.read(), dict(response.headers))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read(), dict(error.headers))


@functools.cache
def kernels() -> str:
    """A folder with the kernels for this machine, compiled once for all runs of the tests; empty without a compiler.

    Each folder of caches that a test makes would have them compiled anew, which takes minutes of both cores.
    """
    folder = tempfile.mkdtemp(prefix="dpi-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with contextlib.suppress(OpsUnavailable):
        isa = build.choose_isa(build.cpu_features())
        library = build.find_library(isa, default_cache_dir(os.environ, Path.home()))
        (Path(folder) / build.library_name(isa)).symlink_to(library)
    return folder


LIVE: set[Pod] = set()
"""Pods that were started and not left yet: their logs are shown when a test fails."""


class Pod:
    """One `dpi serve`, as a context manager. `args` follow the model.

    `head`: the Pod whose group it joins as a headless one; `member_of`: with front ends of its own. `https`: HTTP ports
    from `port` on; more than one has a supervisor's beside them. On leaving, it is stopped if it still runs, its log is
    shown when something failed, and its processes, run directory and ports must be gone.
    """

    def __init__(
        self,
        model: Path,
        *args: str,
        cache: Path,
        head: Pod | None = None,
        member_of: Pod | None = None,
        https: int = 1,
        name: str = "",
        rpc: int | None = None,
        port: int | None = None,
        management: int | None = None,
        env: dict[str, str] | None = None,
        wait: bool = True,
        defaults: bool = True,
    ) -> None:
        self.name = name or ("headless" if head else "member" if member_of else "head")
        self.wait = wait
        self.headless = head is not None
        self.member = member_of is not None
        self.management = management or PORTS.take(1)
        self.https = https
        self.supervisor = PORTS.take(1) if https > 1 else 0
        self.port = port or (0 if head else PORTS.take(https))
        joined = head or member_of
        self.rpc = rpc or (joined.rpc if joined else PORTS.take(CONTROL_PORTS))
        # ipc paths hold 107 bytes, so not under pytest's long folders.
        self.runtime = Path(tempfile.mkdtemp(prefix="dpit"))
        atexit.register(shutil.rmtree, self.runtime, ignore_errors=True)  # of pods that are never started
        self.log_file = self.runtime / "log"
        flags = ["--management-port", str(self.management), "--cache-dir", str(cache)]
        flags += ["--data-parallel-rpc-port", str(self.rpc)]
        if defaults:
            flags += ["--dtype", "float32", "--cpu-threads", "1", "--num-gpu-blocks-override", "1200"]
            flags += ["--served-model-name", "tiny"]
        flags += ["--headless"] if head else ["--port", str(self.port)]
        if self.supervisor:
            flags += ["--data-parallel-supervisor-port", str(self.supervisor)]
        # The same relative name in every pod, as every pod of a cluster mounts its model at one path.
        (self.runtime / "model").symlink_to(model)
        self.command = [sys.executable, "-m", "dpi_engine", "serve", "model", *flags, *args]
        run = self.runtime / "run"
        run.mkdir()
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("DPI_")},
            "PYTHONPATH": f"{ROOT / 'engine'}:{ROOT / 'operator'}",
            "XDG_RUNTIME_DIR": str(run),
            "DPI_POD_NAME": self.name,
            "DPI_NATIVE_DIR": kernels(),
            **(env or {}),
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.killed = False

    # -- life --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Pod:
        self.start()
        try:
            if self.wait:
                self.until_ready()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def start(self) -> None:
        PORTS.hold(self.ports())
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.runtime,
                env=self.environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                preexec_fn=end_with_this_process,
            )
        self.killed = False
        LIVE.add(self)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        assert self.process is not None
        family = self.family()
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                try:
                    self.process.wait(PATIENCE)
                except subprocess.TimeoutExpired:
                    kind = kind or AssertionError
                    raise AssertionError(f"{self.name} did not stop within {PATIENCE:.0f} s of SIGTERM") from None
            if error is None:
                self.assert_gone(family)
        except BaseException:
            kind = kind or AssertionError
            raise
        finally:
            for process in [*family, *self.family()]:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if kind is not None:
                print(f"===== log of {self.name} ({' '.join(self.command[2:])}) =====\n{self.log[-20000:]}")
            PORTS.release(self.ports())
            LIVE.discard(self)
            shutil.rmtree(self.runtime, ignore_errors=True)

    def family(self) -> list[psutil.Process]:
        """The launcher and its children; whoever has this pod's run directory in its environment."""
        mark = self.environment["XDG_RUNTIME_DIR"]
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("XDG_RUNTIME_DIR") == mark:
                    found.append(process)
        return found

    def assert_gone(self, family: list[psutil.Process] | None = None) -> None:
        """No process, no port, no run directory (that of a killed launcher goes when the next one starts)."""
        until(lambda: not self.family(), f"all processes of {self.name} end")
        if not self.killed:
            assert list((self.runtime / "run").iterdir()) == []
        for port in self.ports():
            until(lambda port=port: is_free(port), f"port {port} of {self.name} is free")

    def ports(self) -> list[int]:
        own = [self.management, *([self.supervisor] if self.supervisor else [])]
        own += range(self.port, self.port + self.https) if self.port else []
        joined = self.headless or self.member
        return own if joined else own + list(range(self.rpc, self.rpc + CONTROL_PORTS))

    def wait_exit(self, patience: float = PATIENCE) -> int:
        assert self.process is not None
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not exit within {patience:.0f} s") from None

    def terminate(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL of the launcher alone."""
        assert self.process is not None
        self.killed = True
        self.process.kill()
        self.process.wait(PATIENCE)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    # -- management API ----------------------------------------------------------------------------------------------

    def manage(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        return ask(f"http://127.0.0.1:{self.management}{path}", body, headers)

    def until_ready(self, patience: float = PATIENCE) -> None:
        """Until /startupz and /readyz say so: every rank and every front end is there."""

        def ready() -> bool:
            assert self.running, f"{self.name} ended with code {self.process and self.process.returncode}"
            try:
                return self.manage("/startupz").status == 200 and self.manage("/readyz").status == 200
            except OSError:
                return False

        try:
            until(ready, f"{self.name} is ready", patience, every=0.1)
        except AssertionError as error:  # a pod that several tests share shows its log nowhere else
            raise AssertionError(f"{error}\n{self.log[-6000:]}") from None

    def ranks(self) -> dict[int, dict[str, Any]]:
        return {r["rank"]: r for r in self.manage("/ranks").json["ranks"]}

    def rank(self, rank: int) -> dict[str, Any]:
        return self.ranks()[rank]

    def until_rank(self, rank: int, state: str, patience: float = PATIENCE) -> dict[str, Any]:
        """Until /ranks here says `state`; its entry."""

        def there() -> dict[str, Any] | None:
            entry = self.rank(rank)
            return entry if entry["state"] == state else None

        return until(there, f"rank {rank} is {state} at {self.name}", patience)

    def until_serves(self, *ranks: int) -> None:
        """Until each of `ranks` answers whichever API server is asked.

        The launcher's /ranks runs ahead of the API servers, which it tells. They share a port: of twelve connections
        some go to each.
        """
        for rank in ranks:
            until(
                lambda rank=rank: {self.complete("x", rank=rank, max_tokens=1).status for _ in range(12)} == {200},
                f"rank {rank} serves through every API server of {self.name}",
            )

    def metrics(self) -> list[tuple[str, dict[str, str], float]]:
        """Samples of the management port: name, labels, value."""
        return parse_metrics(self.manage("/metrics").text)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of that name and those labels."""
        return sum(v for n, have, v in self.metrics() if n == name and labels.items() <= have.items())

    # -- OpenAI API --------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def complete(
        self, prompt: Any, *, rank: int | None = None, timeout: float = 60.0, index: int = 0, **fields: Any
    ) -> Answer:
        """`index`: of the HTTP port."""
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True, **fields}
        return ask(f"http://127.0.0.1:{self.port + index}/v1/completions", body, headers, timeout=timeout)

    def text(self, prompt: Any, **fields: Any) -> str:
        """Text of a completion that must succeed; asked again while the rank is SUSPECT, as on a starved machine."""

        def ask_again() -> Answer | None:
            answer = self.complete(prompt, **fields)
            return None if answer.status == 503 and "SUSPECT" in answer.text else answer

        answer = until(ask_again, "the rank gets work again")
        assert answer.status == 200, answer.text
        return answer.json["choices"][0]["text"]

    # -- its processes -----------------------------------------------------------------------------------------------

    def children(self) -> dict[str, int]:
        """Pids of the launcher's living children: `rank-N`, `api-N`, `coordinator`; `new-PID` before its first word."""
        assert self.process is not None
        status = self.manage("/ranks").json
        names = {r["pid"]: f"rank-{r['rank']}" for r in status["ranks"] if r["pid"]}
        names |= {a["pid"]: f"api-{a['index']}" for a in status["api_servers"]}
        found: dict[str, int] = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                line = child.cmdline()
                if not line or child.status() == psutil.STATUS_ZOMBIE:
                    continue
                if "coordinator_process" in line[-1]:
                    found["coordinator"] = child.pid
                else:
                    found[names.get(child.pid, f"new-{child.pid}")] = child.pid
        return found


def parse_metrics(text: str) -> list[tuple[str, dict[str, str], float]]:
    """Samples of a Prometheus page."""
    from prometheus_client.parser import text_string_to_metric_families

    return [(s.name, s.labels, s.value) for family in text_string_to_metric_families(text) for s in family.samples]


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still inside the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
