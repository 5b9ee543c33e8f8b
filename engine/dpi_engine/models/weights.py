"""Weights by name: where tensors come from, and the check that they are exactly those that the model takes."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dpi_engine.config.errors import ConfigError

if TYPE_CHECKING:
    from dpi_engine.models.packed_cache import PackedCache
    from dpi_engine.ops.interface import Ops

Progress = Callable[[str, float], None]
"""Told (stage, fraction done) while a model loads. Stages: `dequantize` (first time only), `load`."""

Index: TypeAlias = "tuple[int | slice, ...]"
"""A part of a tensor: one entry or a run for each of its first axes."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SHOWN = 5


class WeightError(ConfigError):
    """Weights that cannot be read or do not fit the model.

    The text names the file and, where one is at fault, the tensor with what was expected and what was got.
    """


class WeightSource(ABC):
    """Tensors under the names of a Hugging Face checkpoint (`model.layers.0.self_attn.q_proj.weight`)."""

    lasting = False
    """Its tensors are mapped from a file that nobody writes to, so that a model can compute with them as they are."""

    @abstractmethod
    def names(self) -> frozenset[str]:
        """Every tensor there is."""

    @abstractmethod
    def get(self, name: str, shape: Sequence[int]) -> Tensor:
        """The tensor on the CPU, perhaps mapped from a file: do not write to it. Raises WeightError.

        `shape` is what the caller expects; only sources that make tensors up need it, `Weights` checks it.
        """

    def get_part(self, name: str, index: Index, shape: Sequence[int]) -> Tensor:
        """The part `index` of a tensor of `shape`; sources that can read no more than that. Raises WeightError."""
        return self.get(name, shape)[index]

    def stored_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape without reading the tensor, None where it is not known."""
        return None

    @abstractmethod
    def file_of(self, name: str) -> str:
        """Where the tensor lies, for messages."""

    def close(self) -> None:  # noqa: B027 - most sources hold nothing
        """Let go of open files."""


class Weights:
    """Hands tensors of a source to a model under construction, once each, and knows which were left over."""

    def __init__(
        self,
        source: WeightSource,
        allow_unused: Iterable[str] = (),
        unused_parts: Iterable[str] = (),
        packed: PackedCache | None = None,
    ) -> None:
        """Tensors whose names end in one of `allow_unused` or begin with one of `unused_parts` may be left over.
        `packed`: linears that need not be made from them, or are to be kept.
        """
        self._source, self._packed = source, packed
        self._names = source.names()
        self._allow_unused = tuple(allow_unused)
        self._unused_parts = tuple(unused_parts)
        self._taken: set[str] = set()
        self.elements = 0

    def has(self, name: str) -> bool:
        """Whether the checkpoint has the tensor; not for made-up weights, which have none in particular."""
        return self.lists_names and name in self._names

    @property
    def lists_names(self) -> bool:
        """False for made-up weights: any tensor can be taken, none is known beforehand."""
        return bool(self._names)

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor, checked against `shape` and for a dtype the ops can take. Raises WeightError."""
        self._require(name, shape)
        tensor = self._source.get(name, shape)
        self._check_shape(name, shape, tensor.shape)
        return self._checked(name, tensor)

    def take_part(self, name: str, index: Index, *shape: int) -> Tensor:
        """The part `index` of the tensor of `shape`; the rest is not read. Raises WeightError."""
        if all(isinstance(i, slice) and i == slice(0, n) for i, n in zip(index, shape, strict=False)):
            return self.take(name, *shape)
        self._require(name, shape)
        stored = self._source.stored_shape(name)
        if stored is not None:
            self._check_shape(name, shape, stored)
        return self._checked(name, self._source.get_part(name, index, shape))

    def take_rows(self, name: str, rows: range, *shape: int) -> Tensor:
        """Consecutive `rows` of the tensor of `shape` [rows, ...]; no others are read. Raises WeightError."""
        return self.take_part(name, (slice(rows.start, rows.stop),), *shape)

    def take_columns(self, name: str, columns: range, *shape: int) -> Tensor:
        """Consecutive `columns` of the matrix of `shape` [rows, columns]. Raises WeightError."""
        return self.take_part(name, (slice(0, shape[0]), slice(columns.start, columns.stop)), *shape)

    def linear(
        self, ops: Ops, names: Sequence[str], read: Callable[[], tuple[Tensor, Tensor | None]], gated: bool = False
    ) -> Any:
        """The packed linear of the weight and bias that `read` takes: `names`, all of them. Not read where it is kept
        packed. Raises WeightError.
        """
        cache, label = self._packed, " ".join(names)
        kept = None if cache is None else cache.get(label)
        if kept is not None:
            tensors, numbers, elements = kept
            for name in names:
                self.leave(name)
            self.elements += elements
            return ops.kept_linear(tensors, numbers)
        before = self.elements
        weight, bias = read()
        packed = ops.pack_gated(weight, bias) if gated else ops.pack_linear(weight, bias)
        if cache is not None:
            cache.put(label, *ops.linear_tensors(packed), self.elements - before)
        return packed

    def uploaded(self, ops: Ops, tensor: Tensor) -> Tensor:
        """A tensor that was taken, on the device of `ops`: a copy, but where it lies there already and lasts."""
        if self._source.lasting and ops.device.type == "cpu" and tensor.is_contiguous():
            return tensor
        return ops.upload(tensor)

    def leave(self, name: str) -> None:
        """Count the tensor as taken without reading it: it belongs to another rank. Raises WeightError if missing."""
        self._require(name, None)
        self._taken.add(name)

    def _require(self, name: str, shape: Sequence[int] | None) -> None:
        if name not in self._names:
            expected = "" if shape is None else f"; expected shape {list(shape)}"
            raise WeightError(
                f"{self._source.file_of(name)}: tensor '{name}' is missing{expected}. "
                f"The weights have {len(self._names)} tensors: {_some(self._names)}."
            )

    def _check_shape(self, name: str, expected: Sequence[int], got: Sequence[int]) -> None:
        if tuple(got) != tuple(expected):
            raise WeightError(
                f"{self._source.file_of(name)}: tensor '{name}' does not fit the model's configuration: "
                f"expected shape {list(expected)}, got {list(got)}"
            )

    def _checked(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype not in _FLOATS:
            raise WeightError(
                f"{self._source.file_of(name)}: tensor '{name}': expected float32, bfloat16 or float16, "
                f"got {str(tensor.dtype).removeprefix('torch.')} (quantized checkpoints are served from GGUF only)"
            )
        self._taken.add(name)
        self.elements += tensor.numel()
        return tensor

    def finish(self) -> None:
        """Raises WeightError when tensors are left that no part of the model took."""
        left = [
            n
            for n in self._names - self._taken
            if not n.endswith(self._allow_unused) and not n.startswith(self._unused_parts)
        ]
        if left:
            name = min(left)
            raise WeightError(
                f"{self._source.file_of(name)}: {len(left)} tensors belong to no part of this model: {_some(left)}. "
                "Is config.json the one of these weights?"
            )


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    if not ordered:
        return "none"
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(f"'{n}'" for n in ordered[:_SHOWN]) + more


class SafetensorsSource(WeightSource):
    """One safetensors file or several shards, mapped; a tensor is read when it is asked for."""

    def __init__(self, files: Sequence[str | Path], index: str | Path | None = None) -> None:
        """`index` is the model.safetensors.index.json that names each tensor's shard; it must agree with the files.

        Raises WeightError.
        """
        if not files:
            raise WeightError("no safetensors file was given")
        self._where: dict[str, Path] = {}
        self._open = {}
        for file in map(Path, files):
            try:
                handle = safe_open(file, framework="pt")
                names = list(handle.keys())
            except FileNotFoundError:
                raise WeightError(f"{file}: the file is missing") from None
            except (SafetensorError, OSError) as error:
                raise WeightError(
                    f"{file}: cannot be read as safetensors, it is cut short or damaged: {error}"
                ) from error
            for name in names:
                if name in self._where:
                    raise WeightError(f"{file}: tensor '{name}' stands in {self._where[name].name} too")
                self._where[name] = file
            self._open[file] = handle
        self._first = Path(files[0])
        if index is not None:
            self._check_index(Path(index))

    def _check_index(self, index: Path) -> None:
        for name, shard in read_index(index).items():
            held = self._where.get(name)
            if held is None or held.name != shard:
                got = "no file has it" if held is None else f"it is in {held.name}"
                raise WeightError(f"{index}: tensor '{name}': expected in {shard}, {got}")

    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    def get(self, name: str, shape: Sequence[int]) -> Tensor:
        file = self._where[name]
        try:
            tensor: Tensor = self._open[file].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise WeightError(f"{file}: tensor '{name}' cannot be read: {error}") from error
        return tensor

    def get_part(self, name: str, index: Index, shape: Sequence[int]) -> Tensor:
        file = self._where[name]
        try:
            tensor: Tensor = self._open[file].get_slice(name)[index]
        except (SafetensorError, OSError, RuntimeError, IndexError) as error:
            raise WeightError(f"{file}: tensor '{name}' cannot be read: {error}") from error
        return tensor

    def stored_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open[self._where[name]].get_slice(name).get_shape())

    def file_of(self, name: str) -> str:
        return str(self._where.get(name, self._first))

    def close(self) -> None:
        self._open.clear()


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> shard file name, from a model.safetensors.index.json. Raises WeightError."""
    try:
        table = json.loads(path.read_text("utf-8"))["weight_map"]
        return {str(name): str(shard) for name, shard in table.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightError(f"{path}: expected JSON with a 'weight_map' of tensor to file, got {error!r}") from error
