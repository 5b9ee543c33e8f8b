"""Packed linears kept on disk as one safetensors file, so that the next start maps them: it neither reads nor packs the
weights they were made from, and ranks of one machine share the memory.

What a file holds depends on the weights themselves, on the part of them that a worker holds and on the layout of the
kernels; its name is made of all three.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dpi_engine.config.build import PACKAGE, sources_digest
from dpi_engine.models.file_digest import content_digest, write_whole
from dpi_engine.models.tensor_file import write_tensor_file
from dpi_engine.models.weight_cache import NOTES, CacheUnusable, file_lock
from dpi_engine.models.weights import SafetensorsSource, WeightError

log = logging.getLogger(__name__)

MOST_BYTES = 1 << 30
"""Larger models are packed at every start: their file would take as much again of a disk, or of a pod's volume."""

_MOST_WIDENED = 4
"""Files of so many times more cannot be packed into less, and are not read for it."""

SPARE = 2
"""So many times its size must be free on the disk before a file is written."""

_MAKERS = ("models", "ops")
"""Packages whose code decides what a file holds. One that other code has made is made anew."""


Kept: TypeAlias = tuple[dict[str, Tensor], list[int], int]
"""A linear: its tensors by part and its numbers as the ops gave them, and how many weights it was made from."""


class PackedCache:
    """The packed linears of one model for one kind of kernels. Either it finds all of them, or it is told of each and
    writes them in `finish`.
    """

    def __init__(self, folder: Path, weights: Sequence[Path], *parts: object) -> None:
        """`weights` are the files that the linears are made from; `parts` whatever else they depend on, by its repr.

        Never fails: what cannot be read is packed, what cannot be written is packed at the next start, too.
        """
        self._target: Path | None = None
        self._source: SafetensorsSource | None = None
        self._linears: dict[str, tuple[list[str], list[int], int]] = {}
        self._new: dict[str, Tensor] = {}
        self._bytes = 0
        self._notes = folder.parent / NOTES
        try:
            if sum(path.stat().st_size for path in weights) > _MOST_WIDENED * MOST_BYTES:
                return
            digests = [content_digest(path, self._notes) for path in weights]
            name = hashlib.sha256(repr((digests, parts)).encode()).hexdigest()
            self._target = folder / f"{name[:32]}.safetensors"
            self._open(self._target)
        except OSError as error:
            self._cannot(error)

    def _cannot(self, error: Exception) -> None:
        log.info("packed weights are not kept (%s): each start packs them anew", error)
        self._target = None

    def _open(self, target: Path) -> None:
        try:
            note = json.loads(_note(target).read_text("utf-8"))
            if note["made_by"] != made_by():
                return
            if note["digest"] != content_digest(target, self._notes):
                raise ValueError("its content is not what was written")
            with safe_open(target, framework="pt") as file:
                self._linears = json.loads(file.metadata()["linears"])
            self._source = SafetensorsSource([target])
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError, SafetensorError, WeightError) as error:
            log.warning("packed weights %s are damaged (%s) and are made anew", target, error)

    def get(self, label: str) -> Kept | None:
        """One linear, its tensors mapped; None for one that is not there."""
        if self._source is None or label not in self._linears:
            return None
        parts, numbers, elements = self._linears[label]
        return {part: self._source.get(f"{label}/{part}", ()) for part in parts}, numbers, elements

    def put(self, label: str, tensors: dict[str, Tensor], numbers: list[int], elements: int) -> None:
        """Note one linear, to be written. Its tensors must not change."""
        if self._target is None or self._source is not None:
            return
        self._bytes += sum(t.numel() * t.itemsize for t in tensors.values())
        if self._bytes > MOST_BYTES:
            self._new.clear()
            self._target = None
            return
        self._new |= {f"{label}/{part}": tensor for part, tensor in tensors.items()}
        self._linears[label] = list(tensors), numbers, elements

    def finish(self) -> None:
        """All linears are packed: write what is new."""
        new, self._new = self._new, {}
        target = self._target
        if not new or target is None:
            return
        began = time.monotonic()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            # Ranks that start together make the same: one of them writes it.
            with file_lock(target.with_suffix(".lock"), 0.0):
                self._write(new, target)
        except CacheUnusable:
            return
        except OSError as error:
            self._cannot(error)
            return
        log.info("kept %d MB of packed weights in %.1f s", self._bytes >> 20, time.monotonic() - began)

    def _write(self, new: dict[str, Tensor], target: Path) -> None:
        free = shutil.disk_usage(target.parent).free
        if free < SPARE * self._bytes:
            raise OSError(f"{target.parent} has {free >> 20} MB free, too few for {self._bytes >> 20} MB more")
        # Whole panels first: they end on cache lines, biases and scales may not.
        order = sorted(new, key=lambda name: (not name.endswith("/weight"), name))
        entries = [(name, new[name].shape, new[name].dtype) for name in order]
        write_tensor_file(target, entries, new.__getitem__, {"linears": json.dumps(self._linears)})
        # The note comes last: a file without one is not looked at.
        digest = content_digest(target, self._notes)
        write_whole(_note(target), json.dumps({"made_by": made_by(), "digest": digest}))


@functools.cache
def made_by() -> str:
    """Of the code that packs."""
    return "+".join(sources_digest(PACKAGE / name) for name in _MAKERS)


def _note(target: Path) -> Path:
    return target.with_suffix(".json")
