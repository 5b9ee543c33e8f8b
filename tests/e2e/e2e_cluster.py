"""A cluster as tests see it: kubectl, waiting with a deadline, evidence after a failure."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tests" / "cluster"
STATE = Path(os.environ.get("CLUSTER_STATE", "/var/lib/dpi-cluster"))
CACHED_PROGRAMS = Path(os.environ.get("DPI_TEST_CACHE", Path.home() / ".cache" / "dpinference")) / "k8s" / "bin"


class KubectlFailed(AssertionError):
    """kubectl ended with an error; the message holds the command and what it said."""


class NotInTime(AssertionError):
    """What was waited for did not come before its deadline; the message says what was seen last."""


def program(name: str) -> str | None:
    """Path of a cluster program: the one built for the local cluster, else the one in PATH."""
    return shutil.which(str(CACHED_PROGRAMS / name)) or shutil.which(name)


@dataclass(frozen=True)
class Cluster:
    """A cluster by its kubeconfig. `local`: the one of tests/cluster, whose parts and nodes tests may stop."""

    kubeconfig: Path
    binary: str
    local: bool

    def kubectl(self, *args: str, stdin: str | None = None, timeout_s: float = 60) -> str:
        """Standard output of `kubectl ARGS`. Raises KubectlFailed."""
        command = [self.binary, "--kubeconfig", str(self.kubeconfig), *args]
        try:
            done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise KubectlFailed(f"kubectl {' '.join(args)}: no end after {timeout_s:.0f} s") from error
        if done.returncode != 0:
            raise KubectlFailed(f"kubectl {' '.join(args)}: exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
        return done.stdout

    def get(self, *args: str) -> Any:
        """`kubectl get ARGS` as an object; a list kind gives its items."""
        document = json.loads(self.kubectl("get", *args, "-o", "json"))
        return document["items"] if document.get("kind", "").endswith("List") else document

    def apply(self, namespace: str, objects: Sequence[dict[str, Any]]) -> None:
        """Apply manifests in `namespace`."""
        document = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        self.kubectl("apply", "--namespace", namespace, "-f", "-", stdin=document)

    def exec(self, namespace: str, pod: str, *command: str, timeout_s: float = 60) -> str:
        """Standard output of `command` in `pod`."""
        return self.kubectl("exec", "--namespace", namespace, pod, "--", *command, timeout_s=timeout_s)

    def wait(self, what: str, look: Callable[[], T | None], deadline_s: float) -> T:
        """The first true answer of `look`, asked with growing pauses. Raises NotInTime with the last complaint."""
        end, pause, said = time.monotonic() + deadline_s, 0.2, "nothing"
        while True:
            try:
                if found := look():
                    return found
            except KubectlFailed as error:
                said = str(error)
            if time.monotonic() + pause > end:
                raise NotInTime(f"{what}: not so after {deadline_s:.0f} s; kubectl complained last: {said}")
            time.sleep(pause)
            pause = min(pause * 1.5, 1.0)

    def wait_ready(self, namespace: str, *pods: str, deadline_s: float) -> None:
        """All of `pods` are Ready. A pod that has ended or cannot start its container ends the wait at once."""

        def look() -> bool:
            documents = [self.get("pod", pod, "--namespace", namespace) for pod in pods]
            for document in documents:
                if trouble := pod_trouble(document):
                    raise AssertionError(f"pod {document['metadata']['name']} will not become Ready: {trouble}")
            return all(is_ready(document) for document in documents)

        self.wait(f"pods {', '.join(pods)} Ready", look, deadline_s)

    def evidence(self, namespace: str, folder: Path) -> Path:
        """Write what explains a failure in `namespace` into `folder`: objects, events, descriptions, all logs."""
        folder.mkdir(parents=True, exist_ok=True)

        def keep(name: str, *args: str) -> None:
            try:
                text = self.kubectl(*args, timeout_s=20)
            except KubectlFailed as error:
                text = str(error)
            (folder / name).write_text(text)

        inside = ("--namespace", namespace)
        keep("nodes.txt", "get", "nodes", "-o", "wide")
        keep("objects.yaml", "get", "all,endpointslices,configmaps", *inside, "-o", "yaml")
        keep("pods.txt", "get", "pods", *inside, "-o", "wide")
        keep("describe.txt", "describe", "pods,services", *inside)
        keep("events.txt", "get", "events", *inside, "--sort-by=.metadata.creationTimestamp")
        try:
            pods = [p["metadata"]["name"] for p in self.get("pods", *inside)]
        except KubectlFailed:
            pods = []
        for pod in pods:
            keep(f"{pod}.log", "logs", pod, *inside, "--all-containers", "--tail=2000", "--timestamps")
            keep(f"{pod}.previous.log", "logs", pod, *inside, "--all-containers", "--previous", "--tail=2000")
        return folder


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def pod_trouble(pod: dict[str, Any]) -> str | None:
    """Why a pod will not become Ready by waiting, or None."""
    status = pod.get("status", {})
    if status.get("phase") in ("Failed", "Succeeded"):
        return f"it ended ({status['phase']}): {status.get('message', '')}"
    for container in status.get("containerStatuses", []):
        waiting = container["state"].get("waiting", {})
        if waiting.get("reason") in (
            "ErrImageNeverPull",
            "InvalidImageName",
            "CreateContainerConfigError",
            "CreateContainerError",
        ):
            return f"{waiting['reason']}: {waiting.get('message', '')}"
        if last := container.get("lastState", {}).get("terminated"):
            code, reason = last["exitCode"], last.get("reason")
            return f"container {container['name']} ended with exit code {code} ({reason}): {last.get('message', '')}"
    return None
