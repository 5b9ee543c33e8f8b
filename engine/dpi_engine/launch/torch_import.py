"""The first import of torch in a process."""

from __future__ import annotations

import os

from dpi_engine import collector


def import_torch() -> None:
    """Import torch as fast as it goes: a second or two of one core."""
    # The threads of numpy's own BLAS, which nothing here uses, turn idly for a tenth of a second of every core.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with collector.paused():
        import torch  # noqa: F401 - for who imports it next
