"""Tokenizers of Hugging Face folders: special ids, end tokens, templates, and what is said of broken ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from dpi_engine.config.sources import ModelFiles, resolve_model
from dpi_engine.tokenizer import TokenizerError, load_tokenizer, read_tokenizer

CONFIG = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "chat_template": "from the config"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", CONFIG)
    write(tmp_path, "config.json", {"architectures": ["LlamaForCausalLM"], "eos_token_id": 4, "bos_token_id": 0})
    header = b'{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\0\0")
    return tmp_path


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value), "utf-8")


def files_of(folder: Path) -> ModelFiles:
    return resolve_model(str(folder), folder)


def test_special_and_end_tokens(folder: Path) -> None:
    bundle = load_tokenizer(files_of(folder))
    assert (bundle.bos_token, bundle.eos_token, bundle.bos_id) == ("<s>", "</s>", 3)
    assert bundle.eos_ids == (4,)
    assert bundle.special_ids == {3, 4}
    assert bundle.chat_template == "from the config"
    assert bundle.tokenizer.encode("a </s> b <think>").ids == [0, 4, 1, 5]


def test_end_tokens_of_generation_config_come_after_the_named_one(folder: Path) -> None:
    write(folder, "generation_config.json", {"eos_token_id": [1, 4]})
    assert load_tokenizer(files_of(folder)).eos_ids == (4, 1)


def test_without_a_tokenizer_config_ids_come_from_the_model_config(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    bundle = load_tokenizer(files_of(folder))
    assert bundle.eos_ids == (4,) and bundle.bos_id == 0
    assert bundle.chat_template is None and bundle.eos_token is None


def test_template_file_wins(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("from the file")
    assert load_tokenizer(files_of(folder)).chat_template == "from the file"
    assert read_tokenizer(folder).chat_template == "from the file"


def test_default_of_several_templates(folder: Path) -> None:
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    write(folder, "tokenizer_config.json", {**CONFIG, "chat_template": several})
    assert load_tokenizer(files_of(folder)).chat_template == "yes"


def test_truncation_left_in_the_file_is_not_applied(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(files_of(folder)).tokenizer.encode("a b a b").ids == [0, 1, 0, 1]


def test_named_by_path(folder: Path, smollm2: ModelFiles) -> None:
    assert read_tokenizer(folder / "tokenizer.json").eos_ids == (4,)
    assert read_tokenizer(smollm2.weights[0]).eos_ids == (2,)
    with pytest.raises(TokenizerError, match="expected a folder with"):
        read_tokenizer(folder / "nothing")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json: is not a tokenizer"),
        ("tokenizer.json", "{}", r"tokenizer\.json: is not a tokenizer"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json: cannot be read as JSON"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json: expected a JSON object, got list"),
        ("tokenizer_config.json", '{"chat_template": 3}', r"chat_template: expected a text or a list"),
        ("generation_config.json", "nonsense", r"generation_config\.json: cannot be read as JSON"),
    ],
)
def test_broken_files_are_named(folder: Path, name: str, content: str, message: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(files_of(folder))


def test_missing_tokenizer_is_named_with_a_hint(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: the file is missing\.$"):
        load_tokenizer(files_of(folder))
    (folder / "tokenizer.model").touch()
    with pytest.raises(TokenizerError, match=r"tokenizer\.model, an older form"):
        load_tokenizer(files_of(folder))


def test_reading_a_tokenizer_imports_no_torch(smollm2: ModelFiles) -> None:
    code = (
        "import sys; from dpi_engine.tokenizer import read_tokenizer; read_tokenizer(sys.argv[1]);"
        "sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'transformers')))"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(smollm2.weights[0])],
        check=True,
        timeout=240,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
