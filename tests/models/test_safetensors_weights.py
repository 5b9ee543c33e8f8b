"""Safetensors in one file and in shards, and what is said when they do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_oracle import Oracle, PagedBatch, build_oracle, make_oracle, random_ids
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from dpi_engine.config.errors import ConfigError
from dpi_engine.config.sources import resolve_model
from dpi_engine.models.registry import INDEX, Model, load_model
from dpi_engine.models.weights import SafetensorsSource, WeightError
from dpi_engine.ops.torch_ref import TorchOps
from dpi_engine.tokenizer import read_spec

OPS = TorchOps("cpu", torch.float32)
Tensors = dict[str, torch.Tensor]


def load(folder: Path) -> Model:
    files = resolve_model(str(folder), folder)
    return load_model(files, read_spec(files), OPS)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle("llama-64-untied", tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(oracle: Oracle, tmp_path: Path) -> Path:
    """A private copy that a test may damage."""
    for file in oracle.files.directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    build_oracle("llama-64-untied").save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    return tmp_path


def test_shards_compute_what_one_file_computes(oracle: Oracle, shards: Path) -> None:
    ids = random_ids(20, 1)
    assert_close(PagedBatch(load(shards)).run([(0, ids)]), PagedBatch(oracle.model).run([(0, ids)]), rtol=0, atol=0)


def change(folder: Path, edit: Callable[[Tensors], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"model\.safetensors: tensor 'model.layers.1.mlp.up_proj.weight' is missing; expected shape \[112, 96\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(95)}),
            r"model\.safetensors: tensor 'model.norm.weight' .* expected shape \[96\], got \[95\]",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.ones(128, 97)}),
            r"k_proj.weight' .* expected shape \[128, 96\], got \[128, 97\]",
        ),
        (
            lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.ones(112, 96)}),
            r"1 tensors belong to no part of this model: 'model.layers.3.mlp.up_proj.weight'",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(256)}),
            r"belong to no part of this model: 'model.layers.0.self_attn.q_proj.bias'",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(96, dtype=torch.int8)}),
            r"'model.norm.weight': expected float32, bfloat16 or float16, got int8",
        ),
    ],
    ids=["missing", "wrong length", "wrong width", "layer too many", "bias too many", "integers"],
)
def test_misfits_are_named(folder: Path, edit: Callable[[Tensors], None], message: str) -> None:
    change(folder, edit)
    with pytest.raises(WeightError, match=message):
        load(folder)


def test_derived_tensors_of_old_checkpoints_are_passed_over(folder: Path) -> None:
    change(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32)}))
    load(folder)


def test_truncated_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightError, match=r"model\.safetensors: .*cut short or damaged"):
        SafetensorsSource([path])


def test_garbage_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"\x10\0\0\0\0\0\0\0not json at all!")
    with pytest.raises(WeightError, match=r"model\.safetensors"):
        SafetensorsSource([path])


def test_tensor_in_two_shards_is_named(shards: Path) -> None:
    first, second = sorted(shards.glob("*.safetensors"))[:2]
    merged = load_file(second)
    name, tensor = next(iter(load_file(first).items()))
    save_file({**merged, name: tensor}, second)
    with pytest.raises(WeightError, match=f"tensor '{name}' stands in {first.name} too"):
        load(shards)


def test_index_that_contradicts_the_files_is_named(shards: Path) -> None:
    index = shards / INDEX
    table = json.loads(index.read_text())
    name = "model.norm.weight"
    held = table["weight_map"][name]
    other = next(s for s in table["weight_map"].values() if s != held)
    table["weight_map"][name] = other
    index.write_text(json.dumps(table))
    with pytest.raises(WeightError, match=f"'{name}': expected in {other}, it is in {held}"):
        load(shards)


def test_missing_shard_is_named(shards: Path) -> None:
    files = resolve_model(str(shards), shards)
    files.weights[1].unlink()
    with pytest.raises(WeightError, match=rf"{files.weights[1]}: the file is missing"):
        load_model(files, read_spec(files), OPS)


def test_random_weights_are_a_function_of_the_seed(oracle: Oracle) -> None:
    spec = read_spec(oracle.files)
    ids = random_ids(10, 1)

    def logits(seed: int) -> torch.Tensor:
        return PagedBatch(load_model(None, spec, OPS, load_format="dummy", seed=seed)).run([(0, ids)])

    assert_close(logits(3), logits(3), rtol=0, atol=0)
    assert not torch.allclose(logits(3), logits(4))
    assert logits(3).isfinite().all()


def test_unknown_load_format_and_missing_files_are_refused(oracle: Oracle) -> None:
    spec = read_spec(oracle.files)
    with pytest.raises(ConfigError, match="load format 'magic' is not known; known: auto, dummy"):
        load_model(oracle.files, spec, OPS, load_format="magic")
    with pytest.raises(ConfigError, match="needs the model's files"):
        load_model(None, spec, OPS)
