"""`python -m dpi_engine.launch.begin MODULE`: a child process of a launch or a rank, whose life is MODULE's `main`."""

from __future__ import annotations

import importlib
import sys

from dpi_engine import collector


def begin() -> None:
    with collector.paused():
        module = importlib.import_module(sys.argv[1])
        from dpi_engine.launch import child
    child.run(module.main)


if __name__ == "__main__":
    begin()
