"""The tiny model and the cache that all processes of a test run share."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from process_group import TOKEN, Group
from process_model import make_model
from process_pods import LIVE, Pod, kernels

from dpi_engine.config.sources import default_cache_dir


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A pod that several tests share shows its log at its own end, and then only if the fault is there still."""
    report = yield
    if report.failed and report.when != "teardown":
        for pod in sorted(LIVE, key=lambda pod: pod.name):
            report.sections.append((f"log of {pod.name}, running: {pod.running}", pod.log[-8000:]))
    return report


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def process_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of its own for each test process but for the kernels, which are built once for all."""
    cache = tmp_path_factory.mktemp("cache")
    kernels()
    (cache / "native").symlink_to(default_cache_dir(os.environ, Path.home()) / "native")
    return cache


@pytest.fixture(scope="session")
def make_pod(tiny_model: Path, process_cache: Path) -> Callable[..., Pod]:
    """`make_pod(*args, **options)`: a Pod of the tiny model, not started yet."""

    def make(*args: str, model: Path | None = None, **options: Any) -> Pod:
        return Pod(model or tiny_model, *args, cache=process_cache, **options)

    return make


@pytest.fixture(scope="session")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Opens the calls by which a test makes ranks stand still."""
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(TOKEN + "\n")
    return str(file)


@pytest.fixture(scope="session")
def running_group(make_pod: Callable[..., Pod], token_file: str) -> Iterator[Group]:
    shared = ("-dp", "4", "-dpl", "2", "--max-num-batched-tokens", "256")
    head = make_pod(*shared, "--api-server-count", "2", "--management-token-file", token_file, wait=False)
    with head, make_pod(*shared, "-dpr", "2", head=head) as headless:
        head.until_ready()
        yield Group(head, headless)


@pytest.fixture
def group(running_group: Group) -> Group:
    """The one service that most tests share, whole and idle."""
    running_group.settle()
    return running_group
