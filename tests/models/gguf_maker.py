"""Writes small GGUF files from Hugging Face tensors, as converters do: own names, Llama's q and k rows paired."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
Kind = Callable[[str, np.ndarray], gguf.GGMLQuantizationType]


def all_float32(name: str, values: np.ndarray) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType.F32


def matrices_as(kind: gguf.GGMLQuantizationType) -> Kind:
    """Quantize matrices whose rows divide into blocks; keep the rest."""
    block = gguf.GGML_QUANT_SIZES[kind][0]
    return lambda name, v: kind if v.ndim >= 2 and v.shape[-1] % block == 0 else gguf.GGMLQuantizationType.F32


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def pair_rows(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from halves (a0 a1 .. b0 b1 ..) to pairs (a0 b0 a1 b1 ..)."""
    per_head = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
    return np.ascontiguousarray(np.swapaxes(per_head, 1, 2)).reshape(values.shape)


def single_parts(tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    """Fused gate and up matrices of experts apart, as files have them."""
    found: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        values = tensor.numpy()
        if name.endswith("experts.gate_up_proj"):
            stem, half = name.removesuffix("gate_up_proj"), values.shape[1] // 2
            found[f"{stem}gate_proj.weight"] = np.ascontiguousarray(values[:, :half])
            found[f"{stem}up_proj.weight"] = np.ascontiguousarray(values[:, half:])
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = values
        else:
            found[name] = values
    return found


def write_gguf(path: Path, reference: Any, kind_of: Kind = all_float32) -> Path:
    """The transformers model `reference` as a GGUF file without a tokenizer."""
    config = reference.config
    arch = {"mixtral": "llama", "qwen3_moe": "qwen3moe"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type in ("mixtral", "qwen3_moe"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for name, values in single_parts(reference.state_dict()).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "llama" and ".q_proj." in name:
            values = pair_rows(values, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            values = pair_rows(values, config.num_key_value_heads)
        kind = kind_of(name, values)
        writer.add_tensor(gguf_name(name), quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
