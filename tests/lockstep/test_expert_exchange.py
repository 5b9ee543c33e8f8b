"""Experts on several ranks compute what one rank with all of them does; gloo is the reference for who gets what."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mesh_harness import form, meshes, together

from dpi_engine.config.experts import ExpertPlacement
from dpi_engine.ops.exchange import NOT_HERE
from dpi_engine.wire.errors import ExchangeError
from dpi_engine.wire.exchange.experts import SMALL_BYTES, MeshExperts, Way
from dpi_engine.wire.exchange.mesh import Mesh

EXPERTS, HIDDEN = 10, 12
MATRICES = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(3)) / 4
WAYS = [Way.ALL_GATHER, Way.ALL_TO_ALL, Way.AUTO]


def experts(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, first: int = 0) -> torch.Tensor:
    """The weighted sum over a token's experts; `ids` count from `first`."""
    out = torch.zeros(hidden.shape[0], HIDDEN)
    for row in range(hidden.shape[0]):
        for choice in range(ids.shape[1]):
            expert = int(ids[row, choice])
            if expert != NOT_HERE:
                out[row] += weights[row, choice] * (MATRICES[first + expert] @ hidden[row].float())
    return out.to(hidden.dtype)


def layer(exchange: MeshExperts, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    batch = exchange.dispatch(hidden, ids, weights)
    partial = experts(batch.hidden, batch.ids, batch.weights, exchange.placement.local.start)
    return exchange.combine(partial, batch)


def tokens(rows: int, k: int, seed: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:k] for _ in range(rows)] or [torch.empty(k)])
    weights = torch.rand(rows, k, generator=generator)
    return hidden, ids[:rows].to(torch.int32), weights


def exchanges(ranks: list[Mesh], way: Way) -> list[MeshExperts]:
    return [MeshExperts(m, ExpertPlacement(EXPERTS, m.size, m.rank), way) for m in ranks]


@pytest.fixture(scope="module", params=[2, 3, 4])
def linked(request):
    with meshes(request.param) as ranks:
        form(ranks)
        yield ranks


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_sum_over_ranks_is_that_of_one_rank(linked: list[Mesh], way: Way, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, 6))
    rows = data.draw(st.lists(st.sampled_from([0, 1, 2, 7, 33]), min_size=len(linked), max_size=len(linked)))
    seed = data.draw(st.integers(0, 1000))
    mine = [tokens(n, k, seed + r) for r, n in enumerate(rows)]
    made = exchanges(linked, way)
    got = together([lambda e=e, t=t: [layer(e, *t) for _ in range(2)] for e, t in zip(made, mine, strict=True)])
    for (first, second), t in zip(got, mine, strict=True):
        assert torch.equal(first, second)  # every run gives the same bits
        torch.testing.assert_close(first, experts(*t), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_all_tokens_to_one_expert_and_ranks_without_tokens(linked: list[Mesh], way: Way) -> None:
    made = exchanges(linked, way)
    for rows in ([5] + [0] * (len(linked) - 1), [0] * len(linked)):
        mine = [tokens(n, 1, r) for r, n in enumerate(rows)]
        for _, ids, _ in mine:
            ids.fill_(EXPERTS - 1)
        got = together([lambda e=e, t=t: layer(e, *t) for e, t in zip(made, mine, strict=True)])
        for out, t in zip(got, mine, strict=True):
            torch.testing.assert_close(out, experts(*t))


def test_both_ways_give_the_same_sums_and_all_to_all_sends_only_what_is_wanted(linked: list[Mesh]) -> None:
    mine = [tokens(9, 2, r, torch.bfloat16) for r in range(len(linked))]
    results = []
    for way in (Way.ALL_GATHER, Way.ALL_TO_ALL):
        made = exchanges(linked, way)
        results.append(together([lambda e=e, t=t: layer(e, *t) for e, t in zip(made, mine, strict=True)]))
    for a, b in zip(*results, strict=True):
        assert a.dtype is torch.bfloat16
        torch.testing.assert_close(a, b)

    def wanted(exchange: MeshExperts, t) -> bool:
        batch = exchange.dispatch(*t)
        exchange.combine(torch.zeros_like(batch.hidden), batch)
        return bool((batch.ids != NOT_HERE).any(dim=1).all())

    assert all(together([lambda e=e, t=t: wanted(e, t) for e, t in zip(made, mine, strict=True)]))


def test_few_tokens_go_to_all_ranks_and_many_only_where_they_are_wanted() -> None:
    """With as many choices as ranks. Both times the sums are right."""
    with meshes(2) as ranks:
        form(ranks)
        made = exchanges(ranks, Way.AUTO)
        few = 9
        many = SMALL_BYTES // (4 * HIDDEN) + 1

        def rows_here(exchange: MeshExperts, t) -> int:
            batch = exchange.dispatch(*t)
            exchange.combine(torch.zeros_like(batch.hidden), batch)
            return batch.hidden.shape[0]

        for n in (few, many):
            mine = [tokens(n, 2, r) for r in range(2)]
            found = together([lambda e=e, t=t: rows_here(e, t) for e, t in zip(made, mine, strict=True)])
            wanted = [
                sum(int(np.isin(ids.numpy(), e.placement.local).any(1).sum()) for _, ids, _ in mine) for e in made
            ]
            assert all(count < 2 * n for count in wanted)
            assert found == ([2 * n, 2 * n] if n == few else wanted)


def test_a_pass_alone_exchanges_nothing() -> None:
    with meshes(2) as ranks:  # not linked
        exchange = exchanges(ranks, Way.AUTO)[1]
        with pytest.raises(ExchangeError, match="no group"):
            layer(exchange, *tokens(3, 2, 0))
        hidden, ids, weights = tokens(3, 2, 0)
        with exchange.alone():
            assert layer(exchange, hidden, ids, weights).shape == hidden.shape


@pytest.mark.parametrize("change", ["hidden", "choices", "dtype"])
def test_a_peer_with_another_model_is_named(change: str) -> None:
    with meshes(2) as ranks:
        form(ranks)
        made = exchanges(ranks, Way.ALL_GATHER)
        hidden, ids, weights = tokens(3, 2, 0)
        other = {
            "hidden": (torch.zeros(3, HIDDEN + 1), ids, weights),
            "choices": (hidden, ids[:, :1].contiguous(), weights[:, :1].contiguous()),
            "dtype": (hidden.to(torch.float16), ids, weights),
        }[change]
        found = together([lambda: made[0].dispatch(hidden, ids, weights), lambda: made[1].dispatch(*other)])
        for error, peer in zip(found, (1, 0), strict=True):
            assert isinstance(error, ExchangeError)
            assert f"rank {peer} sent tokens of" in str(error)
            assert "does not run the same model" in str(error)


def test_an_expert_that_does_not_exist_is_refused() -> None:
    with meshes(2) as ranks:
        form(ranks)
        made = exchanges(ranks, Way.ALL_GATHER)
        hidden, ids, weights = tokens(3, 2, 0)
        bad = ids.clone()
        bad[1, 1] = EXPERTS
        calls = [lambda w=w, i=i: made[w].dispatch(hidden, i, weights) for w, i in enumerate((ids, bad))]
        found = together(calls)
        assert isinstance(found[0], ExchangeError)
        assert f"an expert outside 0..{EXPERTS - 1}" in str(found[0])


def test_a_placement_for_another_group_is_refused() -> None:
    with meshes(2) as ranks, pytest.raises(ValueError, match="rank 0 of 3"):
        MeshExperts(ranks[1], ExpertPlacement(EXPERTS, 3, 0))


def gloo_rank(rank: int, size: int, folder: str) -> None:
    """In a process of its own: the same layers by gloo's collectives and by ours."""
    import torch.distributed as dist

    from dpi_engine.wire.group import GroupTable, Member

    with Mesh(rank, size, "127.0.0.1", 0) as mesh:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
        endpoints = [None] * size
        dist.all_gather_object(endpoints, mesh.endpoint)
        mesh.announce(GroupTable(1, bytes(16), [Member(r, 1, str(e)) for r, e in enumerate(endpoints)]))
        while not mesh.form(1.0):
            pass
        placement = ExpertPlacement(EXPERTS, size, rank)
        first, count = placement.local.start, len(placement.local)
        for way in (Way.ALL_GATHER, Way.ALL_TO_ALL):
            exchange = MeshExperts(mesh, placement, way)
            for case in range(6):
                n = (case * 5 + rank * 3) % 8  # ranks without tokens among them
                hidden, ids, weights = tokens(n, 3, 10 * case + rank)
                # gloo's all-gather wants equal sizes: pad to the longest.
                rows = torch.tensor([n])
                all_rows = [torch.zeros_like(rows) for _ in range(size)]
                dist.all_gather(all_rows, rows)
                most = max(int(r) for r in all_rows)
                padded = torch.zeros(most, HIDDEN + 6)
                padded[:n] = torch.cat([hidden, ids.float(), weights], 1)
                gathered = [torch.zeros_like(padded) for _ in range(size)]
                dist.all_gather(gathered, padded)
                whole = torch.cat([g[: int(r)] for g, r in zip(gathered, all_rows, strict=True)])
                there = whole[:, HIDDEN : HIDDEN + 3].to(torch.int32) - first
                there = torch.where((there >= 0) & (there < count), there, NOT_HERE)
                partial = experts(whole[:, :HIDDEN].contiguous(), there, whole[:, HIDDEN + 3 :].contiguous(), first)
                splits = [int(r) for r in all_rows]
                back = torch.zeros(n * size, HIDDEN)
                dist.all_to_all_single(back, partial, [n] * size, splits)
                reference = torch.zeros(n, HIDDEN)
                for piece in back.split(n) if n else ():
                    reference += piece
                ours = layer(exchange, hidden, ids, weights)
                assert torch.equal(ours, reference), f"{way}, case {case}: not bit for bit what gloo gives"
        dist.barrier()
        dist.destroy_process_group()


def test_gloo_moves_the_same_rows_and_gives_the_same_bits() -> None:
    size = 3
    with tempfile.TemporaryDirectory() as folder:
        here = Path(__file__)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(here.parent), *(p for p in sys.path if p)]),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        code = f"import {here.stem}; {here.stem}.gloo_rank"
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", f"{code}({rank}, {size}, {folder!r})"],
                env=environment, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(size)
        ]  # fmt: skip
        try:
            for process in processes:
                _, errors = process.communicate(timeout=120)
                assert process.returncode == 0, errors[-3000:]
        finally:
            for process in processes:
                process.kill()
                process.wait()
