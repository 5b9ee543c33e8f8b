"""What only some families have: routed experts, and attention over a compressed latent. Read from `config.json`."""

from __future__ import annotations

import msgspec

from dpi_engine.config.errors import ModelSpecError
from dpi_engine.config.keys import Keys

MAX_LAYERS = 4096
"""Of any model; a length that no file may blow up."""


class MoeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Routed experts of the layers in `layers`; every token goes to `top_k` of `num_experts` experts there.

    `intermediate_size`: of one routed expert; `shared_intermediate_size`: of all shared experts together, which see
    every token (0: none). A token's scores are a `softmax` or `sigmoid` over all experts. Chosen are the `top_k` best
    (by score plus a bias of the checkpoint where `correction_bias`) out of the `kept_groups` best of `groups` groups of
    consecutive experts; a group counts as much as the sum of its `group_best` best experts. The weights of the chosen
    are their scores, divided by their sum where `normalize`, times `scaling`.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    layers: tuple[int, ...]
    shared_intermediate_size: int = 0
    scoring: str = "softmax"
    normalize: bool = True
    scaling: float = 1.0
    correction_bias: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 1


class MlaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads come from one latent.

    `q_rank`: of the compressed queries, None where queries are projected directly; `kv_rank`: of the latent that is
    cached. A query or key head is `nope_dim` wide plus `rope_dim` rotated, whose key part all heads share; a value head
    is `value_dim` wide. `interleaved`: the checkpoint's rotated pairs lie side by side, not in halves.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool = True


def read_moe(keys: Keys, architecture: str, layers: int) -> MoeSpec | None:
    """The experts of a config.json of `architecture`; None for a dense family. Raises ModelSpecError."""
    match architecture:
        case "MixtralForCausalLM":
            moe = MoeSpec(
                num_experts=_experts(keys, "num_local_experts"),
                top_k=keys.integer("num_experts_per_tok", low=1),
                intermediate_size=keys.integer("intermediate_size", low=1),
                layers=tuple(range(layers)),
            )
        case "Qwen3MoeForCausalLM":
            moe = MoeSpec(
                num_experts=_experts(keys, "num_experts"),
                top_k=keys.integer("num_experts_per_tok", low=1),
                intermediate_size=keys.integer("moe_intermediate_size", low=1),
                layers=_sparse_layers(keys, layers),
                normalize=keys.flag("norm_topk_prob", False),
            )
        case "DeepseekV2ForCausalLM" | "DeepseekV3ForCausalLM":
            moe = _deepseek(keys, architecture == "DeepseekV3ForCausalLM", layers)
        case _:
            return None
    return checked_moe(moe, keys.where)


def read_mla(keys: Keys) -> MlaSpec:
    """The attention of a DeepSeek config.json. Raises ModelSpecError."""
    if keys.flag("attention_bias", False):
        raise keys.wrong("attention_bias", "false (latent attention with biases is not in this version)", True)
    return MlaSpec(
        q_rank=keys.integer("q_lora_rank", low=1) if keys.has("q_lora_rank") else None,
        kv_rank=keys.integer("kv_lora_rank", low=1),
        nope_dim=keys.integer("qk_nope_head_dim", low=1),
        rope_dim=keys.integer("qk_rope_head_dim", low=2),
        value_dim=keys.integer("v_head_dim", low=1),
        interleaved=keys.flag("rope_interleave", True),
    )


def gguf_moe(keys: Keys, arch: str, layers: int) -> MoeSpec | None:
    """The experts that GGUF metadata of `arch` tell of; None for a dense model. Raises ModelSpecError."""
    count = keys.integer(f"{arch}.expert_count", 0)
    if arch != "qwen3moe" and not count:
        return None
    if arch not in ("llama", "qwen3moe"):
        raise ModelSpecError(f"{keys.where}: {arch!r} with experts is not known; known: llama, qwen3moe")
    if keys.integer(f"{arch}.expert_shared_count", 0):
        raise keys.wrong(f"{arch}.expert_shared_count", "0", keys.raw(f"{arch}.expert_shared_count"))
    width = "feed_forward_length" if arch == "llama" else "expert_feed_forward_length"
    moe = MoeSpec(
        num_experts=keys.integer(f"{arch}.expert_count", low=1),
        top_k=keys.integer(f"{arch}.expert_used_count", low=1),
        intermediate_size=keys.integer(f"{arch}.{width}", low=1),
        layers=tuple(range(min(layers, MAX_LAYERS))),
    )
    return checked_moe(moe, keys.where)


def checked_moe(moe: MoeSpec, where: str) -> MoeSpec:
    """Relations between fields. Raises ModelSpecError."""
    if moe.top_k > moe.num_experts:
        raise ModelSpecError(f"{where}: {moe.top_k} experts per token, but there are only {moe.num_experts}")
    if moe.num_experts % moe.groups:
        raise ModelSpecError(f"{where}: {moe.num_experts} experts do not divide into {moe.groups} groups")
    size = moe.num_experts // moe.groups
    if not 1 <= moe.kept_groups <= moe.groups or moe.group_best > size:
        raise ModelSpecError(
            f"{where}: cannot choose {moe.kept_groups} of {moe.groups} groups of {size} experts by their "
            f"{moe.group_best} best"
        )
    if moe.kept_groups * size < moe.top_k:
        raise ModelSpecError(
            f"{where}: {moe.kept_groups} groups of {size} experts hold fewer than the {moe.top_k} experts per token"
        )
    return moe


def _experts(keys: Keys, key: str) -> int:
    # Newer tools write one name for all families.
    return keys.integer(key if keys.has(key) or not keys.has("num_local_experts") else "num_local_experts", low=1)


def _sparse_layers(keys: Keys, layers: int) -> tuple[int, ...]:
    step = keys.integer("decoder_sparse_step", 1, low=1)
    dense = keys.raw("mlp_only_layers", [])
    if not isinstance(dense, list | tuple) or any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
        raise keys.wrong("mlp_only_layers", "a list of layer numbers", dense)
    return tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)


def _deepseek(keys: Keys, v3: bool, layers: int) -> MoeSpec:
    if keys.integer("moe_layer_freq", 1) != 1:
        raise keys.wrong(
            "moe_layer_freq", "1 (every layer after the dense ones has experts)", keys.raw("moe_layer_freq")
        )
    method = keys.text("topk_method", "noaux_tc" if v3 else "greedy")
    known = ("noaux_tc",) if v3 else ("greedy", "group_limited_greedy")
    if method not in known:
        raise keys.wrong("topk_method", " or ".join(map(repr, known)), method)
    scoring = keys.text("scoring_func", "sigmoid" if v3 else "softmax")
    if scoring != ("sigmoid" if v3 else "softmax"):
        raise keys.wrong("scoring_func", "'sigmoid'" if v3 else "'softmax'", scoring)
    normalize = keys.flag("norm_topk_prob", v3)
    if normalize and not v3:
        # The published code then leaves out the scaling, others apply both; no published model asks for it.
        raise keys.wrong("norm_topk_prob", "false", True)
    width = keys.integer("moe_intermediate_size", low=1)
    grouped = method != "greedy"
    return MoeSpec(
        num_experts=_experts(keys, "n_routed_experts"),
        top_k=keys.integer("num_experts_per_tok", low=1),
        intermediate_size=width,
        layers=tuple(range(min(keys.integer("first_k_dense_replace"), layers), layers)),
        shared_intermediate_size=width * keys.integer("n_shared_experts", 0, high=1024),
        scoring=scoring,
        normalize=normalize,
        scaling=keys.number("routed_scaling_factor", 1.0, above=0.0),
        correction_bias=v3,
        groups=keys.integer("n_group", low=1) if grouped else 1,
        kept_groups=keys.integer("topk_group", low=1) if grouped else 1,
        group_best=2 if v3 else 1,
    )
