"""How a child process that holds a model ends: at once, with everything said and the exit code that it means."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from process_pods import PATIENCE, ROOT

SCRIPT = """
import atexit, logging, sys
from dpi_engine.launch import child
logging.basicConfig(stream=sys.stderr)
atexit.register(print, "the interpreter was taken down")
def main():
    print("said", end="")
    logging.getLogger("x").warning("logged")
    {end}
child.run(main)
"""


@pytest.mark.parametrize(
    ("end", "code", "word"),
    [("return 0", 0, ""), ("return 3", 3, ""), ("raise KeyError('lost')", 1, "KeyError: 'lost'")],
)
def test_it_says_everything_and_leaves_the_rest_to_the_kernel(end: str, code: int, word: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "engine"), "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", SCRIPT.format(end=end)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (code, "said")
    assert "logged" in done.stderr and word in done.stderr


def test_nobody_listening_is_no_other_end() -> None:
    """Its output goes to a pipe that is closed."""
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "engine"), "PYTHONUNBUFFERED": ""}
    try:
        command = [sys.executable, "-c", SCRIPT.format(end="return 5")]
        done = subprocess.run(command, env=environment, stdout=writing, stderr=writing, timeout=PATIENCE, check=False)
    finally:
        os.close(writing)
    assert done.returncode == 5
