"""Workers that share a model's layers compute what one computes, and each reads its own part of the weights only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import gguf
import pytest
import torch
from gguf_maker import matrices_as, write_gguf
from model_oracle import Oracle, PagedBatch, build_oracle, greedy, make_oracle, random_ids
from torch import Tensor
from torch.testing import assert_close

from dpi_engine.config.errors import ConfigError
from dpi_engine.config.sources import default_cache_dir, resolve_model
from dpi_engine.models.registry import Model, load_model
from dpi_engine.models.weights import Index, SafetensorsSource
from dpi_engine.ops import OpsUnavailable, select_ops
from dpi_engine.tokenizer import read_spec
from tensor_ranks import Workers

EVEN = {"vocab_size": 240}  # the other tests' vocabulary is prime
FAMILIES = (
    "llama-64-untied", "llama-80-tied", "llama-biases", "mistral-96-window", "qwen2-window-from-layer-1", "qwen3-128",
    "mixtral", "qwen3-moe-some-dense", "deepseek-v2-lite", "deepseek-v2-groups", "deepseek-v3",
)  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    torch.set_num_threads(1)
    return make_oracle(request.param, tmp_path_factory.mktemp("oracle"), **EVEN)


def parts_of(oracle: Oracle, workers: Workers, backend: str = "torch") -> list[Model]:
    """Each worker's part of the model, on ops of its own, as processes have them."""
    cache = default_cache_dir(os.environ, Path.home())
    return [
        load_model(oracle.files, oracle.model.spec, select_ops("cpu", torch.float32, backend, 1, cache), group=group)
        for group in workers.groups
    ]


def sizes(oracle: Oracle) -> list[int]:
    return [size for size in (2, 4) if oracle.model.spec.num_heads % size == 0]


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_logits_and_text_are_those_of_one_worker(oracle: Oracle, backend: str) -> None:
    """Prompts whole and in pieces, and decoding, two sequences together; then greedy tokens."""
    first, second = random_ids(37, 1), random_ids(22, 2)
    for size in sizes(oracle):
        workers = Workers(size)
        try:
            models = parts_of(oracle, workers, backend)
        except OpsUnavailable as error:
            pytest.skip(f"the CPU kernels cannot run here: {error}")

        def work(model: Model) -> Tensor:
            batch = PagedBatch(model)
            return torch.cat(
                [
                    batch.run([(0, first[:20]), (1, second[:7])]),
                    batch.run([(0, first[20:36]), (1, second[7:21])], rows=[3, 15, 29]),
                    batch.run([(0, first[36:]), (1, second[21:])]),
                ]
            )

        alone = load_model(oracle.files, oracle.model.spec, models[0].ops)
        want = work(alone)
        got = workers.run(lambda i, work=work, models=models: work(models[i]))[0]
        assert_close(got, want, rtol=1e-4, atol=1e-4)

        prompts = [first, second[:9]]
        text = greedy(alone, prompts, 12)
        batch = workers.run(lambda i, models=models, p=prompts, t=text: guided(models[i], p, t))
        assert batch[0] == text, f"{size} workers"


def guided(model: Model, prompts: list[list[int]], text: list[list[int]]) -> list[list[int]]:
    """Greedy tokens as `greedy` computes them; a worker without logits feeds itself the tokens it would be told."""
    batch = PagedBatch(model, num_blocks=8)
    ends, total = [], 0
    for prompt in prompts:
        total += len(prompt)
        ends.append(total - 1)
    out: list[list[int]] = [[] for _ in prompts]
    logits = batch.run(list(enumerate(prompts)), rows=ends)
    for step in range(len(text[0])):
        for tokens, row in zip(out, logits, strict=True):
            tokens.append(int(row.argmax()))
        if step + 1 < len(text[0]):
            logits = batch.run([(i, [tokens[step]]) for i, tokens in enumerate(text)])
    return out


def test_a_step_without_wanted_rows_fills_the_caches_of_all(oracle: Oracle) -> None:
    prompt = random_ids(21, 4)
    workers = Workers(2)
    models = parts_of(oracle, workers)

    def work(model: Model) -> Tensor:
        batch = PagedBatch(model)
        assert batch.run([(0, prompt[:20])], rows=[]).shape[0] == 0
        return batch.run([(0, prompt[20:])])

    got = workers.run(lambda i: work(models[i]))[0]
    assert_close(got, work(oracle.model), rtol=1e-4, atol=1e-4)


def test_a_worker_reads_its_own_part_only(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole are only tensors that every worker needs: norms, routers, biases of sums, and the shared latent."""
    whole: set[str] = set()
    read = {"elements": 0}
    get, get_part = SafetensorsSource.get, SafetensorsSource.get_part

    def watch(self: SafetensorsSource, name: str, shape: Sequence[int]) -> Tensor:
        whole.add(name)
        found = get(self, name, shape)
        read["elements"] += found.numel()
        return found

    def watch_part(self: SafetensorsSource, name: str, index: Index, shape: Sequence[int]) -> Tensor:
        found = get_part(self, name, index, shape)
        read["elements"] += found.numel()
        return found

    monkeypatch.setattr(SafetensorsSource, "get", watch)
    monkeypatch.setattr(SafetensorsSource, "get_part", watch_part)
    workers = Workers(2)
    model = load_model(oracle.files, oracle.model.spec, oracle.model.ops, group=workers.groups[0])
    shared = ("norm.weight", "gate.weight", "_bias", "_a_proj.weight", "kv_a_proj_with_mqa.weight", "_proj.bias")
    assert [name for name in whole if not name.endswith(shared)] == []
    alone = dict(read)
    load_model(oracle.files, oracle.model.spec, oracle.model.ops)
    assert alone["elements"] < 0.7 * (read["elements"] - alone["elements"])
    assert model.weight_bytes < 0.7 * oracle.model.weight_bytes
    if oracle.model.spec.mla is None:
        assert model.cache_bytes_per_block() * 2 == oracle.model.cache_bytes_per_block()


@pytest.mark.parametrize("family", ["llama-64-untied", "mixtral", "qwen3-moe"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("cached", [True, False])
def test_gguf_files_are_read_in_parts_too(family: str, kind: str, cached: bool, tmp_path: Path) -> None:
    """Float files, quantized ones, and those unpacked into the cache, which is one file for all workers."""
    quant = gguf.GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "model.gguf", build_oracle(family, **EVEN), matrices_as(quant))
    files = resolve_model(str(path), tmp_path)
    spec, cache = read_spec(files), tmp_path / "cache" if cached else None
    ops = select_ops("cpu", torch.float32, "torch", 1)
    workers = Workers(2)
    alone = load_model(files, spec, ops, cache_dir=cache)
    models = [load_model(files, spec, ops, cache_dir=cache, group=group) for group in workers.groups]
    ids = random_ids(30, 3)
    got = workers.run(lambda i: PagedBatch(models[i]).run([(0, ids)]))[0]
    assert_close(got, PagedBatch(alone).run([(0, ids)]), rtol=1e-4, atol=1e-4)
    if cached and kind != "F32":
        assert len(list((cache / "weights").glob("*.safetensors"))) == 1


def test_random_weights_are_the_same_for_any_number_of_workers(oracle: Oracle) -> None:
    ids = random_ids(18, 6)
    ops, spec = oracle.model.ops, oracle.model.spec
    workers = Workers(2)
    models = [load_model(None, spec, ops, load_format="dummy", seed=3, group=g) for g in workers.groups]
    want = PagedBatch(load_model(None, spec, ops, load_format="dummy", seed=3)).run([(0, ids)])
    got = workers.run(lambda i: PagedBatch(models[i]).run([(0, ids)]))[0]
    assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_sizes_that_do_not_divide_are_refused_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = make_oracle("llama-one-kv-head", tmp_path)

    def never(self: SafetensorsSource, *args: object) -> None:
        raise AssertionError("the file was opened")

    monkeypatch.setattr(SafetensorsSource, "__init__", never)
    with pytest.raises(ConfigError, match="attention heads 3 is no multiple of 2") as error:
        load_model(oracle.files, oracle.model.spec, oracle.model.ops, group=Workers(2).groups[0])
    assert "vocabulary size 211" in str(error.value)
