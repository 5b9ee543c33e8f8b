"""The feed-forward block of a layer of routed experts, and how checkpoints name their matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpi_engine.config.model_spec import ModelSpec
from dpi_engine.config.tensor_parallel import WHOLE, Shard
from dpi_engine.models.mlp import GatedMlp
from dpi_engine.models.weights import Index, Weights
from dpi_engine.ops.exchange import ExpertExchange
from dpi_engine.ops.interface import Ops


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """A family's names under `model.layers.N.`: `block` holds the router (`gate.weight`) and the experts, each with the
    matrices `gate`, `up` and `down`.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class ExpertReader:
    """Matrices of the experts of one layer, of `local` experts only; nothing of the others is read. Of each expert only
    the inner rows and columns of `shard` are.

    Three forms are known: one tensor for each matrix (`experts.3.up_proj.weight`); all experts stacked, gate and up as
    one (`experts.gate_up_proj` [experts, 2 inner, hidden]); stacked, gate and up apart (`experts.up_proj.weight`).
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        prefix: str,
        names: ExpertNames,
        local: range,
        shard: Shard = WHOLE,
    ) -> None:
        assert spec.moe is not None
        self._weights, self._prefix, self._names, self._local = weights, f"{prefix}.experts", names, local
        self._count, self._inner, self._hidden = spec.moe.num_experts, spec.moe.intermediate_size, spec.hidden_size
        self.inner = shard.run(self._inner)
        self._fused = weights.has(f"{self._prefix}.gate_up_proj")
        self._stacked = self._fused or weights.has(f"{self._prefix}.{names.up}.weight")
        if weights.lists_names and not self._stacked:
            for expert in range(self._count):
                if expert not in local:
                    for name in (names.gate, names.up, names.down):
                        weights.leave(f"{self._prefix}.{expert}.{name}.weight")

    def load(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """gate and up [inner, hidden] and down [hidden, inner] of local expert `index`. Raises WeightError."""
        expert, inner, hidden = self._local[index], self._inner, self._hidden
        names, part = self._names, slice(self.inner.start, self.inner.stop)
        if self._fused:
            up = slice(inner + part.start, inner + part.stop)
            return (
                self._part("gate_up_proj", (expert, part), 2 * inner, hidden),
                self._part("gate_up_proj", (expert, up), 2 * inner, hidden),
                self._part("down_proj", (expert, slice(0, hidden), part), hidden, inner),
            )
        if self._stacked:
            return (
                self._part(f"{names.gate}.weight", (expert, part), inner, hidden),
                self._part(f"{names.up}.weight", (expert, part), inner, hidden),
                self._part(f"{names.down}.weight", (expert, slice(0, hidden), part), hidden, inner),
            )
        at = f"{self._prefix}.{expert}"
        return (
            self._weights.take_rows(f"{at}.{names.gate}.weight", self.inner, inner, hidden),
            self._weights.take_rows(f"{at}.{names.up}.weight", self.inner, inner, hidden),
            self._weights.take_columns(f"{at}.{names.down}.weight", self.inner, hidden, inner),
        )

    def _part(self, name: str, index: Index, rows: int, columns: int) -> Tensor:
        return self._weights.take_part(f"{self._prefix}.{name}", index, self._count, rows, columns)


class MoeMlp:
    """Each token through the experts that the router chose, wherever they live, and through the shared experts."""

    collective = True

    def __init__(
        self,
        spec: ModelSpec,
        ops: Ops,
        weights: Weights,
        layer: str,
        exchange: ExpertExchange,
        names: Sequence[ExpertNames],
        shard: Shard = WHOLE,
    ) -> None:
        """`layer` is `model.layers.N`; of `names` the first whose router is among the weights is taken.

        With a `shard` every worker routes all tokens and has a part of each expert, and gives a part of the sum.
        """
        moe = spec.moe
        assert moe is not None
        self._ops, self._exchange = ops, exchange
        found = next((n for n in names if weights.has(f"{layer}.{n.block}.gate.weight")), names[0])
        prefix = f"{layer}.{found.block}"
        bias = None
        if moe.correction_bias:
            bias = weights.take(f"{prefix}.gate.e_score_correction_bias", moe.num_experts)
        router = weights.take(f"{prefix}.gate.weight", moe.num_experts, spec.hidden_size)
        self._router = ops.pack_router(router, bias, moe)
        local = exchange.placement.local
        reader = ExpertReader(spec, weights, prefix, found, local, shard)
        self._experts = ops.pack_experts(len(local), spec.hidden_size, len(reader.inner), reader.load)
        self._shared: GatedMlp | None = None
        if moe.shared_intermediate_size:
            width = moe.shared_intermediate_size
            self._shared = GatedMlp(spec, ops, weights, f"{prefix}.shared_experts", inner=width, shard=shard)

    @property
    def recordable(self) -> bool:
        return self._shared is None

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, hidden] -> [n, hidden]. Raises ExchangeError."""
        ops = self._ops
        ids, weights = ops.route(x, self._router)
        if self._exchange.placement.ep_size == 1:
            out = ops.experts(x, ids, weights, self._experts)
        else:
            out = ops.outside(self._exchanged, x, ids, weights)
        if self._shared is not None and x.shape[0]:
            out = torch.add(out, self._shared(x))
        return out

    def _exchanged(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """What the experts of all ranks make of x [n, hidden]: [n, hidden]. Raises ExchangeError."""
        batch = self._exchange.dispatch(x, ids, weights)
        partial = self._ops.experts(batch.hidden, batch.ids, batch.weights, self._experts)
        return self._exchange.combine(partial, batch)
