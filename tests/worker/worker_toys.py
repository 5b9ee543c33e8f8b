"""A toy model whose logits depend on every token it reads through the paged cache, and helpers to plan by hand."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from dpi_engine.core.plan import NewSequence, SequenceWork, StepPlan
from dpi_engine.ops.interface import PAGE_SIZE, Ops, StepTensors
from dpi_engine.wire.messages import SamplingParams

VOCAB = 199


class ToyOps:
    """The part of Ops that the worker itself calls."""

    name = "toy"
    draws = False
    records = False

    def __init__(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.dtype = dtype

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(1)

    def best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return Ops.best(self, logits)


class BlindOps(ToyOps):
    """An argmax that steps over not-a-number, as compare-and-swap kernels do."""

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.nan_to_num(nan=-torch.inf).argmax(1)


class ToyModel:
    """Logits at a position = a fixed random function of (token, index) summed over the sequence so far, read from the
    cache by block table: a wrong slot, table or length changes them. Exact in float32 (small integers)."""

    def __init__(self, vocab: int = VOCAB) -> None:
        self.spec = SimpleNamespace(vocab_size=vocab, moe=None, mla=None)
        g = torch.Generator().manual_seed(7)
        self._table = torch.randint(0, 1009, (vocab, 8, vocab), generator=g)
        self.steps: list[StepTensors] = []
        self.poison: set[int] = set()  # tokens that turn the logits after them into not-a-number

    def new_caches(self, num_blocks: int) -> torch.Tensor:
        return torch.full((num_blocks, PAGE_SIZE), -1)

    def cache_bytes_per_block(self) -> int:
        return 8 * PAGE_SIZE

    def logits_after(self, tokens: list[int]) -> torch.Tensor:
        """The oracle: no cache."""
        ids = torch.tensor(tokens)
        total = self._table[ids, torch.arange(len(tokens)) % 8].sum(0) % 1009
        row = total.float() / 100
        return torch.full_like(row, torch.nan) if self.poison & set(tokens) else row

    def forward(self, step: StepTensors, caches: torch.Tensor) -> torch.Tensor:
        caches.view(-1)[step.slots] = step.ids
        self.steps.append(step)
        rows = []
        cu = step.cu_q.tolist()
        for row in step.rows.tolist():
            i = next(i for i in range(len(cu) - 1) if cu[i] <= row < cu[i + 1])
            if not int(step.kv_lens[i]):  # a lane that only pads a recorded step
                assert int(step.slots[row]) < PAGE_SIZE
                rows.append(torch.zeros(self.spec.vocab_size))
                continue
            position = int(step.positions[row])
            assert position == int(step.kv_lens[i]) - (cu[i + 1] - row)
            tokens = caches[step.block_tables[i].long()].view(-1)[: position + 1].tolist()
            assert -1 not in tokens, "read a token that was never written"
            rows.append(self.logits_after(tokens))
        return torch.stack(rows) if rows else torch.zeros(0, self.spec.vocab_size)


def greedy(**more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, **more)  # type: ignore[arg-type]


def new(
    slot: int, tokens: list[int], blocks: list[int], params: SamplingParams, *, prompt: int | None = None, seed: int = 1
):
    return NewSequence(slot, f"r{slot}", list(tokens), len(tokens) if prompt is None else prompt, blocks, params, seed)


def work(
    slot: int, start: int, count: int, *, sample: bool = True, blocks: list[int] | None = None, prompt: bool = False
):
    return SequenceWork(slot, start, count, blocks or [], sample, prompt)


def plan(work: list[SequenceWork], new: list[NewSequence] | None = None, released: list[int] | None = None) -> StepPlan:
    return StepPlan(step=1, work=work, new=new or [], released=released or [], num_tokens=sum(w.count for w in work))
