"""Tokenizers built from GGUF metadata give the ids of the tokenizers they were made from."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from dpi_engine.config.sources import ModelFiles
from dpi_engine.tokenizer import TokenizerError, load_tokenizer
from dpi_engine.tokenizer.gguf_bpe import build_tokenizer

TEXTS = [
    "",
    " ",
    "Hello world, it's 12345 o'clock; don't you'LL'VE think?",
    "def f(x: int) -> str:\n\treturn f'{x**2:.3e}'  # 3.14e-10\n\n\n    pass\r\n",
    "   leading, trailing   \n \n\t ",
    "Füße, naïve café, ångström, Œuvre, ĳ",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם مرحبا بالعالم",
    "你好，世界。こんにちは世界！안녕하세요 세계 一二三",
    "नमस्ते दुनिया สวัสดีชาวโลก",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 😀😀 ☃️",
    "x\u0301 e\u0301 \u200b\u200d zero\x00width \ufeff \x7f",
    "<|im_start|>system\nYou are.<|im_end|>\n<|im_start|>user\nhi<|im_end|>",
    "a<|endoftext|>b <|im_end|> <|not_special|> <|im_start",
    "1 22 333 4444 55555 1,000,000 0x1F 1e5 v2.0.1",
    "https://example.org/a_b?c=d&e=%20#f user@example.org",
    '<html><body class="x">&amp;</body></html>',
    "snake_case camelCase SCREAMING_CASE kebab-case __dunder__",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 5,
    "!!! ??? ... --- *** ### $$$ %%% ((( ))) [[[ ]]]",
]
ODD_DIGITS = ["½ ²³ x² ١٢٣ １２３ Ⅷ ௧௨ ④"]


GOLDEN: dict[str, list[int]] = json.loads((Path(__file__).parent / "smollm2_ids.json").read_text("utf-8"))
"""Ids that transformers' tokenizer of the same GGUF gives for TEXTS."""


def test_smollm2_ids_equal_the_recorded_ones(smollm2: ModelFiles) -> None:
    ours = load_tokenizer(smollm2).tokenizer
    assert set(GOLDEN) == set(TEXTS)
    for text, ids in GOLDEN.items():
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.slow
def test_smollm2_ids_equal_transformers(smollm2: ModelFiles) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(smollm2.directory, gguf_file=smollm2.weights[0].name)
    ours = load_tokenizer(smollm2).tokenizer
    for text in [*TEXTS, *noise(300)]:
        ids = reference(text, add_special_tokens=False).input_ids
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == text
    # transformers leaves the splitting of digits out, which shows on digits outside ASCII only.
    reference._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in [*ODD_DIGITS, *TEXTS]:
        assert ours.encode(text).ids == reference(text, add_special_tokens=False).input_ids, text


def test_smollm2_bundle(smollm2: ModelFiles) -> None:
    bundle = load_tokenizer(smollm2)
    assert bundle.eos_ids == (2,) and bundle.bos_id == 1
    assert bundle.special_ids == frozenset(range(17))
    assert bundle.special_tokens["eos_token"] == "<|im_end|>"
    assert bundle.chat_template is not None and "<|im_start|>" in bundle.chat_template
    assert bundle.tokenizer.decode([1, 19556, 2]) == bundle.tokenizer.decode([19556])
    assert bundle.tokenizer.encode("<|im_end|>").ids == [2]


def noise(count: int) -> list[str]:
    """Random text over many scripts without digits outside ASCII."""
    source = random.Random(1)
    ranges = [
        (32, 126),
        (161, 177),
        (192, 591),
        (880, 1023),
        (1024, 1279),
        (0x4E00, 0x4FFF),
        (0x1F300, 0x1F5FF),
        (9, 13),
    ]
    return [
        "".join(chr(source.randint(*source.choice(ranges))) for _ in range(source.randint(1, 60))) for _ in range(count)
    ]


SPLITS = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def trained(pre: str) -> tuple[Tokenizer, dict[str, Any]]:
    """A tokenizer trained here, in the form model publishers use, and the GGUF metadata a converter makes of it."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre != "qwen2"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLITS[pre]), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, special_tokens=special, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator([*TEXTS, *noise(50)] * 2, trainer)
    state = json.loads(tokenizer.to_str())["model"]
    vocab = sorted(state["vocab"], key=state["vocab"].__getitem__)
    return tokenizer, {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.merges": [" ".join(m) for m in state["merges"]],
        "tokenizer.ggml.token_type": [3 if t in special else 1 for t in vocab],
        "tokenizer.ggml.bos_token_id": vocab.index("<|begin|>"),
        "tokenizer.ggml.eos_token_id": vocab.index("<|im_end|>"),
    }


@pytest.mark.parametrize("pre", SPLITS)
def test_other_families_ids_equal_the_original(pre: str) -> None:
    original, metadata = trained(pre)
    ours = build_tokenizer(metadata)
    for text in [*TEXTS, *ODD_DIGITS, *noise(100)]:
        assert ours.encode(text).ids == original.encode(text).ids, text


def test_begin_and_end_tokens_are_added_when_the_file_says_so() -> None:
    _, metadata = trained("qwen2")
    plain = build_tokenizer(metadata).encode("hi").ids
    bos, eos = metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
    metadata["tokenizer.ggml.add_bos_token"] = True
    assert build_tokenizer(metadata).encode("hi").ids == [bos, *plain]
    assert build_tokenizer(metadata).encode("hi", add_special_tokens=False).ids == plain
    metadata["tokenizer.ggml.add_eos_token"] = True
    assert build_tokenizer(metadata).encode("hi").ids == [bos, *plain, eos]


def test_user_defined_tokens_are_whole_and_kept_in_text() -> None:
    _, metadata = trained("qwen2")
    metadata["tokenizer.ggml.tokens"].append("<think>")
    metadata["tokenizer.ggml.token_type"].append(4)
    ours = build_tokenizer(metadata)
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert last in ours.encode("a<think>b").ids
    assert ours.decode(ours.encode("a<think>b").ids) == "a<think>b"


def test_a_file_that_names_no_split_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    _, metadata = trained("qwen2")
    del metadata["tokenizer.ggml.pre"]
    with caplog.at_level(logging.WARNING):
        assert build_tokenizer(metadata).encode("hello").ids
    assert "cut into words" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "expected 'gpt2' .* got 'llama'"),
        ({"tokenizer.ggml.pre": "martian"}, "'martian' is not known; known: command-r, .*smollm"),
        ({"tokenizer.ggml.tokens": None}, "tokens': expected a list of strings, got nothing"),
        ({"tokenizer.ggml.tokens": []}, "tokens': expected a list of strings, got an empty list"),
        ({"tokenizer.ggml.tokens": [1]}, "tokens': expected a list of strings, got a list of int"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "1 entries stand twice"),
        ({"tokenizer.ggml.merges": ["nospace"]}, "entry 0: expected two parts, got 'nospace'"),
        ({"tokenizer.ggml.merges": ["qqq zzz"]}, "do not fit the tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type': expected .* entries, got 1"),
        ({"tokenizer.ggml.token_type": ["1"]}, "token_type': expected a list of whole numbers, got a list of str"),
        (
            {"tokenizer.ggml.token_type": [float("nan")]},
            "token_type': expected a list of whole numbers, got a list of float",
        ),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 10**6}, "bos_token_id': expected 0 to"),
    ],
)
def test_wrong_metadata_is_named(change: dict[str, Any], message: str) -> None:
    _, metadata = trained("qwen2")
    with pytest.raises(TokenizerError, match=message):
        build_tokenizer({**metadata, **change})
