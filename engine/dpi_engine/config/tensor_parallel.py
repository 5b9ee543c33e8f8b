"""How the layers of one rank are split over its workers: a pure table, the same on every worker."""

from __future__ import annotations

import msgspec

from dpi_engine.config.errors import ConfigError
from dpi_engine.config.model_spec import ModelSpec

_MOST_SHOWN = 64


class Shard(msgspec.Struct, frozen=True):
    """The part of worker `index` of `size` (Megatron-LM, arXiv 1909.08053).

    Query heads, the inner widths of feed-forward blocks and experts, and the vocabulary are cut into `size` equal runs,
    workers in order. Of key-value heads every worker holds those that its query heads use: where there are fewer heads
    than workers, several hold the same one.
    """

    size: int = 1
    index: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for a worker outside the rank."""
        if self.size < 1 or not 0 <= self.index < self.size:
            raise ValueError(f"expected 0 <= worker < size, got worker {self.index} of {self.size}")

    def run(self, total: int) -> range:
        """This worker's run of `total` equal things. Raises ValueError where they do not divide."""
        share, left = divmod(total, self.size)
        if left:
            raise ValueError(f"{total} is no multiple of {self.size}")
        return range(self.index * share, (self.index + 1) * share)

    def kv_run(self, kv_heads: int) -> range:
        """The key-value heads of this worker's query heads. Raises ValueError where neither divides the other."""
        if kv_heads % self.size == 0:
            return self.run(kv_heads)
        holders, left = divmod(self.size, kv_heads)
        if left:
            raise ValueError(f"neither of {kv_heads} and {self.size} is a multiple of the other")
        return range(self.index // holders, self.index // holders + 1)


WHOLE = Shard()
"""A rank of one worker."""


def misfits(spec: ModelSpec, size: int) -> list[str]:
    """What of a model of `spec` cannot be split over `size` workers, in words; empty when all can."""
    widths = {"attention heads": spec.num_heads, "vocabulary size": spec.vocab_size}
    if spec.moe is None or len(spec.moe.layers) < spec.num_layers:
        widths["intermediate size"] = spec.intermediate_size
    if spec.moe is not None:
        widths["intermediate size of an expert"] = spec.moe.intermediate_size
        widths["intermediate size of the shared experts"] = spec.moe.shared_intermediate_size
    found = [f"{what} {n} is no multiple of {size}" for what, n in widths.items() if n % size]
    kv = spec.num_kv_heads
    if spec.mla is None and kv % size and size % kv:
        found.append(f"key-value heads {kv} is neither a multiple nor a divisor of {size}")
    return found


def check_tensor_parallel(spec: ModelSpec, size: int) -> None:
    """Raise ConfigError naming everything that does not divide, and the sizes that would fit."""
    found = misfits(spec, size)
    if not found:
        return
    fitting = [str(n) for n in range(1, min(spec.num_heads, _MOST_SHOWN) + 1) if not misfits(spec, n)]
    raise ConfigError(
        f"--tensor-parallel-size {size} (-tp): this {spec.architecture} model cannot be split so: {'; '.join(found)}. "
        f"Sizes that fit: {', '.join(fitting)}; for more copies raise --data-parallel-size"
    )
