"""Rendering charts with Helm, and judging what comes out."""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from dpi_operator.api.crd import manifest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))  # before the folder `manifests`, which has a tool's name
OPERATOR, ONE = ROOT / "charts/dpi-operator", ROOT / "charts/dpi"
CACHED = Path.home() / ".cache/dpinference/k8s/bin/helm"
HELM = os.environ.get("HELM") or shutil.which("helm") or (str(CACHED) if CACHED.exists() else None)
KUBERNETES = ("1.30", kubernetes_validate.latest_version())
"""The oldest version that the charts allow, and the newest known."""

needs_helm = pytest.mark.skipif(HELM is None, reason="needs helm: in PATH, named by HELM, or built by `make cluster`")


def helm(*args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    assert HELM
    done = subprocess.run([HELM, *args], capture_output=True, text=True, timeout=60, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done


@functools.cache
def _rendered(chart: Path, values: str, flags: tuple[str, ...]) -> str:
    done = subprocess.run(
        [str(HELM), "template", "rel", str(chart), "--namespace", "sys", "--values", "-", *flags],
        input=values, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(chart: Path, values: dict[str, Any] | None = None, *flags: str) -> list[dict[str, Any]]:
    """All objects of a chart as release `rel` in namespace `sys`."""
    text = _rendered(chart, json.dumps(values or {}), flags)
    return [d for d in yaml.safe_load_all(text) if d]


def refusal(chart: Path, values: dict[str, Any]) -> str:
    """Why Helm refuses these values."""
    done = subprocess.run(
        [str(HELM), "template", "rel", str(chart), "--values", "-"],
        input=json.dumps(values), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0, "not refused"
    return done.stderr


def one(objects: list[dict[str, Any]], kind: str, name: str | None = None) -> dict[str, Any]:
    found = [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]
    assert len(found) == 1, [(o["kind"], o["metadata"]["name"]) for o in objects]
    return found[0]


OTHERS = {"ServiceMonitor", "PodMonitor", "PrometheusRule", "ScaledObject", "Certificate", "Issuer"}
"""Kinds of CRDs that are not Kubernetes' own, whose schemas are not at hand."""


def check_object(document: dict[str, Any]) -> None:
    """Against the schemas of Kubernetes, strictly: an unknown field is an error."""
    if document["kind"] == "DataParallelInference":
        jsonschema.validate(document, manifest()["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    elif document["kind"] not in OTHERS:
        for version in KUBERNETES:
            kubernetes_validate.validate(document, version, strict=True)
