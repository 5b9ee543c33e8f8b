"""What the scheduler is bound by."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Policy(enum.StrEnum):
    """Who runs first: `fcfs` by arrival, `priority` by the request's priority (lower first), then by arrival."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class PauseMode(enum.StrEnum):
    """What a pause does with requests that are there. New ones are taken and queued in every mode.

    `abort` ends them, `wait` lets those that have begun run to their end, `keep` freezes them where they are.
    """

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Raises ValueError for values that no schedule can satisfy.

    `num_blocks` counts the null block. `max_num_batched_tokens` bounds the tokens of one step, `max_num_seqs` the
    sequences in it. `long_prefill_token_threshold`: most tokens of one prompt in one step, 0 for no such limit.
    `max_queued`: most requests that may wait, None for no limit. `cache_namespace` names the model (and adapter) whose
    keys and values the blocks hold.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    policy: Policy = Policy.FCFS
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    max_logprobs: int = 20
    max_queued: int | None = None
    seed: int = 0
    cache_namespace: str = ""

    def __post_init__(self) -> None:
        for name, least in (
            ("num_blocks", 2),
            ("block_size", 1),
            ("max_model_len", 2),
            ("vocab_size", 1),
            ("max_num_seqs", 1),
            ("long_prefill_token_threshold", 0),
            ("max_logprobs", 0),
        ):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        if self.capacity < 2:
            raise ValueError(f"num_blocks: {self.num_blocks} hold {self.capacity} token(s), expected at least 2")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: expected at least max_num_seqs ({self.max_num_seqs}), so that every running "
                f"sequence gets a token in each step; got {self.max_num_batched_tokens}"
            )

    @property
    def capacity(self) -> int:
        """Tokens that all blocks together hold."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def length_limit(self) -> int:
        """Tokens at which any sequence ends for length: one alone must always have room to go on."""
        return min(self.max_model_len, self.capacity)
