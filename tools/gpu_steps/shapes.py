"""Models made on the spot: the configuration of a known shape and a tokenizer trained on generated text, no weights."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpi_engine.config.model_spec import ModelSpec

END = "<|end|>"
TRAINED_TOKENS = 600

_COMMON: dict[str, Any] = {
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 64,
        "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "max_position_embeddings": 2048,
    },
    "qwen2-0.5b": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896,
        "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40960,
    },
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    "tiny-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 1024, "hidden_size": 64,
        "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "max_position_embeddings": 2048, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "max_position_embeddings": 40960, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that one decode step must read: `weights` once, `token` for each key that any of its sequences sees.

    Of routed experts as many count as the step's tokens want when each chooses at random.
    """

    weights: int
    token: int

    @classmethod
    def of(cls, shape: str, itemsize: int, tokens: int = 1) -> StepBytes:
        """For `itemsize` bytes a number. The embedding is looked up, the head (the same numbers) is read whole."""
        spec = ModelSpec.from_config(config(shape))
        attention = spec.hidden_size * (2 * spec.q_size + 2 * spec.kv_size)
        mlp = 3 * spec.hidden_size * spec.intermediate_size
        if spec.moe is not None:
            missed = (1 - spec.moe.top_k / spec.moe.num_experts) ** tokens
            expected = spec.moe.num_experts * (1 - missed)
            mlp = int(expected * 3 * spec.hidden_size * spec.moe.intermediate_size)
        weights = spec.num_layers * (attention + mlp) + spec.vocab_size * spec.hidden_size
        return cls(weights * itemsize, spec.num_layers * 2 * spec.kv_size * itemsize)


def config(shape: str) -> dict[str, Any]:
    """The content of config.json."""
    return {**_COMMON, **SHAPES[shape]}


def make_model(folder: Path, shape: str) -> Path:
    """Write config.json, tokenizer.json and tokenizer_config.json of `shape` into `folder`, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(shape)))
    (folder / "tokenizer.json").write_text(_tokenizer(SHAPES[shape]["vocab_size"]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "bos_token": END}))
    return folder


def _tokenizer(vocab: int) -> str:
    """A byte-level BPE. Random weights answer with any id, so those that training left over get a text too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from dpi_engine.tools.prompts import text

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(TRAINED_TOKENS, vocab),
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(0)
    tokenizer.train_from_iterator((text(rng, 200) for _ in range(50)), trainer)
    made = json.loads(tokenizer.to_str())
    words: dict[str, int] = made["model"]["vocab"]
    for i in range(len(words), vocab):
        words[f"Ġ#{i}"] = i  # Ġ is a space in the byte alphabet
    return json.dumps(made)
