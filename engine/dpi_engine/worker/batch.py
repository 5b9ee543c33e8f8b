"""The sequences in the batch, as arrays that live from step to step, and the inputs of a forward pass made from them.

The work per step is vectorised over tokens; Python touches each sequence a constant number of times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dpi_engine.core.plan import NewSequence, SequenceWork, StepPlan
from dpi_engine.ops.interface import PAGE_SIZE, StepTensors


class PlanError(RuntimeError):
    """A step plan contradicts the batch; running it would compute wrong text."""


@dataclass(slots=True)
class PreparedStep:
    """A step's tensors and what its logits' rows mean.

    The first len(sample_slots) rows belong to the sampled work items, in the order of the plan; then come the prompt
    rows. sample_slots [s] and output_index [s] int64; prompt_rows: (slot, first position, number of rows).
    """

    tensors: StepTensors
    sample_slots: NDArray[np.int64]
    output_index: NDArray[np.int64]
    prompt_rows: list[tuple[int, int, int]]


class Batch:
    """Persistent arrays: tokens [max_num_seqs, max_model_len + 1] int32, lengths and prompt lengths [max_num_seqs],
    block tables [max_num_seqs, blocks of the longest sequence] int32, and the number of blocks in each.

    `prepare` fills buffers that the next call fills again, so a step's tensors live until then.
    """

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int, device: torch.device
    ) -> None:
        # One column more than the limit: the token sampled at the limit has a place until its request ends.
        self.tokens = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.lengths = np.zeros(max_num_seqs, np.int64)
        self.prompt_lengths = np.zeros(max_num_seqs, np.int64)
        self.width = -(-(max_model_len + 1) // PAGE_SIZE)
        self.block_tables = np.zeros((max_num_seqs, self.width), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.max_num_seqs = max_num_seqs
        self.max_tokens = max_num_batched_tokens
        self._device = device
        self._on_cpu = device.type == "cpu"
        longs, ints = 4 * max_num_batched_tokens + max_num_seqs, max_num_seqs * (self.width + 2) + 1
        self._long_host = torch.zeros(longs, dtype=torch.int64, pin_memory=not self._on_cpu)
        self._int_host = torch.zeros(ints, dtype=torch.int32, pin_memory=not self._on_cpu)
        self._long, self._int = self._long_host.numpy(), self._int_host.numpy()
        self._arange = np.arange(max(max_num_batched_tokens, max_num_seqs) + 1)
        self._copied: torch.cuda.Event | None = None

    def apply(self, plan: StepPlan) -> None:
        """Enter the plan's new sequences and block ids. Raises PlanError where they do not fit the arrays."""
        for new in plan.new:
            self._enter(new)
        for work in plan.work:
            if work.new_block_ids:
                self._extend(work.slot, work.new_block_ids)

    def _enter(self, new: NewSequence) -> None:
        n = len(new.token_ids)
        if not 0 <= new.slot < self.max_num_seqs or n > self.tokens.shape[1]:
            raise PlanError(
                f"request {new.request_id}: slot {new.slot} with {n} tokens; the batch has "
                f"{self.max_num_seqs} slots of {self.tokens.shape[1]} tokens"
            )
        self.tokens[new.slot, :n] = new.token_ids
        self.lengths[new.slot] = n
        self.prompt_lengths[new.slot] = new.num_prompt_tokens
        self.num_blocks[new.slot] = 0
        self._extend(new.slot, new.block_ids)

    def _extend(self, slot: int, ids: list[int]) -> None:
        have = int(self.num_blocks[slot])
        if have + len(ids) > self.width:
            raise PlanError(f"slot {slot}: {have + len(ids)} blocks; the longest sequence has {self.width}")
        self.block_tables[slot, have : have + len(ids)] = ids
        self.num_blocks[slot] = have + len(ids)

    def append(self, slots: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Add one sampled token to each of `slots`, so that the next plan need not carry it."""
        self.tokens[slots, self.lengths[slots]] = tokens
        self.lengths[slots] += 1

    def outputs(self, slot: int) -> NDArray[np.int32]:
        """The output tokens of the sequence in `slot` (a view)."""
        return self.tokens[slot, self.prompt_lengths[slot] : self.lengths[slot]]

    def prepare(self, work: list[SequenceWork]) -> PreparedStep:
        """Inputs of the forward pass over `work`, on the device. Raises PlanError on a plan that cannot be right."""
        if self._copied is not None:
            self._copied.synchronize()
        b = len(work)
        spec = np.array([(w.slot, w.start, w.count, w.sample) for w in work], np.int64)
        slots, start, count = spec[:, 0], spec[:, 1], spec[:, 2]
        sampled = spec[:, 3].astype(bool)
        end = start + count
        n = int(count.sum())
        self._check(slots, count, end, sampled, n)

        long, ints = self._long, self._int
        ids, positions, where = long[:n], long[n : 2 * n], long[2 * n : 3 * n]
        cu, kv = ints[: b + 1], ints[b + 1 : 2 * b + 1]
        np.cumsum(count, out=cu[1:])
        cu[0] = 0
        kv[:] = end
        if n == b:
            row_slot = slots
            positions[:] = start
        else:
            row_slot = np.repeat(slots, count)
            np.add(self._arange[:n], np.repeat(start - cu[:-1], count), out=positions)
        ids[:] = self.tokens[row_slot, positions]
        where[:] = self.block_tables[row_slot, positions // PAGE_SIZE]
        where *= PAGE_SIZE
        where += positions % PAGE_SIZE

        max_kv = int(end.max())
        width = -(-max_kv // PAGE_SIZE)
        at = 2 * b + 1
        tables = ints[at : at + b * width].reshape(b, width)
        tables[:] = self.block_tables[slots, :width]

        last = cu[1:][sampled] - 1
        rows = [last.astype(np.int64)]
        prompt_rows = []
        for i, w in enumerate(work):
            if w.prompt_logprobs:
                # The row at position p predicts the token at p + 1, and the last prompt token predicts an output.
                rows_here = min(w.start + w.count, int(self.prompt_lengths[w.slot]) - 1) - w.start
                if rows_here > 0:
                    rows.append(np.arange(cu[i], cu[i] + rows_here, dtype=np.int64))
                    prompt_rows.append((w.slot, w.start, rows_here))
        wanted = np.concatenate(rows) if prompt_rows else rows[0]
        m = len(wanted)
        long[3 * n : 3 * n + m] = wanted

        sample_slots = slots[sampled]
        every_row = m == n and bool((wanted == self._arange[:n]).all())
        return PreparedStep(
            tensors=self._tensors(n, m, b, width, int(count.max()), max_kv, every_row),
            sample_slots=sample_slots,
            output_index=self.lengths[sample_slots] - self.prompt_lengths[sample_slots],
            prompt_rows=prompt_rows,
        )

    def _check(
        self,
        slots: NDArray[np.int64],
        count: NDArray[np.int64],
        end: NDArray[np.int64],
        sampled: NDArray[np.bool_],
        n: int,
    ) -> None:
        if n > self.max_tokens or count.min() < 1:
            raise PlanError(f"a step of {n} tokens in chunks of {count.tolist()}; expected 1 to {self.max_tokens}")
        known = self.lengths[slots]
        wrong = (end > known) | ((end == known) != sampled) | (end > self.num_blocks[slots] * PAGE_SIZE)
        if wrong.any():
            i = int(wrong.argmax())
            raise PlanError(
                f"slot {slots[i]}: the plan computes up to token {end[i]} (sample={bool(sampled[i])}); the batch knows "
                f"{known[i]} tokens and {self.num_blocks[slots[i]]} blocks of {PAGE_SIZE}"
            )

    def _tensors(self, n: int, m: int, b: int, width: int, max_q: int, max_kv: int, every_row: bool) -> StepTensors:
        long, ints = self._long_host[: 3 * n + m], self._int_host[: 2 * b + 1 + b * width]
        if not self._on_cpu:
            long = long.to(self._device, non_blocking=True)
            ints = ints.to(self._device, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self._device))
        return StepTensors(
            ids=long[:n],
            positions=long[n : 2 * n],
            slots=long[2 * n : 3 * n],
            block_tables=ints[2 * b + 1 :].view(b, width),
            kv_lens=ints[b + 1 : 2 * b + 1],
            cu_q=ints[: b + 1],
            rows=long[3 * n :],
            max_q=max_q,
            max_kv=max_kv,
            every_row=every_row,
        )
