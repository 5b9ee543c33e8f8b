"""The name of a build: the same for the same sources, another for any change, and found without torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dpi_engine.config.build import PACKAGE, build, sources_digest


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "sub" / "b.c").write_text("int b;\n")
    (tmp_path / "built.so").write_text("machine code")
    return tmp_path


def test_the_same_sources_have_the_same_digest(package: Path) -> None:
    before = sources_digest(package)
    (package / "built.so").write_text("for another processor")
    assert sources_digest(package) == before


@pytest.mark.parametrize("change", ["content", "name", "more", "moved line"])
def test_any_change_of_a_source_changes_the_digest(package: Path, change: str) -> None:
    before = sources_digest(package)
    if change == "content":
        (package / "sub" / "b.c").write_text("int c;\n")
    elif change == "name":
        (package / "a.py").rename(package / "c.py")
    elif change == "more":
        (package / "empty.py").write_text("")
    else:
        (package / "a.py").write_text("")
        (package / "sub" / "b.c").write_text("x = 1\nint b;\n")
    assert sources_digest(package) != before


def test_a_build_says_version_sources_and_torch_and_loads_none_of_it() -> None:
    assert re.fullmatch(r"[^+]+\+[0-9a-f]{16}, torch \S+", build())
    code = "import sys; from dpi_engine.config.build import build; print(build()); sys.exit('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert (run.returncode, run.stdout.strip()) == (0, build())
