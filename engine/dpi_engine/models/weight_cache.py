"""Dequantized weights kept on disk as one safetensors file, so that the next start maps them."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from dpi_engine.models.file_digest import content_digest, write_whole
from dpi_engine.models.gguf_weights import GgufSource
from dpi_engine.models.tensor_file import write_tensor_file
from dpi_engine.models.weights import Progress, SafetensorsSource, WeightError, WeightSource

log = logging.getLogger(__name__)

FORMAT = 2
"""Raised when the meaning of the cached tensors changes; older files are then not looked at."""

NOTES = "digests"
"""Folder beside those of weights."""

_LOCK_SECONDS = 900.0


class CacheUnusable(Exception):
    """The cache folder cannot be written or waited for; the text says why."""


@contextlib.contextmanager
def file_lock(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold an exclusive lock on `path` between processes. Raises CacheUnusable when it is not free in time."""
    deadline = time.monotonic() + timeout_s
    with open(path, "ab") as file:
        pause = 0.02
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise CacheUnusable(f"another process has held {path} for {timeout_s:.0f} s") from None
                time.sleep(pause)
                pause = min(2 * pause, 0.5)
        yield


def cached(make: Callable[[], GgufSource], origin: Path, folder: Path, progress: Progress) -> WeightSource:
    """The weights of `origin` out of `folder`, put there first if need be, from what `make` opens.

    Where the folder cannot be used a warning says so and `make`'s own is given back: every start dequantizes then.
    Raises what `make` raises.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        notes = folder.parent / NOTES
        target = folder / f"{content_digest(origin, notes)[:32]}-v{FORMAT}.safetensors"
        found = _open(target, notes)
        if found is None:
            with file_lock(target.with_suffix(".lock"), _LOCK_SECONDS):
                found = _open(target, notes)
                if found is None:
                    _write(make(), target, notes, progress)
                    found = _open(target, notes)
        if found is None:
            raise CacheUnusable(f"{target} reads back differently from what was written")
    except (OSError, CacheUnusable) as error:
        log.warning("dequantized weights cannot be cached (%s): each start dequantizes %s anew", error, origin)
        return make()
    return found


def _open(target: Path, notes: Path) -> SafetensorsSource | None:
    """The cached file, or None when there is none or (with a warning) when it is damaged."""
    try:
        noted = json.loads(target.with_suffix(".json").read_text("utf-8"))["digest"]
        if noted != content_digest(target, notes):
            raise ValueError("its content is not what was written")
        source = SafetensorsSource([target])
        source.lasting = True  # files of a cache are replaced, never written to
        return source
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, WeightError) as error:
        log.warning("cached weights %s are damaged (%s) and are made anew", target, error)
        return None


def _write(source: GgufSource, target: Path, notes: Path, progress: Progress) -> None:
    """The lock makes this process the only writer."""
    names = sorted(source.names())
    shapes = {name: source.stored_shape(name) for name in names}
    done = itertools.count(1)
    started = time.monotonic()

    def read(name: str) -> Tensor:
        tensor = source.get(name, shapes[name])
        progress("dequantize", next(done) / len(names))
        return tensor

    size = write_tensor_file(target, [(name, shapes[name], source.stored_dtype(name)) for name in names], read)
    # The note comes last: a file without one is not looked at.
    write_whole(target.with_suffix(".json"), json.dumps({"digest": content_digest(target, notes)}))
    log.info("dequantized %d tensors (%d MB) in %.1f s", len(names), size // 2**20, time.monotonic() - started)
