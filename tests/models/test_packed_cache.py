"""Packed linears that are kept on disk: the same model without reading its weights, and never another one."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_maker import matrices_as, write_gguf
from model_oracle import PagedBatch, build_oracle, random_ids

from dpi_engine.config.machine import cpu_features
from dpi_engine.config.sources import ModelFiles, default_cache_dir, resolve_model
from dpi_engine.models import packed_cache
from dpi_engine.models.decoder import Decoder
from dpi_engine.models.file_digest import content_digest
from dpi_engine.models.registry import load_model
from dpi_engine.models.weight_cache import file_lock
from dpi_engine.models.weights import SafetensorsSource
from dpi_engine.ops.build import possible_isas
from dpi_engine.ops.cpu import CpuOps, make_cpu_ops
from dpi_engine.tokenizer.spec import read_spec

IDS = random_ids(40, 3)
Q8 = gguf.GGMLQuantizationType.Q8_0
KERNELS = default_cache_dir(os.environ, Path.home())  # compiled once for all test processes


@pytest.fixture(params=possible_isas(cpu_features()))
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DPI_CPU_ISA", request.param)
    return str(request.param)


def saved(folder: Path, family: str, seed: int = 0) -> ModelFiles:
    torch.manual_seed(seed)
    model = build_oracle(family)
    if seed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
    model.save_pretrained(folder, safe_serialization=True)
    return resolve_model(str(folder), folder)


def load(files: ModelFiles, cache: Path, ops: CpuOps | None = None) -> Decoder:
    ops = ops or make_cpu_ops(torch.bfloat16, 2, KERNELS)
    return load_model(files, read_spec(files), ops, cache_dir=cache)


def logits(model: Decoder) -> torch.Tensor:
    return PagedBatch(model).run([(0, IDS)])


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "packed").glob("*.safetensors"))


@pytest.mark.parametrize("family", ["llama-80-tied", "llama-biases", "qwen2-128-tied", "qwen3-128"])
def test_a_model_from_kept_linears_computes_the_same(
    family: str, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = saved(tmp_path / "model", family)
    first = load(files, tmp_path)
    want = logits(first)
    read: list[str] = []
    monkeypatch.setattr(
        SafetensorsSource,
        "get",
        lambda self, name, shape, get=SafetensorsSource.get: read.append(name) or get(self, name, shape),
    )
    second = load(files, tmp_path)
    assert torch.equal(logits(second), want)
    assert second.weight_bytes == first.weight_bytes
    of_the_model = [name for name in read if "/" not in name]
    assert not [name for name in of_the_model if "proj.weight" in name]
    assert len(kept(tmp_path)) == 1


def test_weights_of_a_gguf_file_are_not_opened(isa: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_gguf(tmp_path / "model.gguf", build_oracle("llama-64-untied"))
    files = resolve_model(str(path), tmp_path)
    want = logits(load(files, tmp_path))
    with caplog.at_level(logging.INFO, "dpi_engine.models.packed_cache"):
        assert torch.equal(logits(load(files, tmp_path)), want)
    assert not caplog.records  # neither made anew nor damaged


def test_other_weights_of_the_same_shapes_are_packed_anew(isa: str, tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a", "llama-80-tied"), saved(tmp_path / "b", "llama-80-tied", seed=1)
    first, second = logits(load(a, tmp_path)), logits(load(b, tmp_path))
    assert not torch.equal(first, second)
    assert len(kept(tmp_path)) == 2
    assert torch.equal(logits(load(a, tmp_path)), first) and torch.equal(logits(load(b, tmp_path)), second)


def test_a_damaged_file_is_named_and_made_anew(isa: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = saved(tmp_path / "model", "llama-80-tied")
    want = logits(load(files, tmp_path))
    (target,) = kept(tmp_path)
    whole, note = target.read_bytes(), target.with_suffix(".json").read_text()
    middle = len(whole) // 2
    for damage in (
        lambda: target.write_bytes(whole[:middle]),
        lambda: target.write_bytes(whole[:middle] + bytes(2) + whole[middle + 2 :]),
        lambda: target.write_bytes(whole.replace(b"[96,", b"[95,", 1)),
        lambda: target.write_bytes(b""),
        lambda: target.with_suffix(".json").write_text("{"),
        lambda: target.with_suffix(".json").write_text("[]"),
        lambda: target.with_suffix(".json").write_text(json.dumps({"made_by": json.loads(note)["made_by"]})),
        lambda: target.with_suffix(".json").write_text(note.replace('"digest": "', '"digest": "0')),
    ):
        damage()
        assert (target.read_bytes(), target.with_suffix(".json").read_text()) != (whole, note)
        caplog.clear()
        assert torch.equal(logits(load(files, tmp_path)), want)
        assert [r for r in caplog.records if f"packed weights {target} are damaged" in r.getMessage()]
        assert target.read_bytes() == whole and target.with_suffix(".json").read_text() == note


def test_one_changed_number_of_the_model_is_another_model(isa: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", build_oracle("llama-64-untied"), matrices_as(Q8))
    first = logits(load(resolve_model(str(path), tmp_path), tmp_path))
    content, about = bytearray(path.read_bytes()), path.stat()
    content[-40:] = bytes(b ^ 0x55 for b in content[-40:])
    with open(path, "r+b") as file:  # the same inode and size, and times set back
        file.write(content)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert not torch.equal(logits(load(resolve_model(str(path), tmp_path), tmp_path)), first)


def test_what_a_killed_process_left_is_used_up_and_one_of_several_writes(isa: str, tmp_path: Path) -> None:
    files = saved(tmp_path / "model", "llama-80-tied")
    want = logits(load(files, tmp_path))
    (target,) = kept(tmp_path)
    target.with_suffix(".json").unlink()
    target.unlink()
    target.with_suffix(".tmp").write_bytes(b"half")
    with file_lock(target.with_suffix(".lock"), 0.0):
        assert torch.equal(logits(load(files, tmp_path)), want)
        assert not kept(tmp_path)
    assert torch.equal(logits(load(files, tmp_path)), want)
    assert kept(tmp_path) == [target] and not list(target.parent.glob("*.tmp"))


def test_a_digest_is_read_anew_only_for_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, notes = tmp_path / "f", tmp_path / "notes"
    path.write_bytes(b"one")
    want = hashlib.sha256(b"one").hexdigest()
    reads: list[str] = []
    plain = hashlib.file_digest

    def counting(file: Any, name: str) -> Any:
        reads.append(name)
        return plain(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counting)
    assert [content_digest(path, notes) for _ in range(3)] == [want] * 3 and len(reads) == 1
    os.utime(path, ns=(1, 1))
    assert content_digest(path, notes) == want and len(reads) == 2
    (note,) = notes.iterdir()
    for damage in ("", "{", "[]", '{"identity": 1}', json.dumps({**json.loads(note.read_text()), "sha256": 5})):
        note.write_text(damage)
        reads.clear()
        assert content_digest(path, notes) == want and len(reads) == 1
    path.write_bytes(b"two")
    assert content_digest(path, notes) == hashlib.sha256(b"two").hexdigest()
    assert content_digest(path, path / "no folder") == hashlib.sha256(b"two").hexdigest()
    with pytest.raises(FileNotFoundError):
        content_digest(tmp_path / "none", notes)


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(
    isa: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = saved(tmp_path / "model", "llama-80-tied")
    (tmp_path / "packed").write_text("in the way")
    with caplog.at_level(logging.INFO):
        first, second = logits(load(files, tmp_path)), logits(load(files, tmp_path))
    assert torch.equal(first, second)
    assert [r for r in caplog.records if "packed weights are not kept" in r.getMessage()]
    assert sorted(p.name for p in tmp_path.iterdir() if "tmp" in p.name) == []


def test_large_models_and_full_disks_keep_nothing(
    isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = saved(tmp_path / "model", "llama-80-tied")
    monkeypatch.setattr(packed_cache, "MOST_BYTES", 1000)
    want = logits(load(files, tmp_path))
    assert not (tmp_path / "packed").exists()
    monkeypatch.undo()
    monkeypatch.setenv("DPI_CPU_ISA", isa)
    monkeypatch.setattr(packed_cache, "SPARE", 1 << 60)
    with caplog.at_level(logging.INFO):
        assert torch.equal(logits(load(files, tmp_path)), want)
    assert not kept(tmp_path) and [r for r in caplog.records if "MB free, too few for" in r.getMessage()]


def test_tensors_lie_on_cache_lines(isa: str, tmp_path: Path) -> None:
    files = saved(tmp_path / "model", "llama-biases")
    load(files, tmp_path)
    (target,) = kept(tmp_path)
    source = SafetensorsSource([target])
    weights = [source.get(name, ()) for name in source.names() if name.endswith("/weight")]
    assert weights and not [w for w in weights if w.data_ptr() % 64]


def test_what_other_code_has_packed_is_packed_anew(
    isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = saved(tmp_path / "model", "llama-80-tied")
    want = logits(load(files, tmp_path))
    (target,) = kept(tmp_path)
    target.with_suffix(".json").write_text(target.with_suffix(".json").read_text().replace(packed_cache.made_by(), "x"))
    target.write_bytes(target.read_bytes()[:100] + bytes(target.stat().st_size - 100))
    assert torch.equal(logits(load(files, tmp_path)), want)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert torch.equal(logits(load(files, tmp_path)), want) and kept(tmp_path) == [target]


def test_int8_linears_are_kept_beside_the_others(isa: str, tmp_path: Path) -> None:
    if isa == "avx2":
        pytest.skip("int8 linears need AVX-512 VNNI")
    files = saved(tmp_path / "model", "llama-biases")

    def ops() -> CpuOps:
        return make_cpu_ops(torch.bfloat16, 2, KERNELS, "int8")

    want, plain = logits(load(files, tmp_path, ops())), logits(load(files, tmp_path))
    assert not torch.equal(want, plain) and len(kept(tmp_path)) == 2
    first, second = load(files, tmp_path, ops()), load(files, tmp_path)
    assert torch.equal(logits(first), want) and torch.equal(logits(second), plain)


def test_float32_linears_are_torchs_own_and_not_kept(tmp_path: Path) -> None:
    files = saved(tmp_path / "model", "llama-80-tied")
    load(files, tmp_path, make_cpu_ops(torch.float32, 1, KERNELS))
    assert not (tmp_path / "packed").exists()
