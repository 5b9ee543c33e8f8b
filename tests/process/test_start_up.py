"""What the start of a process leaves out, and that nothing is missing for it."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap

import pytest

from dpi_engine import collector


def python(code: str, *, timeout: float = 120) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_collector_is_off_inside_and_as_before_afterwards() -> None:
    assert gc.isenabled()
    try:
        with pytest.raises(KeyError), collector.paused():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() and gc.get_freeze_count() > 0
        gc.disable()
        with collector.paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


def test_torch_is_imported_whole_and_without_threads_of_numpys_own() -> None:
    out = python("""
        import os, sys, threading
        from dpi_engine.launch.torch_import import import_torch
        import_torch()
        tasks = len(os.listdir("/proc/self/task"))
        import gc, torch
        torch.Generator().manual_seed(0)
        print(gc.isenabled(), tasks)
    """)
    assert out.split() == ["True", "1"]
