"""A pod of `dpi up`: its output is read and its end is noticed, whatever becomes of logs and readers."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import aiohttp
import psutil
import pytest
from rich.console import Console
from rich.live import Live

from dpi_engine.standard_streams import Unfailing
from dpi_engine.tools.console import make_console
from dpi_operator.api.read import read_document
from dpi_operator.local.pods import BACKOFF_MAX_S, PodProcess, backoff
from dpi_operator.local.ranks import ask_pod, rank_rows, rank_table
from dpi_operator.local.runner import LocalRunner, UpOptions
from free_ports import PORTS


def soon(condition):
    """The first true value of `condition`."""
    end = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


class World:
    """A PodProcess whose engine is a shell script."""

    def __init__(self, tmp_path, monkeypatch, script, **more):
        program = tmp_path / "engine"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        monkeypatch.setattr("dpi_operator.local.pods.BACKOFF_BASE_S", 0.01)
        self.said, self.failures = [], []
        fields = {"log_file": tmp_path / "log", "max_restarts": 2, "say": self.said.append, **more}
        self.pod = PodProcess(SimpleNamespace(name="p", args=()), failed=self.failures.append, **fields)

    async def until_failed(self):
        async with asyncio.timeout(20):
            self.pod.start()
            while not self.failures:
                await asyncio.sleep(0.01)
            await self.pod.join(1)


MANY_LINES = "i=0; while [ $i -lt 20000 ]; do echo a line of the log $i; i=$((i+1)); done; exit 1"
"""More than pipe and reader hold."""


def test_a_log_on_a_full_disk_neither_stops_a_pod_nor_its_restarts(tmp_path, monkeypatch):
    (tmp_path / "full").symlink_to("/dev/full")
    world = World(tmp_path, monkeypatch, MANY_LINES, log_file=tmp_path / "full")
    asyncio.run(world.until_failed())
    assert world.pod.restarts == 2
    assert world.failures[0].startswith("p: exit code 1 after 2 restarts")
    assert "a line of the log 19999" in world.failures[0]
    told = [s for s in world.said if "cannot be written" in s]
    assert told and all("the pod runs on: No space left on device" in s for s in told)


def test_a_log_that_can_be_written_again_says_what_is_missing(tmp_path, monkeypatch):
    log = tmp_path / "folder" / "log"
    world = World(tmp_path, monkeypatch, f"echo one; sleep 0.3; mkdir {log.parent}; echo two; exit 78", log_file=log)
    asyncio.run(world.until_failed())
    assert log.read_text() == "two\n"
    assert world.said == [
        f"p: {log} cannot be written, the pod runs on: No such file or directory",
        f"p: {log} is written again; 1 lines are missing",
    ]


def test_whoever_reads_the_echo_may_go(tmp_path, monkeypatch):
    def write(text):
        raise BrokenPipeError

    world = World(tmp_path, monkeypatch, "echo one; echo two; exit 78", echo=True)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write, flush=lambda: None))
    asyncio.run(world.until_failed())
    assert (tmp_path / "log").read_text() == "one\ntwo\n"
    assert "exit code 78" in world.failures[0]


def test_a_pod_that_cannot_be_run_at_all_is_no_silence(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch, "")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    asyncio.run(world.until_failed())
    assert world.failures[0].startswith("p: it cannot be run: FileNotFoundError: ")


def test_restarts_before_a_long_good_run_are_forgotten(tmp_path, monkeypatch):
    pod = World(tmp_path, monkeypatch, "", forget_after_s=100).pod
    pod.restarts = 2
    for ready, now in ((True, 0), (True, 99), (False, 150), (True, 200), (True, 299)):
        pod.seen(ready, now)
    assert pod.restarts == 2
    pod.seen(True, 300)
    assert pod.restarts == 0


def test_a_pod_may_end_any_number_of_times():
    assert backoff(5000) == BACKOFF_MAX_S


def test_a_stop_does_not_wait_for_the_next_restart(tmp_path, monkeypatch):
    async def main():
        world = World(tmp_path, monkeypatch, "exit 1")
        monkeypatch.setattr("dpi_operator.local.pods.BACKOFF_BASE_S", 30.0)
        world.pod.start()
        async with asyncio.timeout(20):
            while not world.said:
                await asyncio.sleep(0.01)
        world.pod.terminate()
        began = asyncio.get_running_loop().time()
        assert await world.pod.join(1)
        assert asyncio.get_running_loop().time() - began < 3
        assert world.failures == []

    asyncio.run(main())


def test_a_stop_while_a_pod_is_being_started_ends_it(tmp_path, monkeypatch):
    async def main():
        world = World(tmp_path, monkeypatch, "exec sleep 60")
        world.pod.start()
        await asyncio.sleep(0)
        assert world.pod.process is None
        world.pod.terminate()
        await world.pod.join(1)
        assert world.pod.process.returncode == -signal.SIGTERM

    asyncio.run(main())


def test_brackets_in_an_error_are_no_markup():
    row = {"rank": 0, "group": 0, "pod": "p", "state": "LOST", "error": "[enforce fail] at '/m/[/x]'"}
    console = Console(width=200)
    with console.capture() as shown:
        console.print(rank_table([row]))
    assert row["error"] in shown.get()


def one_pod(first):
    """An object of one rank, with ports from `first` on."""
    spec = {
        "model": {"name": "m"},
        "engine": {"image": "engine:1", "ports": {"http": first, "management": first + 1, "rpc": first + 2}},
    }
    document = {"apiVersion": "dpinference.dev/v1alpha1", "kind": "DataParallelInference", "spec": spec}
    return read_document({**document, "metadata": {"name": "m", "namespace": "ns"}}, "test")


@pytest.mark.parametrize(
    ("listens", "told"), [(True, ("?", "management port of m-0-0 does not answer")), (False, ("NEW", "pod not up"))]
)
def test_a_pod_that_stands_still_is_told_from_one_that_is_not_there(tmp_path, listens, told):
    first = PORTS.take(3)
    (plan,) = LocalRunner(one_pod(first), UpOptions(state_dir=tmp_path)).plans

    async def ask():
        async with aiohttp.ClientSession() as session:
            return await ask_pod(session, plan, 0.3)

    with socket.socket() as listener:  # as of a stopped process: the kernel takes connections, and nobody answers
        if listens:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a test before may have had connections
            listener.bind(("127.0.0.1", first + 1))
            listener.listen()
        (row,) = rank_rows([asyncio.run(ask())])
    assert (row["state"], row["stage"]) == told


FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that takes nothing (/dev/full)")


@FULL
def test_a_runner_that_can_print_nothing_stops_its_pods_as_ever(tmp_path, monkeypatch):
    ended = tmp_path / "ended"
    engine = tmp_path / "engine"
    engine.write_text(f"#!/bin/sh\ntrap 'echo in order > {ended}; exit 0' TERM\nwhile :; do sleep 0.05; done\n")
    engine.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(engine))
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        runner = LocalRunner(one_pod(PORTS.take(3)), UpOptions(state_dir=tmp_path / "state", timeout_s=1.0))
        assert asyncio.run(runner.run()) == 1  # not ready
        with pytest.raises(OSError, match="No space left"):
            full.flush()  # as the command does at its end, which then says so
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    assert ended.read_text() == "in order\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
def test_a_killed_runner_leaves_no_pod_behind(tmp_path):
    ended, engine = tmp_path / "ended", tmp_path / "engine"
    engine.write_text(
        f"#!/bin/sh\ntrap 'echo by SIGTERM > {ended}; exit 0' TERM\necho $$\n"
        "n=0; while [ $n -lt 2000 ]; do sleep 0.05; n=$((n+1)); done\n"  # it ends, also where the test fails
    )
    engine.chmod(0o755)
    first, manifest = PORTS.take(3), tmp_path / "m.yaml"
    manifest.write_text(
        "{apiVersion: dpinference.dev/v1alpha1, kind: DataParallelInference, metadata: {name: m}, spec: {model: "
        "{name: m}, engine: {image: 'engine:1', ports: "
        f"{{http: {first}, management: {first + 1}, rpc: {first + 2}}}}}}}}}\n"
    )
    arguments = ["up", "-f", str(manifest), "--state-dir", str(tmp_path / "state")]
    code = f"import sys; sys.executable = {str(engine)!r}; from dpi_engine import cli; cli.main({arguments!r})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL) as runner:
        try:
            log = tmp_path / "state" / "m-0-0.log"
            pod = int(soon(lambda: log.exists() and log.read_text()))
            assert os.getpgid(pod) == pod, "in a session of its own: what ends the runner's does not reach it"
        finally:
            runner.kill()
    assert soon(lambda: ended.exists() and ended.read_text()) == "by SIGTERM\n"
    assert soon(lambda: not psutil.pid_exists(pod))


@FULL
def test_a_table_that_cannot_be_shown_is_none(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with open("/dev/full", "w") as full:
        console = make_console(Unfailing(full))
        assert console.is_terminal
        with Live(console=console, auto_refresh=False) as view:
            for _ in range(3):
                view.update(rank_table([]), refresh=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_a_reader_that_has_gone_stops_no_pods():
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        console = make_console(Unfailing(pipe))
        console.print("one")
        console.print("two")
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)
