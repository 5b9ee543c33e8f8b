"""Results on disk: one JSON file per machine and kind of run, merged row by row, so that a run can be resumed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

VERSION = 1


class ResultsError(RuntimeError):
    """A results file cannot be used."""


class Results:
    """`machine`: description; `rows`: row key -> what `put` was given."""

    def __init__(self, path: Path | None, machine: dict[str, Any]) -> None:
        """Reads `path` if it is there. Raises ResultsError for another machine's or another version's file."""
        self.path = path
        self.machine = machine
        self.rows: dict[str, dict[str, Any]] = {}
        if path is None or not path.exists():
            return
        try:
            found = json.loads(path.read_text())
            version, processor = found["version"], found["machine"]["processor"]
            rows = found["rows"]
        except (ValueError, KeyError, TypeError) as e:
            raise ResultsError(f"{path}: not a results file ({e!r}); name another with --results") from e
        if version != VERSION:
            raise ResultsError(f"{path}: version {version}, expected {VERSION}; name another with --results")
        if processor != machine["processor"]:
            raise ResultsError(
                f"{path}: measured on {processor!r}, this is {machine['processor']!r}; name another with --results"
            )
        self.rows = rows

    def put(self, key: str, row: dict[str, Any]) -> None:
        """Keep one row, with the time and the load of the machine, and write the file."""
        self.rows[key] = {"measured": time.strftime("%Y-%m-%dT%H:%M:%S"), **row}
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        whole = {"version": VERSION, "machine": self.machine, "rows": self.rows}
        new.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n")
        os.replace(new, self.path)
