"""Cores beside the GPU: a rank whose memory and threads are of its GPU's NUMA node copies to it the short way."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

ROOT = Path("/")


def bus_of(properties: Any) -> str:
    """PCI address of a GPU from what torch knows of it (torch.cuda.get_device_properties)."""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def device_node(bus: str, root: Path = ROOT) -> int | None:
    """NUMA node of the PCI device `bus` (0000:17:00.0), or None where the system does not say."""
    try:
        node = int((root / "sys/bus/pci/devices" / bus.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1: there is one node, or the firmware does not say


def node_cpus(node: int, root: Path = ROOT) -> set[int]:
    """Cores of a NUMA node; none where it is not known."""
    try:
        text = (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip()
        return _cpu_list(text)
    except (OSError, ValueError):
        return set()


def _cpu_list(text: str) -> set[int]:
    """`0-3,8,10-11` as numbers. Raises ValueError."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def pin_to_device(
    bus: str,
    root: Path = ROOT,
    allowed: Collection[int] | None = None,
    pin: Callable[[Collection[int]], None] = lambda cpus: os.sched_setaffinity(0, cpus),
) -> set[int]:
    """Let this process run on the cores of the node of PCI device `bus` alone, those of them that it may use
    (`allowed`, default: its mask). Gives back the cores, none where nothing was changed.
    """
    node = device_node(bus, root)
    if node is None:
        log.info("cores are not pinned: the system does not say which NUMA node GPU %s is on", bus)
        return set()
    may = set(os.sched_getaffinity(0) if allowed is None else allowed)
    cpus = node_cpus(node, root) & may
    if not cpus or cpus == may:
        why = "none of its cores may be used here" if not cpus else "all cores that may be used are on it"
        log.info("cores are not pinned: GPU %s is on NUMA node %d, and %s", bus, node, why)
        return set()
    pin(cpus)
    log.info("pinned to %d cores of NUMA node %d, which GPU %s is on", len(cpus), node, bus)
    return cpus
