"""`dpi render -f FILE`: what the operator would make of an object, without a cluster."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from dpi_engine.tools.arguments import filled


class RenderError(ValueError):
    """Nothing would be made; the message says why."""


def rendered(document: Mapping[str, Any], domain: str = "cluster.local") -> list[dict[str, Any]]:
    """Manifests that a first plan for the object would create, in order; the planner's own notes are left out.

    Raises RenderError with the message of the condition that is in the way.
    """
    from dpi_operator.plan.actions import Apply, Create
    from dpi_operator.plan.facts import Snapshot
    from dpi_operator.plan.names import A_APPLIED, state_config_map
    from dpi_operator.plan.reconcile import reconcile

    metadata = {"namespace": "default", **(document.get("metadata") or {})}
    plan = reconcile(Snapshot({**document, "metadata": metadata, "status": {}}), 0.0, domain)
    for condition in plan.status.conditions:
        if condition.type in ("Accepted", "ConfigConsistent") and condition.status == "False":
            raise RenderError(f"{condition.reason}: {condition.message}")
    found = []
    for action in plan.actions:
        if not isinstance(action, Apply | Create) or action.manifest["metadata"]["name"] == state_config_map(
            metadata["name"]
        ):
            continue
        own = dict(action.manifest["metadata"])
        annotations = {k: v for k, v in own.pop("annotations", {}).items() if k != A_APPLIED}
        if not metadata.get("uid"):
            own.pop("ownerReferences", None)
        found.append({**action.manifest, "metadata": own | ({"annotations": annotations} if annotations else {})})
    return found


class RenderCommand:
    name = "render"
    help = "print what the operator would make of a DataParallelInference, without a cluster"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "-f", "--filename", type=filled, required=True, metavar="FILE", help="manifest of one object"
        )
        parser.add_argument("--cluster-domain", default="cluster.local", help="DNS domain of the cluster")

    def run(self, args: argparse.Namespace) -> int:
        import yaml

        from dpi_operator.api.read import ManifestError, read_document, the_document

        class Plain(yaml.SafeDumper):
            def ignore_aliases(self, data: Any) -> bool:
                return True

        try:
            document = the_document(args.filename)
            read_document(document, args.filename)
            manifests = rendered(document, args.cluster_domain)
        except (ManifestError, RenderError) as e:
            print(f"dpi render: {e}", file=sys.stderr)
            return 2
        yaml.dump_all(manifests, sys.stdout, Dumper=Plain, sort_keys=False, width=120)
        return 0


COMMAND = RenderCommand()
