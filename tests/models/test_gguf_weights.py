"""GGUF files give the tensors of the model they were made from, and broken ones a named error."""

from __future__ import annotations

import copy
import logging
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import pytest
import torch
from expert_ranks import AllGather, Table
from gguf.quants import dequantize, quantize
from gguf_maker import gguf_name, matrices_as, write_gguf
from model_oracle import PagedBatch, build_oracle, random_ids
from torch.testing import assert_close

from dpi_engine.config.experts import ExpertPlacement
from dpi_engine.config.sources import resolve_model
from dpi_engine.models.gguf_weights import GgufSource, hugging_face_name
from dpi_engine.models.registry import load_model
from dpi_engine.models.weight_cache import CacheUnusable, cached, file_lock
from dpi_engine.models.weights import WeightError
from dpi_engine.ops.torch_ref import TorchOps
from dpi_engine.tokenizer import GgufError, read_header, read_spec

Q8 = gguf.GGMLQuantizationType.Q8_0


def load(path: Path, cache: Path | None = None):
    files = resolve_model(str(path), path.parent)
    return load_model(files, read_spec(files), TorchOps("cpu", torch.float32), cache_dir=cache)


@pytest.mark.parametrize("family", ["llama-80-tied", "llama-biases", "qwen2-128-tied", "qwen3-80-tied", "qwen3-128"])
def test_float_file_computes_what_transformers_computes(family: str, tmp_path: Path) -> None:
    reference = build_oracle(family)
    model = load(write_gguf(tmp_path / "model.gguf", reference))
    ids = random_ids(40, 1)
    with torch.no_grad():
        want = reference(torch.tensor([ids])).logits[0]
    assert_close(PagedBatch(model).run([(0, ids)]), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_1", "BF16", "F16"])
def test_quantized_file_equals_its_dequantized_values(kind: str, tmp_path: Path) -> None:
    quant = gguf.GGMLQuantizationType[kind]
    reference = build_oracle("llama-64-untied")
    kind_of = matrices_as(quant)
    path = write_gguf(tmp_path / "model.gguf", reference, kind_of)
    dequantized = copy.deepcopy(reference)
    with torch.no_grad():
        for name, parameter in dequantized.named_parameters():
            values = parameter.numpy()
            if kind_of(name, values) == quant:
                # What is computed from quantized numbers is kept in bfloat16.
                kept = torch.from_numpy(dequantize(quantize(values, quant), quant))
                parameter.copy_(kept if kind == "F16" else kept.bfloat16().float())
    ids = random_ids(30, 2)
    with torch.no_grad():
        want = dequantized(torch.tensor([ids])).logits[0]
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        assert_close(PagedBatch(load(path, cache)).run([(0, ids)]), want, rtol=1e-4, atol=1e-4)


def test_names_of_every_part() -> None:
    for name in build_oracle("qwen3-128").state_dict():
        assert hugging_face_name(gguf_name(name)) == name
    assert hugging_face_name("blk.3.ffn_gate_exps.weight") == "model.layers.3.mlp.experts.gate_proj.weight"
    assert hugging_face_name("blk.0.ffn_gate_shexp.weight") is None
    assert hugging_face_name("rope_freqs.weight") is None


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_experts_compute_what_transformers_computes(family: str, tmp_path: Path) -> None:
    reference = build_oracle(family)
    path = write_gguf(tmp_path / "model.gguf", reference)
    ids = random_ids(30, 2)
    with torch.no_grad():
        want = reference(torch.tensor([ids])).logits[0]
    model = load(path)
    assert model.spec.moe is not None and model.spec.moe.num_experts == reference.config.num_local_experts
    assert_close(PagedBatch(model).run([(0, ids)]), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("through_cache", [False, True])
def test_a_rank_takes_its_experts_out_of_quantized_stacks(
    through_cache: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = resolve_model(str(write_gguf(tmp_path / "m.gguf", build_oracle("mixtral"), matrices_as(Q8))), tmp_path)
    spec, ops, cache = read_spec(files), TorchOps("cpu", torch.float32), tmp_path / "c" if through_cache else None
    whole = load_model(files, spec, ops, cache_dir=cache)
    assert spec.moe is not None
    placement = ExpertPlacement(spec.moe.num_experts, 2, 1)
    get = GgufSource.get

    def no_stacks(self: GgufSource, name: str, shape: Sequence[int]) -> torch.Tensor:
        assert ".experts." not in name, "all experts were read"
        return get(self, name, shape)

    monkeypatch.setattr(GgufSource, "get", no_stacks)
    half = load_model(files, spec, ops, cache_dir=cache, exchange=AllGather(Table(2), placement))
    for mine, all_of_them in zip(half._layers, whole._layers, strict=True):
        got, want = mine.mlp._experts, all_of_them.mlp._experts  # type: ignore[attr-defined]
        assert torch.equal(got.gate_up, want.gate_up[placement.local.start :])
        assert torch.equal(got.down, want.down[placement.local.start :])


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", build_oracle("llama-64-untied"), matrices_as(Q8))


def test_second_load_maps_the_cache_and_reads_no_quantized_number(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[tuple[str, float]] = []
    files = resolve_model(str(quantized), tmp_path)
    ops = TorchOps("cpu", torch.float32)
    load_model(
        files,
        read_spec(files),
        ops,
        cache_dir=tmp_path / "c",
        progress=lambda stage, done: stages.append((stage, done)),
    )
    assert {s for s, _ in stages} == {"dequantize", "load"} and stages[-1] == ("load", 1.0)

    def forbidden(*args: object) -> None:
        raise AssertionError("dequantized again")

    monkeypatch.setattr(GgufSource, "get", forbidden)
    load(quantized, tmp_path / "c")
    assert sorted(p.suffix for p in (tmp_path / "c" / "weights").iterdir()) == [".json", ".lock", ".safetensors"]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "emptied", "no note", "bad note"])
def test_damaged_cache_is_made_anew_with_a_warning(
    damage: str, quantized: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = random_ids(20, 3)
    want = PagedBatch(load(quantized, tmp_path / "c")).run([(0, ids)])
    (cached,) = (tmp_path / "c" / "weights").glob("*.safetensors")
    note = cached.with_suffix(".json")
    original = cached.read_bytes()
    content = bytearray(original)
    match damage:
        case "truncated":
            cached.write_bytes(content[: len(content) // 2])
        case "flipped":
            content[len(content) // 2] ^= 0xFF
            cached.write_bytes(content)
        case "emptied":
            cached.write_bytes(b"")
        case "no note":
            note.unlink()
        case "bad note":
            note.write_text("[]")
    with caplog.at_level(logging.WARNING):
        got = PagedBatch(load(quantized, tmp_path / "c")).run([(0, ids)])
    assert_close(got, want, rtol=0, atol=0)
    assert cached.read_bytes() == original
    if damage != "no note":
        assert "are damaged" in caplog.text and str(cached) in caplog.text


def test_unusable_cache_folder_is_said_and_gone_without(
    quantized: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "c").write_text("a file where a folder should be")
    with caplog.at_level(logging.WARNING):
        load(quantized, tmp_path / "c")
    assert "cannot be cached" in caplog.text


def test_other_weights_of_the_same_shapes_get_another_cache_entry(quantized: Path, tmp_path: Path) -> None:
    load(quantized, tmp_path / "c")
    changed = build_oracle("llama-64-untied")
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.5)
    other = write_gguf(tmp_path / "other.gguf", changed, matrices_as(Q8))
    assert other.stat().st_size == quantized.stat().st_size
    load(other, tmp_path / "c")
    assert len(list((tmp_path / "c" / "weights").glob("*.safetensors"))) == 2


def test_file_cut_in_the_tensor_data_names_the_tensor(quantized: Path, tmp_path: Path) -> None:
    files = resolve_model(str(quantized), tmp_path)
    spec = read_spec(files)
    quantized.write_bytes(quantized.read_bytes()[:-1000])
    with pytest.raises((WeightError, GgufError), match=r"cut short: tensor '\S+' (ends|begins) at byte"):
        load_model(files, spec, TorchOps("cpu", torch.float32))


def test_starting_together_writes_the_cache_once(quantized: Path, tmp_path: Path) -> None:
    header = read_header(quantized)
    spec = read_spec(resolve_model(str(quantized), tmp_path))
    counts: list[int] = []
    gate = threading.Barrier(4, timeout=120)

    class Counting(GgufSource):
        def get(self, name: str, shape: Sequence[int]) -> torch.Tensor:
            counts.append(1)
            return super().get(name, shape)

    def start() -> frozenset[str]:
        source = Counting(header, spec)
        gate.wait()
        return cached(lambda: source, quantized, tmp_path / "c", lambda stage, done: None).names()

    with ThreadPoolExecutor(4) as pool:
        names = [f.result(240) for f in [pool.submit(start) for _ in range(4)]]
    assert len(set(names)) == 1 and len(counts) == len(names[0])


def test_a_lock_held_too_long_is_named(tmp_path: Path) -> None:
    path = tmp_path / "held.lock"
    with (
        file_lock(path, 0.0),
        pytest.raises(CacheUnusable, match=f"another process has held {path}"),
        file_lock(path, 0.0),
    ):
        pass
    with file_lock(path, 0.0):
        pass


def test_header_cut_anywhere_is_a_named_error(quantized: Path, tmp_path: Path) -> None:
    content = quantized.read_bytes()
    header = read_header(quantized)
    cut = tmp_path / "cut.gguf"
    for length in [*range(200), *range(200, header.data_start, 97)]:
        cut.write_bytes(content[:length])
        with pytest.raises(GgufError, match=str(cut)):
            read_header(cut)


def test_header_with_wild_numbers_is_a_named_error_or_reads(quantized: Path, tmp_path: Path) -> None:
    """No byte of a header may crash the reader or make it ask for all memory."""
    content = bytearray(quantized.read_bytes())
    wild = tmp_path / "wild.gguf"
    outcomes = set()
    for at in range(0, min(read_header(quantized).data_start, 4000), 13):
        for pattern in (b"\xff" * 8, struct.pack("<Q", 1 << 40)):
            changed = content.copy()
            changed[at : at + 8] = pattern
            wild.write_bytes(changed)
            try:
                read_header(wild)
                outcomes.add("read")
            except GgufError as error:
                assert str(wild) in str(error)
                outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def test_weights_that_do_not_fit_the_metadata_are_named(tmp_path: Path) -> None:
    reference = build_oracle("llama-64-untied")
    reference.config.intermediate_size += 16
    with pytest.raises(WeightError, match=r"gate_proj.*expected shape \[128, 96\], got \[112, 96\]"):
        load(write_gguf(tmp_path / "model.gguf", reference))
