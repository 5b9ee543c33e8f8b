"""Python's cyclic garbage collector, kept out of the start of a process and of what the start has made.

Imports and loading make some 10**5 objects that stay. Looking through them again and again costs a sixth of the start,
and later a pause of a tenth of a second in the midst of serving.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No collection inside. What is alive at the end is left alone for good: use it around what makes lasting things,
    and not around work on requests.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
