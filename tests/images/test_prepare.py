"""`python -m dpi_engine.tools.prepare`: afterwards an engine finds all in the folder and writes nothing there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpi_engine.config.sources import ModelFiles
from dpi_engine.models.registry import open_weights
from dpi_engine.models.weights import SafetensorsSource
from dpi_engine.tokenizer.spec import read_spec


def run(model: str, cache: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dpi_engine.tools.prepare", model, "--cache-dir", str(cache)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "engine"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)


def listing(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_prepared_folder_serves_the_weights_without_a_write(smollm2: ModelFiles, tmp_path: Path) -> None:
    done = run(str(smollm2.location), tmp_path)
    assert done.returncode == 0, done.stderr
    before = listing(tmp_path)
    assert any(path.suffix == ".safetensors" for path in before)
    source = open_weights(smollm2, read_spec(smollm2), tmp_path, lambda stage, fraction: None)
    assert isinstance(source, SafetensorsSource), "mapped from the folder, not dequantized again"
    source.close()
    assert listing(tmp_path) == before


def test_a_folder_that_cannot_be_written_is_an_error(smollm2: ModelFiles, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    done = run(str(smollm2.location), blocked)
    assert done.returncode == 1
    assert f"cannot be kept below {blocked}" in done.stderr


@pytest.mark.parametrize("model", ["/nowhere/model", "pypi:not a name"])
def test_a_model_that_is_not_there_is_named(model: str, tmp_path: Path) -> None:
    done = run(model, tmp_path)
    assert done.returncode == 1
    assert model in done.stderr
