"""Several meshes in threads of the test process, linked over loopback."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from dpi_engine.wire.exchange.mesh import Mesh
from dpi_engine.wire.group import GroupTable, Member

KEY = bytes(range(16))
PATIENCE = 30.0


def table(meshes: list[Mesh], epoch: int = 1, *, without: int | None = None, key: bytes = KEY) -> GroupTable:
    members = [Member(m.rank, 1, m.endpoint) for m in meshes if m.rank != without]
    return GroupTable(epoch, key, members, "" if without is None else f"rank {without} (LOST)")


def together(functions: list[Callable[[], Any]]) -> list[Any]:
    """Results of all, run at once; an exception is a result."""
    results: list[Any] = [AssertionError("did not end")] * len(functions)

    def run(i: int) -> None:
        try:
            results[i] = functions[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + PATIENCE
    for thread in threads:
        thread.join(max(0.1, end - time.monotonic()))
    return results


def form(meshes: list[Mesh], epoch: int = 1) -> None:
    for mesh in meshes:
        mesh.announce(table(meshes, epoch))
    done = together([lambda m=m: until_formed(m) for m in meshes])
    assert done == [True] * len(meshes), done
    assert {m.group for m in meshes} == {epoch}


def until_formed(mesh: Mesh) -> bool:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if mesh.form(0.5):
            return True
    return False


@contextlib.contextmanager
def meshes(size: int, **options: Any) -> Iterator[list[Mesh]]:
    made = [Mesh(rank, size, "127.0.0.1", 0, **options) for rank in range(size)]
    try:
        yield made
    finally:
        for mesh in made:
            mesh.close()
