"""Models with random weights in this process, made in seconds: all tensors are cut from one table of random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import torch
from torch import Tensor

from dpi_engine.config.model_spec import ModelSpec
from dpi_engine.models import registry
from dpi_engine.models.dummy import DummySource
from dpi_engine.models.registry import Model, load_model
from dpi_engine.ops.interface import Ops
from gpu_steps.shapes import config

_TABLE = 1 << 24


class QuickSource(DummySource):
    """Tensors of numbers as DummySource's, but the same ones over and over."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        super().__init__(spec, seed)
        self._table = torch.randn(_TABLE, generator=torch.Generator().manual_seed(seed))
        self._scaled: dict[int, Tensor] = {}

    def get(self, name: str, shape: Sequence[int]) -> Tensor:
        if len(shape) == 1:
            return super().get(name, shape)
        width = shape[-1]
        if width not in self._scaled:
            # Rows must not all be equal where a row's width divides the table's.
            self._scaled[width] = (self._table[: _TABLE - 4099] / width**0.5).to(self._dtype)
        numbers, count = self._scaled[width], 1
        for n in shape:
            count *= n
        if count > len(numbers):
            numbers = numbers.repeat(-(-count // len(numbers)))
        return numbers[:count].view(*shape)


def quick_model(shape: str, ops: Ops, max_model_len: int) -> Model:
    """The model of gpu_steps.shapes.SHAPES[shape] on the device of `ops`."""
    spec = ModelSpec.from_config(config(shape))
    with mock.patch.object(registry, "DummySource", QuickSource):
        return load_model(None, spec, ops, load_format="dummy", max_model_len=max_model_len)
