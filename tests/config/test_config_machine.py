"""Cores, memory and processor features, read from made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpi_engine.config.machine import (
    auto_dtype,
    cpu_features,
    cpu_quota,
    memory_available,
    memory_limit,
    memory_total,
    memory_used,
    usable_cpus,
)

G = 1 << 30


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "garbage"}, None),
        ({"sys/fs/cgroup/cpu.max": "100000 0"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "400000 100000"}, 4.0),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000",
                "sys/fs/cgroup/a/cpu.max": "200000 100000",
            },
            2.0,
        ),
        ({"proc/self/cgroup": "0::/of/the/host\n", "sys/fs/cgroup/cpu.max": "300000 100000"}, 3.0),
        ({"proc/self/cgroup": "0::/../../etc\n", "sys/fs/cgroup/cpu.max": "300000 100000"}, 3.0),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/kube/pod\n1:name=systemd:/x\n",
                "sys/fs/cgroup/cpu,cpuacct/kube/pod/cpu.cfs_quota_us": "250000",
                "sys/fs/cgroup/cpu,cpuacct/kube/pod/cpu.cfs_period_us": "100000",
            },
            2.5,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/kube/pod\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
        ),
    ],
)
def test_cpu_quota_of_both_cgroup_versions(tmp_path, files, quota):
    assert cpu_quota(machine(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("affinity", "quota", "cpus"),
    [(8, None, 8), (8, "150000 100000", 1), (8, "50000 100000", 1), (2, "800000 100000", 2), (8, "399999 100000", 3)],
)
def test_usable_cpus_are_the_least_of_mask_and_floored_quota(tmp_path, affinity, quota, cpus):
    root = machine(tmp_path, {"sys/fs/cgroup/cpu.max": quota} if quota else {})
    assert usable_cpus(root, range(affinity)) == cpus


def test_usable_cpus_of_this_machine():
    assert usable_cpus() >= 1


def test_memory_of_cgroup_version_2(tmp_path):
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod\n",
            "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:   {16 * G // 1024} kB\n",
            "sys/fs/cgroup/pod/memory.max": str(4 * G),
            "sys/fs/cgroup/pod/memory.current": str(3 * G),
            "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {G}\n",
        },
    )
    assert (memory_limit(root), memory_used(root), memory_available(root)) == (4 * G, 2 * G, 2 * G)


def test_a_parents_memory_limit_counts_with_the_parents_use(tmp_path):
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/memory.max": str(4 * G),
            "sys/fs/cgroup/pod/memory.current": str(3 * G),
            "sys/fs/cgroup/pod/box/memory.max": "max",
            "sys/fs/cgroup/pod/box/memory.current": str(G),
        },
    )
    assert (memory_limit(root), memory_used(root), memory_available(root)) == (4 * G, G, G)


def test_memory_of_cgroup_version_1_and_without_a_limit(tmp_path):
    files = {
        "proc/self/cgroup": "9:memory:/pod\n",
        "proc/meminfo": "MemAvailable: 1024 kB\n",
        "sys/fs/cgroup/memory/pod/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/pod/memory.usage_in_bytes": "1000",
    }
    root = machine(tmp_path, files)
    assert (memory_limit(root), memory_used(root), memory_available(root)) == (None, 1000, 1 << 20)
    machine(tmp_path, {"sys/fs/cgroup/memory/pod/memory.limit_in_bytes": "5000"})
    assert (memory_limit(root), memory_available(root)) == (5000, 4000)


def test_all_memory_is_the_machines_or_what_the_cgroup_grants_of_it(tmp_path):
    root = machine(tmp_path, {"proc/self/cgroup": "0::/pod\n", "proc/meminfo": "MemTotal: 2048 kB\nMemFree: 1 kB\n"})
    assert memory_total(root) == 2 << 20
    machine(tmp_path, {"sys/fs/cgroup/pod/memory.max": "5000"})
    assert memory_total(root) == 5000


def test_a_machine_that_says_nothing(tmp_path):
    assert memory_total(tmp_path) is None
    assert (memory_limit(tmp_path), memory_available(tmp_path), cpu_features(tmp_path)) == (None, None, frozenset())


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("fpu avx2 fma avx512f avx512bw avx512vl avx512_bf16 avx512_vnni amx_bf16", "bfloat16"),
        ("fpu avx2 fma f16c", "bfloat16"),
        ("fpu avx2", "float32"),
        ("fpu sse2", "float32"),
    ],
)
def test_features_and_the_dtype_they_give(tmp_path, flags, dtype):
    root = machine(
        tmp_path, {"proc/cpuinfo": f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t: {flags}\n"}
    )
    found = cpu_features(root)
    assert found == set(flags.split()) - {"fpu", "sse2"}
    assert auto_dtype(found) == dtype


def test_features_are_those_of_all_cores_and_arm_names_are_known(tmp_path):
    root = machine(tmp_path, {"proc/cpuinfo": "flags : avx2 fma avx512f\n\nflags : avx2 fma\n"})
    assert cpu_features(root) == {"avx2", "fma"}
    root = machine(tmp_path / "arm", {"proc/cpuinfo": "Features : fp asimd bf16 i8mm\n"})
    assert cpu_features(root) == {"asimd", "bf16", "i8mm"} and auto_dtype(cpu_features(root)) == "bfloat16"
