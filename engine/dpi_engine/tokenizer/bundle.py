"""A model's tokenizer with what goes along: special ids, end tokens, chat template. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dpi_engine.config.gguf_file import is_gguf, read_header
from dpi_engine.config.sources import ModelFiles
from dpi_engine.tokenizer.errors import TokenizerError
from dpi_engine.tokenizer.gguf_bpe import build_tokenizer


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """`eos_ids` end a generation, the first is the one named eos. `special_ids` are left out of text.

    `special_tokens` maps bos_token, eos_token, unk_token, pad_token to their text where the model has them: chat
    templates use these names. `chat_template` is Jinja, None when the model has none.
    """

    tokenizer: Tokenizer
    chat_template: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None
    special_ids: frozenset[int]
    special_tokens: dict[str, str]

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")


_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_tokenizer(files: ModelFiles) -> TokenizerBundle:
    """Read the tokenizer of a model: its tokenizer.json, else what its GGUF file holds.

    A chat_template.jinja beside the weights wins over a template inside. Raises TokenizerError (or GgufError) naming
    the file and what is wrong with it.
    """
    if files.tokenizer is None and files.format == "gguf":
        bundle = _from_gguf(files.weights[0])
    elif files.tokenizer is None:
        older = [n for n in ("tokenizer.model", "vocab.json") if (files.directory / n).exists()]
        hint = f" It has {older[0]}, an older form: convert it, or name another with --tokenizer." if older else ""
        raise TokenizerError(f"{files.directory / 'tokenizer.json'}: the file is missing.{hint}")
    else:
        bundle = _from_json(files.directory, files.tokenizer)
    if files.chat_template is not None:
        bundle = replace(bundle, chat_template=files.chat_template.read_text("utf-8"))
    return bundle


def read_tokenizer(path: str | Path) -> TokenizerBundle:
    """The same for --tokenizer: a folder with tokenizer.json, a tokenizer.json itself, or a GGUF file."""
    path = Path(path)
    if is_gguf(path):
        return _from_gguf(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise TokenizerError(f"{path}: expected a folder with tokenizer.json, a tokenizer.json or a GGUF file")
    bundle = _from_json(file.parent, file)
    template = file.parent / "chat_template.jinja"
    return replace(bundle, chat_template=template.read_text("utf-8")) if template.is_file() else bundle


def _from_json(folder: Path, file: Path) -> TokenizerBundle:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{file}: is not a tokenizer that the tokenizers library reads: {error}") from error
    # Padding or truncation left in the file by training would change prompts without a word.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    config = _json(folder / "tokenizer_config.json")
    tokens = {name: text for name in _NAMED if (text := _token_text(config.get(name))) is not None}
    generation, model = _json(folder / "generation_config.json"), _json(folder / "config.json")
    named = [tokenizer.token_to_id(tokens["eos_token"])] if "eos_token" in tokens else []
    eos = [*named, *_ids(generation.get("eos_token_id")), *_ids(model.get("eos_token_id"))]
    bos = tokenizer.token_to_id(tokens["bos_token"]) if "bos_token" in tokens else None
    return _bundle(
        tokenizer,
        _template(config.get("chat_template"), folder),
        eos,
        bos if bos is not None else next(iter(_ids(model.get("bos_token_id"))), None),
        tokens,
    )


def _from_gguf(path: Path) -> TokenizerBundle:
    metadata = read_header(path).metadata
    try:
        tokenizer = build_tokenizer(metadata)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error
    ids = {
        "bos_token": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token": metadata.get("tokenizer.ggml.eos_token_id"),
        "unk_token": metadata.get("tokenizer.ggml.unknown_token_id"),
        "pad_token": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    tokens = {}
    for name, token_id in ids.items():
        if isinstance(token_id, int) and (text := tokenizer.id_to_token(token_id)) is not None:
            tokens[name] = text
    eos: list[int | None] = [*_ids(ids["eos_token"]), *_ids(metadata.get("tokenizer.ggml.eot_token_id"))]
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise TokenizerError(f"{path}: GGUF metadata 'tokenizer.chat_template': expected a text, got {template!r:.40}")
    return _bundle(
        tokenizer,
        template,
        eos,
        next(iter(_ids(ids["bos_token"])), None),
        tokens,
    )


def _bundle(
    tokenizer: Tokenizer, template: str | None, eos: Sequence[int | None], bos: int | None, tokens: dict[str, str]
) -> TokenizerBundle:
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    found = tuple(dict.fromkeys(i for i in eos if i is not None))
    return TokenizerBundle(tokenizer, template, found, bos, frozenset(special), tokens)


def _json(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file; empty when there is no file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _token_text(value: Any) -> str | None:
    """A token is written as its text, or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(value: Any) -> list[int]:
    """An id, a list of ids or nothing, as a list."""
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]


def _template(value: Any, folder: Path) -> str | None:
    """A template is one text, or a list of named ones of which `default` is taken."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        chosen = named.get("default")
        if isinstance(chosen, str):
            return chosen
    raise TokenizerError(
        f"{folder / 'tokenizer_config.json'}: chat_template: expected a text or a list with one named 'default'"
    )
