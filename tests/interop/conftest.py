"""Beside a real vLLM: only with INTEROP=1, which `make interop` sets after it has built one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "process"))

from peer_vllm import PYTHON, VERSION, Vllm  # noqa: E402
from process_model import make_model  # noqa: E402
from process_moe import make_moe_model  # noqa: E402
from process_pods import Pod  # noqa: E402

WANTED = os.environ.get("INTEROP", "") not in ("", "0")
LIMIT_S = 1500


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.timeout(LIMIT_S))
        if not WANTED:
            item.add_marker(pytest.mark.skip(reason=f"needs a built vLLM {VERSION} and minutes: make interop"))


@pytest.fixture(scope="session")
def interop_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def interop_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_moe_model(tmp_path_factory.mktemp("mixture") / "moe")


@pytest.fixture(scope="session")
def interop_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def ours(interop_model: Path, interop_cache: Path) -> Callable[..., Pod]:
    """`ours(*args, **options)`: a launch of ours with vLLM's protocol, or another `protocol`; not started yet."""

    def make(*args: str, model: Path | None = None, protocol: str = "vllm", **options: Any) -> Pod:
        flags = (*args, "--data-parallel-protocol", protocol)
        return Pod(model or interop_model, *flags, cache=interop_cache, **options)

    return make


@pytest.fixture(scope="session")
def theirs(interop_model: Path) -> Callable[..., Vllm]:
    """`theirs(*args, **options)`: a launch of vLLM, not started yet."""
    if not PYTHON.exists():
        pytest.fail(f"no vLLM at {PYTHON}: run benchmarks/peer/setup.sh, or name its folder by DPI_PEER")

    def make(*args: str, model: Path | None = None, **options: Any) -> Vllm:
        return Vllm(model or interop_model, *args, **options)

    return make
