"""Which cores are beside a GPU, and when a rank is pinned to them; machines are trees of files here."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpi_engine.worker.numa import bus_of, device_node, node_cpus, pin_to_device

BUS = "0000:C1:00.0"


def machine(root: Path, node: str | None, cpus: dict[int, str]) -> Path:
    folder = root / "sys/bus/pci/devices" / BUS.lower()
    folder.mkdir(parents=True)
    if node is not None:
        (folder / "numa_node").write_text(f"{node}\n")
    for number, text in cpus.items():
        at = root / f"sys/devices/system/node/node{number}"
        at.mkdir(parents=True)
        (at / "cpulist").write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(("text", "node"), [("1", 1), ("0", 0), ("-1", None), ("what", None), (None, None)])
def test_the_node_of_a_gpu(tmp_path: Path, text: str | None, node: int | None) -> None:
    assert device_node(BUS, machine(tmp_path, text, {})) == node


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("64-65,128-129", {64, 65, 128, 129}), ("x-3", set())],
)
def test_the_cores_of_a_node(tmp_path: Path, text: str, cpus: set[int]) -> None:
    machine(tmp_path, None, {2: text})
    assert node_cpus(2, tmp_path) == cpus
    assert node_cpus(3, tmp_path) == set()


@pytest.mark.parametrize(
    ("node", "allowed", "pinned", "words"),
    [
        ("1", range(8), {4, 5, 6, 7}, "pinned to 4 cores of NUMA node 1"),
        ("1", {3, 5}, {5}, "pinned to 1 cores"),
        ("1", {4, 6}, set(), "all cores that may be used are on it"),
        ("1", {0, 1}, set(), "none of its cores may be used here"),
        ("-1", range(8), set(), "does not say which NUMA node"),
    ],
)
def test_a_rank_runs_beside_its_gpu(
    tmp_path: Path, node: str, allowed: Collection[int], pinned: set[int], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    machine(tmp_path, node, {0: "0-3", 1: "4-7"})
    told: list[Collection[int]] = []
    with caplog.at_level(logging.INFO):
        assert pin_to_device(BUS, tmp_path, allowed, told.append) == pinned
    assert told == ([pinned] if pinned else [])
    assert words in caplog.text


def test_the_address_of_a_gpu_as_the_system_writes_it() -> None:
    assert bus_of(SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)) == BUS.lower()
