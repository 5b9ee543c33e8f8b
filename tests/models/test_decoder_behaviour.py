"""What the decoder promises beside its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_oracle import FAMILIES, Oracle, PagedBatch, make_oracle, random_ids
from torch.testing import assert_close


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    torch.set_num_threads(1)
    return make_oracle("llama-64-untied", tmp_path_factory.mktemp("oracle"))


def test_a_step_without_wanted_rows_fills_the_cache_and_gives_no_logits(oracle: Oracle) -> None:
    ids = random_ids(40, 1)
    batch = PagedBatch(oracle.model)
    assert batch.run([(0, ids[:30])], rows=[]).shape == (0, 211)
    assert_close(batch.run([(0, ids[30:])]), oracle.truth(ids)[30:], rtol=1e-4, atol=1e-4)


def test_not_a_number_of_an_earlier_owner_does_not_reach_the_next_one(oracle: Oracle) -> None:
    """A page changes hands without being cleared as a whole; what lies past the new owner's end must not matter."""
    batch = PagedBatch(oracle.model)
    batch.run([(0, random_ids(100, 1))])
    for cache in batch.caches:
        cache[:, batch.tables[0]] = float("nan")
    batch.release(0)
    first, second = random_ids(37, 2), random_ids(5, 3)
    whole = batch.run([(1, first[:30]), (2, second[:4])])
    decoded = batch.run([(1, [first[30]]), (2, [second[4]])])
    mixed = batch.run([(1, first[31:])])
    truth = oracle.truth(first)
    assert_close(whole[:30], truth[:30], rtol=1e-4, atol=1e-4)
    assert_close(decoded, torch.stack([truth[30], oracle.truth(second)[4]]), rtol=1e-4, atol=1e-4)
    assert_close(mixed, truth[31:], rtol=1e-4, atol=1e-4)


def test_not_a_number_in_one_sequence_stays_there(oracle: Oracle) -> None:
    batch = PagedBatch(oracle.model)
    sick, well = random_ids(20, 1), random_ids(20, 2)
    batch.run([(0, sick[:19]), (1, well[:19])])
    for cache in batch.caches:
        cache[:, batch.tables[0]] = float("nan")
    got = batch.run([(0, [sick[19]]), (1, [well[19]])])
    assert got[0].isnan().all()
    assert_close(got[1], oracle.truth(well)[19], rtol=1e-4, atol=1e-4)


HALF = [(family, torch.bfloat16) for family in FAMILIES] + [("llama-80-tied", torch.float16)]


@pytest.mark.parametrize(("family", "dtype"), HALF)
def test_half_precision_is_as_near_to_float32_as_transformers_is(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """How far the rounding of half precision leads away depends on the model; transformers rounds as often."""
    oracle = make_oracle(family, tmp_path, dtype)
    ids = random_ids(60, 4)
    batch = PagedBatch(oracle.model)
    got = torch.cat([batch.run([(0, ids[:45])])] + [batch.run([(0, [t])]) for t in ids[45:]])
    truth = oracle.truth(ids)
    oracle.reference.to(dtype)
    theirs = oracle.truth(ids).float()
    ours, other, size = (got - truth).norm(dim=1), (theirs - truth).norm(dim=1), truth.norm(dim=1)
    if oracle.model.spec.moe is not None:
        # A rounded score can send a token to another expert, which is more than a rounding: such tokens are few.
        assert ours.median() < 1.5 * other.median() and ours.median() < 0.15 * size.median()
        return
    assert ours.norm() < 1.25 * other.norm()
    assert ours.norm() < 0.15 * size.norm()
    assert oracle.model.forward(batch.step([(1, [3])]), batch.caches).dtype == dtype


def test_sizes_are_told(oracle: Oracle) -> None:
    model = oracle.model
    parameters = sum(p.numel() for p in oracle.reference.parameters())
    assert model.weight_bytes == 4 * parameters
    assert model.cache_bytes_per_block() == 3 * 2 * 16 * 2 * 64 * 4
    assert sum(c.numel() * 4 for c in model.new_caches(5)) == 5 * model.cache_bytes_per_block()
