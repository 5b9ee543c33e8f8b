"""The cluster, the images and a namespace of its own for every test.

E2E=1 makes what is missing (`make cluster`, `make images`) in place of skipping. With E2E=1 and KUBECONFIG set, that
cluster is used: bring the images there and name them by E2E_ENGINE_IMAGE (with the model in it) and E2E_OPERATOR_IMAGE.
A KUBECONFIG without E2E=1 is left alone, so that a test run never touches a cluster by accident.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_cluster import ROOT, STATE, TOOLS, Cluster, KubectlFailed, program
from e2e_install import Install
from e2e_service import Client

WANTED = os.environ.get("E2E", "") not in ("", "0")
EVIDENCE = Path(os.environ.get("E2E_EVIDENCE", ROOT / "build" / "e2e"))
VERSION = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]  # type: ignore[index]
FAILED = pytest.StashKey[bool]()
BUILD_S = 5400


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
        if item.parent is not None:
            item.parent.stash[FAILED] = True
    return report


def _need(reason: str) -> None:
    """Skip with the reason, or fail with it where the end-to-end tests were asked for."""
    if WANTED:
        pytest.fail(reason)
    pytest.skip(f"{reason} (E2E=1 makes it)")


def _make(target: str) -> None:
    done = subprocess.run(["make", target], cwd=ROOT, capture_output=True, text=True, timeout=BUILD_S)
    if done.returncode != 0:
        pytest.fail(f"`make {target}` failed: {(done.stdout + done.stderr)[-3000:]}")


@contextlib.contextmanager
def alone(kubeconfig: Path) -> Iterator[None]:
    """One run at a time on a cluster: tests stop its API server and its nodes."""
    name = hashlib.sha256(str(kubeconfig.resolve()).encode()).hexdigest()[:16]
    with (Path(tempfile.gettempdir()) / f"dpi-e2e-{os.getuid()}-{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _need(f"other end-to-end tests of this machine use the cluster of {kubeconfig} ({lock.name} is locked)")
        yield


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    given = os.environ.get("KUBECONFIG")
    if WANTED and given:
        kubeconfig, local = Path(given), Path(given) == STATE / "admin.conf"
    else:
        kubeconfig, local = STATE / "admin.conf", True
        if not kubeconfig.exists():
            if not WANTED:
                pytest.skip("no cluster of tests/cluster is up (`make cluster`, or E2E=1, brings it up)")
            _make("cluster")
    binary = program("kubectl")
    if binary is None:
        _need("no kubectl in the cache or in PATH")
        raise AssertionError
    found = Cluster(kubeconfig, binary, local)
    with alone(kubeconfig):
        try:
            found.kubectl("get", "--raw", "/readyz", timeout_s=20)
        except KubectlFailed as error:
            _need(f"the cluster of {kubeconfig} does not answer: {error}")
        yield found


def _image(cluster: Cluster, variable: str, name: str) -> str:
    """The image to use; on the local cluster it is loaded, and built first where E2E=1 and there is none."""
    image = os.environ.get(variable)
    if not cluster.local:
        if not image:
            pytest.fail(f"{variable}: set it to an image that the nodes of {cluster.kubeconfig} can pull")
        return image
    image = image or f"dpinference/{name}:{VERSION}"
    store = {**os.environ, "STORAGE_DRIVER": os.environ.get("STORAGE_DRIVER", "overlay")}
    there = ["buildah", "inspect", "--type", "image", image]
    if subprocess.run(there, capture_output=True, env=store).returncode != 0:
        if not WANTED:
            pytest.skip(f"no image {image} (`make images`, or E2E=1, builds it)")
        _make("images")
    done = subprocess.run([str(TOOLS / "load"), image], capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        pytest.fail(f"loading {image} failed: {(done.stdout + done.stderr)[-2000:]}")
    return image


@pytest.fixture(scope="session")
def operator_image(cluster: Cluster) -> str:
    return _image(cluster, "E2E_OPERATOR_IMAGE", "operator")


@pytest.fixture(scope="session")
def engine_image(cluster: Cluster) -> str:
    """The engine with SmolLM2 in it."""
    return _image(cluster, "E2E_ENGINE_IMAGE", "engine-smollm2")


@pytest.fixture(scope="session")
def install(cluster: Cluster, operator_image: str) -> Iterator[Install]:
    """The operator in the cluster, by its chart. Gone at the end, unless the test run found it there."""
    helm = program("helm")
    if helm is None:
        _need("no helm in the cache or in PATH")
        raise AssertionError
    installed = Install(cluster, helm, operator_image)
    installed.install()
    yield installed
    if os.environ.get("E2E_KEEP", "") in ("", "0"):
        installed.uninstall()


@pytest.fixture
def operator(install: Install) -> Install:
    """The operator runs, whatever the test before did to it."""
    install.install_if_gone()
    return install


@contextlib.contextmanager
def _namespace(cluster: Cluster, node: pytest.Item | pytest.Collector) -> Iterator[str]:
    """A namespace, gone afterwards. After a failure what explains it is kept in build/e2e."""
    name = f"e2e-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    yield name
    if node.stash.get(FAILED, False):
        folder = cluster.evidence(name, EVIDENCE / re.sub(r"\W+", "-", node.name))
        print(f"objects, events and logs: {folder}")
    # Pods first: a namespace's own deletion has long pauses in it, and what still ends would slow the next test down.
    with contextlib.suppress(KubectlFailed):  # the CRD may be gone
        cluster.kubectl("delete", "dpi", "--all", "--namespace", name, "--timeout=60s", timeout_s=70)
    cluster.kubectl("delete", "pods", "--all", "--namespace", name, "--timeout=90s", timeout_s=100)
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the test's own."""
    with _namespace(cluster, request.node) as name:
        yield name


@pytest.fixture(scope="module")
def shared_namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace for the tests of one file, which build on each other."""
    with _namespace(cluster, request.node) as name:
        yield name


def _client(cluster: Cluster, namespace: str, image: str) -> Client:
    cluster.apply(namespace, [client_pod_of("client", image)])
    cluster.wait_ready(namespace, "client", deadline_s=60)
    return Client(cluster, namespace)


@pytest.fixture
def client(cluster: Cluster, namespace: str, operator_image: str) -> Client:
    """A pod that sends requests."""
    return _client(cluster, namespace, operator_image)


@pytest.fixture(scope="module")
def shared_client(cluster: Cluster, shared_namespace: str, operator_image: str) -> Client:
    """A pod that sends requests, for the tests of one file."""
    return _client(cluster, shared_namespace, operator_image)


def client_pod_of(name: str, image: str) -> dict[str, Any]:
    python = {
        "name": "python",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "infinity"],
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "containers": [python],
        },
    }


@pytest.fixture
def client_pod(client: Client) -> Callable[..., str]:
    """Runs Python source in a pod of the test's namespace, as a user of the endpoint would; gives its output."""
    return client.python
