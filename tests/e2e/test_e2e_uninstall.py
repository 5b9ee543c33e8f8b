"""Uninstalling leaves nothing; the operator's absence holds up no deletion."""

from __future__ import annotations

import pytest
from e2e_cluster import Cluster, KubectlFailed
from e2e_install import NAMESPACE, Install
from e2e_service import Service, object_of

pytestmark = pytest.mark.timeout(5400)

CLUSTER_KINDS = (
    "clusterroles,clusterrolebindings,customresourcedefinitions,validatingwebhookconfigurations,priorityclasses"
)


def test_uninstalling_leaves_nothing_and_objects_can_be_deleted_without_the_operator(
    cluster: Cluster, operator: Install, namespace: str, engine_image: str
) -> None:
    document = object_of("orphan", engine_image, parallelism={"dataParallelSize": 1})
    cluster.apply(namespace, [document])
    service = Service(cluster, namespace, "orphan")
    cluster.wait("its pod", lambda: service.pods() or None, 30)
    operator.helm("uninstall", "dpi", "--namespace", NAMESPACE, "--wait", "--timeout", "90s")

    # The chart's CRD goes with it (crds.keep is false here), so all objects of it go, and with them what they own.
    def everything() -> list[str]:
        left = [
            f"{o['kind']}/{o['metadata']['name']}"
            for o in cluster.get(CLUSTER_KINDS)
            if "dpi" in o["metadata"]["name"] and "system:" not in o["metadata"]["name"]
        ]
        kinds = "pods,services,configmaps,networkpolicies,serviceaccounts,poddisruptionbudgets,leases"
        for where in (namespace, NAMESPACE):
            left += [
                f"{where}: {o['kind']}/{o['metadata']['name']}"
                for o in cluster.get(kinds, "--namespace", where)
                if o["metadata"]["name"] not in ("kube-root-ca.crt", "default", "client")
            ]
        return left

    try:
        cluster.wait("nothing is left", lambda: not everything(), 120)
    except AssertionError as error:
        raise AssertionError(f"{error}; left: {everything()}") from error
    # kubectl words it by what it remembers of the server's kinds.
    with pytest.raises(KubectlFailed, match=r"doesn't have a resource type|could not find the requested resource"):
        cluster.get("dpi", "--namespace", namespace)
