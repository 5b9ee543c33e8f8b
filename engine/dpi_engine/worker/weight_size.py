"""How much memory a model's weights take, before any is read, and what to do where a GPU has less."""

from __future__ import annotations

import torch

from dpi_engine.config.errors import ConfigError
from dpi_engine.config.model_spec import ModelSpec

GIB = 1 << 30


def weight_elements(spec: ModelSpec, workers: int = 1, experts: int | None = None) -> int:
    """Numbers in the weights of one of `workers` that share every layer; norms and biases, which are few, left out.

    `experts`: how many of each layer's routed experts the rank holds (None: all).
    """
    hidden, moe, mla = spec.hidden_size, spec.moe, spec.mla
    if mla is None:
        attention = hidden * (2 * spec.q_size + 2 * spec.kv_size)
    else:
        q_width = spec.num_heads * (mla.nope_dim + mla.rope_dim)
        queries = hidden * q_width if mla.q_rank is None else mla.q_rank * (hidden + q_width)
        latents = hidden * (mla.kv_rank + mla.rope_dim) + mla.kv_rank * spec.num_heads * (mla.nope_dim + mla.value_dim)
        attention = queries + latents + hidden * spec.num_heads * mla.value_dim
    dense = 3 * hidden * spec.intermediate_size
    sparse, sparse_layers = 0, 0
    if moe is not None:
        sparse_layers = len(moe.layers)
        each = 3 * hidden * moe.intermediate_size
        held = moe.num_experts if experts is None else experts
        sparse = held * each + moe.num_experts * hidden + 3 * hidden * moe.shared_intermediate_size
    layers = spec.num_layers * attention + (spec.num_layers - sparse_layers) * dense + sparse_layers * sparse
    # The embedding is looked up and the head multiplied: where both are one, the two are held all the same.
    return (layers + 2 * spec.vocab_size * hidden) // workers


def weight_bytes(
    spec: ModelSpec, dtype: torch.dtype, workers: int = 1, experts: int | None = None, quantized: bool = False
) -> int:
    """Bytes of those numbers. `quantized`: linears take one for each; the embedding, routed experts and routers, and
    the parts of heads of latent attention, which are in no linear, are in `dtype`.
    """
    whole = weight_elements(spec, workers, experts) * dtype.itemsize
    if not quantized:
        return whole
    moe, mla = spec.moe, spec.mla
    wide = spec.vocab_size * spec.hidden_size
    if moe is not None:
        held = moe.num_experts if experts is None else experts
        each = 3 * spec.hidden_size * moe.intermediate_size
        wide += len(moe.layers) * (held * each + moe.num_experts * spec.hidden_size)
    if mla is not None:
        wide += spec.num_layers * mla.kv_rank * spec.num_heads * (mla.nope_dim + mla.value_dim)
    return whole - (weight_elements(spec, workers, experts) - wide // workers) * (dtype.itemsize - 1)


def check_weights_fit(
    spec: ModelSpec,
    dtype: torch.dtype,
    workers: int,
    total: int,
    share: float,
    sharers: int,
    experts: int | None = None,
    quantized: bool = False,
) -> None:
    """Raises ConfigError, with what would fit, when the weights of one worker do not go into its `share` of a GPU of
    `total` bytes that `sharers` ranks use. `experts` and `quantized` as for weight_bytes.
    """
    room = int(total * share / sharers)
    need = weight_bytes(spec, dtype, workers, experts, quantized)
    if need < room:
        return
    if experts is None:
        wanted = workers
        while weight_bytes(spec, dtype, wanted, None, quantized) >= room and wanted < 1024:
            wanted *= 2
        remedies = [f"--tensor-parallel-size {wanted} (-tp) on as many such GPUs"]
    else:
        remedies = ["more ranks that share the experts (--data-parallel-size), with a GPU each"]
    if sharers > 1:
        remedies.insert(0, "fewer ranks for each GPU")
    if dtype.itemsize > 2:
        remedies.insert(0, "--dtype bfloat16")
    elif not quantized and weight_bytes(spec, dtype, workers, experts, True) < room:
        remedies.append("--quantization int8 or fp8 (-q)")
    raise ConfigError(
        f"the weights take {need / GIB:.1f} GiB in {str(dtype).removeprefix('torch.')}, more than the {room / GIB:.1f} "
        f"GiB that a rank may use of this GPU ({share:.0%} of {total / GIB:.1f} GiB for {sharers} rank(s)); use "
        f"{', or '.join(remedies)}, or a smaller model"
    )
