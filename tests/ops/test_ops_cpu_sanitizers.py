"""The kernels under the sanitizers for addresses and undefined behaviour, on every instruction set of this machine."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ops_cpu_support import ISAS, KERNELS

from dpi_engine.ops import build
from dpi_engine.ops.native_library import SIGNATURES

HERE = Path(__file__).parent
ENGINE = Path(build.__file__).parents[2]
FLAGS = "-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all -Werror"
"""-O1, as at -O3 the checks take the compiler minutes."""
BUILD_S, RUN_S = 600.0, 300.0
REPORTED = 99

NOT_OF = {
    "avx2": {"dpi_linear_dot", "dpi_linear_int8", "dpi_int8_room", "dpi_pack_int8"},
    "avx512bf16": {"dpi_linear"},
    "amx": {"dpi_linear"},
}
"""Functions that the backend does not call on an instruction set."""


@pytest.fixture(scope="module")
def runtime() -> str:
    """Path of the compiler's address sanitizer, which must be in a process before all else."""
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    asked = [*compiler, "-print-file-name=libasan.so"]
    path = subprocess.run(asked, capture_output=True, text=True, timeout=60).stdout.strip()
    if not Path(path).is_absolute() or not Path(path).exists():
        pytest.skip(f"{compiler[0]} has no libasan.so (Debian: libgcc-12-dev), without which nothing is checked")
    return path


def sanitized_library(isa: str) -> Path:
    """The kernels built with FLAGS after all others, and kept: the compiler has a name made of FLAGS, which is part of
    the build's checksum.
    """
    real = build.find_compiler()
    assert real is not None
    text = f'#!/bin/sh\nexec {" ".join(real)} "$@" {FLAGS}\n'
    wrapper = KERNELS / "native" / f"sanitizing-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if not wrapper.exists():
        wrapper.parent.mkdir(parents=True, exist_ok=True)
        new = wrapper.with_suffix(f".{os.getpid()}")
        new.write_text(text)
        new.chmod(0o755)
        new.replace(wrapper)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", str(wrapper))
        patch.delenv("DPI_NATIVE_DIR", raising=False)
        patch.setattr(build, "COMPILE_DEADLINE", BUILD_S)
        patch.setattr(build, "LOCK_DEADLINE", BUILD_S)
        return build.find_library(isa, KERNELS)


def run_sanitized(runtime: str, isa: str, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """`command` and the instruction set as arguments of python, with the sanitized kernels; `folder` is for them."""
    (folder / build.library_name(isa)).symlink_to(sanitized_library(isa))
    environment = {
        **os.environ,
        "DPI_NATIVE_DIR": str(folder),
        "LD_PRELOAD": runtime,
        # What python and torch keep until the end is no leak of ours.
        "ASAN_OPTIONS": f"detect_leaks=0:exitcode={REPORTED}",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": f"{ENGINE}:{HERE}",
    }
    return subprocess.run(
        [sys.executable, *command, isa],
        env=environment,
        cwd=HERE,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=RUN_S,
    )


@pytest.mark.parametrize("isa", ISAS)
def test_no_kernel_leaves_its_memory_or_the_language(runtime: str, isa: str, tmp_path: Path) -> None:
    done = run_sanitized(runtime, isa, tmp_path, str(HERE / "every_kernel.py"))
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr[-6000:]}"
    assert not done.stderr, done.stderr[-6000:]
    assert set(done.stdout.split()) == set(SIGNATURES) - NOT_OF[isa]


READS_PAST_ITS_ROWS = """
import sys, torch
from ops_cpu_support import ops_for
ops = ops_for(sys.argv[1], torch.float32)
library = ops._calls.library
x = torch.randn(3, 48)
weight, out = torch.ones(48), torch.empty(3, 48)
library.dpi_rms_norm(x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), 4, 48, 1e-5, 0, 0, 1)
"""


def test_a_kernel_that_leaves_its_memory_is_found(runtime: str, tmp_path: Path) -> None:
    """That the sanitizers see tensors at all: four rows are asked for where there are three."""
    done = run_sanitized(runtime, ISAS[-1], tmp_path, "-c", READS_PAST_ITS_ROWS)
    assert done.returncode == REPORTED, done.stderr[-3000:]
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert "norm_rows" in done.stderr
