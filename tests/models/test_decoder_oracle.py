"""Logits of every family equal transformers' in float32, on both backends, however the work is cut into steps."""

from __future__ import annotations

import pytest
import torch
from model_oracle import DEVICE, FAMILIES, OPS, Oracle, PagedBatch, make_oracle, random_ids
from torch.testing import assert_close

from dpi_engine.ops import OpsUnavailable

# GPUs sum in other orders, and emulate float32 by three products of TF32; TF32 alone would be off by 1e-2.
_GAP = 1.5e-4 if DEVICE == "cpu" else 5e-4

# This one magnifies rounding: in float32 transformers itself is 1.3e-4 away from its float64, and AVX2 kernels differ
# from it by 2.3e-4. The others stay below 5e-5.
_ROUGH = {"qwen2-128-tied": 6e-4}


def tolerance(oracle: Oracle) -> dict[str, float]:
    gap = max(_GAP, _ROUGH.get(oracle.name, 0.0))
    return {"rtol": gap, "atol": gap}


CASES = [(family, ops) for family in FAMILIES for ops in (("torch", "cpu") if DEVICE == "cpu" else (OPS,))]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    family, ops = request.param
    try:
        return make_oracle(family, tmp_path_factory.mktemp("oracle"), ops=ops)
    except OpsUnavailable as error:
        pytest.skip(f"the CPU kernels cannot run here: {error}")


def test_whole_prompts_of_one_batch(oracle: Oracle) -> None:
    prompts = [random_ids(n, seed) for seed, n in enumerate((70, 1, 16, 33))]
    got = PagedBatch(oracle.model).run(list(enumerate(prompts)))
    assert_close(got, torch.cat([oracle.truth(p) for p in prompts]), **tolerance(oracle))


def test_chunks_mixed_with_decodes_of_others(oracle: Oracle) -> None:
    long, short, late = random_ids(90, 1), random_ids(40, 2), random_ids(20, 3)
    batch = PagedBatch(oracle.model)
    rows: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}

    def run(*pieces: tuple[int, list[int]]) -> None:
        logits = batch.run(list(pieces))
        at = 0
        for sequence, tokens in pieces:
            rows[sequence].append(logits[at : at + len(tokens)])
            at += len(tokens)

    run((1, short[:17]))
    at = 0
    for i, size in enumerate((16, 7, 1, 24, 15, 2, 25)):
        run((0, long[at : at + size]), (1, [short[17 + i]]))
        at += size
    assert at == len(long)
    run((1, [short[24]]), (2, late[:3]))
    run((2, late[3:]), (1, short[25:]))
    for sequence, ids in ((0, long), (1, short), (2, late)):
        assert_close(torch.cat(rows[sequence]), oracle.truth(ids), **tolerance(oracle))


def test_token_by_token_in_a_batch(oracle: Oracle) -> None:
    """Three sequences of different age decode together, across page borders."""
    sequences = [random_ids(50, 7), random_ids(37, 8), random_ids(31, 9)]
    known = [20, 7, 1]
    batch = PagedBatch(oracle.model)
    batch.run([(i, s[:n]) for i, (s, n) in enumerate(zip(sequences, known, strict=True))], rows=[])
    steps = 30
    got = [
        batch.run([(i, [s[n + t]]) for i, (s, n) in enumerate(zip(sequences, known, strict=True))])
        for t in range(steps)
    ]
    for i, (ids, n) in enumerate(zip(sequences, known, strict=True)):
        want = oracle.truth(ids[: n + steps])[n:]
        assert_close(torch.stack([g[i] for g in got]), want, **tolerance(oracle))


def test_only_the_rows_asked_for_in_their_order(oracle: Oracle) -> None:
    ids = random_ids(23, 4)
    got = PagedBatch(oracle.model).run([(0, ids)], rows=[22, 3])
    assert_close(got, oracle.truth(ids)[[22, 3]], **tolerance(oracle))
