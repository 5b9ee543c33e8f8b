"""The real model: greedy text is what transformers computes in float32 from the tensors that our loader produced."""

from __future__ import annotations

import time
from pathlib import Path

import model_oracle
import pytest
import torch
from model_oracle import greedy

from dpi_engine.config.sources import ModelFiles
from dpi_engine.models.registry import load_model, open_weights
from dpi_engine.ops.torch_ref import TorchOps
from dpi_engine.tokenizer import load_tokenizer, read_spec

QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three colours.",
    "What is 2 + 2?",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "Explain gravity to a child.",
    "List the planets of the solar system.",
    "Write a Python function that adds two numbers.",
    "What do bees make?",
]
BEGINNINGS = [
    "Once upon a time",
    "The quick brown fox",
    "def fibonacci(n):",
    "In 1969, the first",
    "Water boils at",
    "Dear Sir or Madam,",
    "The three primary colours are",
    "import numpy as np\n",
    "1, 2, 3, 4,",
    "Paris, London, Berlin,",
]
NEW_TOKENS = 16
TIE = 1e-4


@pytest.mark.slow
def test_greedy_text_of_twenty_prompts(smollm2: ModelFiles, model_cache: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    assert model_oracle.BASE  # makes transformers usable without a CUDA driver
    spec = read_spec(smollm2)
    bundle = load_tokenizer(smollm2)
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    texts = [chat.format(q) for q in QUESTIONS] + BEGINNINGS
    prompts = [bundle.tokenizer.encode(t).ids for t in texts]
    ours = load_model(smollm2, spec, TorchOps("cpu", torch.float32), max_model_len=256, cache_dir=model_cache)
    outputs = greedy(ours, prompts, NEW_TOKENS)
    assert "Paris" in bundle.tokenizer.decode(outputs[0])

    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        max_position_embeddings=spec.max_position_embeddings,
        tie_word_embeddings=spec.tie_word_embeddings,
    )
    reference = LlamaForCausalLM(config).float().eval()
    source = open_weights(smollm2, spec, model_cache, lambda stage, done: None)
    missing, unexpected = reference.load_state_dict(
        {name: source.get(name, ()).float() for name in source.names()}, strict=False
    )
    assert missing == ["lm_head.weight"] and not unexpected
    reference.tie_weights()

    ties = []
    for text, prompt, output in zip(texts, prompts, outputs, strict=True):
        # Greedy text is equal when each token is the best one after all before it.
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        best = logits.topk(2).values
        close = (best[:, 0] - best[:, 1]) < TIE
        if close.any():
            ties.append(text)
            continue
        assert logits.argmax(-1).tolist() == output, text
    assert len(ties) <= 2, ties


def test_second_load_is_quick_and_identical(smollm2: ModelFiles, model_cache: Path) -> None:
    """Bounded loosely, for a busy machine; what it guards against is dequantizing anew, which takes longer."""
    ops = TorchOps("cpu", torch.bfloat16)
    spec = read_spec(smollm2)
    load_model(smollm2, spec, ops, max_model_len=64, cache_dir=model_cache)
    stages = set()
    started = time.monotonic()
    model = load_model(
        smollm2, spec, ops, max_model_len=64, cache_dir=model_cache, progress=lambda stage, done: stages.add(stage)
    )
    print(f"loaded in {time.monotonic() - started:.2f} s")
    assert stages == {"load"}
    assert model.weight_bytes == 2 * (134_515_008 + 49152 * 576)
