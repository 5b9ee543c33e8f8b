"""`dpi rollback NAME`: give an object of the cluster the pods of an earlier revision again."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from dpi_operator.local.names import object_name

MANAGER = "dpi-rollback"
"""Field manager of the change, so that it is told from what others wrote."""


class RollbackCommand:
    name = "rollback"
    help = "go back to an earlier revision of a DataParallelInference of the cluster"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("object", metavar="NAME", type=object_name, help="name of the object")
        parser.add_argument("-n", "--namespace", default="", metavar="NS", help="its namespace (the context's)")
        parser.add_argument(
            "--to-revision",
            default="",
            metavar="N",
            help="number or hash of the revision, as `dpi status` lists them (the newest that is not in force)",
        )
        parser.add_argument("--dry-run", action="store_true", help="only print what would change")

    def run(self, args: argparse.Namespace) -> int:
        import asyncio

        return asyncio.run(_roll_back(args.namespace, args.object, args.to_revision, args.dry_run))


async def _roll_back(namespace: str, name: str, to: str, dry_run: bool) -> int:
    from dpi_operator.api.read import ManifestError
    from dpi_operator.api.types import KIND
    from dpi_operator.apply.client import Api, ApiError
    from dpi_operator.plan.history import NoSuchRevision

    try:
        api = await Api.connect()
        namespace = namespace or api.namespace
        try:
            document = await api.get(KIND, namespace, name)
            if document is None:
                print(f"dpi rollback: there is no {KIND} {namespace}/{name}", file=sys.stderr)
                return 1
            return await _change(api, document, to, dry_run)
        finally:
            await api.close()
    except (ApiError, ManifestError, NoSuchRevision) as e:
        print(f"dpi rollback: {e}", file=sys.stderr)
        return 1


async def _change(api: Any, document: dict[str, Any], to: str, dry_run: bool) -> int:
    from dpi_operator.api.read import read_document
    from dpi_operator.api.types import KIND
    from dpi_operator.plan.history import changes, choose, past_revisions, patch_to
    from dpi_operator.plan.names import child_selector

    metadata = document["metadata"]
    namespace, name = metadata["namespace"], metadata["name"]
    dpi = read_document(document, f"{namespace}/{name}")
    owned = [
        r
        for r in await api.list_all("ControllerRevision", namespace, child_selector(name))
        if any(o.get("uid") == metadata["uid"] for o in r["metadata"].get("ownerReferences") or ())
    ]
    target = choose(past_revisions(owned), dpi.spec, to)
    patch = patch_to(dpi.spec, target.fields)
    if not patch:
        print(f"{namespace}/{name} is at revision {target} already")
        return 0
    for line in changes(patch, document["spec"]):
        print(line)
    if dry_run:
        print(f"{namespace}/{name} would go back to revision {target}")
        return 0
    # A change made since the object was read is not to be overwritten: then the API answers with a conflict.
    body = {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "spec": patch}
    await api.merge(KIND, namespace, name, body, manager=MANAGER)
    print(f"{namespace}/{name} goes back to revision {target}; `dpi status {name} -n {namespace}` shows how far it is")
    if dpi.spec.paused:
        print(
            "spec.paused is true: groups keep their revision until it is false, and lost ranks come back as they were"
        )
    return 0


COMMAND = RollbackCommand()
