"""A tiny Qwen3-MoE with random weights, made without torch; tokenizer and the rest as in process_model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from process_model import CONFIG, HIDDEN, LAYERS, TEMPLATE, tokenizer, weights
from safetensors.numpy import save_file

EXPERTS, TOP_K, INNER = 8, 2, 48

MOE_CONFIG: dict[str, Any] = {
    **CONFIG,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": INNER,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def moe_weights(seed: int = 11) -> dict[str, np.ndarray]:
    tensors = {name: tensor for name, tensor in weights(seed).items() if ".mlp." not in name}
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float = 0.12) -> np.ndarray:
        return rng.normal(0.0, scale, (rows, columns)).astype(np.float32)

    for layer in range(LAYERS):
        at = f"model.layers.{layer}.mlp"
        tensors[f"{at}.gate.weight"] = matrix(EXPERTS, HIDDEN, 0.3)
        for expert in range(EXPERTS):
            tensors[f"{at}.experts.{expert}.gate_proj.weight"] = matrix(INNER, HIDDEN)
            tensors[f"{at}.experts.{expert}.up_proj.weight"] = matrix(INNER, HIDDEN)
            tensors[f"{at}.experts.{expert}.down_proj.weight"] = matrix(HIDDEN, INNER)
    return tensors


def make_moe_model(folder: Path, *, seed: int = 11) -> Path:
    """The whole model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MOE_CONFIG))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|start|>", "eos_token": "<|end|>", "chat_template": TEMPLATE})
    )
    tokenizer().save(str(folder / "tokenizer.json"))
    save_file(moe_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
