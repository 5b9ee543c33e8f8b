"""Sampling parameters of the sequences in the batch, held as arrays by slot so that a step gathers them at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dpi_engine.core.plan import NewSequence
from dpi_engine.wire.messages import SamplingParams
from dpi_engine.worker.random import seed_bits

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy."""

RANDOM, EDITS, PENALTIES, LOGPROBS = 1, 2, 4, 8
"""Bits of `SlotParams.flags`: what a row needs beyond the plain argmax."""

ALL_TOKENS = -1
"""`logprobs` value that asks for the whole vocabulary."""

Ids = NDArray[np.int64]


@dataclass(slots=True)
class LogitEdits:
    """Changes to one request's logits that do not depend on how often a token occurred."""

    allowed: Ids | None = None  # all others are masked
    banned: Ids | None = None  # one-token bad words
    bad_words: list[tuple[list[int], int]] = field(default_factory=list)  # (tokens before, token that must not follow)
    stops: Ids | None = None  # masked while fewer than min_tokens came out
    min_tokens: int = 0
    bias_ids: Ids | None = None
    bias: NDArray[np.float32] | None = None

    def masked(self, outputs: NDArray[np.int32]) -> list[Ids]:
        """Groups of token ids that may not come next after `outputs` (the request's output tokens)."""
        found = [self.banned] if self.banned is not None else []
        if self.stops is not None and len(outputs) < self.min_tokens:
            found.append(self.stops)
        hits = [
            last
            for before, last in self.bad_words
            if len(before) <= len(outputs)
            and outputs[-1] == before[-1]
            and outputs[len(outputs) - len(before) :].tolist() == before
        ]
        if hits:
            found.append(np.array(hits, np.int64))
        return found


class SeenTokens:
    """Distinct tokens of one request and how often each came out; grows by one entry per new token at most."""

    __slots__ = ("_index", "counts", "ids", "size")

    def __init__(self, prompt: NDArray[np.int32], outputs: NDArray[np.int32], vocab: int) -> None:
        seen = np.unique(np.concatenate((prompt, outputs)))
        seen = seen[(seen >= 0) & (seen < vocab)]
        self.size = len(seen)
        self.ids = np.zeros(max(64, 2 * self.size), np.int64)
        self.counts = np.zeros(len(self.ids), np.float32)
        self.ids[: self.size] = seen
        self._index = {int(token): i for i, token in enumerate(seen)}
        for token in outputs.tolist():
            self.counts[self._index[token]] += 1

    def add(self, token: int) -> None:
        """Count one output token."""
        at = self._index.get(token)
        if at is None:
            if self.size == len(self.ids):
                self.ids = np.concatenate((self.ids, np.zeros_like(self.ids)))
                self.counts = np.concatenate((self.counts, np.zeros_like(self.counts)))
            at = self._index[token] = self.size
            self.ids[at] = token
            self.size += 1
        self.counts[at] += 1


class SlotParams:
    """Arrays [max_num_seqs] of sampling parameters, plus the rarer ones by slot."""

    def __init__(self, max_num_seqs: int, vocab: int) -> None:
        self.vocab = vocab
        self.flags = np.zeros(max_num_seqs, np.uint8)
        self.temperature = np.ones(max_num_seqs, np.float64)
        self.top_p = np.ones(max_num_seqs, np.float64)
        self.min_p = np.zeros(max_num_seqs, np.float64)
        self.top_k = np.zeros(max_num_seqs, np.int64)  # 0: no limit
        self.seed = np.zeros(max_num_seqs, np.uint64)
        self.presence = np.zeros(max_num_seqs, np.float32)
        self.frequency = np.zeros(max_num_seqs, np.float32)
        self.repetition = np.ones(max_num_seqs, np.float32)
        self.logprobs = np.zeros(max_num_seqs, np.int64)
        self.prompt_logprobs = np.zeros(max_num_seqs, np.int64)
        self.edits: dict[int, LogitEdits] = {}
        self.seen: dict[int, SeenTokens] = {}

    def set(self, new: NewSequence) -> None:
        """Take the parameters of a sequence that enters the batch."""
        slot, p = new.slot, new.sampling
        self.clear(slot)
        flags = 0
        if p.temperature >= GREEDY_BELOW:
            flags |= RANDOM
            self.temperature[slot] = p.temperature
            self.top_p[slot] = p.top_p
            self.min_p[slot] = p.min_p
            self.top_k[slot] = p.top_k if 0 < p.top_k < self.vocab else 0
            self.seed[slot] = seed_bits(new.seed)
        if p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0:
            flags |= PENALTIES
            self.presence[slot] = p.presence_penalty
            self.frequency[slot] = p.frequency_penalty
            self.repetition[slot] = p.repetition_penalty
            tokens = np.array(new.token_ids, np.int32)
            self.seen[slot] = SeenTokens(tokens[: new.num_prompt_tokens], tokens[new.num_prompt_tokens :], self.vocab)
        edits = self._edits(p)
        if edits is not None:
            flags |= EDITS
            self.edits[slot] = edits
        if p.logprobs is not None:
            flags |= LOGPROBS
            self.logprobs[slot] = self._count(p.logprobs)
        self.prompt_logprobs[slot] = self._count(p.prompt_logprobs or 0)
        self.flags[slot] = flags

    def clear(self, slot: int) -> None:
        """Forget the sequence in `slot`."""
        self.flags[slot] = 0
        self.edits.pop(slot, None)
        self.seen.pop(slot, None)

    def _count(self, wanted: int) -> int:
        return self.vocab if wanted == ALL_TOKENS else min(wanted, self.vocab)

    def _ids(self, ids: list[int] | None) -> Ids | None:
        # Ids outside the vocabulary cannot come out anyway; indexing with them would reach other rows.
        if not ids:
            return None
        kept = [i for i in ids if 0 <= i < self.vocab]
        return np.array(kept, np.int64) if kept else None

    def _edits(self, p: SamplingParams) -> LogitEdits | None:
        edits = LogitEdits()
        if p.allowed_token_ids is not None:
            allowed = self._ids(p.allowed_token_ids)
            edits.allowed = np.zeros(0, np.int64) if allowed is None else allowed
        words = p.bad_words_token_ids or []
        edits.banned = self._ids([w[0] for w in words if len(w) == 1])
        edits.bad_words = [(list(w[:-1]), w[-1]) for w in words if len(w) > 1 and 0 <= w[-1] < self.vocab]
        if p.min_tokens > 0:
            stops = set(p.all_stop_token_ids or ()) | set(p.stop_token_ids or ())
            if p.eos_token_id is not None and not p.ignore_eos:
                stops.add(p.eos_token_id)
            edits.stops, edits.min_tokens = self._ids(sorted(stops)), p.min_tokens
        if p.logit_bias:
            pairs = [(int(i), b) for i, b in p.logit_bias.items() if 0 <= int(i) < self.vocab]
            if pairs:
                edits.bias_ids = np.array([i for i, _ in pairs], np.int64)
                edits.bias = np.array([b for _, b in pairs], np.float32)
        empty = (
            edits.allowed is None
            and edits.banned is None
            and not edits.bad_words
            and edits.stops is None
            and edits.bias_ids is None
        )
        return None if empty else edits
