"""These tests run Triton's kernels: on a GPU (DPI_TEST_DEVICE=cuda), or on the CPU in Triton's interpreter.

The interpreter must be asked for before anything imports Triton (TRITON_INTERPRET=1), so `make test` runs this folder
in processes of its own (tests/ops/test_ops_cuda_interpreted.py).
"""

import functools
import os
from collections.abc import Callable
from typing import Any

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not os.environ.get("DPI_TEST_DEVICE", "").startswith("cuda"):
    collect_ignore_glob = ["test_*.py"]


def patch_once_a_launch() -> None:
    """The interpreter puts its own functions into triton.language for a kernel, and again at each call of one jitted
    function by another, where they are there already: two thirds of its time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    if patch is None or not hasattr(interpreter, "_LangPatchScope"):
        return  # another Triton: slower
    patched: set[str] = set()

    @functools.cache
    def languages(fn: Any) -> set[str]:
        found = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        return {module.__name__ for module in found}

    def once(fn: Any) -> Any:
        scope = interpreter._LangPatchScope()
        if patched and languages(fn) <= patched:
            return scope
        scope = patch(fn)
        if not patched:  # the kernel's own: all others end with it
            restore = scope.restore

            def ended() -> None:
                patched.clear()
                restore()

            scope.restore = ended
        patched.update(languages(fn))
        return scope

    interpreter._patch_lang = once


if INTERPRETED:
    patch_once_a_launch()
