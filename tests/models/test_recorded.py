"""Decoding steps that are recorded compute bit for bit what the ordinary pass does."""

from __future__ import annotations

import pytest
import torch
from model_oracle import Oracle, PagedBatch, make_oracle, random_ids

from dpi_engine.ops import OpsUnavailable, build
from dpi_engine.ops.interface import StepTensors

FAMILIES = (
    "llama-64-untied", "llama-80-tied", "llama-biases", "mistral-96-window", "qwen3-128", "mixtral",
    "qwen3-moe-some-dense",
)  # fmt: skip
HERE = [isa for isa in ("avx2", "avx512bf16") if isa in build.possible_isas(build.cpu_features())]
CASES = [(family, isa, None) for family in FAMILIES for isa in HERE]
CASES += [(family, isa, "int8") for family in ("llama-biases", "qwen3-128") for isa in HERE if isa != "avx2"]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(filter(None, case)))
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    family, isa, quantization = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPI_CPU_ISA", isa)
        try:
            folder = tmp_path_factory.mktemp("oracle")
            return make_oracle(family, folder, torch.bfloat16, "cpu", threads=2, quantization=quantization)
        except OpsUnavailable as error:
            pytest.skip(f"the {isa} kernels cannot run here: {error}")


def both(oracle: Oracle, step: StepTensors, caches: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the recorded and of the ordinary pass; the second writes the same keys and values once more."""
    model = oracle.model
    assert model._recorded is not None
    recorded = model._recorded.forward(step, caches)
    assert recorded is not None
    return recorded.clone(), model._forward(step, caches)


def test_steps_of_every_size(oracle: Oracle) -> None:
    """Sequences join and leave; block tables grow by a page; the sizes come again."""
    batch = PagedBatch(oracle.model)
    prompts = [random_ids(n, n) for n in (14, 3, 30, 1, 62)]
    batch.run(list(enumerate(prompts)))
    for number, size in enumerate((5, 4, 5, 1, 2, 3, 3, 5)):
        step = batch.step([(i, [number + i]) for i in range(size)])
        with torch.inference_mode():
            got, want = both(oracle, step, batch.caches)
        assert torch.equal(got, want)
        assert got.shape == (size, oracle.model.spec.vocab_size)
    assert sorted(oracle.model._recorded._programs) == [1, 2, 3, 4, 5]


def test_it_writes_keys_and_values(oracle: Oracle) -> None:
    """Whole texts decoded by programs alone, and by the ordinary pass alone, over caches of their own."""
    ids = [random_ids(40, 1), random_ids(40, 2)]
    mine, theirs = PagedBatch(oracle.model), PagedBatch(oracle.model)
    for a, b in zip(*ids, strict=True):
        with torch.inference_mode():
            got = oracle.model._recorded.forward(mine.step([(0, [a]), (1, [b])]), mine.caches)
            want = oracle.model._forward(theirs.step([(0, [a]), (1, [b])]), theirs.caches)
        assert torch.equal(got, want)


def test_new_caches_make_new_programs(oracle: Oracle) -> None:
    for _ in range(2):
        batch = PagedBatch(oracle.model)
        with torch.inference_mode():
            got, want = both(oracle, batch.step([(0, [7])]), batch.caches)
        assert torch.equal(got, want)


def test_other_steps_are_not_recorded(oracle: Oracle) -> None:
    batch = PagedBatch(oracle.model)
    recorded = oracle.model._recorded
    assert recorded.forward(batch.step([(0, [1, 2])]), batch.caches) is None
    assert recorded.forward(batch.step([(0, [1]), (1, [2])], rows=[1]), batch.caches) is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("block_tables", 9999, "block_tables: a block is outside the 64 blocks"),
        ("slots", 10**6, "slots: one is outside the 1024 slots"),
        ("positions", -1, "positions: one is negative"),
        ("ids", 211, "ids: one is outside the 211 rows"),
    ],
)
def test_a_step_that_cannot_be_right_is_named_and_the_next_one_works(oracle, name, value, message) -> None:
    batch = PagedBatch(oracle.model)
    step = batch.step([(0, [5]), (1, [6])])
    kept = getattr(step, name).clone()
    getattr(step, name).view(-1)[1] = value
    with pytest.raises(IndexError, match=message):
        oracle.model.forward(step, batch.caches)
    getattr(step, name).copy_(kept)
    with torch.inference_mode():
        got, want = both(oracle, step, batch.caches)
    assert torch.equal(got, want)
