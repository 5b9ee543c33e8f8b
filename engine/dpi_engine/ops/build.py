"""Compile the C kernels, or find them compiled.

A library is named by a checksum of its sources, flags and compiler, so nothing stale is ever loaded. It is looked for
in $DPI_NATIVE_DIR, in the package's `native/prebuilt`, then in the cache folder; else it is built there, by one process
while the others wait. `python -m dpi_engine.ops.build --out DIR` builds every instruction set, for images that have no
compiler.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dpi_engine.config.errors import SettingsError
from dpi_engine.config.machine import usable_cpus
from dpi_engine.ops.interface import OpsUnavailable

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "native"
PREBUILT = SOURCES / "prebuilt"

COMMON_FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-Wall",
    "-Wextra",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni")
ISA_FLAGS = {"amx": (*_AVX512, "-mamx-tile", "-mamx-bf16", "-mamx-int8"), "avx512bf16": _AVX512, "avx2": _AVX2}
"""Instruction sets, best first. Explicit, never the building machine's: images are built elsewhere."""

_AVX2_FEATURES = ("avx2", "fma", "f16c")
_AVX512_FEATURES = (*_AVX2_FEATURES, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni")
ISA_FEATURES = {
    "amx": (*_AVX512_FEATURES, "amx_tile", "amx_bf16", "amx_int8"),
    "avx512bf16": _AVX512_FEATURES,
    "avx2": _AVX2_FEATURES,
}
"""What /proc/cpuinfo must list for each."""

COMPILE_DEADLINE = 180.0
BUILDING = ".build-"
LOCK_DEADLINE = 240.0


def cpu_features() -> frozenset[str]:
    """The `flags` of the first processor in /proc/cpuinfo; empty where there is none (not Linux, not x86)."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith("flags"):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def possible_isas(features: frozenset[str]) -> list[str]:
    """The instruction sets that `features` have all of, best first."""
    return [isa for isa, needed in ISA_FEATURES.items() if features.issuperset(needed)]


def choose_isa(features: frozenset[str], forced: str | None = None) -> str:
    """The best instruction set among `features`, or the `forced` one (DPI_CPU_ISA). Raises OpsUnavailable, and
    SettingsError where the forced one cannot be had: plain PyTorch in its place is not what was asked for.
    """
    if forced:
        if forced not in ISA_FLAGS:
            raise SettingsError(f"DPI_CPU_ISA: expected {' or '.join(ISA_FLAGS)}, got '{forced}'")
        lacking = [name for name in ISA_FEATURES[forced] if name not in features]
        if lacking:
            raise SettingsError(f"DPI_CPU_ISA={forced}: this processor lacks {', '.join(lacking)}; leave it out")
        return forced
    if possible := possible_isas(features):
        return possible[0]
    raise OpsUnavailable(
        f"the CPU kernels need an x86-64 processor with {', '.join(ISA_FEATURES['avx2'])}; "
        f"this one ({platform.machine()}) has not all of them"
    )


def find_compiler() -> list[str] | None:
    """$CC (with arguments), else gcc, cc or clang on the path; None without any."""
    chosen = os.environ.get("CC")
    if chosen:
        words = shlex.split(chosen)
        return words if words and shutil.which(words[0]) else None
    for name in ("gcc", "cc", "clang"):
        found = shutil.which(name)
        if found:
            return [found]
    return None


def source_files() -> list[Path]:
    return sorted([*SOURCES.glob("*.c"), *SOURCES.glob("*.h")])


def source_checksum(isa: str) -> str:
    """Identifies sources and flags; names prebuilt libraries, whose compiler is not at hand when they are loaded."""
    digest = hashlib.sha256()
    for path in source_files():
        digest.update(f"{path.name}\0".encode())
        digest.update(path.read_bytes())
    digest.update(" ".join((*COMMON_FLAGS, *ISA_FLAGS[isa])).encode())
    return digest.hexdigest()[:16]


def _build_checksum(isa: str, compiler: list[str]) -> str:
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise OpsUnavailable(f"C compiler {shlex.join(compiler)} does not run: {error}") from error
    return hashlib.sha256(source_checksum(isa).encode() + shlex.join(compiler).encode() + version).hexdigest()[:16]


def library_name(isa: str) -> str:
    """File name of a prebuilt library."""
    return f"{isa}-{source_checksum(isa)}.so"


def compile_library(isa: str, out: Path, compiler: list[str]) -> None:
    """Build `out` in a folder beside it and rename it. Raises OpsUnavailable with the compiler's words."""
    deadline = time.monotonic() + COMPILE_DEADLINE

    def run(arguments: list[str]) -> None:
        command = [*compiler, *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=max(1.0, deadline - time.monotonic())
            )
        except subprocess.TimeoutExpired as error:
            raise OpsUnavailable(f"the compiler took over {COMPILE_DEADLINE:.0f} s: {shlex.join(command)}") from error
        except OSError as error:
            raise OpsUnavailable(f"C compiler {compiler[0]} does not run: {error}") from error
        if done.returncode != 0:
            raise OpsUnavailable(
                f"the CPU kernels do not compile for {isa} (exit code {done.returncode}): {shlex.join(command)}\n"
                f"{done.stderr[-2000:]}"
            )

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=BUILDING) as folder:
            files = [path for path in source_files() if path.suffix == ".c"]
            files.sort(key=lambda path: path.stat().st_size, reverse=True)  # about in order of the time they take
            objects = {path: f"{folder}/{path.stem}.o" for path in files}
            flags = [*COMMON_FLAGS, *ISA_FLAGS[isa]]
            with ThreadPoolExecutor(usable_cpus()) as pool:
                list(pool.map(lambda item: run([*flags, "-c", str(item[0]), "-o", item[1]]), objects.items()))
            # Not linked with an OpenMP runtime on purpose: the symbols come from the one that torch has loaded.
            finished = f"{folder}/library.so"
            run(["-shared", *objects.values(), "-o", finished, "-lm"])
            os.replace(finished, out)
    except OSError as error:
        raise OpsUnavailable(f"the CPU kernels cannot be written to {out.parent}: {error}") from error


def find_library(isa: str, cache_dir: str | os.PathLike[str]) -> Path:
    """Path of the library for `isa`, built under cache_dir/native if need be. Raises OpsUnavailable."""
    name = library_name(isa)
    folders = [Path(os.environ["DPI_NATIVE_DIR"])] if os.environ.get("DPI_NATIVE_DIR") else []
    for folder in (*folders, PREBUILT):
        if (folder / name).is_file():
            return folder / name
    if folders:
        log.warning("DPI_NATIVE_DIR=%s has no %s, so it is built here or taken from the cache folder", *folders, name)
    compiler = find_compiler()
    if compiler is None:
        wrong = f"CC={os.environ['CC']} is not found" if os.environ.get("CC") else "no C compiler"
        raise OpsUnavailable(
            f"{wrong} for the CPU kernels: install gcc (Debian: apt-get install gcc libc6-dev), set CC, or set "
            f"DPI_NATIVE_DIR to a folder with {name} (python -m dpi_engine.ops.build --out DIR makes it)"
        )
    out = Path(cache_dir) / "native" / _build_checksum(isa, compiler) / f"{isa}.so"
    if out.is_file():
        return out
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(out.parent / "lock", "w") as lock:
            _take(lock.fileno(), out.parent / "lock")
            if not out.is_file():
                for left in out.parent.glob(f"{BUILDING}*"):  # of one that was killed: who builds here has the lock
                    shutil.rmtree(left, ignore_errors=True)
                compile_library(isa, out, compiler)
    except OSError as error:
        raise OpsUnavailable(f"the CPU kernels cannot be built in {out.parent}: {error}") from error
    return out


def _take(descriptor: int, path: Path) -> None:
    """An exclusive lock, given up by the kernel when its holder dies."""
    deadline = time.monotonic() + LOCK_DEADLINE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise OpsUnavailable(
                    f"another process builds the CPU kernels and has held {path} for over {LOCK_DEADLINE:.0f} s"
                ) from None
            time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dpi_engine.ops.build", description="Compile the CPU kernels.")
    parser.add_argument("--out", required=True, type=Path, help="folder for the libraries, one per instruction set")
    arguments = parser.parse_args()
    compiler = find_compiler()
    try:
        if compiler is None:
            raise OpsUnavailable("no C compiler: install gcc or set CC")
        for isa in ISA_FLAGS:
            out = arguments.out / library_name(isa)
            compile_library(isa, out, compiler)
            print(out)
    except OpsUnavailable as error:
        print(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
