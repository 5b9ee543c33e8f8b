"""Random weights, for tests and for checks of a device where no model is at hand."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from dpi_engine.config.model_spec import ModelSpec
from dpi_engine.models.weights import WeightSource


class DummySource(WeightSource):
    """Any tensor asked for, a function of (seed, name, shape): norms near one, the rest normal, scaled by fan-in."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self._dtype = getattr(torch, spec.dtype)
        self._seed = seed

    def names(self) -> frozenset[str]:
        return _Everything()

    def get(self, name: str, shape: Sequence[int]) -> Tensor:
        # torch's CPU generator looks at 32 bits of a seed only, so both go through a checksum of that width.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        tensor = torch.empty(tuple(shape), dtype=self._dtype)
        if len(shape) == 1:
            tensor.normal_(std=0.1, generator=generator)
            return tensor if name.endswith("bias") else tensor + 1
        return tensor.normal_(std=1 / math.sqrt(shape[-1]), generator=generator)

    def file_of(self, name: str) -> str:
        return f"random weights, seed {self._seed}"


class _Everything(frozenset[str]):
    """The set that has every name and lists none."""

    def __contains__(self, name: object) -> bool:
        return True
