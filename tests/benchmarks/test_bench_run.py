"""A run of the table on a tiny model, with our own server and front end, as a user runs it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from process_model import make_model

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), *args]
    # The tests beside this one never let the processors rest, so that each round would wait as long as it may.
    environment = {**os.environ, "DPI_BENCH_PATIENCE": "0.5"}
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)


@pytest.mark.timeout(LIMIT_S + 60)
def test_a_small_run_measures_keeps_and_resumes(tmp_path: Path) -> None:
    model = str(make_model(tmp_path / "tiny"))
    path = tmp_path / "results.json"
    common = ("--model", model, "--rounds", "2", "--results", str(path))
    done = bench(*common, "--only", "generator", "w8", "front-flood")
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads(path.read_text())
    assert set(kept["rows"]) == {"generator", "w8", "front-flood"}
    assert kept["machine"]["processor"] and kept["machine"]["packages"]["torch"]
    served = kept["rows"]["w8"]["sides"]["dpi"]
    assert len(served["output_tok_s"]) == 2 and min(served["output_tok_s"]) > 0
    assert min(served["cpu_s_per_1000"]) > 0 and min(served["generator_cpu_s_per_1000"]) > 0
    assert all(f <= t * 1.001 for f, t in zip(served["first_answer_ms"], served["ttft_p50_ms"], strict=True))
    assert [g["met"] for g in kept["rows"]["w8"]["goals"]] == [None], "without the peer no goal can be judged"
    front = kept["rows"]["front-flood"]["sides"]["dpi"]
    assert min(front["tokens_per_event"]) >= 1 and min(front["tok_s_per_core"]) > 0
    assert "out tok/s" in done.stdout and "not judged" in done.stdout

    again = bench(*common, "--only", "generator", "w8", "--resume")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "0 rows" in again.stdout
    assert json.loads(path.read_text()) == kept


@pytest.mark.timeout(LIMIT_S + 60)
def test_a_server_that_cannot_start_is_named_and_the_run_fails(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    done = bench("--model", str(folder), "--rounds", "1", "--only", "w8")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "w8" in done.stderr and "NOT measured" in done.stdout
    assert "model.layers.2" in done.stdout, "the end of the server's log"

    (folder / "model.safetensors").write_bytes(b"not weights")
    done = bench("--model", str(folder), "--rounds", "1", "--only", "w8")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "w8" in done.stderr and "no complete safetensors file" in done.stdout


@pytest.mark.timeout(LIMIT_S + 60)
def test_a_run_that_is_terminated_leaves_no_server_behind(tmp_path: Path) -> None:
    model = str(make_model(tmp_path / "tiny"))
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--model", model, "--rounds", "100", "--only", "w8"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        family = psutil.Process(run.pid)
        end = time.monotonic() + LIMIT_S
        servers: list[psutil.Process] = []
        while not any("serve" in server.cmdline() for server in servers):
            assert run.poll() is None and time.monotonic() < end
            time.sleep(0.05)
            servers = family.children(recursive=True)
        try:
            run.terminate()
            _, said = run.communicate(timeout=LIMIT_S)
            assert run.returncode == 143
            assert said == "bench: ended by SIGTERM; its servers are stopped\n"
            assert not psutil.wait_procs(servers, timeout=10)[1]
        finally:
            for server in servers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    server.kill()
