"""The operator's chart on a real API server: what it installs, upgrades and leaves, and whom its roles let do what."""

import base64
import itertools
import json
import os
import subprocess
import sys

import pytest
from chart_render import HELM, OPERATOR, needs_helm

from api_server import kubeconfig, kubectl, needs_api_server
from dpi_operator.api.crd import NAME
from dpi_operator.apply.kinds import KINDS

pytestmark = [needs_helm, needs_api_server]

SPACE = "dpi-chart-test"
ACCOUNT = f"system:serviceaccount:{SPACE}:rel-dpi-operator"


def helm(*args):
    done = subprocess.run(
        [str(HELM), *args, "--namespace", SPACE, "--kubeconfig", str(kubeconfig())],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def may(verb, resource, sub="", name="", namespace=SPACE):
    """Whether the operator's account may do this."""
    attributes = {"verb": verb, "resource": resource[1], "group": resource[0], "namespace": namespace}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": ACCOUNT,
            "groups": ["system:serviceaccounts", f"system:serviceaccounts:{SPACE}", "system:authenticated"],
            "resourceAttributes": attributes | {"subresource": sub, "name": name},
        },
    }
    answer = kubectl("create", "-o", "json", "-f", "-", document=json.dumps(review)).stdout
    return json.loads(answer)["status"]["allowed"]


@pytest.fixture(scope="module", autouse=True)
def space():
    for name in (SPACE, f"{SPACE}-b"):
        kubectl("create", "namespace", name)
    yield
    for name in (SPACE, f"{SPACE}-b"):
        kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def installed(request):
    helm("install", "rel", str(OPERATOR), "--take-ownership", *getattr(request, "param", ()))
    yield
    helm("uninstall", "rel")


def test_a_crd_that_is_kept_outlives_the_release_and_an_upgrade_renews_it():
    helm("install", "rel", str(OPERATOR), "--take-ownership")
    try:
        broken = [{"op": "remove", "path": "/spec/versions/0/additionalPrinterColumns"}]
        kubectl("patch", "crd", NAME, "--type=json", "-p", json.dumps(broken))
        helm("upgrade", "rel", str(OPERATOR), "--force-conflicts")
        crd = json.loads(kubectl("get", "crd", NAME, "-o", "json").stdout)
        assert crd["spec"]["versions"][0]["additionalPrinterColumns"]
    finally:
        helm("uninstall", "rel")
    kubectl("get", "crd", NAME)
    left = kubectl(
        "get", "clusterroles,clusterrolebindings", "-l", "app.kubernetes.io/instance=rel", "-o", "name"
    ).stdout
    assert left == ""


def test_the_operator_may_do_all_that_its_code_does(installed):
    for kind in KINDS.values():
        name = "rel-dpi-operator" if kind.name == "Lease" else ""
        for verb in kind.verbs:
            assert may(verb, (kind.group, kind.plural), name="" if verb == "create" else name), (verb, kind.plural)
        for sub, verbs in kind.subresources:
            for verb in verbs:
                assert may(verb, (kind.group, kind.plural), sub), (verb, kind.plural, sub)


def test_the_operator_may_not_do_more(installed):
    for resource, verb in itertools.product(
        [("", "secrets"), ("", "nodes"), ("apps", "deployments"), ("rbac.authorization.k8s.io", "roles")],
        ["get", "list", "create", "patch", "delete"],
    ):
        assert not may(verb, resource), (verb, resource)
    assert not may("create", ("", "pods"), "exec")
    assert not may("delete", ("dpinference.dev", "dataparallelinferences"))
    assert not may("update", ("coordination.k8s.io", "leases"), name="another")
    assert not may("get", ("coordination.k8s.io", "leases"), name="rel-dpi-operator", namespace=f"{SPACE}-b")


@pytest.mark.parametrize(
    "installed", [("--set", "watch.scope=namespaces", "--set", f"watch.namespaces={{{SPACE}}}")], indirect=True
)
def test_a_scoped_operator_may_act_in_its_namespaces_only(installed):
    assert may("create", ("", "pods"))
    assert not may("create", ("", "pods"), namespace=f"{SPACE}-b")
    assert not may("list", ("dpinference.dev", "dataparallelinferences"), namespace="")


def test_helm_test_finds_the_crd_and_its_rules(installed, tmp_path):
    """The script that `helm test` runs in a pod, run here as that pod's account."""
    kubectl(
        "create", "clusterrolebinding", "dpi-chart-test", "--clusterrole=rel-dpi-operator-edit", f"--user={ACCOUNT}"
    )
    try:
        (cluster,) = json.loads(kubectl("config", "view", "--raw", "--flatten", "--minify", "-o", "json").stdout)[
            "clusters"
        ]
        host, _, port = cluster["cluster"]["server"].removeprefix("https://").rpartition(":")
        (tmp_path / "token").write_text(kubectl("create", "token", "rel-dpi-operator", "-n", SPACE).stdout)
        (tmp_path / "namespace").write_text(SPACE)
        (tmp_path / "ca.crt").write_bytes(base64.b64decode(cluster["cluster"]["certificate-authority-data"]))
        call = f"import test_install as t; t.ACCOUNT = {str(tmp_path)!r}; raise SystemExit(t.main())"
        environment = os.environ | {"KUBERNETES_SERVICE_HOST": host.strip("[]"), "KUBERNETES_SERVICE_PORT": port}
        environment |= {"PYTHONPATH": str(OPERATOR / "files"), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, "-c", call], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("ok ") == 2
    finally:
        kubectl("delete", "clusterrolebinding", "dpi-chart-test")
