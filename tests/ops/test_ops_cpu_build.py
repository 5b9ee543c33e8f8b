"""Where the compiled kernels come from, and that they share torch's threads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from ops_cpu_support import ISAS, KERNELS, ops_for

from dpi_engine.config.errors import SettingsError
from dpi_engine.ops import build, native_library, select_ops
from dpi_engine.ops.cpu import make_cpu_ops
from dpi_engine.ops.interface import OpsUnavailable

ISA = ISAS[-1]
ENGINE = str(Path(build.__file__).parents[2])


@pytest.fixture
def plain_env(monkeypatch):
    for name in ("CC", "DPI_NATIVE_DIR", "DPI_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_best_instruction_set_is_chosen():
    avx2 = frozenset(build.ISA_FEATURES["avx2"])
    assert build.choose_isa(avx2) == "avx2"
    assert build.choose_isa(avx2 | {"avx512f", "avx512bw"}) == "avx2"
    assert build.choose_isa(frozenset(build.ISA_FEATURES["avx512bf16"])) == "avx512bf16"
    every = frozenset(build.ISA_FEATURES["amx"])
    assert build.choose_isa(every) == "amx"
    assert build.choose_isa(every, "avx2") == "avx2"


def test_what_a_processor_lacks_is_named():
    with pytest.raises(OpsUnavailable, match="avx2, fma, f16c"):
        build.choose_isa(frozenset({"sse2"}))


def test_a_forced_instruction_set_that_cannot_be_had_is_refused_and_replaced_by_nothing(plain_env, tmp_path):
    with pytest.raises(SettingsError, match="lacks fma, f16c"):
        build.choose_isa(frozenset({"avx2"}), "avx2")
    with pytest.raises(SettingsError, match="expected amx or avx512bf16 or avx2, got 'sse9'"):
        build.choose_isa(frozenset({"avx2"}), "sse9")
    plain_env.setenv("DPI_CPU_ISA", "sse9")
    with pytest.raises(SettingsError, match="got 'sse9'"):
        select_ops("cpu", "float32", "auto", 1, tmp_path)


def test_without_a_compiler_the_message_says_what_to_install(plain_env, tmp_path):
    plain_env.setenv("PATH", str(tmp_path))
    with pytest.raises(OpsUnavailable, match="install gcc"):
        build.find_library(ISA, tmp_path)
    plain_env.setenv("CC", "no-such-compiler -O2")
    with pytest.raises(OpsUnavailable, match=r"CC=no-such-compiler -O2 is not found .*install gcc"):
        build.find_library(ISA, tmp_path)


def test_a_folder_of_kernels_without_them_is_named_in_a_warning(plain_env, tmp_path, caplog):
    plain_env.setenv("PATH", str(tmp_path))
    plain_env.setenv("DPI_NATIVE_DIR", "/no/such/folder")
    with pytest.raises(OpsUnavailable, match="no C compiler"):
        build.find_library(ISA, tmp_path)
    assert f"DPI_NATIVE_DIR=/no/such/folder has no {build.library_name(ISA)}" in caplog.text


def test_a_failing_compiler_is_quoted(plain_env, tmp_path):
    compiler = tmp_path / "badcc"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "out of patience" >&2\nexit 3\n')
    compiler.chmod(0o755)
    plain_env.setenv("CC", str(compiler))
    with pytest.raises(OpsUnavailable, match=r"(?s)exit code 3.*out of patience"):
        build.find_library(ISA, tmp_path / "cache")
    left = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert left == ["lock"]


def test_what_a_killed_build_left_is_removed_by_the_next(plain_env, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ]\n')
    compiler.chmod(0o755)
    plain_env.setenv("CC", str(compiler))
    with pytest.raises(OpsUnavailable):
        build.find_library(ISA, tmp_path)
    (lock,) = tmp_path.rglob("lock")
    left = lock.parent / ".build-abc"
    left.mkdir()
    (left / "rows.o").write_text("")
    with pytest.raises(OpsUnavailable):
        build.find_library(ISA, tmp_path)
    assert [path.name for path in lock.parent.iterdir()] == ["lock"]


def test_a_cache_folder_that_cannot_be_written_is_an_error(plain_env, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OpsUnavailable, match="file"):
        build.find_library(ISA, tmp_path / "file")


def wrapped_compiler(path: Path, first: str = ":", flags: str = "") -> Path:
    """The real compiler, after the shell command `first`; it does not optimise, which takes most of its time."""
    real = build.find_compiler()
    assert real is not None, "these tests need a C compiler"
    path.write_text(f'#!/bin/sh\n{first}\nexec {real[0]} "$@" -O0 {flags}\n')
    path.chmod(0o755)
    return path


def test_two_processes_build_once_and_a_prebuilt_folder_needs_no_compiler(plain_env, tmp_path):
    """Two processes start a compiler at once, which counts its links; then the product is used without it."""
    log = tmp_path / "links"
    compiler = wrapped_compiler(tmp_path / "countingcc", f'[ "$1" = -shared ] && echo link >> {log}')
    code = textwrap.dedent(
        f"""
        from dpi_engine.ops import build
        print(build.find_library({ISA!r}, {str(tmp_path / "cache")!r}))
        """
    )
    env = dict(os.environ, CC=str(compiler), PYTHONPATH=ENGINE, OMP_NUM_THREADS="1")
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    paths = {process.communicate(timeout=200)[0].strip() for process in both}
    assert len(paths) == 1
    assert log.read_text().splitlines() == ["link"]

    folder = tmp_path / "prebuilt"
    folder.mkdir()
    shutil.copy(paths.pop(), folder / build.library_name(ISA))
    plain_env.setenv("DPI_NATIVE_DIR", str(folder))
    plain_env.setenv("PATH", "")
    plain_env.setenv("DPI_CPU_ISA", ISA)
    ops = make_cpu_ops(torch.float32, 1, tmp_path / "unused")
    assert ops.argmax(torch.tensor([[1.0, 3.0, 2.0]])).tolist() == [1]
    assert not (tmp_path / "unused").exists()


def test_the_command_for_images_builds_every_instruction_set_without_a_warning(tmp_path):
    compiler = wrapped_compiler(tmp_path / "cc", flags="-Werror")
    env = dict(os.environ, PYTHONPATH=ENGINE, OMP_NUM_THREADS="1", CC=str(compiler))
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "dpi_engine.ops.build", "--out", str(out)],
        env=env,
        capture_output=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout
    assert {path.name for path in out.iterdir()} == {build.library_name(isa) for isa in build.ISA_FLAGS}


def test_a_library_that_is_not_ours_is_refused(tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(OpsUnavailable, match=r"broken\.so do not load"):
        native_library.load(broken)
    other = native_library.openmp_runtimes()[0]
    with pytest.raises(OpsUnavailable, match="dpi_"):
        native_library.load(Path(other))


def test_there_is_one_openmp_runtime_and_it_is_the_one_torch_brought():
    code = textwrap.dedent(
        f"""
        import os
        os.environ["DPI_CPU_ISA"] = {ISA!r}
        import torch
        from dpi_engine.ops import native_library
        before = native_library.openmp_runtimes()
        from dpi_engine.ops.cpu import make_cpu_ops
        ops = make_cpu_ops(torch.float32, 2, {str(KERNELS)!r})
        x = torch.randn(300, 256)
        ops.linear(ops.rms_norm(x, torch.ones(256), 1e-5), ops.pack_linear(torch.randn(64, 256)))
        threads = len(os.listdir("/proc/self/task"))
        for _ in range(3):
            x @ x.T
            ops.silu_mul(x)
        assert len(os.listdir("/proc/self/task")) == threads, "a second team was started"
        print(len(before), before == native_library.openmp_runtimes(), torch.get_num_threads())
        """
    )
    ops_for(ISA, torch.float32)
    env = dict(os.environ, PYTHONPATH=ENGINE)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["1", "True", "2"], done.stderr


def test_unusable_settings_are_named(tmp_path):
    with pytest.raises(OpsUnavailable, match=r"float32 or bfloat16, not in torch\.float16"):
        make_cpu_ops(torch.float16, 1, tmp_path)
    with pytest.raises(OpsUnavailable, match="threads: expected at least 1, got 0"):
        make_cpu_ops(None, 0, tmp_path)


@pytest.mark.parametrize("isa", ISAS)
def test_dtypes_of_each_instruction_set(isa):
    wide = ops_for(isa, torch.float32)
    assert (wide.dtype, wide.weight_dtype, wide.cache_dtype) == (torch.float32,) * 3
    half = ops_for(isa, torch.bfloat16)
    activations = torch.float32 if isa == "avx2" else torch.bfloat16
    assert (half.dtype, half.weight_dtype, half.cache_dtype) == (activations, torch.bfloat16, torch.bfloat16)
    assert half.isa == wide.isa == isa
