"""Which decode steps are recorded, and what a replay gets to see, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from ahead_toys import DrawingOps, FakeRecorder
from hypothesis import given
from hypothesis import strategies as st
from worker_toys import ToyModel, ToyOps

from dpi_engine.config.moe_spec import MlaSpec, MoeSpec
from dpi_engine.ops.interface import PAGE_SIZE, StepTensors
from dpi_engine.worker.graphs import LARGEST, DecodeGraphs, graph_sizes, graphs_fit, padded_size


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (32, [1, 2, 4, 8, 16, 24, 32]),
        (100, [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]),
        (1024, [1, 2, 4, 8, 16, 24, 32, 48, *range(64, LARGEST + 1, 32)]),
    ],
)  # fmt: skip
def test_sizes(most: int, sizes: list[int]) -> None:
    assert graph_sizes(most) == sizes


@given(st.integers(1, 600), st.lists(st.one_of(st.none(), st.integers(0, 600)), min_size=1, max_size=8))
def test_ranks_that_step_together_choose_the_same_size(most: int, decodes: list[int | None]) -> None:
    sizes = graph_sizes(most)
    chosen = padded_size(sizes, decodes)
    assert all(padded_size(sizes, decodes[i:] + decodes[:i]) == chosen for i in range(len(decodes)))
    known = [n for n in decodes if n is not None]
    if len(known) < len(decodes) or max(known) > sizes[-1]:
        assert chosen is None
    else:
        assert chosen in sizes and chosen >= max(known)
        assert all(size < max(*known, 1) for size in sizes if size < chosen)


class WatchedModel(ToyModel):
    """Keeps copies of the steps it was given, which are overwritten."""

    def forward(self, step: StepTensors, caches: torch.Tensor) -> torch.Tensor:
        names = ("ids", "slots", "kv_lens", "block_tables")
        self.seen = SimpleNamespace(**{name: getattr(step, name).clone() for name in names})
        return torch.arange(step.ids.shape[0]).unsqueeze(1) + torch.zeros(1, self.spec.vocab_size)


def decode_step(kv_lens: list[int]) -> StepTensors:
    b = len(kv_lens)
    width = -(-max(kv_lens) // PAGE_SIZE)
    return StepTensors(
        ids=torch.arange(b) + 100,
        positions=torch.tensor(kv_lens) - 1,
        slots=torch.arange(b) + 50,
        block_tables=torch.arange(1, b * width + 1, dtype=torch.int32).view(b, width),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
        cu_q=torch.arange(b + 1, dtype=torch.int32),
        rows=torch.arange(b),
        max_q=1,
        max_kv=max(kv_lens),
    )


def make_graphs(model: WatchedModel, recorder: FakeRecorder, most: int = 8) -> tuple[DecodeGraphs, list[tuple]]:
    told: list[tuple] = []
    graphs = DecodeGraphs(
        DrawingOps(), lambda step: model.forward(step, torch.empty(0)), model.spec.vocab_size, most, 100
    )
    graphs.capture(recorder, lambda *news: told.append(news))
    return graphs, told


def test_the_largest_is_recorded_first_and_progress_is_told() -> None:
    model, recorder = WatchedModel(), FakeRecorder()
    sizes: list[int] = []
    forward = model.forward
    model.forward = lambda step, caches: (sizes.append(step.ids.shape[0]), forward(step, caches))[1]  # type: ignore
    graphs, told = make_graphs(model, recorder)
    assert sizes == [8, 4, 2, 1] == graphs.sizes[::-1] and recorder.recorded == 4
    assert [done for _, done in told] == [0.0, 0.25, 0.5, 0.75, 1.0] and told[0][0] == "recording decode steps"


def test_lanes_that_are_left_over_have_no_keys_and_write_to_the_null_block() -> None:
    model = WatchedModel()
    graphs, _ = make_graphs(model, FakeRecorder())
    full = graphs.run(decode_step([20, 3, 90, 40, 7, 8, 9, 17]))
    assert full is not None and full.shape[0] == 8
    seen_full = model.seen
    assert seen_full.kv_lens.tolist() == [20, 3, 90, 40, 7, 8, 9, 17]
    assert seen_full.block_tables[2, :6].tolist() == [13, 14, 15, 16, 17, 18]
    few = graphs.run(decode_step([30, 31, 32, 33, 34]))
    assert few is not None and few.shape[0] == 5
    assert model.seen.kv_lens.tolist() == [30, 31, 32, 33, 34, 0, 0, 0]
    assert model.seen.slots.tolist() == [50, 51, 52, 53, 54, 0, 0, 0]
    assert model.seen.ids.tolist()[:5] == [100, 101, 102, 103, 104]
    assert graphs.replays == 2


def test_other_steps_are_left_alone() -> None:
    graphs, _ = make_graphs(WatchedModel(), FakeRecorder())
    assert graphs.run(decode_step([5] * 9)) is None  # too many
    chunk = decode_step([5, 6])
    chunk.max_q = 2
    assert graphs.run(chunk) is None
    silent = decode_step([5, 6])
    silent.rows = silent.rows[:1]  # a prompt's chunk of one token, which samples nothing
    assert graphs.run(silent) is None
    assert graphs.replays == 0


def test_what_cannot_be_recorded_is_said() -> None:
    moe = MoeSpec(num_experts=8, top_k=2, intermediate_size=8, layers=(0,))
    mla = MlaSpec(q_rank=None, kv_rank=8, nope_dim=8, rope_dim=8, value_dim=8)
    grouped = MoeSpec(num_experts=8, top_k=2, intermediate_size=8, layers=(0,), groups=2)
    assert graphs_fit(DrawingOps(), SimpleNamespace(moe=None, mla=None)) is None  # type: ignore[arg-type]
    assert graphs_fit(DrawingOps(), SimpleNamespace(moe=moe, mla=None)) is None  # type: ignore[arg-type]
    for ops, spec, why in (
        (ToyOps(), SimpleNamespace(moe=None, mla=None), "ops 'toy' read lengths"),
        (DrawingOps(), SimpleNamespace(moe=None, mla=mla), "latents"),
        (DrawingOps(), SimpleNamespace(moe=grouped, mla=None), "grouped routing"),
    ):
        assert why in str(graphs_fit(ops, spec))  # type: ignore[arg-type]
