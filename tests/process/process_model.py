"""A tiny Qwen3 with random weights and a tokenizer of its own, made without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 320
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 64, 4, 2, 64, 96, 2
POSITIONS = 8192

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)

TEXT = (
    "the quick brown fox jumps over the lazy dog while nine ranks wait for the head and every request finds its way "
    "to the rank with the shortest queue; blocks are taken, pages are filled, tokens come back one by one "
) * 4


def weights(seed: int = 7, hidden: int = HIDDEN) -> dict[str, np.ndarray]:
    """Random tensors of CONFIG; `hidden` other than the configured one makes them unfit for it."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0.0, 0.12, (rows, columns)).astype(np.float32)

    def norm(width: int) -> np.ndarray:
        return (1.0 + 0.2 * rng.normal(size=width)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB, hidden) * 5,
        "model.norm.weight": norm(hidden),
        "lm_head.weight": matrix(VOCAB, hidden),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.input_layernorm.weight": norm(hidden),
            f"{at}.post_attention_layernorm.weight": norm(hidden),
            f"{at}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, hidden),
            f"{at}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, hidden),
            f"{at}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, hidden),
            f"{at}.self_attn.o_proj.weight": matrix(hidden, HEADS * HEAD_DIM),
            f"{at}.self_attn.q_norm.weight": norm(HEAD_DIM),
            f"{at}.self_attn.k_norm.weight": norm(HEAD_DIM),
            f"{at}.mlp.gate_proj.weight": matrix(MLP, hidden),
            f"{at}.mlp.up_proj.weight": matrix(MLP, hidden),
            f"{at}.mlp.down_proj.weight": matrix(hidden, MLP),
        }
    return tensors


def tokenizer() -> Tokenizer:
    """Byte-level BPE of VOCAB entries: two special tokens, 256 bytes, and merges learned from TEXT."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    assert made.get_vocab_size() == VOCAB
    return made


def make_model(folder: Path, *, seed: int = 7, hidden: int = HIDDEN) -> Path:
    """The whole model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|start|>", "eos_token": "<|end|>", "chat_template": TEMPLATE})
    )
    tokenizer().save(str(folder / "tokenizer.json"))
    save_file(weights(seed, hidden), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
