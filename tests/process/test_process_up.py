"""`dpi up`: a manifest run as processes on this machine."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from process_pods import PATIENCE, PORTS, ROOT, Answer, ask, end_with_this_process, until

from dpi_operator.local.up import UpCommand


def manifest(model: Path, http: int, management: int, rpc: int, cache: Path, **parallelism: int) -> dict[str, Any]:
    args = ["--dtype", "float32", "--cpu-threads", "1", "--num-gpu-blocks-override", "600", "--cache-dir", str(cache)]
    return {
        "apiVersion": "dpinference.dev/v1alpha1",
        "kind": "DataParallelInference",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {"name": "tiny", "uri": f"file://{model}"},
            "engine": {
                "image": "engine:1",
                "args": args,
                "apiServerCount": 1,
                "ports": {"http": http, "management": management, "rpc": rpc},
            },
            "parallelism": parallelism,
        },
    }


class Up:
    """One `dpi up` and what it started. Pods are told apart by their management ports."""

    def __init__(self, folder: Path, document: dict[str, Any], *args: str) -> None:
        self.folder, self.run = folder, folder / "run"
        self.file = folder / "tiny.yaml"
        self.file.write_text(yaml.safe_dump(document))
        ports = document["spec"]["engine"]["ports"]
        self.url = f"http://127.0.0.1:{ports['http']}"
        self.head, self.headless = (f"http://127.0.0.1:{ports['management'] + step}" for step in (0, 1000))
        self.ports = [p + step for p in ports.values() for step in (0, 1000)]
        self.run.mkdir()
        self.log = folder / "log"
        self.state = folder / "state"
        command = [sys.executable, "-m", "dpi_engine", "up", "-f", str(self.file), "--state-dir", str(self.state)]
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("DPI_")},
            "PYTHONPATH": f"{ROOT / 'engine'}:{ROOT / 'operator'}",
            "XDG_RUNTIME_DIR": str(self.run),
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *args],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                preexec_fn=end_with_this_process,
            )

    def family(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = process.environ().get("XDG_RUNTIME_DIR") == str(self.run)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def until_said(self, text: str) -> None:
        def said() -> bool:
            assert self.process.poll() is None, f"ended with {self.process.returncode}"
            return text in self.output

        until(said, f"{text!r} is printed")

    def ranks(self) -> dict[int, dict[str, Any]]:
        return {r["rank"]: r for r in ask(f"{self.head}/ranks").json["ranks"]}

    def close(self, failed: bool) -> None:
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                process.kill()
        if failed:
            logs = "\n".join(f"--- {f.name}\n{f.read_text(errors='replace')[-8000:]}" for f in self.state.glob("*.log"))
            print(f"===== dpi up =====\n{self.output}\n{logs}")


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Short enough for sockets."""
    import shutil
    import tempfile

    path = Path(tempfile.mkdtemp(prefix="dpiu"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def up(folder: Path, document: dict[str, Any], *args: str) -> Iterator[Up]:
    running = Up(folder, document, *args)
    try:
        yield running
    except BaseException:
        running.close(failed=True)
        raise
    running.close(failed=False)


def ports() -> tuple[int, int, int]:
    """http, management, rpc such that those of a second pod, 1,000 higher, are free too."""
    while True:
        first = PORTS.take(40)
        with contextlib.ExitStack() as held:
            try:
                for port in range(first + 1000, first + 1040):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        return first, first + 1, first + 5


MODES = {
    "Hybrid": {"dataParallelSize": 4, "dataParallelSizeLocal": 2},
    "External": {"dataParallelSize": 2},
    "MultiPort": {"dataParallelSize": 4, "dataParallelSizeLocal": 2},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_endpoint_of_a_mode_serves_and_a_lost_pod_comes_back_alone(
    folder: Path, tiny_model: Path, process_cache: Path, mode: str
) -> None:
    document = manifest(tiny_model, *ports(), process_cache, **MODES[mode])
    document["spec"]["loadBalancing"] = {"mode": mode, "supervisorPolicy": "RestartOne"}
    http = document["spec"]["engine"]["ports"]["http"]
    if mode == "MultiPort":  # the first of two ports per pod
        del document["spec"]["engine"]["apiServerCount"]
        http += 20
        document["spec"]["engine"]["ports"] |= {"http": http, "supervisor": http + 5}
    with up(folder, document) as running:
        running.until_said("Ctrl-C stops")
        each = 2 if mode == "MultiPort" else 1
        urls = [f"http://127.0.0.1:{http + step + i}" for step in (0, 1000) for i in range(each)]
        for url in urls:
            assert f"{url}/v1" in running.output
        body = {"model": "tiny", "prompt": "the quick", "max_tokens": 8, "temperature": 0, "ignore_eos": True}

        def texts() -> set[str]:
            answers = [ask(f"{url}/v1/completions", body) for url in urls]
            assert {a.status for a in answers} == {200}
            return {a.json["choices"][0]["text"] for a in answers}

        expected = texts()
        assert len(expected) == 1
        before, last = running.ranks(), MODES[mode]["dataParallelSize"] - 1
        assert [r["pod"] for r in before.values()] == [f"tiny-0-{0 if r <= last // 2 else 1}" for r in before]
        pod = psutil.Process(before[last]["pid"]).parent()
        assert pod is not None
        pod.kill()
        running.until_said("tiny-0-1: killed by SIGKILL; restart 1 in 1 s")
        assert ask(f"{urls[0]}/v1/completions", body).status == 200

        def back() -> bool:
            rank = running.ranks()[last]
            return rank["state"] == "READY" and rank["epoch"] > before[last]["epoch"]

        until(back, "the pod's last rank is back")

        def listening() -> bool:
            try:
                return texts() == expected
            except OSError:
                return False

        until(listening, "all endpoints answer as before")
        assert running.ranks()[0]["pid"] == before[0]["pid"]
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(PATIENCE) == 0
        until(lambda: not running.family(), "every process has ended")


def test_two_pods_serve_one_is_restarted_and_ctrl_c_leaves_nothing(
    folder: Path, tiny_model: Path, process_cache: Path
) -> None:
    document = manifest(tiny_model, *ports(), process_cache, dataParallelSize=2, dataParallelSizeLocal=1)
    with up(folder, document) as running:
        running.until_said("Ctrl-C stops")
        assert "without a cluster these fields mean nothing: engine.image" in running.output
        assert running.url in running.output
        body = {"model": "tiny", "prompt": "the quick", "max_tokens": 8, "temperature": 0, "ignore_eos": True}

        def completion(rank: int) -> Answer:
            return ask(f"{running.url}/v1/completions", body, {"X-data-parallel-rank": str(rank)})

        def text(rank: int) -> str:
            answer = completion(rank)
            assert answer.status == 200, answer.text
            return answer.json["choices"][0]["text"]

        assert text(0) == text(1)
        before = running.ranks()
        headless = psutil.Process(before[1]["pid"]).parent()
        assert headless is not None
        headless.kill()
        running.until_said("tiny-0-1: killed by SIGKILL; restart 1 in 1 s")

        def back() -> bool:
            rank = running.ranks()[1]
            return rank["state"] == "READY" and rank["epoch"] > before[1]["epoch"]

        until(back, "rank 1 is back")
        until(lambda: completion(1).status == 200, "and the API server knows it")
        assert running.ranks()[0]["pid"] == before[0]["pid"]
        assert text(0) == text(1)
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(PATIENCE) == 0
        assert "stopped" in running.output
        until(lambda: not running.family(), "every process has ended")
        assert [p for p in running.run.iterdir() if "dpi-" in p.name] == []
        assert {f.name for f in running.state.iterdir()} == {"tiny-0-0.log", "tiny-0-1.log"}


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_nothing_outlives_a_runner_however_it_ends(
    folder: Path, tiny_model: Path, process_cache: Path, number: signal.Signals
) -> None:
    document = manifest(tiny_model, *ports(), process_cache, dataParallelSize=1)
    with up(folder, document) as running:
        running.until_said("Ctrl-C stops")
        running.process.send_signal(number)
        running.process.wait(PATIENCE)
        until(lambda: not running.family(), "every process has ended")


def test_a_question_is_asked_and_answered(folder: Path, tiny_model: Path, process_cache: Path) -> None:
    document = manifest(tiny_model, *ports(), process_cache, dataParallelSize=1)
    with up(folder, document, "--ask", "what do ranks wait for?") as running:
        assert running.process.wait(2 * PATIENCE) == 0
        assert "what do ranks wait for?" in running.output
        assert "READY" in running.output
        until(lambda: not running.family(), "every process has ended")


def test_a_second_ctrl_c_does_not_wait_for_requests(folder: Path, tiny_model: Path, process_cache: Path) -> None:
    document = manifest(tiny_model, *ports(), process_cache, dataParallelSize=1)
    document["spec"]["lifecycle"] = {"shutdownTimeoutSeconds": 600, "terminationGracePeriodSeconds": 700}
    with up(folder, document) as running:
        running.until_said("Ctrl-C stops")
        body = {"model": "tiny", "prompt": "the quick", "max_tokens": 400, "n": 100, "ignore_eos": True, "stream": True}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, f"{running.url}/v1/completions", body)
            until(lambda: running.ranks()[0]["running"] > 0, "requests run")
            running.process.send_signal(signal.SIGINT)
            running.until_said("stopping")
            running.process.send_signal(signal.SIGINT)
            assert '"error"' in asked.result().text
        assert running.process.wait(PATIENCE) == 0
        assert "was killed" not in running.output


def test_ctrl_c_while_pods_start_leaves_nothing(folder: Path, tiny_model: Path, process_cache: Path) -> None:
    document = manifest(tiny_model, *ports(), process_cache, dataParallelSize=2, dataParallelSizeLocal=1)
    with up(folder, document) as running:
        running.until_said("starting tiny-0-1")
        until(lambda: len(running.family()) >= 3, "both pods' launchers run")
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(PATIENCE) == 130
        until(lambda: not running.family(), "every process has ended")


@pytest.mark.parametrize(("port", "field"), [(0, "http"), (1, "management"), (2, "rpc")])
def test_a_port_in_use_is_named_before_anything_starts(
    folder: Path, tiny_model: Path, process_cache: Path, port: int, field: str
) -> None:
    chosen = ports()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", chosen[port]))
        taken.listen()
        with up(folder, manifest(tiny_model, *chosen, process_cache, dataParallelSize=1)) as running:
            assert running.process.wait(PATIENCE) == 1
            assert f"port {chosen[port]} of tiny-0-0 is in use; change spec.engine.ports.{field}" in running.output
            assert not running.state.exists()


def test_two_of_one_name_do_not_share_their_logs(folder: Path, tiny_model: Path, process_cache: Path) -> None:
    with up(folder, manifest(tiny_model, *ports(), process_cache, dataParallelSize=1)) as first:
        first.until_said("starting tiny-0-0")
        log = first.state / "tiny-0-0.log"
        until(lambda: log.exists() and "management API" in log.read_text(), "the first one's pod logs")
        (folder / "2").mkdir()
        document = manifest(tiny_model, *ports(), process_cache, dataParallelSize=1)
        with up(folder / "2", document, "--state-dir", str(first.state)) as second:
            assert second.process.wait(PATIENCE) == 1
            assert f"--state-dir {first.state}: another `dpi up` writes its logs there" in second.output
            assert not second.family()
        assert "management API" in log.read_text()


def test_a_folder_for_logs_that_cannot_be_made_is_named(folder: Path, tiny_model: Path, process_cache: Path) -> None:
    document = manifest(tiny_model, *ports(), process_cache, dataParallelSize=1)
    with up(folder, document, "--state-dir", "/proc/nowhere") as running:
        assert running.process.wait(PATIENCE) == 2
        assert "--state-dir /proc/nowhere: cannot be used: " in running.output
        assert "Traceback" not in running.output


def test_a_bad_manifest_is_named(folder: Path, tiny_model: Path, process_cache: Path) -> None:
    document = manifest(tiny_model, *ports(), process_cache, dataParalelSize=2)
    with up(folder, document) as running:
        assert running.process.wait(PATIENCE) == 2
        assert "dataParalelSize" in running.output
        assert "did you mean `dataParallelSize`" in running.output
        assert "Traceback" not in running.output


def test_a_model_that_cannot_be_served_ends_with_the_pods_last_words(
    folder: Path, tiny_model: Path, process_cache: Path
) -> None:
    document = manifest(tiny_model / "nowhere", *ports(), process_cache, dataParallelSize=1)
    with up(folder, document) as running:
        assert running.process.wait(PATIENCE) == 1
        assert "tiny-0-0: configuration refused (exit code 78)" in running.output
        assert "nothing is there" in running.output
        assert not running.family()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        *((["--timeout", n], f"--timeout: expected seconds above 0, got {n}") for n in ("0", "-1", "nan", "inf")),
        (["--ask", " "], "--ask: expected a question, got none"),
    ],
)
def test_flags_that_mean_nothing_are_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str], words: str
) -> None:
    parser = argparse.ArgumentParser()
    UpCommand().add_arguments(parser)
    assert UpCommand().run(parser.parse_args(["-f", str(tmp_path / "none.yaml"), *flags])) == 2
    assert capsys.readouterr().err == f"dpi up: {words}\n"
