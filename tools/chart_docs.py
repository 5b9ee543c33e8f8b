"""The parts of a chart that follow from its values.yaml: its schema, and the table in its README.

`python tools/chart_docs.py CHART...` writes CHART/values.schema.json and the table; `--check` only compares, and
`--table` leaves the schema alone.

In values.yaml a comment `# -- TEXT` documents the key below it (further comment lines continue it), and
`# @schema YAML` adds to its schema. A documented mapping is free of form; one without a comment is a section whose
keys are documented themselves, and no others are allowed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

BEGIN, END = "<!-- values: generated from values.yaml -->", "<!-- end of values -->"
_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z0-9_.-]+):")


class ValuesError(ValueError):
    """A values.yaml that does not follow the rules above."""


@dataclass(slots=True)
class Doc:
    """What comments say of one key."""

    text: str = ""
    schema: dict[str, Any] = field(default_factory=dict)


def comments(source: str) -> dict[str, Doc]:
    """Dotted path of each documented key -> what its comment says."""
    found: dict[str, Doc] = {}
    path: list[tuple[int, str]] = []
    doc: Doc | None = None
    for line in source.splitlines():
        text = line.strip()
        if text.startswith("# -- "):
            doc = Doc(text.removeprefix("# -- "))
        elif text.startswith("# @schema ") and doc:
            doc.schema |= yaml.safe_load(text.removeprefix("# @schema "))
        elif text.startswith("#") and doc:
            doc.text += " " + text.lstrip("# ")
        elif m := _KEY.match(line):
            depth = len(m["indent"])
            path = [*(p for p in path if p[0] < depth), (depth, m["key"])]
            if doc:
                found[".".join(key for _, key in path)] = doc
            doc = None
        else:
            doc = None
    return found


def leaves(values: Any, docs: dict[str, Doc], path: str = "") -> Iterator[tuple[str, Any]]:
    """Documented keys in their order. Raises ValuesError for a key that is neither documented nor a section."""
    for key, value in values.items():
        below = f"{path}.{key}".lstrip(".")
        if below in docs:
            yield below, value
        elif isinstance(value, dict) and value:
            yield from leaves(value, docs, below)
        else:
            raise ValuesError(f"{below}: no comment `# -- ` above it")


def schema(values: Any, docs: dict[str, Doc], path: str = "") -> dict[str, Any]:
    """JSON schema of the values."""
    names: dict[type, str] = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    if path in docs:
        doc = docs[path]
        return {"type": names[type(values)], "description": doc.text} | doc.schema
    below = {key: schema(value, docs, f"{path}.{key}".lstrip(".")) for key, value in values.items()}
    if not path:  # a parent chart's own
        below["global"] = {"type": "object"}
    return {"type": "object", "additionalProperties": False, "properties": below}


def table(values: Any, docs: dict[str, Doc]) -> str:
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for path, value in leaves(values, docs):
        shown = json.dumps(value, separators=(", ", ": ")).replace("|", "\\|")
        lines.append(f"| `{path}` | `{shown}` | {docs[path].text} |")
    return "\n".join(lines)


def render(chart: Path, with_schema: bool = True) -> dict[Path, str]:
    """The files as they ought to be, by path."""
    source = (chart / "values.yaml").read_text(encoding="utf-8")
    values, docs = yaml.safe_load(source), comments(source)
    readme = (chart / "README.md").read_text(encoding="utf-8")
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValuesError(f"{chart}/README.md: no `{BEGIN}` and `{END}` around the table")
    files = {chart / "README.md": f"{before}{BEGIN}\n\n{table(values, docs)}\n\n{END}{after}"}
    if with_schema:
        head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": f"Values of {chart.name}"}
        files[chart / "values.schema.json"] = json.dumps(head | schema(values, docs), indent=2) + "\n"
    return files


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("charts", nargs="+", type=Path, metavar="CHART")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file differs")
    parser.add_argument("--table", action="store_true", help="the table only")
    args = parser.parse_args(argv)
    stale = 0
    for chart in args.charts:
        for path, text in render(chart, not args.table).items():
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                stale += 1
                print(("differs: " if args.check else "written: ") + str(path))
                if not args.check:
                    path.write_text(text, encoding="utf-8")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
