"""How tests are dealt out to several test processes (`pytest -n 4`).

A file stays together, as its tests may share a fixture that takes long to make. What takes longest comes first, so that
no process is left alone with it at the end.
"""

from __future__ import annotations

from typing import Any

import pytest

SERVICE = (
    "tests/process/test_process_faults.py",
    "tests/process/test_process_group.py",
    "tests/process/test_process_clients.py",
    "tests/process/test_process_garbage.py",
    "tests/process/test_process_management.py",
)
"""Their tests share one service of seven processes (fixture `group`)."""

API_SERVER = (
    "tests/chart/test_chart_install.py",
    "tests/crd/test_crd_server.py",
    "tests/operator/test_operator_refused.py",
    "tests/operator/test_operator_rollback.py",
    "tests/operator/test_operator_webhook.py",
)
"""Their tests share one Kubernetes API server (`needs_api_server`)."""

ALONE = (
    "tests/process/test_process_up.py",
    "tests/operator/test_operator_service.py",
    "tests/ops/test_ops_cuda_interpreted.py",
)
"""Their tests take long and share nothing: each may go to another process."""

LONG = (
    "tests/process/test_process_tensor_parallel.py",
    *SERVICE,
    "tests/process/",
    *API_SERVER,
    "tests/operator/test_operator_service.py",
    "tests/ops/",
    "tests/models/",
    "tests/worker/",
)
"""Files and folders in the order in which they begin; the others follow."""


def part_of(nodeid: str) -> str:
    """Tests with the same answer go to one process, one after the other."""
    file = nodeid.partition("::")[0]
    for together in (SERVICE, API_SERVER):
        if file in together:
            return together[0]
    if file.startswith("tests/e2e/"):
        return "tests/e2e"  # one run at a time on a cluster
    return nodeid if file in ALONE else file


def rank_of(nodeid: str) -> int:
    """Place of a test's file in LONG."""
    return next((n for n, start in enumerate(LONG) if nodeid.startswith(start)), len(LONG))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: rank_of(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False

    class Parts(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return part_of(nodeid)

    return Parts(config, log)
