"""What the start of a process leaves out, and that nothing is missing for it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap

import pytest

from dpi_engine import collector
from dpi_engine.launch.children import BEGIN
from dpi_engine.launch.torch_import import DEFERRED, GPU_NODES


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


def test_torch_on_a_cpu_computes_without_what_is_deferred() -> None:
    out = python(f"""
        import sys
        from dpi_engine.launch.torch_import import import_torch
        import_torch("cpu")
        import torch
        from torch.nn.functional import scaled_dot_product_attention
        q = torch.randn(1, 2, 3, 4)
        scaled_dot_product_attention(q, q, q), torch.linalg.svd(q[0, 0]), torch.compile, torch.export
        with torch.inference_mode():
            print(type(sys.modules["{DEFERRED}"]).__name__, "torch._refs" in sys.modules)
    """)
    assert out.split() == ["_Deferred", "False"]


def test_who_asks_for_the_deferred_part_gets_it() -> None:
    out = python(f"""
        import inspect, sys
        from dpi_engine.launch.torch_import import import_torch
        import_torch("cpu")
        import torch
        inspect.getmodule(python := lambda: 0)  # looks at every module's file, and must not load this one
        print(type(sys.modules["{DEFERRED}"]).__name__)
        from {DEFERRED} import meta_index_Tensor
        print(meta_index_Tensor.__name__, sys.modules["{DEFERRED}"].__file__ is not None)
        from torch._subclasses.fake_tensor import FakeTensorMode
        with FakeTensorMode():
            x = torch.empty(4, 6)
            print(tuple((x @ torch.empty(6, 5))[torch.tensor([0, 1])].shape))
    """)
    assert out.splitlines() == ["_Deferred", "meta_index_Tensor True", "(2, 5)"]


def test_torch_for_a_gpu_is_whole() -> None:
    if any(map(os.path.exists, GPU_NODES)):
        pytest.skip("--device auto is a GPU here")
    out = python(f"""
        import sys
        from dpi_engine.launch.torch_import import import_torch
        import_torch("cuda")
        print(type(sys.modules["{DEFERRED}"]).__name__)
        import_torch("cpu")
        print(type(sys.modules["{DEFERRED}"]).__name__)
    """)
    assert out.split() == ["module", "module"]


@pytest.mark.parametrize("name", ["engine", "api", "coordinator"])
def test_a_child_process_without_a_spec_ends_with_an_error(name: str) -> None:
    module = f"dpi_engine.launch.{name}_process"
    done = subprocess.run(
        [sys.executable, "-m", BEGIN, module], input=b"{}", capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 1 and b"ValidationError" in done.stderr
