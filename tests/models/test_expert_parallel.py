"""Experts spread over ranks compute what one rank computes, whatever each rank has to do; only their own are read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import pytest
import torch
from expert_ranks import AllGather, AllToAll, Table, together
from model_oracle import DEVICE, Oracle, PagedBatch, make_oracle, random_ids
from torch import Tensor
from torch.testing import assert_close

from dpi_engine.config.errors import ConfigError
from dpi_engine.config.experts import ExpertPlacement
from dpi_engine.config.sources import default_cache_dir
from dpi_engine.models.registry import Model, load_model
from dpi_engine.models.weights import SafetensorsSource
from dpi_engine.ops import OpsUnavailable, select_ops
from dpi_engine.ops.exchange import LocalExperts

FAMILIES = ("mixtral", "qwen3-moe-some-dense", "deepseek-v3")
KINDS = {"all-gather": AllGather, "all-to-all": AllToAll}
CLOSE = {"rtol": 1e-5, "atol": 2e-5}


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    torch.set_num_threads(1)
    return make_oracle(request.param, tmp_path_factory.mktemp("oracle"))


def ranks_of(oracle: Oracle, kind: type[AllGather], size: int, backend: str = "torch") -> tuple[list[Model], Table]:
    """The model once for each rank; each has ops of its own, as processes do."""
    table = Table(size)
    assert oracle.model.spec.moe is not None
    models = []
    for rank in range(size):
        ops = select_ops(DEVICE, torch.float32, backend, 1, default_cache_dir(os.environ, Path.home()))
        placement = ExpertPlacement(oracle.model.spec.moe.num_experts, size, rank)
        models.append(load_model(oracle.files, oracle.model.spec, ops, exchange=kind(table, placement)))
    return models, table


@pytest.mark.parametrize("backend", ["torch", "cpu"] if DEVICE == "cpu" else ["torch"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_with_different_work_get_what_one_rank_gets(oracle: Oracle, kind: str, size: int, backend: str) -> None:
    """Every rank has sequences of its own, whole, chunked and decoding; one of them nothing in some steps."""
    try:
        models, table = ranks_of(oracle, KINDS[kind], size, backend)
    except OpsUnavailable as error:
        pytest.skip(f"the CPU kernels cannot run here: {error}")
    prompts = [random_ids(20 + 7 * rank, rank) for rank in range(size)]
    alone = load_model(oracle.files, oracle.model.spec, models[0].ops)
    truth = [PagedBatch(alone).run([(0, prompt)]) for prompt in prompts]

    def work(rank: int) -> Tensor:
        model, prompt = models[rank], prompts[rank]
        batch = PagedBatch(model)
        head = batch.run([(0, prompt[:9])])
        if rank == 0:
            model.idle()
            middle = torch.empty(0, head.shape[1])
        else:
            middle = batch.run([(0, prompt[9:14])])
        rest = [head, middle]
        for token in prompt[9 if rank == 0 else 14 :][:6]:
            rest.append(batch.run([(0, [token])]))
        return torch.cat(rest)

    for rank, got in enumerate(together([lambda r=rank: work(r) for rank in range(size)], table)):
        assert_close(got, truth[rank][: got.shape[0]], **CLOSE)


def test_a_step_without_wanted_rows_still_meets_the_others(oracle: Oracle) -> None:
    """Rank 0 computes a chunk in the middle of a prompt, so that its last layer has no token; rank 1 decodes."""
    models, table = ranks_of(oracle, AllGather, 2)
    ids = random_ids(30, 3)

    def chunk() -> Tensor:
        batch = PagedBatch(models[0])
        assert batch.run([(0, ids[:20])], rows=[]).shape[0] == 0
        return batch.run([(0, ids[20:])])

    def decode() -> Tensor:
        batch = PagedBatch(models[1])
        return torch.cat([batch.run([(0, ids[:1])]), batch.run([(0, ids[1:2])])])

    got = together([chunk, decode], table)
    want = PagedBatch(oracle.model).run([(0, ids)])
    assert_close(got[0], want[20:], **CLOSE)
    assert_close(got[1], want[:2], **CLOSE)


def test_every_step_makes_the_same_calls(oracle: Oracle) -> None:
    models, table = ranks_of(oracle, AllGather, 2)
    layers = len(oracle.model.spec.moe.layers)  # type: ignore[union-attr]
    exchanges = [model._collective[0]._exchange for model in models]

    def work(rank: int) -> None:
        if rank:
            models[1].idle()
        else:
            PagedBatch(models[0]).run([(0, random_ids(5, 1))], rows=[])

    together([lambda r=rank: work(r) for rank in range(2)], table)
    assert [exchange.calls for exchange in exchanges] == [layers, layers]
    assert models[0].collective and not oracle.model.collective
    oracle.model.idle()  # nothing to meet


def test_an_error_of_the_exchange_reaches_the_caller(oracle: Oracle) -> None:
    models, table = ranks_of(oracle, AllGather, 2)
    table.leave()
    with pytest.raises(BrokenBarrierError):
        PagedBatch(models[0]).run([(0, [1, 2, 3])])


def test_one_expert_for_all_tokens(oracle: Oracle) -> None:
    """A router that always says the same leaves all ranks but one without work."""
    models, table = ranks_of(oracle, AllToAll, 2)
    everyone = [oracle.model, *models]
    for model in everyone:
        for layer in model._layers:
            if layer.mlp.collective:
                weight = layer.mlp._router.weight  # type: ignore[attr-defined]
                weight.zero_()  # equal scores: the lowest experts, which rank 0 holds
    ids = random_ids(12, 5)
    got = together([lambda m=model: PagedBatch(m).run([(0, ids)]) for model in models], table)
    want = PagedBatch(oracle.model).run([(0, ids)])
    for logits in got:
        assert_close(logits, want, **CLOSE)


@pytest.fixture
def recording(tmp_path: Path) -> tuple[Oracle, Table, list[Model]]:
    """Two ranks of a model whose decoding steps are recorded, one thread each."""
    table = Table(2)
    try:
        oracle = make_oracle("qwen3-moe-some-dense", tmp_path, torch.bfloat16, "cpu")
    except OpsUnavailable as error:
        pytest.skip(f"the CPU kernels cannot run here: {error}")
    if not oracle.model.ops.can_record:
        pytest.skip("the kernels of this instruction set do not record")
    assert oracle.model.spec.moe is not None
    models = []
    for rank in range(2):
        ops = select_ops(DEVICE, torch.bfloat16, "cpu", 1, default_cache_dir(os.environ, Path.home()))
        placement = ExpertPlacement(oracle.model.spec.moe.num_experts, 2, rank)
        models.append(load_model(oracle.files, oracle.model.spec, ops, exchange=AllGather(table, placement)))
    return oracle, table, models


def decoded(model: Model, steps: int, sequences: int, first: int) -> list[Tensor]:
    """Logits of decoding steps of `sequences` texts."""
    batch = PagedBatch(model)
    # A recorded step leaves its logits where the next one writes.
    return [batch.run([(i, [first + 7 * i + step]) for i in range(sequences)]).clone() for step in range(steps)]


def test_recorded_steps_meet_the_others_as_ordinary_ones_do(recording: tuple[Oracle, Table, list[Model]]) -> None:
    """Bit for bit the same logits, and as many exchanges; the ranks have different numbers of sequences."""
    _, table, models = recording
    exchanges = [model._collective[0]._exchange for model in models]
    found, calls = [], []
    for recorded in (True, False):
        for model in models:
            assert model._recorded is not None
            if not recorded:
                model._recorded = None
        before = [exchange.calls for exchange in exchanges]
        jobs = [lambda m=model, n=n: decoded(m, 5, n, 3 * n) for n, model in enumerate(models, 2)]
        found.append(together(jobs, table))
        if recorded:
            assert all(sorted(model._recorded._programs) == [n] for n, model in enumerate(models, 2))
        calls.append([exchange.calls - b for exchange, b in zip(exchanges, before, strict=True)])
    assert calls[0] == calls[1]
    for mine, theirs in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_an_error_of_the_exchange_ends_a_recorded_step(recording: tuple[Oracle, Table, list[Model]]) -> None:
    _, table, models = recording
    together([lambda m=model: decoded(m, 1, 2, 3) for model in models], table)
    table.leave()
    with pytest.raises(BrokenBarrierError):
        decoded(models[0], 1, 2, 3)


def test_a_recorded_step_that_cannot_be_right_is_named_before_others_are_met(
    recording: tuple[Oracle, Table, list[Model]],
) -> None:
    _, _, models = recording
    batch = PagedBatch(models[0])
    step = batch.step([(0, [5]), (1, [6])])
    step.slots[1] = 10**6
    with pytest.raises(IndexError, match="slots: one is outside"):
        models[0].forward(step, batch.caches)
    assert models[0]._collective[0]._exchange.calls == 0


def test_only_local_experts_are_read(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = SafetensorsSource.get

    def get(self: SafetensorsSource, name: str, shape: Sequence[int]) -> Tensor:
        read.append(name)
        return original(self, name, shape)

    monkeypatch.setattr(SafetensorsSource, "get", get)
    moe = oracle.model.spec.moe
    assert moe is not None
    seen: list[int] = []
    for rank in range(3):
        read.clear()
        placement = ExpertPlacement(moe.num_experts, 3, rank)
        load_model(oracle.files, oracle.model.spec, oracle.model.ops, exchange=AllGather(Table(3), placement))
        experts = {int(name.split(".experts.")[1].split(".")[0]) for name in read if ".experts." in name}
        assert experts == set(placement.local)
        seen += sorted(experts)
    assert seen == list(range(moe.num_experts))


def test_weight_bytes_count_local_experts_only(oracle: Oracle) -> None:
    models, _ = ranks_of(oracle, AllGather, 2)
    spec = oracle.model.spec
    assert spec.moe is not None
    one = 4 * 3 * spec.hidden_size * spec.moe.intermediate_size * len(spec.moe.layers)
    for model, rank in zip(models, range(2), strict=True):
        others = spec.moe.num_experts - ExpertPlacement(spec.moe.num_experts, 2, rank).count(rank)
        assert oracle.model.weight_bytes - model.weight_bytes == one * others


def test_an_exchange_that_does_not_fit_is_refused(oracle: Oracle, tmp_path: Path) -> None:
    spec, ops = oracle.model.spec, oracle.model.ops
    with pytest.raises(ConfigError, match="places 77 experts, the model has"):
        load_model(oracle.files, spec, ops, exchange=LocalExperts(77))
    dense: Any = make_oracle("llama-64-untied", tmp_path)
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts"):
        load_model(dense.files, dense.model.spec, ops, exchange=LocalExperts(8))
