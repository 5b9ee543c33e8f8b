"""Forms in which checkpoints hold experts, and what is said when they do not fit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from expert_ranks import AllGather, Table
from model_oracle import Oracle, PagedBatch, build_oracle, make_oracle, random_ids
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from dpi_engine.config.experts import ExpertPlacement
from dpi_engine.config.sources import default_cache_dir, resolve_model
from dpi_engine.models.registry import INDEX, Model, load_model
from dpi_engine.models.weights import WeightError
from dpi_engine.ops import OpsUnavailable, select_ops
from dpi_engine.ops.exchange import ExpertExchange
from dpi_engine.ops.torch_ref import TorchOps
from dpi_engine.tokenizer import read_spec

OPS = TorchOps("cpu", torch.float32)
Tensors = dict[str, torch.Tensor]


def load(folder: Path, exchange: ExpertExchange | None = None, load_format: str = "auto") -> Model:
    files = resolve_model(str(folder), folder)
    return load_model(files, read_spec(files), OPS, exchange=exchange, load_format=load_format)


@pytest.fixture(scope="module", params=["mixtral", "deepseek-v3"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(oracle: Oracle, tmp_path: Path) -> Path:
    """A private copy that a test may damage."""
    for file in oracle.files.directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change(folder: Path, edit: Callable[[Tensors], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def same(model: Model, oracle: Oracle) -> None:
    ids = random_ids(20, 1)
    assert_close(PagedBatch(model).run([(0, ids)]), PagedBatch(oracle.model).run([(0, ids)]), rtol=1e-6, atol=1e-6)


def experts_of(tensors: Tensors, layer: str) -> dict[str, list[torch.Tensor]]:
    """Take the single matrices of a layer's experts out: gate, up and down, in order of experts."""
    found: dict[str, list[torch.Tensor]] = {}
    for part, names in {"gate": ("w1", "gate_proj"), "up": ("w3", "up_proj"), "down": ("w2", "down_proj")}.items():
        taken = {}
        for name in [
            n for n in tensors if n.startswith(f"{layer}.") and ".experts." in n and n.split(".")[-2] in names
        ]:
            taken[int(name.split(".experts.")[1].split(".")[0])] = tensors.pop(name)
        found[part] = [taken[i] for i in sorted(taken)]
    return found


def restack(fused: bool) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        for layer in {".".join(n.split(".")[:3]) for n in tensors if ".experts." in n}:
            parts = experts_of(tensors, layer)
            if f"{layer}.block_sparse_moe.gate.weight" in tensors:
                tensors[f"{layer}.mlp.gate.weight"] = tensors.pop(f"{layer}.block_sparse_moe.gate.weight")
            gate, up, down = (torch.stack(parts[part]) for part in ("gate", "up", "down"))
            prefix = f"{layer}.mlp.experts"
            if fused:
                tensors |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.down_proj": down}
            else:
                tensors |= {
                    f"{prefix}.gate_proj.weight": gate,
                    f"{prefix}.up_proj.weight": up,
                    f"{prefix}.down_proj.weight": down,
                }

    return edit


@pytest.mark.parametrize("fused", [True, False])
def test_stacked_experts_compute_what_single_ones_compute(oracle: Oracle, folder: Path, fused: bool) -> None:
    change(folder, restack(fused))
    same(load(folder), oracle)


@pytest.mark.parametrize("fused", [True, False])
def test_of_stacked_experts_a_rank_reads_its_own_only(oracle: Oracle, folder: Path, fused: bool) -> None:
    """What the others hold is overwritten with not-a-number on disk; the rank's matrices are all finite."""
    change(folder, restack(fused))
    moe = oracle.model.spec.moe
    assert moe is not None
    placement = ExpertPlacement(moe.num_experts, 2, 1)

    def spoil(tensors: Tensors) -> None:
        for name in tensors:
            if ".experts." in name:
                tensors[name][: placement.local.start] = float("nan")

    change(folder, spoil)
    model = load(folder, AllGather(Table(2), placement))
    for layer in model._layers:
        if layer.mlp.collective:
            packed = layer.mlp._experts  # type: ignore[attr-defined]
            assert packed.gate_up.shape[0] == len(placement.local)
            assert packed.gate_up.isfinite().all() and packed.down.isfinite().all()


def test_shards_compute_what_one_file_computes(oracle: Oracle, tmp_path: Path) -> None:
    name = "mixtral" if oracle.model.spec.architecture.startswith("Mixtral") else "deepseek-v3"
    build_oracle(name).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3 and (tmp_path / INDEX).exists()
    same(load(tmp_path), oracle)


def test_layers_for_speculation_are_left_out(oracle: Oracle, folder: Path) -> None:
    """DeepSeek-V3's checkpoint goes on after the last layer; a Mixtral's does not."""
    layers = oracle.model.spec.num_layers
    change(folder, lambda t: t.update({f"model.layers.{layers}.eh_proj.weight": torch.zeros(2, 2)}))
    if oracle.model.spec.extra_layers:
        same(load(folder), oracle)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(WeightError, match="1 tensors belong to no part"):
        load(folder)


def first(tensors: Tensors, end: str) -> str:
    return min(name for name in tensors if ".experts." in name and name.endswith(end))


def last(tensors: Tensors) -> str:
    return max((n for n in tensors if ".experts." in n), key=lambda n: int(n.split(".experts.")[1].split(".")[0]))


def test_a_missing_expert_is_named_even_when_another_rank_holds_it(folder: Path, oracle: Oracle) -> None:
    gone: list[str] = []

    def edit(tensors: Tensors) -> None:
        gone.append(last(tensors))
        del tensors[gone[0]]

    change(folder, edit)
    moe = oracle.model.spec.moe
    assert moe is not None
    other = AllGather(Table(2), ExpertPlacement(moe.num_experts, 2, 0))
    for exchange in (None, other):
        with pytest.raises(WeightError) as caught:
            load(folder, exchange)
        assert gone[0] in str(caught.value) and "is missing" in str(caught.value)


def test_a_matrix_of_another_shape_is_named(folder: Path) -> None:
    changed: list[str] = []

    def edit(tensors: Tensors) -> None:
        changed.append(first(tensors, ".weight"))
        tensors[changed[0]] = torch.zeros(3, 5)

    change(folder, edit)
    with pytest.raises(WeightError) as caught:
        load(folder)
    for word in (changed[0], "expected shape [", "got [3, 5]", "model.safetensors"):
        assert word in str(caught.value)


def test_a_stack_of_another_number_of_experts_is_named(folder: Path, oracle: Oracle) -> None:
    change(folder, restack(True))
    change(folder, lambda t: t.update({n: x[:-1] for n, x in t.items() if n.endswith("gate_up_proj")}))
    moe = oracle.model.spec.moe
    assert moe is not None
    with pytest.raises(WeightError) as caught:
        load(folder)
    for word in ("gate_up_proj", f"expected shape [{moe.num_experts}, ", f"got [{moe.num_experts - 1}, "):
        assert word in str(caught.value)


def test_more_experts_than_the_configuration_has_are_refused(folder: Path) -> None:
    def edit(tensors: Tensors) -> None:
        name = last(tensors)
        number = name.split(".experts.")[1].split(".")[0]
        tensors[name.replace(f".experts.{number}.", f".experts.{int(number) + 1}.")] = tensors[name].clone()

    change(folder, edit)
    with pytest.raises(WeightError, match="1 tensors belong to no part of this model"):
        load(folder)


def test_made_up_weights_are_the_same_on_every_rank(folder: Path, oracle: Oracle) -> None:
    """Expert 3 is expert 3, whoever holds it."""
    moe = oracle.model.spec.moe
    assert moe is not None
    whole = load(folder, load_format="dummy")
    placement = ExpertPlacement(moe.num_experts, 2, 1)
    half = load(folder, AllGather(Table(2), placement), "dummy")
    for mine, all_of_them in zip(half._layers, whole._layers, strict=True):
        if mine.mlp.collective:
            got, want = mine.mlp._experts, all_of_them.mlp._experts  # type: ignore[attr-defined]
            assert torch.equal(got.down, want.down[placement.local.start :])


def test_latents_that_the_kernels_cannot_compute_are_refused_before_weights_are_read(oracle: Oracle) -> None:
    try:
        kernels = select_ops("cpu", torch.float32, "cpu", 1, default_cache_dir(os.environ, Path.home()))
    except OpsUnavailable as error:
        pytest.skip(f"the CPU kernels cannot run here: {error}")
    spec = oracle.model.spec
    if spec.mla is None:
        pytest.skip("no latents")
    wide = msgspec.structs.replace(spec, mla=msgspec.structs.replace(spec.mla, kv_rank=1024))
    with pytest.raises(OpsUnavailable, match="latent: the CPU kernels take even widths up to 512, got 1024"):
        load_model(None, wide, kernels, load_format="dummy")
    model = load_model(None, wide, OPS, load_format="dummy")
    assert PagedBatch(model).run([(0, [1, 2, 3])]).isfinite().all()
