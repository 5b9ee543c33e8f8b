"""Writes the results of `run.py --peer` into docs/performance.md: a table between its marks, and the plots.

python benchmarks/docs.py [--results benchmarks/results/versus-peer-….json]      needs the extra `bench`
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "engine"), str(HERE.parent / "operator")]

from suite.page import PageError, newest, section, with_section  # noqa: E402
from suite.plots import draw_all  # noqa: E402

DOCS = HERE.parent / "docs"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="file of `run.py --peer` (default: the one measured last)")
    args = parser.parse_args()
    try:
        path = args.results or newest(HERE / "results")
        whole = json.loads(path.read_text())
        plots = draw_all(whole, DOCS / "images")
        page = DOCS / "performance.md"
        text = section(whole, path.relative_to(HERE.parent) if path.is_relative_to(HERE.parent) else path, plots)
        page.write_text(with_section(page.read_text(), text))
    except PageError as e:
        print(f"docs: {e}", file=sys.stderr)
        return 1
    print(f"{page}: {len(whole['rows'])} rows of {path.name}, plots {', '.join(plots) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
