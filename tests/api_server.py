"""A real API server for tests: DPI_TEST_KUBECONFIG, else etcd and kube-apiserver started on loopback, without nodes.

The programs are those that the test cluster is made of (`make cluster` builds them); without them there is no server
and the tests that need one are skipped. A server started here ends with the test run.
"""

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from free_ports import PORTS

CACHE = Path(os.environ.get("DPI_TEST_CACHE") or Path.home() / ".cache/dpinference")
START_S = 120.0

_KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "https://127.0.0.1:{port}", certificate-authority: {authority}}}}}]
users: [{{name: u, user: {{token: {token}}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
"""
_TOKEN = "only-for-this-test"


def program(name: str) -> str | None:
    """Path of a program of the test cluster, or of that name in PATH."""
    built = CACHE / "k8s/bin" / name
    return str(built) if built.exists() else shutil.which(name)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _start() -> Path:
    home = Path(tempfile.mkdtemp(prefix="dpi-api-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    client = PORTS.take(3)
    peer, port = client + 1, client + 2
    subprocess.run(
        ["openssl", "genrsa", "-out", str(home / "sa.key"), "2048"], check=True, capture_output=True, timeout=60
    )
    (home / "tokens.csv").write_text(f"{_TOKEN},admin,admin,system:masters\n")
    commands = [
        [
            program("etcd"), "--data-dir", str(home / "etcd"), "--unsafe-no-fsync",
            "--listen-client-urls", f"http://127.0.0.1:{client}", "--advertise-client-urls", f"http://127.0.0.1:{client}",
            "--listen-peer-urls", f"http://127.0.0.1:{peer}",
        ],
        [
            program("kube-apiserver"), "--etcd-servers", f"http://127.0.0.1:{client}", "--bind-address", "127.0.0.1",
            "--secure-port", str(port), "--cert-dir", str(home / "certs"), "--authorization-mode", "RBAC",
            "--token-auth-file", str(home / "tokens.csv"), "--service-cluster-ip-range", "10.77.0.0/24",
            "--service-account-issuer", "https://test", "--service-account-key-file", str(home / "sa.key"),
            "--service-account-signing-key-file", str(home / "sa.key"),
        ],
    ]  # fmt: skip
    for command in commands:
        with open(home / f"{Path(str(command[0])).name}.log", "wb") as log:
            process = subprocess.Popen([str(c) for c in command], stdout=log, stderr=log)
        atexit.register(_end, process)
    kubeconfig = home / "kubeconfig"
    kubeconfig.write_text(_KUBECONFIG.format(port=port, token=_TOKEN, authority=home / "certs/apiserver.crt"))
    deadline = time.monotonic() + START_S
    ask = [str(program("kubectl")), "--kubeconfig", str(kubeconfig), "--request-timeout=5s", "get", "--raw", "/readyz"]
    while True:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=START_S, check=False)
        if done.stdout.strip() == "ok":
            return kubeconfig
        if time.monotonic() > deadline:
            raise RuntimeError(f"the API server is not ready after {START_S:.0f} s: {done.stderr}; see {home}")
        time.sleep(0.3)


@functools.cache
def kubeconfig() -> Path:
    """Kubeconfig of the server, started if need be."""
    given = os.environ.get("DPI_TEST_KUBECONFIG")
    return Path(given) if given else _start()


HERE = bool(program("kubectl")) and (
    bool(os.environ.get("DPI_TEST_KUBECONFIG")) or bool(program("etcd") and program("kube-apiserver"))
)

needs_api_server = pytest.mark.skipif(
    not HERE, reason="needs kubectl with etcd and kube-apiserver (`make cluster` builds them), or DPI_TEST_KUBECONFIG"
)


def kubectl(*args: str, document: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    """One call of kubectl as an administrator; `document` goes to its input."""
    done = subprocess.run(
        [str(program("kubectl")), "--kubeconfig", str(kubeconfig()), "--request-timeout=60s", *args],
        input=document, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert not check or done.returncode == 0, done.stderr
    return done
