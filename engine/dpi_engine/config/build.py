"""Which build of the engine this is: ranks that compute one step together must all be of one."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
SUFFIXES = (".py", ".c", ".h")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def sources_digest(package: Path) -> str:
    """SHA-256 over names and bytes of all source files below `package`, 16 hex digits."""
    total = hashlib.sha256()
    for path in sorted(p for p in package.rglob("*") if p.suffix in SUFFIXES):
        data = path.read_bytes()
        total.update(f"{path.relative_to(package).as_posix()}\0{len(data)}\0".encode())
        total.update(data)
    return total.hexdigest()[:16]


@functools.cache
def build() -> str:
    """Version, digest of the sources, and version of torch. The same on every kind of processor; imports no torch."""
    return f"{_version('dpinference')}+{sources_digest(PACKAGE)}, torch {_version('torch')}"
