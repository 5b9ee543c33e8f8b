"""The table of what each worker of a rank holds: nothing is missing, nothing counts twice, odd sizes are named."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpi_engine.config.errors import ConfigError, ParallelError
from dpi_engine.config.model_spec import ModelSpec
from dpi_engine.config.settings import parse_serve
from dpi_engine.config.tensor_parallel import Shard, check_tensor_parallel, misfits

LLAMA = ModelSpec(
    architecture="LlamaForCausalLM",
    hidden_size=576,
    intermediate_size=1536,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=49152,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
)


def shards(size: int) -> list[Shard]:
    return [Shard(size, i) for i in range(size)]


@given(st.integers(1, 64), st.integers(1, 64))
def test_runs_cover_everything_once_and_in_order(size: int, share: int) -> None:
    found = [i for shard in shards(size) for i in shard.run(size * share)]
    assert found == list(range(size * share))


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 8))
def test_every_worker_has_the_kv_heads_of_its_query_heads(kv: int, size: int, group: int) -> None:
    """Group-query attention: query head h reads key-value head h * kv / heads."""
    heads = kv * group
    if heads % size or (kv % size and size % kv):
        return
    for shard in shards(size):
        mine = shard.kv_run(kv)
        assert {h * kv // heads for h in shard.run(heads)} == set(mine)
        # The kernels spread query heads evenly over the key-value heads they are given.
        local = heads // size
        assert local % len(mine) == 0
        for i, head in enumerate(shard.run(heads)):
            assert mine[i * len(mine) // local] == head * kv // heads


@pytest.mark.parametrize(
    ("kv_heads", "size", "want"),
    [
        (8, 2, [range(4), range(4, 8)]),
        (2, 2, [range(1), range(1, 2)]),
        (2, 4, [range(1), range(1), range(1, 2), range(1, 2)]),
        (1, 3, [range(1)] * 3),
    ],
)
def test_few_kv_heads_are_held_by_several_workers(kv_heads: int, size: int, want: list[range]) -> None:
    assert [shard.kv_run(kv_heads) for shard in shards(size)] == want


def test_what_does_not_divide_is_no_run() -> None:
    with pytest.raises(ValueError, match="10 is no multiple of 4"):
        Shard(4, 1).run(10)
    with pytest.raises(ValueError, match="neither of 3 and 2"):
        Shard(2, 0).kv_run(3)
    with pytest.raises(ValueError, match="worker 2 of 2"):
        Shard(2, 2)


@pytest.mark.parametrize(
    ("changes", "size", "named"),
    [
        ({"num_heads": 9, "num_kv_heads": 3}, 2, ["attention heads 9 is no multiple of 2", "key-value heads 3"]),
        ({"intermediate_size": 1537}, 2, ["intermediate size 1537 is no multiple of 2"]),
        ({"vocab_size": 211}, 2, ["vocabulary size 211 is no multiple of 2"]),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, ["key-value heads 6 is neither a multiple nor a divisor of 4"]),
        ({}, 16, ["attention heads 8 is no multiple of 16"]),
    ],
)
def test_every_size_that_does_not_divide_is_named(changes: dict[str, Any], size: int, named: list[str]) -> None:
    spec = msgspec.structs.replace(LLAMA, **changes)
    with pytest.raises(ConfigError) as error:
        check_tensor_parallel(spec, size)
    for text in [f"--tensor-parallel-size {size}", "Sizes that fit: 1", *named]:
        assert text in str(error.value)
    assert len(misfits(spec, size)) == len(named)


def test_the_sizes_that_fit_are_told() -> None:
    spec = msgspec.structs.replace(LLAMA, num_heads=12, num_kv_heads=6)
    with pytest.raises(ConfigError, match=r"Sizes that fit: 1, 2, 3, 6, 12;"):
        check_tensor_parallel(spec, 5)
    for size in (1, 2, 3, 6, 12):
        check_tensor_parallel(spec, size)


def test_experts_of_one_rank_are_not_shared_in_two_ways() -> None:
    with pytest.raises(ParallelError, match="-ep") as error:
        parse_serve(["model", "-tp", "2", "-ep", "-dp", "2"])
    assert "leave one of them out" in str(error.value)
    assert parse_serve(["model", "-tp", "2", "-dp", "2"]).tensor_parallel_size == 2
