"""A `tokenizers.Tokenizer` out of the `tokenizer.ggml.*` metadata of a GGUF file (byte-level BPE)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from dpi_engine.tokenizer.errors import TokenizerError

log = logging.getLogger(__name__)

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

# How text is cut into words before merging, by the pattern each family of models was trained with.
_SPLITS = {
    "qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL,
    "llama3": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL,
    "tekken": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
        + _TAIL.replace(r"[\r\n]*", r"[\r\n/]*", 1)
    ),
}

# tokenizer.ggml.pre -> kind: gpt2 (the pattern built into `tokenizers`), digits (the same, digits apart), or _SPLITS.
_PRE = {
    "gpt-2": "gpt2",
    "default": "gpt2",
    "smollm": "digits",
    "starcoder": "digits",
    "refact": "digits",
    "command-r": "digits",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "tekken": "tekken",
}
# Words that are whole vocabulary entries are taken as such, without merging.
_WHOLE_WORDS = {"llama3", "tekken"}


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise TokenizerError(f"GGUF metadata '{key}': expected a list of strings, got {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    if not isinstance(value, list):
        return "nothing" if value is None else type(value).__name__
    return f"a list of {type(value[0]).__name__}" if value else "an empty list"


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = []
    for i, line in enumerate(_strings(metadata, "tokenizer.ggml.merges")):
        left, separator, right = line.partition(" ")
        if not separator or not left or not right:
            raise TokenizerError(f"GGUF metadata 'tokenizer.ggml.merges', entry {i}: expected two parts, got {line!r}")
        pairs.append((left, right))
    return pairs


def _pre_tokenizer(kind: str) -> Any:
    if kind == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "digits":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLITS[kind]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build from the metadata of `read_header`. Raises TokenizerError naming the key that is missing or wrong."""
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise TokenizerError(
            f"GGUF metadata 'tokenizer.ggml.model': expected 'gpt2' (byte-level BPE), got {model!r}. "
            "Give a tokenizer.json with --tokenizer."
        )
    pre = metadata.get("tokenizer.ggml.pre", "default")
    kind = _PRE.get(pre)
    if kind is None:
        raise TokenizerError(
            f"GGUF metadata 'tokenizer.ggml.pre': '{pre}' is not known; known: {', '.join(sorted(_PRE))}. "
            "Give a tokenizer.json with --tokenizer."
        )
    if pre == "default":
        log.warning("the GGUF file does not say how text is cut into words; taking the pattern of GPT-2")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise TokenizerError(f"GGUF metadata 'tokenizer.ggml.tokens': {len(tokens) - len(vocab)} entries stand twice")
    try:
        tokenizer = Tokenizer(BPE(vocab=vocab, merges=_merges(metadata), ignore_merges=kind in _WHOLE_WORDS))
    except TokenizerError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"GGUF metadata 'tokenizer.ggml.merges' do not fit the tokens: {error}") from error
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(kind)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer, metadata, tokens)
    return tokenizer


def _add_special(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    types = metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(types, list) or (types and not isinstance(types[0], int)):
        raise TokenizerError(
            f"GGUF metadata 'tokenizer.ggml.token_type': expected a list of whole numbers, got {_kind(types)}"
        )
    if types and len(types) != len(tokens):
        raise TokenizerError(
            f"GGUF metadata 'tokenizer.ggml.token_type': expected {len(tokens)} entries, got {len(types)}"
        )
    marked = [(token, kind) for token, kind in zip(tokens, types, strict=False) if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, k in marked if k == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t, k in marked if k == _USER_DEFINED])

    def wanted(flag: str, which: str) -> str | None:
        if not metadata.get(f"tokenizer.ggml.{flag}"):
            return None
        token_id = metadata.get(f"tokenizer.ggml.{which}_token_id")
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise TokenizerError(
                f"GGUF metadata 'tokenizer.ggml.{which}_token_id': expected 0 to {len(tokens) - 1}, got {token_id!r}"
            )
        return tokens[token_id]

    first, last = wanted("add_bos_token", "bos"), wanted("add_eos_token", "eos")
    steps: list[Any] = [processors.ByteLevel(trim_offsets=False)]
    if first or last:
        template = ([first] if first else []) + ["$A"] + ([last] if last else [])
        named = [(t, tokenizer.token_to_id(t)) for t in dict.fromkeys(t for t in (first, last) if t)]
        steps.append(processors.TemplateProcessing(single=template, special_tokens=named))
    tokenizer.post_processor = processors.Sequence(steps)
