"""What this machine really lets a process use: cores, memory, processor features.

Every function takes the root of the file system, so that any machine can be described by a tree of files.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

ROOT = Path("/")
_HUGE = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"

FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512dq",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "bf16",
    "i8mm",
    "sve",
)
"""Processor flags that kernels are chosen by, as the kernel names them."""


def usable_cpus(root: Path = ROOT, affinity: Collection[int] | None = None) -> int:
    """Cores to compute with: the least of the affinity mask and the cgroup quota rounded down, at least 1.

    A quota is rounded down because a team of threads that is throttled together runs at the pace of the slowest.
    `affinity` defaults to the mask of this process.
    """
    cores = len(os.sched_getaffinity(0) if affinity is None else affinity)
    quota = cpu_quota(root)
    return max(1, min(cores, int(quota))) if quota is not None else max(1, cores)


def cpu_quota(root: Path = ROOT) -> float | None:
    """Cores that the cgroup and all its parents grant per period (1.5: one and a half); None: no limit."""
    found = []
    for folder in _groups(root, "cpu"):
        if (text := _read(folder / "cpu.max")) is not None:
            quota, _, period = text.partition(" ")
        else:
            quota, period = _read(folder / "cpu.cfs_quota_us") or "", _read(folder / "cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit() and int(period) > 0 and int(quota) > 0:
            found.append(int(quota) / int(period))
    return min(found, default=None)


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes that the cgroup grants, the least over all its parents; None: no limit."""
    limits = (_limit(folder) for folder in _groups(root, "memory"))
    return min((limit for limit in limits if limit is not None), default=None)


def memory_used(root: Path = ROOT) -> int | None:
    """Bytes charged to this process's own cgroup without reclaimable file cache; None outside of one."""
    return next((used for folder in _groups(root, "memory") if (used := _used(folder)) is not None), None)


def _limit(folder: Path) -> int | None:
    for file in ("memory.max", "memory.limit_in_bytes"):
        text = _read(folder / file) or ""
        if text.isdigit() and int(text) < _HUGE:
            return int(text)
    return None


def _used(folder: Path) -> int | None:
    for file, key in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):
        text = _read(folder / file) or ""
        if text.isdigit():
            return max(0, int(text) - _stat(folder / "memory.stat", key))
    return None


def memory_available(root: Path = ROOT) -> int | None:
    """Bytes that can still be had: the least of MemAvailable and what each cgroup has left; None if nothing says so."""
    left = _meminfo(root, "MemAvailable")
    for folder in _groups(root, "memory"):
        if (limit := _limit(folder)) is not None:
            left.append(max(0, limit - (_used(folder) or 0)))
    return min(left, default=None)


def memory_total(root: Path = ROOT) -> int | None:
    """Bytes that can be had at all: the least of MemTotal and what the cgroup grants; None if nothing says so."""
    limit = memory_limit(root)
    return min(_meminfo(root, "MemTotal") + ([] if limit is None else [limit]), default=None)


def _meminfo(root: Path, key: str) -> list[int]:
    """Bytes of one line of /proc/meminfo; empty if it is not there."""
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if name == key and words and words[0].isdigit():
            return [int(words[0]) * 1024]
    return []


def cpu_features(root: Path = ROOT) -> frozenset[str]:
    """Those of FEATURES that every listed core has; empty if /proc/cpuinfo says nothing."""
    common: set[str] | None = None
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        name, _, rest = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags = set(rest.split())
            common = flags if common is None else common & flags
    return frozenset((common or set()) & set(FEATURES))


def auto_dtype(features: Collection[str]) -> str:
    """`bfloat16` or `float32`: what `--dtype auto` computes in on a processor with `features`.

    bfloat16 needs dot products in hardware, or AVX2 with FMA, where our kernels widen bfloat16 weights on the way.
    """
    widened = "avx2" in features and "fma" in features
    native = any(f in features for f in ("avx512_bf16", "amx_bf16", "bf16"))
    return "bfloat16" if native or widened else "float32"


def _groups(root: Path, controller: str) -> list[Path]:
    """Folders of this process's cgroup and its parents, innermost first, version 2 and 1."""
    base = root / "sys/fs/cgroup"
    starts: list[tuple[Path, str]] = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            starts.append((base, path))
        elif controller in controllers.split(","):
            starts.append((base / controller, path))
            starts.append((base / controllers, path))
    # Inside a container the own group is often mounted at the top while its path is that of the host.
    starts += [(base, "/"), (base / controller, "/"), (base / "cpu,cpuacct" if controller == "cpu" else base, "/")]
    folders: list[Path] = []
    for top, path in starts:
        parts = [p for p in path.split("/") if p not in ("", "..", ".")]
        for depth in range(len(parts), -1, -1):
            folder = top.joinpath(*parts[:depth])
            if folder not in folders and folder.is_dir():
                folders.append(folder)
    return folders


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _stat(path: Path, key: str) -> int:
    for line in (_read(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.isdigit():
            return int(value)
    return 0
