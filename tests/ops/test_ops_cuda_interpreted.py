"""Runs tests/ops_cuda in Triton's interpreter, a process for each file: the kernels' own code, on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path.name for path in (ROOT / "tests" / "ops_cuda").glob("test_*.py"))


def test_there_are_files() -> None:
    assert len(FILES) >= 4


@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", FILES)
def test_in_the_interpreter(file: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("DPI_TEST_DEVICE", None)
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "engine"), str(ROOT / "operator"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/ops_cuda/{file}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert re.search(r"^[.]+ +\[100%\]$", done.stdout, re.MULTILINE), done.stdout[-2000:]
