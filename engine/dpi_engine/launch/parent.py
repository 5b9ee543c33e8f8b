"""Ties the life of a process to that of the one that started it."""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
"""Loaded with the module: between fork and exec nothing may be."""


def end_with_parent(signum: int, parent: int | None = None) -> None:
    """Have the kernel send `signum` to this process when its parent ends, however it ends (Linux).

    A parent that ended before this call is not seen, unless its pid is given as `parent`: this process then ends here.
    """
    if _LIBC is None:
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, signum)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
