"""How a child process that holds a model ends: at once, with everything said and the exit code that it means."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from process_pods import PATIENCE, ROOT

from dpi_engine.config.settings import Settings
from dpi_engine.launch import children, tensor_workers
from dpi_engine.launch.spec import ChildKind, ChildSpec

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


MODULES = [*children.MODULES.values(), tensor_workers.MODULE]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("damage", ["another's child", "cut off", "empty"])
def test_it_ends_when_whoever_started_it_is_gone(module: str, damage: str, tmp_path: Path) -> None:
    """A launcher killed before its child could ask to end with it; or before it had written the whole spec."""
    settings = Settings(model="m")
    kind = next((k for k, m in children.MODULES.items() if m == module), ChildKind.ENGINE)
    control = f"ipc://{tmp_path}/control"
    spec = ChildSpec(kind=kind, index=0, name="orphan", control=control, run_dir=str(tmp_path), settings=settings)
    assert os.getpid() != spec.parent
    text = {"another's child": msgspec.json.encode(spec), "cut off": msgspec.json.encode(spec)[:-1], "empty": b""}
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "engine")}
    command = [sys.executable, "-m", children.BEGIN, module]
    done = subprocess.run(command, env=environment, input=text[damage], capture_output=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert (b"DecodeError" in done.stderr) == (damage != "another's child"), done.stderr.decode()
