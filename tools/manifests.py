"""Writes what is made from other files: the CRD, schemas and READMEs of charts, reference pages, install.yaml.

`python tools/manifests.py` writes, `--check` only compares. install.yaml needs `helm` in PATH, or HELM naming it;
without one it is left as it is and that is said.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "engine"), str(ROOT / "operator"), str(ROOT / "tools")]

import chart_docs  # noqa: E402
import object_reference  # noqa: E402
import operator_metrics  # noqa: E402

from dpi_operator.api.crd import manifest_yaml, open_api_schema  # noqa: E402

NAMESPACE = "dpi-system"
INSTALL = "manifests/install.yaml"
HEADER = f"""# The operator in namespace {NAMESPACE}, made from charts/dpi-operator by `make manifests`.
# kubectl apply --server-side -f {INSTALL}
"""
_HELMS_OWN = ("app.kubernetes.io/managed-by: Helm", "helm.sh/chart:", "# Source:")


def plain_schema(schema: Any) -> Any:
    """A structural schema as JSON schema: without extensions and defaults, objects closed unless they are open."""
    if isinstance(schema, list):
        return [plain_schema(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {k: plain_schema(v) for k, v in schema.items() if k not in ("default", "format", "nullable", "properties")}
    plain = {k: v for k, v in plain.items() if not k.startswith("x-kubernetes-")}
    if "properties" in schema:
        plain["properties"] = {k: plain_schema(v) for k, v in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            plain["additionalProperties"] = False
    if schema.get("nullable"):
        plain["type"] = [plain["type"], "null"]
    return plain


def values_schema() -> dict[str, Any]:
    """Schema of charts/dpi's values: the fields of spec and the chart's own."""
    spec = plain_schema(open_api_schema()["properties"]["spec"])
    image = spec["properties"]["engine"]["properties"]["image"]
    image.pop("minLength")  # the chart has a default
    spec["properties"]["engine"].pop("required")
    spec["properties"]["replicas"]["type"] = ["integer", "null"]
    text_map = {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}
    own = {
        "fullnameOverride": {"type": "string", "pattern": "^([a-z]([-a-z0-9]*[a-z0-9])?)?$", "maxLength": 40},
        "labels": text_map,
        "annotations": text_map,
        "global": {"type": "object"},
    }
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of dpi"}
    return head | spec | {"required": ["model"], "properties": own | spec["properties"]}


def helm() -> str | None:
    """Path of Helm, None where there is none."""
    return os.environ.get("HELM") or shutil.which("helm")


def install_yaml(program: str) -> str:
    """The chart with its defaults as one file that kubectl applies."""
    done = subprocess.run(
        [
            program, "template", "dpi-operator", str(ROOT / "charts/dpi-operator"), "--namespace", NAMESPACE,
            "--skip-tests", "--set", "crds.keep=false",
        ],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"helm template failed: {done.stderr.strip()}")
    lines = [line for line in done.stdout.splitlines() if not line.strip().startswith(_HELMS_OWN)]
    space = (
        f"---\napiVersion: v1\nkind: Namespace\nmetadata:\n  name: {NAMESPACE}\n  labels:\n"
        "    pod-security.kubernetes.io/enforce: restricted\n"
    )
    return HEADER + space + "\n".join(lines).strip() + "\n"


def files() -> dict[Path, str]:
    """All of them as they ought to be."""
    return {
        ROOT / "manifests/crd.yaml": manifest_yaml(),
        ROOT / "charts/dpi-operator/files/crd.yaml": manifest_yaml(),
        ROOT / "charts/dpi/values.schema.json": json.dumps(values_schema(), indent=1) + "\n",
        ROOT / "docs/reference/status.md": object_reference.status_page(),
        ROOT / "docs/reference/charts.md": object_reference.charts_page(),
        ROOT / "docs/reference/operator-metrics.md": operator_metrics.page(),
        **chart_docs.render(ROOT / "charts/dpi-operator"),
        **chart_docs.render(ROOT / "charts/dpi", with_schema=False),
    }


def stale(made: dict[Path, str]) -> list[Path]:
    return [p for p, text in made.items() if not p.exists() or p.read_text(encoding="utf-8") != text]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file differs")
    args = parser.parse_args(argv)
    different = 0

    def settle(made: dict[Path, str]) -> None:
        nonlocal different
        for path in stale(made):
            different += 1
            print(("differs: " if args.check else "written: ") + str(path.relative_to(ROOT)))
            if not args.check:
                path.write_text(made[path], encoding="utf-8")

    settle(files())  # first, since the install file is made from the chart
    if program := helm():
        settle({ROOT / INSTALL: install_yaml(program)})
    else:
        print(f"not looked at, since there is no helm: {INSTALL}", file=sys.stderr)
    return 1 if args.check and different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
