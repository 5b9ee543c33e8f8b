"""The first import of torch in a process that computes on CPUs.

A third of it is one module that registers, in Python, what every operator would give without computing it. Only torch's
compiler and exporter ask for that. The module is left for when somebody does.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

from dpi_engine import collector

DEFERRED = "torch._meta_registrations"
GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""What a machine has whose GPUs torch could use: of NVIDIA's driver, the same under WSL, and AMD's."""


class _Deferred(ModuleType):
    """Stands for a module until one of its names is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(load_deferred(), name)


def load_deferred() -> ModuleType:
    """The module itself, imported now if it was not before."""
    if isinstance(sys.modules.get(DEFERRED), _Deferred):
        del sys.modules[DEFERRED]
    return importlib.import_module(DEFERRED)


def import_torch(device: str) -> None:
    """Import torch, whole where `device` (--device) could be a GPU, whose libraries may compile with it."""
    # The threads of numpy's own BLAS, which nothing here uses, turn idly for a tenth of a second of every core.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with collector.paused():
        on_cpu = device == "cpu" or (device == "auto" and not any(map(os.path.exists, GPU_NODES)))
        if on_cpu and "torch" not in sys.modules:
            sys.modules[DEFERRED] = _Deferred(DEFERRED)
        import torch  # noqa: F401 - for who imports it next
