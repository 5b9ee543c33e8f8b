"""The operator as a platform engineer installs it: Helm, the chart of this repository, default values but the image."""

from __future__ import annotations

import subprocess
import uuid
from dataclasses import dataclass
from typing import Any

from e2e_cluster import ROOT, Cluster, KubectlFailed

CHART = ROOT / "charts" / "dpi-operator"
NAMESPACE = "dpi-system"
RELEASE = "dpi"
DEPLOYMENT = "dpi-dpi-operator"
SELECTOR = "app.kubernetes.io/instance=dpi,app.kubernetes.io/name=dpi-operator"


@dataclass(frozen=True)
class Install:
    """One release of the chart. Two operators, so that one can go."""

    cluster: Cluster
    binary: str
    image: str

    def helm(self, *args: str, timeout_s: float = 180) -> str:
        """Standard output of `helm ARGS`. Raises AssertionError with what it said."""
        command = [self.binary, "--kubeconfig", str(self.cluster.kubeconfig), *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0, f"helm {' '.join(args)}: exit code {done.returncode}: {done.stderr[-3000:]}"
        return done.stdout

    def install(self, *settings: str) -> None:
        """Install or upgrade, and wait until the operators are ready."""
        repository, _, tag = self.image.rpartition(":")
        self.helm(
            "upgrade",
            "--install",
            RELEASE,
            str(CHART),
            "--namespace",
            NAMESPACE,
            "--create-namespace",
            "--wait",
            "--timeout",
            "120s",
            "--set",
            f"image.repository={repository},image.tag={tag},replicaCount=2,crds.keep=false",
            # An image of the same name may be another one: new pods in any case.
            "--set-string",
            f"podAnnotations.e2e={uuid.uuid4().hex[:8]}",
            *(part for setting in settings for part in ("--set", setting)),
        )

    def there(self) -> bool:
        return any(r == RELEASE for r in self.helm("list", "--namespace", NAMESPACE, "--short").split())

    def install_if_gone(self) -> None:
        if not self.there():
            self.install()

    def uninstall(self) -> None:
        """Remove the release and its namespace; nothing to do where there is none."""
        if self.there():
            self.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--timeout", "90s")
        try:
            self.cluster.kubectl("delete", "namespace", NAMESPACE, "--timeout=90s", timeout_s=100)
        except KubectlFailed as error:
            if "NotFound" not in str(error):
                raise

    def pods(self) -> list[dict[str, Any]]:
        return self.cluster.get("pods", "--namespace", NAMESPACE, "-l", SELECTOR)

    def active(self) -> str:
        """Name of the pod that holds the lease."""
        lease = self.cluster.get("lease", DEPLOYMENT, "--namespace", NAMESPACE)
        holder = lease["spec"].get("holderIdentity") or ""
        found = [p["metadata"]["name"] for p in self.pods() if holder.startswith(p["metadata"]["name"])]
        assert len(found) == 1, f"the lease's holder {holder!r} is none of the operator's pods"
        return found[0]

    def kill_active(self) -> str:
        """Delete the active operator without grace, as the loss of its node would; its name."""
        name = self.active()
        self.cluster.kubectl("delete", "pod", name, "--namespace", NAMESPACE, "--grace-period=0", "--force")
        return name

    def logs(self) -> str:
        return "\n".join(
            self.cluster.kubectl("logs", p["metadata"]["name"], "--namespace", NAMESPACE, "--tail=500")
            for p in self.pods()
        )
